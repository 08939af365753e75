"""The same core on every backend: one tiny llama with equal weights, the same greedy tokens for every shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed", exc_type=ImportError)
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
pytest.importorskip("torch", reason="the torch extra is not installed")

from portadraft import backends
from portadraft.backends.numpy import NumpyTarget
from portadraft.core.decode import Request
from portadraft.core.target import Target
from portadraft.core.types import BeamShape
from portadraft.drafters import PromptLookup, Together
from portadraft.identity import same_weights
from portadraft.testing import decode, random_redrafter

pytestmark = pytest.mark.mlx

SHAPES = [BeamShape(1, 4), BeamShape(4, 4), BeamShape(4, 4, 8), BeamShape(8, 5)]
_NAMES = {
    "norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def _hugging_face_names(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    top = {"embeddings": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    out = {}
    for name, value in weights.items():
        layer, _, part = name.partition(".")
        out[top[name] if name in top else f"model.layers.{layer}.{_NAMES[part]}.weight"] = value
    return out


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    import torch
    import transformers
    from mlx_lm.models import llama

    reference = NumpyTarget.random(3)
    config = reference.config
    sizes: dict[str, Any] = {
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.inner_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "rms_norm_eps": config.epsilon,
        "tie_word_embeddings": False,
    }
    weights = _hugging_face_names(reference._weights)
    hf = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_theta=config.rope_base)).eval()
    hf.load_state_dict({n: torch.tensor(v) for n, v in weights.items()})
    stock = llama.Model(llama.ModelArgs(model_type="llama", **sizes, rope_theta=config.rope_base))
    stock.load_weights([(n, mx.array(v)) for n, v in weights.items()])
    return {
        "numpy": reference,
        "torch": backends.get("torch").load().make_target(hf),
        "mlx": backends.get("mlx").load().make_target(stock),
    }


def run(target: Target, shape: BeamShape | None) -> list[list[int]]:
    drafter = None if shape is None else Together(target.ops, [random_redrafter(target, 1), PromptLookup(target.ops)])
    rng = np.random.default_rng(4)
    prompts = [tuple(int(t) for t in rng.integers(0, 64, n)) for n in (3, 9, 5)]
    return decode(target, drafter, [Request(p, 24) for p in prompts], shape)[0]


@pytest.fixture(scope="module")
def plain(targets: dict[str, Target]) -> list[list[int]]:
    return run(targets["numpy"], None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backends_agree(targets: dict[str, Target], plain: list[list[int]], shape: BeamShape) -> None:
    assert len({tuple(row) for row in plain}) == 3
    for name, target in targets.items():
        assert run(target, shape) == plain, name


def test_plain_decoding_agrees(targets: dict[str, Target], plain: list[list[int]]) -> None:
    for name, target in targets.items():
        assert run(target, None) == plain, name


def test_identities_agree(targets: dict[str, Target]) -> None:
    torch, mlx = targets["torch"].facts, targets["mlx"].facts
    assert same_weights(torch.weights_id, mlx.weights_id)
    assert torch.weights_id == mlx.weights_id
    assert torch.architecture_id == mlx.architecture_id
