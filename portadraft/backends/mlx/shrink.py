"""A small random model of the same architecture as a large one.

What decides whether a tree can be verified (layer types, masks, rotary variant, cache use)
is kept; what only costs time (most layers, heads, experts, widths, vocabulary) is cut.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from portadraft.backends.sources import first_line

VOCABULARY = 128
WINDOW = 8
LAYERS = 8
"""The most layers of a clone: enough for every period of layer kinds that mlx-lm's models have."""
MOST_PARAMETERS = 100_000_000
"""A clone larger than this is not built: the check must not cost more than the model."""

_VOCABULARY = ("vocab_size", "vocab_size_per_layer_input")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers")
_WINDOW = ("sliding_window", "sliding_window_size", "attention_window_size")
_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size",
          "expert_ffn_hidden_size", "intermediate_size_mlp", "n_inner", "ff_intermediate_size")  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_GROUPS = ("n_group", "topk_group")


def shrunken_clones(model: Any, failures: list[str] | None = None) -> Iterator[Any]:
    """Random float32 models of the given one's class, the smallest first, then milder cuts.

    A cut that cannot be built is passed over; why is added to `failures`.
    """
    failures = [] if failures is None else failures
    arguments = getattr(model, "args", None) or getattr(model, "config", None)
    if arguments is None:
        return
    for level in range(3):
        try:
            cut = copy.deepcopy(arguments)
            for part in _parts(cut):
                _shrink(part, level)
            clone = type(model)(cut)
            size = sum(p.size for _, p in tree_flatten(clone.parameters()))
            if size > MOST_PARAMETERS:
                failures.append(f"cut {level} has {size:,} parameters, more than {MOST_PARAMETERS:,}")
                continue
            _randomize(clone)
        except Exception as error:  # whatever a model's code raises about sizes that it does not take
            failures.append(f"cut {level} raises {type(error).__name__}: {first_line(error)[:120]}")
            continue
        yield clone


def _parts(arguments: Any) -> Iterator[dict[str, Any]]:
    """The arguments and those of a text part, as what their values can be set in."""
    own = arguments if isinstance(arguments, dict) else vars(arguments)
    yield own
    for name in ("text_config", "text"):
        inner = own.get(name)
        if isinstance(inner, dict):
            yield inner
        elif hasattr(inner, "__dict__"):
            yield vars(inner)


def _shrink(part: dict[str, Any], level: int) -> None:
    """Level 0 cuts most; 1 keeps heads and experts; 2 widths too."""
    _at_most(part, _VOCABULARY, VOCABULARY)
    _at_most(part, _WINDOW, WINDOW)
    count = next((part[name] for name in _LAYERS if _is_number(part.get(name))), 0)
    for name, value in part.items():
        # Lists with an entry per layer are cut like the layers.
        if isinstance(value, list) and len(value) == count:
            part[name] = value[:LAYERS]
    _at_most(part, _LAYERS, LAYERS)
    if level < 2:
        _at_most(part, _INNER, 64)
    if level < 1:
        _at_most(part, _EXPERTS, 4)
        _at_most(part, _CHOSEN, 2)
        _at_most(part, _GROUPS, 1)
        _cut_heads(part)


def _cut_heads(part: dict[str, Any]) -> None:
    """Up to two KV heads with up to two query heads each; the head size stays, rotary factors depend on it."""
    heads, kv_heads, hidden = (part.get(n, 0) for n in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    if not (_is_number(heads) and _is_number(kv_heads) and _is_number(hidden)):
        return
    assert heads and kv_heads and hidden
    size = part.get("head_dim") or hidden // heads
    kv_new = min(kv_heads, 2)
    new = kv_new * min(max(heads // kv_heads, 1), 2)
    part["num_attention_heads"], part["num_key_value_heads"], part["hidden_size"] = new, kv_new, new * size


def _at_most(part: dict[str, Any], names: tuple[str, ...], most: int) -> None:
    for name in names:
        if _is_number(part.get(name)):
            part[name] = min(part[name], most)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _randomize(clone: Any) -> None:
    """Weights so large that attention decides what it says, and no plain ones or zeros."""
    key = mx.random.key(0)
    weights = []
    for name, p in tree_flatten(clone.parameters()):
        key, use = mx.random.split(key)
        if mx.issubdtype(p.dtype, mx.floating):
            noise = mx.random.normal(p.shape, key=use)
            p = noise * (1.5 / p.shape[-1] ** 0.5) if p.ndim > 1 else p.astype(mx.float32) + 0.1 * noise
        weights.append((name, p))
    clone.update(tree_unflatten(weights))
    clone.eval()
    mx.eval(clone.parameters())
