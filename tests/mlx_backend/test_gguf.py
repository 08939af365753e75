"""GGUF files with mlx: blocks kept packed, rows put back, converted once, and whatever is wrong with a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed", exc_type=ImportError)
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from portadraft.backends.mlx import gguf as ours
from portadraft.errors import CorruptFile, UnsupportedModel
from portadraft.models import cache
from tests.mlx_backend import packed

pytestmark = pytest.mark.mlx

HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY, LAYERS = 64, 96, 4, 2, 80, 2
IDS = list(range(5, 25))


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "cache"))
    mx.disable_compile()
    yield
    mx.enable_compile()


def _permuted(x: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp stores the rows of q and k."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(x.shape)


def _matrices() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)).astype(np.float32)

    size = HIDDEN // HEADS
    out = {"token_embd": matrix(VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        out |= {
            f"blk.{i}.attn_q": matrix(HEADS * size, HIDDEN),
            f"blk.{i}.attn_k": matrix(KV_HEADS * size, HIDDEN),
            f"blk.{i}.attn_v": matrix(KV_HEADS * size, HIDDEN),
            f"blk.{i}.attn_output": matrix(HIDDEN, HEADS * size),
            f"blk.{i}.ffn_gate": matrix(INNER, HIDDEN),
            f"blk.{i}.ffn_up": matrix(INNER, HIDDEN),
            f"blk.{i}.ffn_down": matrix(HIDDEN, INNER),
        }
    return out


def write(path: Path, architecture: str = "llama", kind: str = "Q8_0", **extra: np.ndarray) -> dict[str, np.ndarray]:
    """A tiny llama as GGUF; returns its matrices as the blocks say them, by GGUF's names, rows in mlx's order."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_eos_token_id(7)
    block = gguf.GGMLQuantizationType[kind]
    said = {}
    for name, value in _matrices().items():
        heads = HEADS if name.endswith("attn_q") else KV_HEADS if name.endswith("attn_k") else 0
        said[name] = gguf.quants.dequantize(gguf.quants.quantize(value, block), block)
        stored = gguf.quants.quantize(_permuted(value, heads) if heads else value, block)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=block)
    norms = [f"blk.{i}.{part}" for i in range(LAYERS) for part in ("attn_norm", "ffn_norm")]
    for name in ("output_norm", *norms):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    for name, value in extra.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return said


def expected(said: dict[str, np.ndarray]) -> np.ndarray:
    """Logits of the last of IDS from mlx-lm's llama with the unpacked matrices."""
    from mlx_lm.models import llama

    model = llama.Model(
        llama.ModelArgs(
            model_type="llama", hidden_size=HIDDEN, num_hidden_layers=LAYERS, intermediate_size=INNER,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, rms_norm_eps=1e-5, vocab_size=VOCABULARY,
            rope_theta=5000.0, tie_word_embeddings=True,
        )
    )  # fmt: skip
    names = {f"{old}.weight": f"{new}.weight" for old, new in ours._TOP.items()}
    for i in range(LAYERS):
        names |= {f"blk.{i}.{old}.weight": f"model.layers.{i}.{new}.weight" for old, new in ours._LAYER.items()}
    model.load_weights([(names[f"{n}.weight"], mx.array(v)) for n, v in said.items()], strict=False)
    return packed.plain(model, IDS)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_what_the_blocks_say(tmp_path: Path, kind: str, dtype: str | None) -> None:
    said = write(tmp_path / "tiny.gguf", kind=kind)
    model, ends = ours.load_gguf(tmp_path / "tiny.gguf", None if dtype is None else getattr(mx, dtype))
    assert ends.eos_token_id == 7
    kinds = {m.bits for m in model.modules() if "scales" in m}
    assert kinds == (set() if dtype else {int(kind[1])})
    assert all(m.scales.dtype == mx.float32 for m in model.modules() if "scales" in m)
    assert packed.distance(packed.plain(model, IDS), expected(said)) < 1e-4


def test_control_rows_left_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = write(tmp_path / "tiny.gguf")
    monkeypatch.setattr(ours, "_unpermuted", lambda x, heads: x)
    model, _ = ours.load_gguf(tmp_path / "tiny.gguf", None)
    assert packed.distance(packed.plain(model, IDS), expected(said)) > 1e-2


def test_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, conversions, convert = tmp_path / "tiny.gguf", [], ours._convert
    write(path)
    monkeypatch.setattr(ours, "_convert", lambda p: (conversions.append(p), convert(p))[1])
    logits = [packed.plain(ours.load_gguf(path, dtype)[0], IDS) for dtype in (None, None, mx.float32)]
    assert len(conversions) == 1
    np.testing.assert_array_equal(logits[0], logits[1])
    assert packed.distance(logits[2], logits[0]) < 1e-4
    (entry,) = (tmp_path / "cache" / "mlx-weights").iterdir()
    weights = entry / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])  # a damaged entry is made anew
    np.testing.assert_array_equal(packed.plain(ours.load_gguf(path, None)[0], IDS), logits[0])
    assert len(conversions) == 2
    write(path, kind="Q4_0")  # another file in its place is not taken for it
    assert packed.distance(packed.plain(ours.load_gguf(path, None)[0], IDS), logits[0]) > 1e-3
    assert len(conversions) == 3


def test_the_entry_is_a_folder_of_mlx_lm(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    write(tmp_path / "tiny.gguf", kind="Q4_0")
    model, _ = ours.load_gguf(tmp_path / "tiny.gguf", None)
    (entry,) = (tmp_path / "cache" / "mlx-weights").iterdir()
    stock, _ = load_model(entry)
    np.testing.assert_array_equal(packed.plain(stock, IDS), packed.plain(model, IDS))


def test_a_read_only_cache_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "file" / "cache"))
    said = write(tmp_path / "tiny.gguf")
    with pytest.warns(UserWarning, match="could not keep mlx-weights"):
        model, _ = ours.load_gguf(tmp_path / "tiny.gguf", None)
    assert packed.distance(packed.plain(model, IDS), expected(said)) < 1e-4


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    write(path, architecture="qwen2")
    with pytest.raises(UnsupportedModel, match=r"architecture 'qwen2'.*backend='torch'"):
        ours.load_gguf(path, None)
    write(path, **{"rope_freqs.weight": np.ones(8, np.float32)})
    with pytest.raises(UnsupportedModel, match="scaled rotary frequencies"):
        ours.load_gguf(path, None)
    write(path, **{"blk.0.attn_sinks.weight": np.ones(8, np.float32)})
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_sinks\.weight"):
        ours.load_gguf(path, None)
    path.write_bytes(b"GGUF" + bytes(3))
    with pytest.raises(CorruptFile, match="download it again"):
        ours.load_gguf(path, None)
    assert not (tmp_path / "cache" / "mlx-weights").exists()
