"""Drafters on disk: round trips, damage, full disks, Apple's layout."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from portadraft.backends.numpy.ops import NumpyOps
from portadraft.core import recurrent
from portadraft.core.recurrent import RecurrentConfig
from portadraft.drafters import checkpoint_files as module
from portadraft.drafters.checkpoint import (
    Checkpoint,
    Identity,
    read_checkpoint,
    read_identity,
    write_apple,
    write_checkpoint,
)
from portadraft.errors import CorruptFile, IncompatibleDrafter, InvalidArgument, ModelNotFound


def make(seed: int = 0, dtype: str = "float16", **changes: Any) -> Checkpoint:
    sizes: dict[str, Any] = {
        "hidden_size": 6, "embedding_size": 6, "inner_size": 12, "blocks": 2, "vocabulary_size": 10
    }  # fmt: skip
    config = RecurrentConfig(**(sizes | changes))
    rng = np.random.default_rng(seed)
    params = {k: (0.4 * rng.standard_normal(s)).astype(dtype) for k, s in config.shapes().items()}
    part = config.vocabulary_size < 20
    vocabulary = np.sort(rng.permutation(20)[: config.vocabulary_size]).astype(np.int32) if part else None
    identity = Identity(20, 6, "tiny", "0123456789abcdef", "fedcba9876543210.AAAA")
    return Checkpoint(config, params, identity, vocabulary, {"tokens": 12, "minutes": 0.5, "data": ["answers"]})


def untied(**changes: Any) -> Checkpoint:
    return make(tied_head=False, vocabulary_size=20, **changes)


def same(a: Checkpoint, b: Checkpoint) -> None:
    assert a.config == b.config
    assert a.identity == b.identity
    assert a.training == b.training
    assert a.params.keys() == b.params.keys()
    for name in a.params:
        assert a.params[name].dtype == b.params[name].dtype
        assert a.params[name].tobytes() == b.params[name].tobytes(), name
    if a.draft_vocabulary is None:
        assert b.draft_vocabulary is None
    else:
        np.testing.assert_array_equal(a.draft_vocabulary, b.draft_vocabulary)


@pytest.mark.parametrize("given", [make(), make(inner_size=8), make(vocabulary_size=20), untied(), make(blocks=0)])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, given: Checkpoint) -> None:
    same(given, read_checkpoint(write_checkpoint(tmp_path / "d", given)))
    assert read_identity(tmp_path / "d") == given.identity
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["config.json", "model.safetensors"]


def test_float32_is_rounded_to_float16_or_kept(tmp_path: Path) -> None:
    given = make(dtype="float32")
    half = read_checkpoint(write_checkpoint(tmp_path / "half", given))
    for name, value in given.params.items():
        assert half.params[name].dtype == np.float16
        np.testing.assert_array_equal(half.params[name], value.astype(np.float16))
    same(given, read_checkpoint(write_checkpoint(tmp_path / "kept", given, dtype=None)))
    same(given, read_checkpoint(write_checkpoint(tmp_path / "full", given, dtype="float32")))


def test_values_outside_float16_are_refused(tmp_path: Path) -> None:
    given = make(dtype="float32")
    given.params["rnn_u.bias"][0] = 1e6
    with pytest.raises(InvalidArgument, match=r"rnn_u\.bias.*float32"):
        write_checkpoint(tmp_path / "d", given)
    assert not list(tmp_path.iterdir())


def test_bfloat16_is_read_by_bits(tmp_path: Path) -> None:
    given = make(dtype="float32")
    folder = write_checkpoint(tmp_path / "d", given, dtype="float32")
    bits = {k: (v.view(np.uint32) >> 16).astype(np.uint16) for k, v in given.params.items()}
    # The format by hand: a length, a JSON header, and the bytes; numpy has no bfloat16 to write with.
    header: dict[str, Any] = {}
    data = b""
    for name, value in [*bits.items(), ("draft_vocabulary", given.draft_vocabulary)]:
        kind = "I32" if name == "draft_vocabulary" else "BF16"
        header[name] = {"dtype": kind, "shape": value.shape, "data_offsets": [len(data), len(data) + value.nbytes]}
        data += value.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    edit(folder, weights_sha256=None)
    loaded = read_checkpoint(folder)
    for name, value in bits.items():
        assert loaded.params[name].dtype == np.float32
        np.testing.assert_array_equal(loaded.params[name].view(np.uint32), value.astype(np.uint32) << 16)


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "d", make())
    code = (
        "import sys; from portadraft.drafters.checkpoint import read_checkpoint; "
        f"read_checkpoint({str(folder)!r}); assert not {{'torch', 'mlx', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# damage


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("keep", [0, 4, 20, 200, -1])
def test_a_cut_file_is_named(tmp_path: Path, keep: int) -> None:
    folder = write_checkpoint(tmp_path / "d", make())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptFile, match=r"d/model\.safetensors"):
        read_checkpoint(folder)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "d", make())
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptFile, match="SHA-256"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": "other"}', "\ud800".encode("utf-8", "surrogatepass")]
)
def test_a_broken_configuration_is_named(tmp_path: Path, text: str | bytes) -> None:
    folder = write_checkpoint(tmp_path / "d", make())
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    for read in (read_checkpoint, read_identity):
        with pytest.raises(CorruptFile, match=r"d/config\.json"):
            read(folder)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("architecture", "blocks", "two"),
        ("architecture", "blocks", -1),
        ("architecture", "blocks", True),
        ("architecture", "hidden_size", 0),
        ("architecture", "first_state", "guess"),
        ("architecture", "tied_head", 1),
        ("target", "weights_id", 5),
        ("target", "vocabulary_size", None),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, part: str, key: str, value: Any) -> None:
    folder = write_checkpoint(tmp_path / "d", make())
    document = json.loads((folder / "config.json").read_text())
    edit(folder, **{part: document[part] | {key: value}})
    with pytest.raises(CorruptFile, match=f"{part}.{key}"):
        read_checkpoint(folder)


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "d", make())
    edit(folder, format_version=2)
    with pytest.raises(IncompatibleDrafter, match="format_version=2"):
        read_checkpoint(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"none/config\.json"):
        read_checkpoint(tmp_path / "none")
    folder = write_checkpoint(tmp_path / "d", make())
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"d/model\.safetensors"):
        read_checkpoint(folder)


def rewrite(folder: Path, tensors: dict[str, Any]) -> None:
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors))
    edit(folder, weights_sha256=None)


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "integers", "vocabulary", "no vocabulary", "unsorted"])
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, damage: str) -> None:
    given = make()
    folder = write_checkpoint(tmp_path / "d", given)
    tensors = dict(given.params) | {"draft_vocabulary": given.draft_vocabulary}
    named = "rnn_w.weight"
    if damage == "missing":
        del tensors[named]
    elif damage == "extra":
        tensors["lm_head.7.linear.bias"] = tensors["rnn_u.bias"]
        named = r"lm_head\.7"
    elif damage == "shape":
        tensors[named] = np.ascontiguousarray(tensors[named][:, :4])
    elif damage == "integers":
        tensors[named] = tensors[named].astype(np.int32)
    else:
        named = "draft_vocabulary"
        if damage == "vocabulary":
            tensors[named] = tensors[named] + 15
        elif damage == "unsorted":
            tensors[named] = np.ascontiguousarray(tensors[named][::-1])
        else:
            del tensors[named]
    rewrite(folder, tensors)
    with pytest.raises(CorruptFile, match=named):
        read_checkpoint(folder)


# all or nothing


def test_an_existing_folder_is_kept_unless_told(tmp_path: Path) -> None:
    first, second = make(0), make(1)
    folder = write_checkpoint(tmp_path / "d", first)
    with pytest.raises(InvalidArgument, match="overwrite=True"):
        write_checkpoint(folder, second)
    same(first, read_checkpoint(folder))
    write_checkpoint(folder, second, overwrite=True)
    same(second, read_checkpoint(folder))
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


class FullDisk:
    """A file that takes some bytes, then finds the disk full."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()

    def write(self, data: bytes) -> int:
        self.file.write(data[: self.room])
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(data)
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("at", ["weights", "config", "fsync", "rename"])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool, at: str
) -> None:
    before, given = make(1), make(2)
    folder = tmp_path / "deep" / "d"
    if exists:
        write_checkpoint(folder, before)
    with monkeypatch.context() as patch:
        real_open, real_rename = Path.open, Path.rename
        if at in ("weights", "config"):

            def full(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
                file = real_open(self, mode, *args, **kwargs)
                stop = "model.safetensors" if at == "weights" else "config.json"
                return FullDisk(file, 40) if "w" in mode and self.name == stop else file

            patch.setattr(Path, "open", full)
        elif at == "fsync":

            def fail(_: int) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(module.os, "fsync", fail)
        else:

            def rename(self: Path, to: Path) -> Path:
                if self.suffix == ".part":
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real_rename(self, to)

            patch.setattr(Path, "rename", rename)
        with pytest.raises(OSError, match=r"(?s)No space.*nothing was changed.*deep/d") as caught:
            write_checkpoint(folder, given, overwrite=True)
        assert caught.value.errno == errno.ENOSPC
    assert [p.name for p in folder.parent.iterdir()] == (["d"] if exists else [])
    if exists:
        same(before, read_checkpoint(folder))


# Apple's layout


def logits(given: Checkpoint, tokens: list[int], seed: int = 5) -> np.ndarray:
    """The drafter's logits along a path, by our own forward."""
    ops, rng = NumpyOps(), np.random.default_rng(seed)
    table = rng.standard_normal((20, 6)).astype(np.float32)
    hidden = rng.standard_normal(6).astype(np.float32)
    params = {k: v.astype(np.float32) for k, v in given.params.items()}
    state = recurrent.first_state(ops, params, given.config, table[tokens[0]])
    out = []
    for token in [*tokens[1:], None]:
        out.append(recurrent.head(ops, params, given.config, recurrent.trunk(ops, params, given.config, state, hidden)))
        if token is not None:
            state = recurrent.next_state(ops, params, state, table[token])
    return np.stack(out)


def published_logits(folder: Path, tokens: list[int], seed: int = 5) -> np.ndarray:
    """The same by what the layout's publisher says: x = [h, s], s = silu(W e + U s + b) from zeros."""
    p = {k: v.astype(np.float32) for k, v in safetensors.numpy.load_file(folder / "model.safetensors").items()}
    blocks = json.loads((folder / "config.json").read_text())["num_draft_layers"]
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((20, 6)).astype(np.float32)
    hidden = rng.standard_normal(6).astype(np.float32)

    def silu(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))

    state, out = np.zeros(6, np.float32), []
    for token in tokens:
        state = silu(p["rnn_w.weight"] @ table[token] + p["rnn_u.weight"] @ state + p["rnn_u.bias"])
        x = np.concatenate([hidden, state])
        if "input_proj.weight" in p:
            x = p["input_proj.weight"] @ x + p["input_proj.bias"]
        for i in range(blocks):
            x = x + silu(p[f"lm_head.{i}.linear.weight"] @ x + p[f"lm_head.{i}.linear.bias"])
        out.append(p[f"lm_head.{blocks}.weight"] @ x)
    return np.stack(out)


