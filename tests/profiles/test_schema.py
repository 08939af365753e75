"""Profiles as untrusted input: whatever the bytes are, the outcome is a profile within its bounds or a clear error."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portadraft.core.types import MOST_NODES
from portadraft.errors import CorruptFile
from portadraft.profiles.reading import MOST_BYTES, NewerSchema, parse, read
from portadraft.profiles.schema import MOST_LENGTH, MOST_SPREAD, Profile, as_document, spread_of

from .examples import costs, make, pooled_parts, sample, shape, table

FULL = make(costs=costs(), acceptance=table(), samples=(sample("ann", 20.0, shape()), sample("ann", 10.0, None)))


def _document() -> dict[str, Any]:
    return as_document(FULL)


def _check_bounds(profile: Profile) -> None:
    for choice in profile.batches:
        if choice.shape is not None:
            beam = choice.shape.beam()
            assert 1 <= beam.width * beam.length <= MOST_NODES
            assert 1 <= beam.length <= MOST_LENGTH
            assert 1 <= choice.batch_size <= 4096


def test_round_trip() -> None:
    again = parse(FULL.to_bytes())
    assert again == FULL
    assert again.id == FULL.id
    assert again.to_bytes() == FULL.to_bytes()


@given(pooled_parts())
def test_any_profile_comes_back(profile: Profile) -> None:
    assert parse(profile.to_bytes()) == profile


def test_id_changes_with_content() -> None:
    assert make(source="x").id != make(source="y").id


def test_unknown_fields_are_passed_over() -> None:
    """A later version may add some."""
    document = _document()
    document["future"] = {"x": [1, 2]}
    document["batches"][0]["colour"] = "green"
    assert parse(json.dumps(document).encode()) == FULL


def test_figures_may_be_rounded_as_papers_do() -> None:
    for change in ({"speedup": 1.7}, {"speedup": 1.6818}, {"tokens_per_s": None, "speedup": 9.0}, {"speedup": None}):
        document = _document()
        document["batches"][0] |= change
        parse(json.dumps(document).encode())
    with pytest.raises(CorruptFile, match=r"speedup 1\.9: expected tokens_per_s / plain_tokens_per_s, 37 / 22"):
        parse(json.dumps(_set("batches.0.speedup", 1.9)).encode())


def test_unknown_schema() -> None:
    document = {"schema_version": 2, "everything": "else"}
    with pytest.raises(NewerSchema, match="schema version 2; this portadraft reads up to 1; upgrade"):
        parse(json.dumps(document).encode(), "their.json")


def _set(path: str, value: Any) -> dict[str, Any]:
    document = _document()
    *parents, last = path.split(".")
    place: Any = document
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[int(last) if isinstance(place, list) else last] = value
    return document


HOSTILE: dict[str, Any] = {
    "huge width": _set("batches.0.shape.width", 10**30),
    "huge length": _set("batches.0.shape.length", 10**9),
    "large area": _set("batches.0.shape", {"width": 4096, "length": 64, "nodes": None}),
    "no width": _set("batches.0.shape", {"length": 4}),
    "width 0": _set("batches.0.shape.width", 0),
    "negative length": _set("batches.0.shape.length", -4),
    "one slot": _set("batches.0.shape.nodes", 1),
    "width as text": _set("batches.0.shape.width", "4"),
    "width as fraction": _set("batches.0.shape.width", 4.5),
    "width as truth": _set("batches.0.shape.width", True),
    "shape as text": _set("batches.0.shape", "4x4"),
    "batch size 0": _set("batches.0.batch_size", 0),
    "no batches": _set("batches", []),
    "a size twice": _set("batches", [{"batch_size": 1, "shape": None}] * 2),
    "ten thousand batches": _set("batches", [{"batch_size": n, "shape": None} for n in range(1, 10_001)]),
    "batches as object": _set("batches", {"1": 2}),
    "negative speed": _set("batches.0.tokens_per_s", -1.0),
    "gain of nowhere": _set("batches.0.speedup", 99.0),
    "less gain than its figures": _set("batches.0.speedup", 1.5),
    "plain decoding that gains": _set("batches.0", {"batch_size": 1, "shape": None, "speedup": 99.0}),
    "plain decoding faster than itself": _set(
        "batches.0", {"batch_size": 1, "shape": None, "tokens_per_s": 37.0, "plain_tokens_per_s": 22.0}
    ),
    "speed zero": _set("batches.0.tokens_per_s", 0),
    "endless speed": _set("batches.0.tokens_per_s", 1e308),
    "NaN": _set("batches.0.speedup", float("nan")),
    "infinity": _set("costs.overhead_ms", float("inf")),
    "NaN cost": _set("costs.verify.0.ms", float("nan")),
    "tokens per step of 1e9": _set("acceptance.0.tokens_per_step", 1e9),
    "escape in a name": _set("machine.name", "\x1b[2J"),
    "line break in a name": _set("model.name", "a\nb"),
    "lone surrogate": _set("machine.name", "\ud800"),
    "long name": _set("machine.name", "x" * 100_000),
    "many versions": _set("software.versions", {f"p{i}": "1" for i in range(1000)}),
    "other kind": _set("machine.kind", "toaster"),
    "no time zone": _set("created", "2026-11-30T00:00:00"),
    "time as number": _set("created", 1e300),
    "unknown origin": _set("origin", "divine"),
    "schema as text": _set("schema_version", "1"),
    "schema as truth": _set("schema_version", True),
    "schema 0": _set("schema_version", 0),
    "schema huge": _set("schema_version", 10**400),
    "null": None,
    "a list": [1, 2],
    "a text": "profile",
    "empty": {},
}


@pytest.mark.parametrize("document", HOSTILE.values(), ids=HOSTILE)
def test_hostile_documents(document: Any) -> None:
    with pytest.raises(CorruptFile, match=r"^their\.json: ") as caught:
        parse(json.dumps(document).encode("utf-8", "surrogatepass"), "their.json")
    assert len(str(caught.value)) < 700
    assert str(caught.value).isprintable()


RAW = {
    "nothing": b"",
    "zeros": b"\0" * 1000,
    "not UTF-8": b'{"schema_version": 1, "source": "\xff\xfe"}',
    "half a document": FULL.to_bytes()[:-20],
    "two documents": FULL.to_bytes() * 2,
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep and closed": b'{"schema_version":1,"x":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "long number": b'{"schema_version":' + b"9" * 100_000 + b"}",
    "a string without an end": b'"' + b'\\"' * 2_000_000,
    "many brackets": b"[]" * 2_000_000,
    "100 MB": b" " * 100_000_000,
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
}


@pytest.mark.parametrize("data", RAW.values(), ids=RAW)
def test_hostile_bytes(data: bytes) -> None:
    start = time.process_time()
    with pytest.raises(CorruptFile):
        parse(data)
    assert time.process_time() - start < 5.0  # linear, whatever it is


def test_depth_is_counted_outside_of_strings() -> None:
    deep = make(source="[" * 100 + '\\"{')
    assert parse(deep.to_bytes()) == deep


@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    with pytest.raises(CorruptFile):
        parse(data)


_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3)
)


@given(st.data())
def test_any_value_in_any_place(data: st.DataObject) -> None:
    """One value replaced anywhere: still a profile within its bounds, or a clear error."""
    document = _document()
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in list(items):
            places.append((node, key))
            walk(value)

    walk(document)
    node, key = data.draw(st.sampled_from(range(len(places))).map(places.__getitem__))
    node[key] = data.draw(_leaves)
    try:
        profile = parse(json.dumps(document).encode("utf-8", "surrogatepass"))
    except CorruptFile:
        return
    _check_bounds(profile)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(FULL.to_bytes())
    assert read(path) == FULL
    with pytest.raises(FileNotFoundError, match="no such file"):
        read(tmp_path / "none.json")
    with pytest.raises(CorruptFile, match="not an ordinary file"):
        read(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("no named pipes on this system")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(CorruptFile, match="not an ordinary file"):
        read(tmp_path / "pipe.json")


def test_a_huge_file_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(100 * 2**30)  # sparse
    with pytest.raises(CorruptFile, match=f"larger than {MOST_BYTES} bytes"):
        read(path)


def test_spread() -> None:
    assert spread_of([5.0]) == 0
    assert spread_of([1.0, 2.0, 3.0]) == pytest.approx(0.25)
    assert spread_of([0.0, 0.0]) == 0
    assert spread_of([0.0, 0.0, 0.0, 9.0, 9.0]) == spread_of([1e-9, 1e-9, 1e-9, 9.0, 9.0]) == MOST_SPREAD
