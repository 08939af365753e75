"""Tiny random models of many families, and the plain way to ask them.

Weights are large (initializer_range 0.3), so that attention matters: with the usual 0.02 a
wrong mask changes nothing that a test would see.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from portadraft.core.types import PackedBeam

VOCABULARY = 97
WINDOW = 6

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _make(name: str, **overrides: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, f"{name}Config")(**{**_BASE, **overrides})
        return from_config(config)

    return make


def from_config(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights and biases start as ones and zeros, which would hide errors in them.
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 24,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
    "factor": 4.0,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _make("Llama"),
    "llama-untied-bias": _make("Llama", tie_word_embeddings=False, attention_bias=True, num_key_value_heads=1),
    "mistral-sliding": _make("Mistral", sliding_window=WINDOW),
    "qwen2": _make("Qwen2"),
    "qwen3": _make("Qwen3", head_dim=16),
    "gemma2": _make("Gemma2", head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=5.0,
                    final_logit_softcapping=8.0, **_MIXED),
    "gemma3": _make("Gemma3Text", head_dim=8, query_pre_attn_scalar=8, **_MIXED),
    "phi3": _make("Phi3"),
    "gpt-neox": _make("GPTNeoX", num_key_value_heads=4),
    "olmo2": _make("Olmo2"),
    "mixtral": _make("Mixtral", num_local_experts=4),
    "gpt-oss": _make("GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, **_MIXED),
    "phi3-longrope": _make("Phi3", rope_parameters=_LONGROPE, original_max_position_embeddings=24),
}  # fmt: skip

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "mamba": (lambda: from_config(transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0, eos_token_id=2)),
        "recurrent"),
    "jamba": (_make("Jamba", num_experts=2, attn_layer_period=2, attn_layer_offset=1), "recurrent|mamba"),
    "lfm2": (_make("Lfm2", layer_types=["conv", "full_attention"] * 2), "conv"),
    "bloom": (lambda: from_config(transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=1, eos_token_id=2)),
        "ALiBi"),
    "mpt": (lambda: from_config(transformers.MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4)),
        "ALiBi"),
}  # fmt: skip


def plain_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """The stock model over a whole sequence, without a cache and without code of ours: (T, V)."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The greatest difference, in standard deviations of b."""
    return float((a - b).abs().max() / b.std())


def random_tree(rng: np.random.Generator, rows: int, slots: int, alive: Sequence[int] | None = None) -> PackedBeam:
    """A packed beam of random parents and tokens; row b has alive[b] slots, the rest is dead."""
    parents = np.zeros((rows, slots), np.int32)
    depths = np.zeros((rows, slots), np.int32)
    mask = np.zeros((rows, slots, slots), bool)
    sizes = np.array(alive if alive is not None else [slots] * rows, np.int32)
    for b in range(rows):
        for i in range(slots):
            if i and i < sizes[b]:
                parents[b, i] = rng.integers(0, i)
                depths[b, i] = depths[b, parents[b, i]] + 1
            mask[b, i] = mask[b, parents[b, i]]
            mask[b, i, i] = True
    tokens = rng.integers(3, VOCABULARY, (rows, slots)).astype(np.int32)
    t = torch.from_numpy
    return PackedBeam(t(tokens), t(parents), t(depths), t(mask), t(sizes), int(depths.max()))


def path(packed: PackedBeam, row: int, slot: int) -> list[int]:
    """The slots from the root to `slot`."""
    out = [slot]
    while out[-1]:
        out.append(int(packed.parents[row, out[-1]]))
    return out[::-1]
