"""Whether a model verifies trees exactly: found by trying, not by a list of names.

A shrunken random clone of the model's own configuration runs two small trees over two rows
of different lengths, longer than its attention window, with a commit in between; every
slot's logits must be those of a plain stock forward over the slot's path. The outcome is
kept in the user's cache folder, by configuration and versions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from portadraft.backends.torch.shrink import shrunken_clones
from portadraft.backends.torch.target import TorchTarget, unsupported
from portadraft.core.types import PackedBeam, Verdict, Verified
from portadraft.errors import UnsupportedModel
from portadraft.models.records import read_record, record_path, write_record

TOLERANCE = 1e-3
"""Of the logits' standard deviation; float32 noise is below 1e-5, a wrong mask above 1e-1."""
SERVED = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
_PROMPTS = (19, 13)
# Row 0 and row 1 of each tree, as parents: branches, and paths that are not neighbours.
_TREES = (((0, 0, 0, 1, 2, 4), (0, 0, 1, 1, 0, 3)), ((0, 0, 1, 0, 3), (0, 0, 0, 2, 2)))
_ENDS = (5, 1)


def require_supported(model: Any) -> None:
    """Pass if a packed pass of this architecture is exact.

    Raises: UnsupportedModel with the model's type and the reason.
    """
    reason = obvious_reason(model)
    if reason is None:
        path = _record_path(model)
        reason = read_record(path)
        if reason is None:
            reason = check(model)
            write_record(path, reason)
    if reason:
        raise unsupported(model, reason)


def obvious_reason(model: Any) -> str | None:
    """Why the model cannot work, where its configuration already says so."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, expected a decoder-only one"
    text = config.get_text_config()
    # The older name first: the newer list is derived from it in some configurations, in more general words.
    kinds = {str(k) for k in getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None) or ()}
    foreign = sorted(kinds - SERVED)
    if foreign:
        what = "a hybrid model" if kinds & SERVED or "hybrid" in kinds else "a recurrent model"
        return f"it is {what} with layers of type {', '.join(foreign)}, whose state cannot branch over a tree"
    attention = getattr(text, "attn_config", None)
    asked = getattr(text, "alibi", None) or getattr(attention, "alibi", None)
    builds = any("alibi" in name for m in (model, getattr(model, "base_model", model)) for name in dir(type(m)))
    if asked or (builds and asked is None):
        return "it uses ALiBi, whose biases go by the place in the cache, not by position"
    if model.get_output_embeddings() is None:
        return "it names no output embeddings (LM head)"
    return None


def check(model: Any) -> str:
    """Run the check on a shrunken clone: "" if it passes, else the reason."""
    failures: list[str] = []
    reason = ""
    for clone in shrunken_clones(model, failures):
        try:
            worst = _greatest_error(clone)
        except UnsupportedModel as error:
            return error.reason or str(error)
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError) as error:
            # A milder cut may run: this one may be smaller than the model's code expects.
            reason = f"the self-check failed with {type(error).__name__}: {error}"
            continue
        if worst <= TOLERANCE:
            return ""
        return (
            f"on a small random clone a packed pass differs from plain passes by {worst:.2g} standard deviations "
            f"of the logits, expected at most {TOLERANCE:g}"
        )
    return reason or (
        f"no small clone of its configuration could be built to check it ({'; '.join(failures) or 'none was tried'}); "
        "portadraft.load(…, check=False) skips the check, at your own risk"
    )


def _greatest_error(clone: Any) -> float:
    """The greatest difference of any slot of the trees from its path alone, in standard deviations."""
    vocabulary = clone.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(1)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(1, vocabulary, shape, generator=generator, dtype=torch.int32)

    target = TorchTarget(clone, strict=True)
    texts = [tokens(n).tolist() for n in _PROMPTS]
    first = target.admit(texts)
    worst = max(_error(first.logits[b, 0], _plain(clone, text)) for b, text in enumerate(texts))
    for parents in _TREES:
        packed = _packed(tokens(2, len(parents[0])), parents)
        worst = max(worst, _tree_error(clone, target.verify(packed), packed, texts, parents))
        if parents is _TREES[0]:
            paths = [_path(row, end) for row, end in zip(parents, _ENDS, strict=True)]
            _commit(target, paths)
            texts = [texts[b] + packed.tokens[b, path].tolist() for b, path in enumerate(paths)]
    return worst


def _tree_error(
    clone: Any, verified: Verified, packed: PackedBeam, texts: Sequence[list[int]], parents: Sequence[Sequence[int]]
) -> float:
    worst = 0.0
    for b, text in enumerate(texts):
        for slot in range(len(parents[b])):
            path = [int(packed.tokens[b, s]) for s in _path(parents[b], slot)]
            worst = max(worst, _error(verified.logits[b, slot], _plain(clone, text + path)))
    return worst


def _packed(tokens: Tensor, parents: Sequence[Sequence[int]]) -> PackedBeam:
    rows, slots = tokens.shape
    depths = torch.zeros((rows, slots), dtype=torch.int32)
    mask = torch.eye(slots, dtype=torch.bool).repeat(rows, 1, 1)
    for b, row in enumerate(parents):
        for slot in range(1, slots):
            depths[b, slot] = depths[b, row[slot]] + 1
            mask[b, slot] |= mask[b, row[slot]]
    sizes = torch.full((rows,), slots, dtype=torch.int32)
    return PackedBeam(tokens, torch.tensor(parents, dtype=torch.int32), depths, mask, sizes, int(depths.max()))


def _path(parents: Sequence[int], slot: int) -> list[int]:
    path = [slot]
    while path[-1]:
        path.append(parents[path[-1]])
    return path[::-1]


def _commit(target: TorchTarget, paths: Sequence[list[int]]) -> None:
    longest = max(len(path) for path in paths)
    slots = [path + [0] * (longest - len(path)) for path in paths]
    counts = [len(path) for path in paths]
    array = torch.tensor(slots, dtype=torch.int32)
    target.commit(Verdict(torch.zeros_like(array), torch.tensor(counts, dtype=torch.int32), array), counts, slots)


def _plain(clone: Any, ids: list[int]) -> Tensor:
    """The stock model over the whole sequence, no cache, none of our code: logits (V,) of the last position."""
    with torch.no_grad():
        logits: Tensor = clone(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits


def _error(ours: Tensor, plain: Tensor) -> float:
    error = float((ours - plain).abs().max() / plain.std())
    return error if error == error else float("inf")


# where the outcome is kept


def _record_path(model: Any) -> Path:
    import portadraft

    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
    sources = hashlib.sha256()
    for name in ("attention", "cache", "limits", "passes", "rotary_rows", "selfcheck", "shrink", "target"):
        # Our own code decides the outcome too, and changes between releases while it is worked on.
        sources.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    key = {
        "class": type(model).__name__,
        "config": config,
        "portadraft": getattr(portadraft, "__version__", ""),
        "sources": sources.hexdigest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    return record_path(digest)