@pytest.mark.parametrize("inner", [12, 8])
@pytest.mark.parametrize("blocks", [0, 2])
def test_apples_layout_round_trips_and_computes_the_same(tmp_path: Path, inner: int, blocks: int) -> None:
    given = untied(inner_size=inner, blocks=blocks)
    folder = write_apple(tmp_path / "apple", given)
    loaded = read_checkpoint(folder)
    assert loaded.config == given.config
    assert read_identity(folder) == loaded.identity == Identity(20, 6)
    for name in given.params:
        assert loaded.params[name].tobytes() == given.params[name].tobytes(), name
    path = [3, 17, 0, 9]
    ours, theirs = logits(given, path), published_logits(folder, path)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
    # Negative control: without the swap of the two halves it is another drafter.
    moved = {k: np.ascontiguousarray(v) for k, v in given.params.items()}
    safetensors.numpy.save_file(moved, folder / "model.safetensors")
    assert np.abs(ours - published_logits(folder, path)).max() > 0.1
    # Twice written, the files are the same to the bit.
    again = write_apple(tmp_path / "again", loaded)
    assert (again / "model.safetensors").read_bytes() == (
        write_apple(tmp_path / "third", given) / "model.safetensors"
    ).read_bytes()


def test_older_names_of_apples_layout_are_read(tmp_path: Path) -> None:
    given = untied(inner_size=8)
    folder = write_apple(tmp_path / "apple", given)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    old = {k.replace("lm_head.", "lm_heads.").replace("input_proj.", "input_projs."): v for k, v in tensors.items()}
    safetensors.numpy.save_file(old, folder / "model.safetensors")
    for name, value in read_checkpoint(folder).params.items():
        np.testing.assert_array_equal(value, given.params[name])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (make(), "target's own"),
        (make(tied_head=False), "10 of 20"),
        (untied(first_state="embedding"), "first_state"),
    ],
)
def test_what_apples_layout_cannot_express_is_refused(tmp_path: Path, given: Checkpoint, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        write_apple(tmp_path / "apple", given)
    assert not list(tmp_path.iterdir())


def test_apples_drafter_without_recurrence_is_refused(tmp_path: Path) -> None:
    folder = write_apple(tmp_path / "apple", untied())
    edit(folder, rnn=False)
    with pytest.raises(IncompatibleDrafter, match="rnn=false"):
        read_checkpoint(folder)
