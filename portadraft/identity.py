"""Which model is this? Names for what costs and what acceptance depend on. Pure functions; no backend.

An architecture id is what costs depend on: type, shapes, data type, quantisation. A weights id is
what acceptance depends on. It is `<hash of names and shapes>.<sampled values>`: the sample is taken
at positions that depend on names and shapes alone, and kept as values rather than hashed, so that
weights that were rounded through another half-precision type are still recognised.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLED_TENSORS = 16
SAMPLES_PER_TENSOR = 4
_EXACT_SHARE = 0.75
_RELATIVE = 2.0**-7
_SMALLEST_HALF = 2.0**-24
_WRAPPERS = ("language_model.", "text_model.", "model.", "transformer.")

Shapes = Mapping[str, Sequence[int]]


def canonical_name(name: str) -> str:
    """A tensor's name without the wrappers that depend on who loaded it."""
    while True:
        for prefix in _WRAPPERS:
            if name.startswith(prefix):
                name = name[len(prefix) :]
                break
        else:
            return name


def _digest(*parts: object) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _header(shapes: Shapes) -> list[tuple[str, list[int]]]:
    return sorted((name, [int(n) for n in shape]) for name, shape in shapes.items())


def make_architecture_id(model_type: str, shapes: Shapes, dtype: str, quantization: Mapping[str, Any] | None) -> str:
    """A short hash of what a model's speed depends on. shapes: by canonical name, a tied head left out."""
    packed = {key: value for key, value in (quantization or {}).items() if isinstance(value, (str, int, float, bool))}
    return _digest(model_type, _header(shapes), dtype, packed)[:16]


def sample_positions(shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    """Where to look: (canonical name, flat positions), spread over the matrices in name order."""
    matrices = [(name, shape) for name, shape in _header(shapes) if len(shape) >= 2 and int(np.prod(shape)) > 0]
    count = min(SAMPLED_TENSORS, len(matrices))
    chosen = sorted({round(i * (len(matrices) - 1) / max(1, count - 1)) for i in range(count)})
    out = []
    for index in chosen:
        name, shape = matrices[index]
        size = int(np.prod(shape, dtype=np.int64))
        seeds = (_digest(name, list(shape), i)[:15] for i in range(SAMPLES_PER_TENSOR))
        out.append((name, tuple(int(seed, 16) % size for seed in seeds)))
    return out


def to_bf16(values: NDArray[np.floating[Any]]) -> NDArray[np.uint16]:
    """The bits of values rounded to bfloat16, ties to even."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def make_weights_id(shapes: Shapes, samples: NDArray[np.floating[Any]]) -> str:
    """A weights id. samples: the values at `sample_positions(shapes)`, in that order."""
    values = base64.urlsafe_b64encode(to_bf16(samples).astype("<u2").tobytes()).decode().rstrip("=")
    return f"{_digest(_header(shapes))[:16]}.{values}"


def same_weights(a: str, b: str) -> bool:
    """Whether two weights ids name the same weights.

    Names and shapes must agree exactly. Samples may differ by half-precision rounding (relative
    2^-7), most of them not at all: rounding through a second type moves few values. Text that is
    no weights id equals nothing.
    """
    left, right = _parse(a), _parse(b)
    if left is None or right is None or left[0] != right[0] or left[1].size != right[1].size:
        return False
    x, y = left[1], right[1]
    if x.size == 0:
        return True
    close = np.abs(x - y) <= np.maximum(_RELATIVE * np.maximum(np.abs(x), np.abs(y)), _SMALLEST_HALF)
    return bool(np.all(close) and np.mean(x == y) >= _EXACT_SHARE)


def _parse(text: str) -> tuple[str, NDArray[np.float32]] | None:
    header, dot, values = text.partition(".")
    if not dot or len(header) != 16:
        return None
    try:
        raw = base64.urlsafe_b64decode(values + "=" * (-len(values) % 4))
        return header, from_bf16(np.frombuffer(raw, dtype="<u2").astype(np.uint16))
    except (binascii.Error, ValueError):
        return None


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A short hash of a tokenizer's vocabulary: which id is which token, added tokens included."""
    vocabulary = tokenizer.get_vocab()
    digest = hashlib.sha256()
    for token, index in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}\t{token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]
