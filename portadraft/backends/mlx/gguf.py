"""A llama in a GGUF file as an mlx-lm model, without torch.

mlx reads GGUF itself and keeps 4- and 8-bit blocks as they are. Scales become float32: in half
precision they round, and mlx computes 10 to 30 times slower with them on a CPU.

What comes out is kept in the cache, blocks packed, as a folder that mlx-lm could load as well:
config.json with a `quantization` part, and model.safetensors.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from portadraft.errors import CorruptFile, UnsupportedModel
from portadraft.models import cache
from portadraft.models.files import check_safetensors, read_config

Array = Any
Weights = dict[str, Array]

_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


_KIND = "mlx-weights"
_FORM = 1
"""Counts the changes of what is kept."""
_GROUP = 32  # numbers of a block, in all types that mlx keeps packed


def load_gguf(path: Path, dtype: Any | None) -> tuple[Any, Any]:
    """The model, and an object with `eos_token_id`.

    dtype: None keeps quantised blocks, with float32 scales; else everything is unpacked to that type.

    Raises: CorruptFile for a damaged file; UnsupportedModel for another architecture than llama.
    """
    config, weights = _converted(path)
    packed = {
        name: (of["group_size"], of["bits"])
        for name, of in config.get("quantization", {}).items()
        if isinstance(of, dict)
    }
    if dtype is not None:
        weights = _unpacked(weights, packed, dtype)
        packed = {}
    model = _build(config, packed)
    try:
        model.load_weights(list(weights.items()))
    except ValueError as error:
        raise CorruptFile(f"model file {path}: its tensors do not fit its header ({error})") from error
    model.eval()
    mx.eval(model.parameters())
    return model, SimpleNamespace(eos_token_id=config["eos_token_id"])


def _converted(path: Path) -> tuple[dict[str, Any], Weights]:
    """A GGUF file's configuration and weights by mlx-lm's names, from the cache where it was converted before."""
    key = f"{cache.file_identity(path)}-{version('mlx')}-{_FORM}"
    entry = cache.lookup(_KIND, key)
    if entry is not None:
        try:
            check_safetensors(entry / "model.safetensors")
            kept: Any = mx.load(str(entry / "model.safetensors"))
            return dict(read_config(entry)), kept
        except (CorruptFile, OSError, RuntimeError):
            cache.drop(_KIND, key)
    config, weights = _convert(path)
    if sum(x.nbytes for x in weights.values()) < cache.free_bytes() // 2:
        cache.store(_KIND, key, lambda folder: _write(folder, config, weights))
    return config, weights


def _write(folder: Path, config: dict[str, Any], weights: Weights) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _build(config: dict[str, Any], packed: dict[str, tuple[int, int]]) -> Any:
    from mlx_lm.models import llama

    model = llama.Model(llama.ModelArgs.from_dict(config))

    def form(name: str, _: Any) -> Any:
        return {"group_size": packed[name][0], "bits": packed[name][1]} if name in packed else False

    if packed:
        nn.quantize(model, class_predicate=form)
    return model


def _convert(path: Path) -> tuple[dict[str, Any], Weights]:
    try:
        read: Any = mx.load(str(path), format="gguf", return_metadata=True)
        arrays, facts = read
    except (RuntimeError, ValueError) as error:
        raise CorruptFile(f"model file {path}: mlx cannot read it ({error}); download it again") from error
    kind = facts.get("general.architecture")
    if kind != "llama" or "rope_freqs.weight" in arrays:
        what = f"architecture {kind!r}" if kind != "llama" else "llama 3's scaled rotary frequencies"
        raise UnsupportedModel(
            f"model file {path}: {what}; the mlx backend reads GGUF files of plain llama models only. Use the model's "
            "Hugging Face folder, or backend='torch'"
        )

    def number(name: str, default: float | None = None) -> Any:
        value = facts.get(f"llama.{name}", default)
        if value is None:
            raise CorruptFile(f"model file {path}: its header does not say llama.{name}; download it again")
        return value.item() if isinstance(value, mx.array) else value

    if "token_embd.weight" not in arrays:
        raise CorruptFile(f"model file {path}: it has no embedding table; download it again")
    heads = int(number("attention.head_count"))
    kv_heads = int(number("attention.head_count_kv", heads))
    weights = _renamed(arrays, heads, kv_heads)
    ends = facts.get("tokenizer.ggml.eos_token_id")
    packed = sorted(n.removesuffix(".scales") for n in weights if n.endswith(".scales"))
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": int(number("embedding_length")),
        "num_hidden_layers": int(number("block_count")),
        "intermediate_size": int(number("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": float(number("attention.layer_norm_rms_epsilon")),
        "vocab_size": int(arrays["token_embd.weight"].shape[0]),
        "max_position_embeddings": int(number("context_length")),
        "rope_theta": float(number("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in arrays,
        "eos_token_id": None if ends is None else int(ends.item()),
    }
    if packed:
        layers = {name: {"group_size": _GROUP, "bits": _bits(weights, name)} for name in packed}
        # mlx-lm wants a size for all layers, too, and then goes by each layer's own.
        config["quantization"] = {**layers[packed[0]], **layers}
    return config, weights


def _renamed(arrays: Weights, heads: int, kv_heads: int) -> Weights:
    out = {}
    for name, value in arrays.items():
        stem, _, leaf = name.rpartition(".")
        if leaf in ("scales", "biases"):
            value = value.astype(mx.float32)
        if stem.startswith("blk."):
            _, number, part = stem.split(".", 2)
            if part not in _LAYER:
                raise UnsupportedModel(f"a GGUF file with tensors {name!r}, which plain llama models do not have")
            if part in ("attn_q", "attn_k"):
                value = _unpermuted(value, heads if part == "attn_q" else kv_heads)
            out[f"model.layers.{number}.{_LAYER[part]}.{leaf}"] = value
        elif stem in _TOP:
            out[f"{_TOP[stem]}.{leaf}"] = value
        else:
            raise UnsupportedModel(f"a GGUF file with tensors {name!r}, which plain llama models do not have")
    return out


def _unpermuted(x: Array, heads: int) -> Array:
    """GGUF interleaves the two halves of each head's rows; blocks lie along the other axis, so rows move whole."""
    rows = x.shape[0]
    return x.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(x.shape)


def _bits(weights: Weights, name: str) -> int:
    words, blocks = weights[f"{name}.weight"].shape[-1], weights[f"{name}.scales"].shape[-1]
    return int(words * 32 // (blocks * _GROUP))


def _unpacked(weights: Weights, packed: dict[str, tuple[int, int]], dtype: Any) -> Weights:
    out = {n: v.astype(dtype) for n, v in weights.items() if n.rpartition(".")[0] not in packed}
    for name, (group, bits) in packed.items():
        weight, scales, biases = (weights[f"{name}.{leaf}"] for leaf in ("weight", "scales", "biases"))
        out[f"{name}.weight"] = mx.dequantize(weight, scales, biases, group, bits).astype(dtype)
    return out
