"""The identities of a loaded mlx-lm model (see `portadraft.identity`).

A quantised layer counts with the shape and values of what it unpacks to, so that a model has one
weights id however it is stored.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from portadraft import identity
from portadraft.backends.mlx import heads


def architecture_id(model: Any, dtype: str, kind: str) -> str:
    """What the model's speed depends on: type, shapes, data type, quantisation."""
    shapes = {name: shape for name, (shape, _) in _tensors(model).items()}
    bits = sorted(
        {f"{m.bits}/{m.group_size}" for _, m in model.named_modules() if "scales" in m and hasattr(m, "bits")}
    )
    return identity.make_architecture_id(kind, shapes, dtype, {"bits": ",".join(bits)} if bits else None)


def weights_id(model: Any) -> str:
    """What acceptance depends on: the same for equal weights, whatever the backend, file format or load type."""
    tensors = _tensors(model)
    shapes = {name: shape for name, (shape, _) in tensors.items()}
    picked = [_pick(*tensors[name], positions) for name, positions in identity.sample_positions(shapes)]
    samples = np.concatenate(picked) if picked else np.zeros(0, np.float32)
    return identity.make_weights_id(shapes, samples)


def _pick(shape: tuple[int, ...], source: Any, positions: tuple[int, ...]) -> np.ndarray[Any, Any]:
    where = [mx.array(axis.astype(np.int32)) for axis in np.unravel_index(np.asarray(positions), shape)]
    if isinstance(source, mx.array):
        values = source[tuple(where)]
    else:
        rows = heads.dense(source, where[0]).astype(mx.float32)
        values = mx.take_along_axis(rows, where[1][:, None], axis=1)[:, 0]
    return np.array(values.astype(mx.float32))


def _tensors(model: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Logical shape and array (or quantised module) by canonical name."""
    packed = {
        name: module
        for name, module in model.named_modules()
        if "scales" in module and module["weight"].ndim == 2 and hasattr(module, "bits")
    }
    out: dict[str, tuple[tuple[int, ...], Any]] = {}
    for name, value in tree_flatten(model.parameters()):
        owner, _, leaf = name.rpartition(".")
        if owner in packed and leaf in ("scales", "biases"):
            continue
        if owner in packed and leaf == "weight":
            out[identity.canonical_name(name)] = (heads.rows(packed[owner]), packed[owner])
        else:
            out[identity.canonical_name(name)] = (tuple(value.shape), value)
    return out
