"""A llama in a GGUF file as an mlx-lm model, without torch.

mlx reads GGUF itself and keeps 4- and 8-bit blocks as they are. Scales become float32: in half
precision they round, and mlx computes 10 to 30 times slower with them on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from portadraft.errors import CorruptFile, UnsupportedModel

Array = Any

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


def load_gguf(path: Path, dtype: Any | None) -> tuple[Any, Any]:
    """The model, and an object with `eos_token_id`.

    dtype: None keeps quantised blocks, with float32 scales; else everything is unpacked to that type.

    Raises: CorruptFile for a damaged file; UnsupportedModel for another architecture than llama.
    """
    from mlx_lm.models import llama

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

    heads = int(number("attention.head_count"))
    kv_heads = int(number("attention.head_count_kv", heads))
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=int(number("embedding_length")),
        num_hidden_layers=int(number("block_count")),
        intermediate_size=int(number("feed_forward_length")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=float(number("attention.layer_norm_rms_epsilon")),
        vocab_size=int(arrays["token_embd.weight"].shape[0]),
        max_position_embeddings=int(number("context_length")),
        rope_theta=float(number("rope.freq_base", 10000.0)),
        tie_word_embeddings="output.weight" not in arrays,
    )
    weights = _renamed(arrays, heads, kv_heads)
    packed = {n.removesuffix(".scales") for n in weights if n.endswith(".scales")}
    if dtype is not None:
        weights = _unpacked(weights, packed, dtype)
        packed = set()
    model = llama.Model(args)
    for name in packed:
        bits = _bits(weights[f"{name}.weight"], weights[f"{name}.scales"])
        nn.quantize(model, 32, bits, class_predicate=lambda path, _, name=name: path == name)
    try:
        model.load_weights(list(weights.items()))
    except ValueError as error:
        raise CorruptFile(f"model file {path}: its tensors do not fit its header ({error})") from error
    model.eval()
    mx.eval(model.parameters())
    ends = facts.get("tokenizer.ggml.eos_token_id")
    return model, SimpleNamespace(eos_token_id=None if ends is None else int(ends.item()))


def _renamed(arrays: dict[str, Array], heads: int, kv_heads: int) -> dict[str, Array]:
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


def _bits(weight: Array, scales: Array) -> int:
    return int(weight.shape[-1] * 32 // (scales.shape[-1] * 32))


def _unpacked(weights: dict[str, Array], packed: Iterable[str], dtype: Any) -> dict[str, Array]:
    out = {n: v.astype(dtype) for n, v in weights.items() if n.rpartition(".")[0] not in set(packed)}
    for name in packed:
        weight, scales, biases = (weights[f"{name}.{leaf}"] for leaf in ("weight", "scales", "biases"))
        out[f"{name}.weight"] = mx.dequantize(weight, scales, biases, 32, _bits(weight, scales)).astype(dtype)
    return out
