"""The identities of a loaded Hugging Face model (see `portadraft.identity`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from portadraft import identity


def architecture_id(model: Any) -> str:
    """What the model's speed depends on: type, shapes, data type, quantisation."""
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(model).items()}
    dtype = str(model.dtype).removeprefix("torch.")
    return identity.make_architecture_id(str(model.config.model_type), shapes, dtype, quantization)


def weights_id(model: Any) -> str:
    """What acceptance depends on: the same for equal weights, whatever the file format or load type."""
    tensors = _tensors(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    picked = [_pick(tensors[name], positions) for name, positions in identity.sample_positions(shapes)]
    samples = torch.cat([p.cpu() for p in picked]).numpy() if picked else np.zeros(0, np.float32)
    return identity.make_weights_id(shapes, samples)


def _pick(tensor: Tensor, positions: tuple[int, ...]) -> Tensor:
    where = np.unravel_index(np.asarray(positions), tuple(tensor.shape))
    index = tuple(torch.as_tensor(axis, device=tensor.device) for axis in where)
    return tensor.detach()[index].float()


def _tensors(model: Any) -> dict[str, Tensor]:
    """Parameters by canonical name; a head that repeats the embedding is left out."""
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    repeated: set[str] = set()
    if head is not None and _repeats(head.weight, table):
        repeated = {f"{name}.weight" for name, module in model.named_modules() if module is head}
    tensors = model.named_parameters(remove_duplicate=False)
    return {identity.canonical_name(name): tensor for name, tensor in tensors if name not in repeated}


def _repeats(head: Tensor, table: Tensor) -> bool:
    if head is table or head.data_ptr() == table.data_ptr():
        return True
    if head.shape != table.shape or head.dtype != table.dtype or head.device != table.device:
        return False
    return bool(torch.equal(head[::997], table[::997]) and torch.equal(head, table))
