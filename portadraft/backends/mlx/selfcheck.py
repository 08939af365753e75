"""Whether a model verifies trees exactly: found by trying, not by a list of names.

A shrunken random clone of the model's own arguments runs two small trees over two rows of
different lengths, longer than its attention window, with a commit in between; each slot's
logits must be those of the stock model, with its own cache, over the slot's path. The outcome is
kept in the user's cache folder, by arguments and versions.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from portadraft.backends.mlx.shrink import shrunken_clones
from portadraft.backends.mlx.target import MlxTarget, unsupported
from portadraft.core.types import PackedBeam, Verdict
from portadraft.errors import UnsupportedModel
from portadraft.models.records import read_record, record_path, write_record

TOLERANCE = 1e-3
"""Of the logits' standard deviation; float32 noise is below 1e-4, a wrong mask or position above 1e-1."""
_PROMPTS = (19, 13)
# Row 0 and row 1 of each tree, as parents: branches, and paths that are not neighbours.
_TREES = (((0, 0, 0, 1, 2), (0, 0, 1, 1, 0)), ((0, 0, 1, 0), (0, 0, 0, 2)))
_ENDS = (4, 1)
_SOURCES = ("cache", "heads", "limits", "passes", "rotary", "selfcheck", "shrink", "target")


def require_supported(model: Any) -> None:
    """Pass if a packed pass of this architecture is exact.

    Raises: UnsupportedModel with the model's type and the reason.
    """
    path = _record_path(model)
    reason = read_record(path)
    if reason is None:
        reason = check(model)
        write_record(path, reason)
    if reason:
        raise unsupported(model, reason)


def check(model: Any) -> str:
    """Run the check on a shrunken clone: "" if it passes, else the reason."""
    failures: list[str] = []
    reason = ""
    for clone in shrunken_clones(model, failures):
        try:
            worst = greatest_error(clone)
        except UnsupportedModel as error:
            return error.reason or str(error)
        except Exception as error:  # whatever a model's code raises about sizes that it does not take
            reason = f"the self-check failed with {type(error).__name__}: {error}"
            continue
        if worst <= TOLERANCE:
            return ""
        return (
            f"on a small random clone a packed pass differs from plain passes by {worst:.2g} standard deviations "
            f"of the logits, expected at most {TOLERANCE:g}"
        )
    return reason or (
        f"no small clone of its arguments could be built to check it ({'; '.join(failures) or 'it keeps none'}); "
        "portadraft.load(…, check=False) skips the check, at your own risk"
    )


def greatest_error(clone: Any) -> float:
    """The greatest difference of any slot of the trees from its path alone, in standard deviations."""
    target = MlxTarget(clone)
    rng = np.random.default_rng(1)
    vocabulary = target.facts.vocabulary_size
    texts = [[int(t) for t in rng.integers(1, vocabulary, n)] for n in _PROMPTS]
    first = target.ops.to_numpy(target.admit(texts).logits)
    worst = max(_error(first[b, 0], _plain(clone, text)) for b, text in enumerate(texts))
    for parents in _TREES:
        tokens = rng.integers(1, vocabulary, (2, len(parents[0]))).astype(np.int32)
        logits = target.ops.to_numpy(target.verify(_packed(tokens, parents)).logits)
        for b, text in enumerate(texts):
            for slot in range(len(parents[b])):
                path = [int(tokens[b, s]) for s in _path(parents[b], slot)]
                worst = max(worst, _error(logits[b, slot], _plain(clone, text + path)))
        if parents is _TREES[0]:
            paths = [_path(row, end) for row, end in zip(parents, _ENDS, strict=True)]
            _commit(target, paths)
            texts = [texts[b] + [int(tokens[b, s]) for s in path] for b, path in enumerate(paths)]
    return worst


def _packed(tokens: np.ndarray[Any, Any], parents: Sequence[Sequence[int]]) -> PackedBeam:
    rows, slots = tokens.shape
    depths = np.zeros((rows, slots), np.int32)
    mask = np.zeros((rows, slots, slots), bool)
    for b, row in enumerate(parents):
        for slot in range(slots):
            path = _path(row, slot)
            depths[b, slot] = len(path) - 1
            mask[b, slot, path] = True
    sizes = mx.full((rows,), slots, dtype=mx.int32)
    numbers = mx.array(np.asarray(parents, np.int32))
    return PackedBeam(mx.array(tokens), numbers, mx.array(depths), mx.array(mask), sizes, int(depths.max()))


def _path(parents: Sequence[int], slot: int) -> list[int]:
    path = [slot]
    while path[-1]:
        path.append(parents[path[-1]])
    return path[::-1]


def _commit(target: MlxTarget, paths: Sequence[list[int]]) -> None:
    longest = max(len(path) for path in paths)
    slots = [path + [0] * (longest - len(path)) for path in paths]
    counts = [len(path) for path in paths]
    array = mx.array(slots, dtype=mx.int32)
    target.commit(Verdict(mx.zeros_like(array), mx.array(counts, dtype=mx.int32), array), counts, slots)


def _plain(clone: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """The stock model over the whole sequence with its own cache: logits (V,) of the last position."""
    logits = clone(mx.array([ids]), cache=make_prompt_cache(clone))[0, -1]
    return np.array(logits.astype(mx.float32))


def _error(ours: np.ndarray[Any, Any], plain: np.ndarray[Any, Any]) -> float:
    error = float(np.abs(ours - plain).max() / plain.std())
    return error if error == error else float("inf")


# where the outcome is kept


def _record_path(model: Any) -> Path:
    arguments = getattr(model, "args", None) or getattr(model, "config", None)
    sources = hashlib.sha256()
    for name in _SOURCES:
        # Our own code decides the outcome too, and changes between releases while it is worked on.
        sources.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    key = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "arguments": repr(arguments),
        "sources": sources.hexdigest(),
        "mlx": importlib.metadata.version("mlx"),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return record_path(f"mlx-{digest}")
