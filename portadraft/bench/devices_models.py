"""Llamas of real size with random weights, made on the device, and drafters for them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from portadraft.backends.torch.target import TorchTarget
from portadraft.core.ops import Ops
from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.tree import pack_beam, root_only
from portadraft.core.types import Beam, PackedBeam
from portadraft.drafters.redrafter import ReDrafter


@dataclass(frozen=True)
class Shape:
    """A llama's sizes. batches: measure it with several rows too; build_seconds: what building it may take."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    batches: bool = True
    build_seconds: float = 5.0

    def parameters(self) -> int:
        """How many numbers the model has."""
        size = self.hidden // self.heads
        layer = self.hidden * size * (2 * self.heads + 2 * self.kv_heads) + 3 * self.hidden * self.inner
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2)


SHAPES = (
    Shape("llama of 7B", 4096, 11008, 32, 32, 32, 32000),
    Shape("llama of 1B", 2048, 8192, 16, 32, 8, 128256, tied=True),
    Shape("llama of 33B", 6656, 17920, 60, 52, 52, 32000, batches=False, build_seconds=30.0),
)
TOYS = (
    Shape("toy llama", 64, 96, 2, 4, 4, 199),
    Shape("tied toy llama", 32, 48, 2, 4, 2, 131, tied=True, batches=False),
)


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """A random llama whose greedy continuation is clear: the head knows each token's successor by its embedding.

    With untied weights the successor is another token, with tied ones the token itself.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            model = LlamaForCausalLM(config)
            with torch.no_grad():
                table = model.get_input_embeddings().weight
                table.normal_(0.0, 1.0)
                if not shape.tied:
                    model.get_output_embeddings().weight.copy_(table.roll(1, 0))
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def traffic(model: Any, context: int, cache_bytes_per_token: int) -> int:
    """Bytes that a pass over one token must read: all weights but the embedding table's other rows, and the cache."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    if table is not head:
        total -= table.numel() * table.element_size()
    return int(total + context * cache_bytes_per_token)


def drafter_for(target: TorchTarget) -> ReDrafter:
    """A ReDrafter of random weights with two residual blocks of the hidden size and the target's own head."""
    facts, device = target.facts, target.embeddings().device
    config = RecurrentConfig(
        hidden_size=facts.hidden_size,
        embedding_size=int(target.embeddings().shape[1]),
        inner_size=facts.hidden_size,
        blocks=2,
        vocabulary_size=facts.vocabulary_size,
        tied_head=True,
    )
    generator = torch.Generator(device).manual_seed(0)
    params = {
        name: torch.randn(shape, generator=generator, device=device) / shape[-1] ** 0.5
        for name, shape in config.shapes().items()
    }
    return ReDrafter(target, config, params)


def chain(ops: Ops, batch: int, slots: int) -> PackedBeam:
    """A packed beam of that many slots: chains of up to four tokens below the root."""
    roots = ops.asarray([5] * batch)
    if slots == 1:
        return root_only(ops, roots)
    length = min(4, slots - 1)
    width = -(-(slots - 1) // length)
    numbers = itertools.count(7)
    tokens = [[[next(numbers) % 100 for _ in range(length)] for _ in range(width)]] * batch
    scores = [[[-1.0 * (step + 1) for step in range(length)] for _ in range(width)]] * batch
    beam = Beam(ops.asarray(tokens), ops.full((batch, width), length, "int32"), ops.asarray(scores, "float32"))
    return pack_beam(ops, roots, beam, slots)
