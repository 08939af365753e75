"""A small random model of the same architecture as a large one.

What decides whether a tree can be verified (layer types, masks, rotary variant, cache use)
is kept; what only costs time (layers of a kind, heads, experts, widths, vocabulary) is cut.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

VOCABULARY = 128
WINDOW = 8
MOST_PARAMETERS = 200_000_000
"""A clone larger than this is not built: the check must not cost more than the model."""

_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "n_inner")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def shrunken_clones(model: Any, failures: list[str] | None = None) -> Iterator[Any]:
    """Random float32 models of the given one's class on the CPU, the smallest first, then milder cuts.

    A cut that cannot be built or does not run is passed over; why is added to `failures`.
    """
    failures = [] if failures is None else failures
    for level in range(3):
        try:
            config = shrunken(model.config, level)
            with torch.device("meta"):
                size = sum(p.numel() for p in type(model)(copy.deepcopy(config)).parameters())
            if size > MOST_PARAMETERS:
                failures.append(f"cut {level} has {size:,} parameters, more than {MOST_PARAMETERS:,}")
                continue
            clone = _random(type(model), config)
            with torch.no_grad():
                logits = clone(input_ids=torch.zeros((1, 3), dtype=torch.int64), use_cache=False).logits
            if not bool(logits.isfinite().all()):
                failures.append(f"cut {level} computes numbers that are not finite")
                continue
        except Exception as error:  # whatever a model's code raises about sizes that it does not take
            text = (str(error).strip() or "no message").splitlines()[0][:120]
            failures.append(f"cut {level} raises {type(error).__name__}: {text}")
            continue
        yield clone


def shrunken(config: Any, level: int) -> Any:
    """A cut copy of a configuration; level 0 cuts most, 1 keeps heads and experts, 2 widths too."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._attn_implementation = "eager"
    text = config.get_text_config()
    _cut_layers(text)
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(text, name, None):
            setattr(text, name, WINDOW)
    _lift_rotary_switch(text)
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(getattr(text, name), VOCABULARY))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    if level < 2:
        for name in _INNER:
            if isinstance(getattr(text, name, None), int):
                setattr(text, name, 64)
    if level < 1:
        _cut_heads(text)
        _cut_experts(text)
    return config


def _cut_layers(text: Any) -> None:
    """Keep one layer of each kind and at least two; every list with an entry per layer is cut alike."""
    count = int(text.num_hidden_layers)
    lists = {k: v for k, v in vars(text).items() if isinstance(v, list) and len(v) == count}
    kinds = [tuple(repr(values[i]) for values in lists.values()) for i in range(count)]
    keep = sorted({kinds.index(kind) for kind in kinds})[:6]
    keep = sorted({*keep, *range(min(count, 2))})
    if getattr(text, "first_k_dense_replace", None):
        text.first_k_dense_replace = 1
    for name, values in lists.items():
        setattr(text, name, [values[i] for i in keep])
    text.num_hidden_layers = len(keep)


def _lift_rotary_switch(text: Any) -> None:
    """Keep the check's short texts clear of a length at which rotary frequencies change (see `limits`)."""
    for name in ("max_position_embeddings", "original_max_position_embeddings"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, max(getattr(text, name), 4096))
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for scheme in (parameters, *(v for v in parameters.values() if isinstance(v, dict))):
        if scheme.get("rope_type") == "longrope" and "original_max_position_embeddings" in scheme:
            scheme["original_max_position_embeddings"] = max(scheme["original_max_position_embeddings"], 4096)


def _cut_heads(text: Any) -> None:
    """Up to two KV heads with up to two query heads each; the head size stays, rotary factors depend on it."""
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    explicit = getattr(text, "head_dim", None)
    size = int(explicit or text.hidden_size // heads)
    kv_new = min(kv_heads, 2)
    new = kv_new * min(max(heads // kv_heads, 1), 2)
    text.num_attention_heads = new
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = kv_new
    text.hidden_size = new * size
    if hasattr(text, "hidden_size_per_layer_input") and text.hidden_size_per_layer_input:
        text.hidden_size_per_layer_input = 16


def _cut_experts(text: Any) -> None:
    for name in _EXPERTS:
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(getattr(text, name), 4))
    for name in ("num_experts_per_tok", "moe_k", "num_selected_experts"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(getattr(text, name), 2))
    for name in ("n_group", "topk_group"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, 1)


def _random(kind: type, config: Any) -> Any:
    """A model with weights so large that attention decides what it says, and no plain ones or zeros."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            clone = kind(config)
            with torch.no_grad():
                for parameter in clone.parameters():
                    if parameter.ndim >= 2:
                        parameter.normal_(0.0, 2.0 / parameter.shape[-1] ** 0.5)
                    else:
                        parameter.add_(0.1 * torch.randn_like(parameter))
    finally:
        torch.set_default_dtype(before)
    return clone.eval()
