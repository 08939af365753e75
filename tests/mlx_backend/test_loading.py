"""Loading with mlx: a folder that transformers wrote, quantised models, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed", exc_type=ImportError)
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from portadraft.backends.mlx import make_target
from portadraft.backends.mlx.loading import choose_device, choose_dtype
from portadraft.errors import InvalidArgument, UnsupportedModel
from portadraft.identity import same_weights
from tests.mlx_backend import packed, tiny

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module", autouse=True)
def _uncompiled() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


def test_a_quantised_model_is_served() -> None:
    import mlx.nn as nn

    model = tiny.build("llama")
    plain_id = make_target(model, check=False).facts.weights_id
    nn.quantize(model, 32, 8)
    error = packed.greatest_error(model)
    assert error < 1e-4
    target = make_target(model)
    assert same_weights(target.facts.weights_id.partition(".")[0] + ".", plain_id.partition(".")[0] + ".")
    assert tuple(target.head_rows().shape) == tuple(target.embeddings().shape) == (tiny.VOCABULARY, 64)


def test_device_and_dtype() -> None:
    assert choose_device("auto").value in ("cpu", "gpu")
    with pytest.raises(InvalidArgument, match="device='cuda'"):
        choose_device("cuda")
    with pytest.raises(InvalidArgument, match="dtype='int4'"):
        choose_dtype("int4", "cpu", False)
    assert choose_dtype("auto", "cpu", False).value == "float32"
    assert "kept" in choose_dtype("auto", "cpu", True).reason


_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 128, "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
_THETA = {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"num_key_value_heads": 2, "rope_parameters": _THETA}),
        ("GPTNeoX", {"intermediate_size": 128, "rope_parameters": {**_THETA, "partial_rotary_factor": 0.5}}),
        ("StableLm", {"num_key_value_heads": 2, "rope_parameters": {**_THETA, "partial_rotary_factor": 0.5}}),
        (
            "Gemma3Text",
            {
                "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
                },
            },
        ),
    ],
)  # fmt: skip
def test_what_new_folders_say_elsewhere_is_found(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """transformers 5 writes bases and windows where mlx-lm does not look; it would take others, silently."""
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    import transformers

    from portadraft.backends.mlx.loading import _load_folder

    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **options})
    torch.manual_seed(0)
    hf = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    hf.save_pretrained(tmp_path)
    ids = list(range(3, 40))
    with torch.no_grad():
        expected = hf(torch.tensor([ids])).logits[0, -1].numpy()
    assert packed.distance(packed.plain(_load_folder(tmp_path, "tiny"), ids), expected) < 1e-3
    stated = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in stated
    whole = stated["rope_parameters"].get("full_attention", stated["rope_parameters"])
    whole["rope_theta"] = 10_000.0
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert packed.distance(packed.plain(_load_folder(tmp_path, "tiny"), ids), expected) > 1e-2


def test_what_mlx_lm_cannot_say_or_read_is_refused(tmp_path: Path) -> None:
    from portadraft.backends.mlx.loading import _load_folder
    from portadraft.backends.mlx.renamed import older_names

    kinds = ["sliding_attention", "full_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match=r"do not repeat \(sliding_attention, full.*backend='torch'"):
        older_names({"model_type": "gemma3_text", "layer_types": kinds}, "tiny")
    assert older_names({"model_type": "qwen3", "layer_types": kinds}, "tiny") == {}
    assert older_names({"model_type": "cohere2", "layer_types": kinds[:2] * 2}, "tiny") == {"sliding_window_pattern": 2}
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"x": mx.zeros(1)})
    with pytest.raises(UnsupportedModel, match=r"cannot read its config\.json \(TypeError: .*hidden_size"):
        _load_folder(tmp_path, "tiny")


def test_the_generation_config_is_kept(tmp_path: Path) -> None:
    """For `sampling="model"`; end tokens may stand in either file, and damage is as good as absence."""
    from portadraft.backends.mlx.loading import _generation_config

    path = tmp_path / "generation_config.json"
    assert vars(_generation_config(tmp_path, {"eos_token_id": 3})) == {"eos_token_id": 3}
    path.write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.95}')
    found = _generation_config(tmp_path, {"eos_token_id": 3})
    assert (found.do_sample, found.temperature, found.top_p, found.eos_token_id) == (True, 0.6, 0.95, 3)
    path.write_text('{"eos_token_id": [4, 5]}')
    assert _generation_config(tmp_path, {"eos_token_id": 3}).eos_token_id == [4, 5]
    for damaged in ("[1]", "{"):
        path.write_text(damaged)
        assert vars(_generation_config(tmp_path, {"eos_token_id": 3})) == {"eos_token_id": 3}


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    from portadraft.backends.mlx.loading import _load_folder

    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"x": mx.zeros((1,))})
    with pytest.raises(UnsupportedModel, match="mlx-lm has no code for it"):
        _load_folder(tmp_path, "unknown")
