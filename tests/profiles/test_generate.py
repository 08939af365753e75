"""From a profile in one home to the shape that another home's `generate` uses, and what stats say about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import portadraft
from portadraft import Model
from portadraft.core.decode import Decoder
from portadraft.errors import CorruptFile, InvalidArgument
from portadraft.profiles import home, save
from portadraft.profiles.book import Book
from portadraft.profiles.folder import Folder
from portadraft.profiles.following import describe
from portadraft.profiles.governor import Governor
from portadraft.profiles.indexing import push
from portadraft.profiles.mirror import Mirror
from portadraft.profiles.nearness import Query
from portadraft.profiles.schema import BatchChoice, Conditions, Machine, Profile, now
from tests.test_api import PROMPT, save_drafter, save_model

from .conftest import move_home
from .examples import shape


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_model(path)
    return path


def _load(folder: Path, **options: Any) -> Model:
    return portadraft.load(folder, dtype="float32", device="cpu", drafter="lookup", **options)


@pytest.fixture(scope="module")
def asked(folder: Path) -> Query:
    model = _load(folder)
    return model.profiles.query(model.selected)


def _profile(asked: Query, **changes: Any) -> Profile:
    """What tuning this machine would store; the shapes are such as no default is."""
    fields: dict[str, Any] = {
        "origin": "measured",
        "created": now(),
        "machine": asked.machine,
        "software": asked.software,
        "model": asked.model,
        "drafter": asked.drafter,
        "conditions": Conditions(dtype=asked.dtype),
        "batches": (
            BatchChoice(batch_size=1, shape=shape(1, 3, None)),
            BatchChoice(batch_size=2, shape=shape(1, 2, None)),
            BatchChoice(batch_size=3, shape=None),
        ),
    }
    return Profile(**{**fields, **changes})


def _chosen(model: Model, **options: Any) -> tuple[str, str]:
    choice = model.generate(PROMPT, max_tokens=4, **options).stats.chosen["shape"]
    return choice.value, choice.reason


def test_from_one_home_to_another(folder: Path, asked: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = str(tmp_path / "store")
    move_home(monkeypatch, tmp_path / "one")
    save(_profile(asked))
    own = home.user_folder()
    push(Folder(Path(store)), [own.get(identity) for identity in own.ids()])

    move_home(monkeypatch, tmp_path / "two")
    assert _chosen(_load(folder))[1].startswith("default for lookup alone: one candidate of 8 tokens; no profile for")
    Mirror(store).sync()
    monkeypatch.setenv("PORTADRAFT_PROFILES", store)
    value, reason = _chosen(_load(folder))
    assert value == "1x3"
    assert reason.startswith(f"profile, exact: the fleet store {store}")


def _bumped(asked: Query) -> Profile:
    return _profile(
        asked, software=asked.software.model_copy(update={"versions": {"torch": "1.0", "transformers": "2"}})
    )


def test_fallbacks_are_named(folder: Path, asked: Query, new_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = save(_bumped(asked))
    assert "profile, other-versions: your folder" in _chosen(_load(folder))[1]
    assert "torch 1.0, here" in _chosen(_load(folder))[1]
    home.user_folder().remove(identity)

    machine = asked.machine.model_copy(update={"memory_gb": (asked.machine.memory_gb or 1) * 2})
    identity = save(_profile(asked, machine=machine))
    value, reason = _chosen(_load(folder))
    assert value == "1x3"
    assert "profile, other-conditions: " in reason
    assert f"{machine.memory_gb} GB of memory, here {asked.machine.memory_gb}" in reason
    home.user_folder().remove(identity)

    unknown = asked.machine.model_copy(update={"name": "Unheard-of 9000", "kind": "gpu"})
    save(_profile(asked, machine=unknown))
    value, reason = _chosen(_load(folder))
    assert value == "1x8"
    assert "no profile for this machine and model" in reason

    monkeypatch.setenv("PORTADRAFT_PROFILES", "http://127.0.0.1:9/profiles")
    value, reason = _chosen(_load(folder))
    assert value == "1x8"
    assert "the fleet store http://127.0.0.1:9/profiles ($PORTADRAFT_PROFILES): not reachable" in reason


def test_the_shape_follows_the_live_rows(
    folder: Path, asked: Query, new_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows of different lengths: as they finish, each number of live rows has its own shape."""
    save(_profile(asked))
    used: dict[int, set[str]] = {}
    step = Decoder.step

    def watched(decoder: Decoder) -> Any:
        name = "plain" if decoder.shape is None else f"{decoder.shape.width}x{decoder.shape.length}"
        used.setdefault(decoder.live, set()).add(name)
        return step(decoder)

    monkeypatch.setattr(Decoder, "step", watched)
    # Whether a shape pays here and now is not the question: what is proposed is taken.
    monkeypatch.setattr(Governor, "choose", lambda self, live: self.aim.choose(live))
    model, prompts = _load(folder), ["aa aa aa", "bb", "the end of it"]
    plain = [model.generate(p, max_tokens=30, drafter=None, raw=True).text for p in prompts]
    used.clear()
    seen = list(model.as_completed([*prompts, *prompts, prompts[0]], max_tokens=30, raw=True, batch_size=3))
    assert used == {3: {"plain"}, 2: {"1x2"}, 1: {"1x3"}} or used == {3: {"plain"}, 1: {"1x3"}}
    texts = {i: answer.text for i, answer in seen}
    assert [texts[i] for i in range(7)] == [*plain, *plain, plain[0]]
    assert seen[0][1].stats.chosen["shape"].value == "1 row: 1x3; 2 rows: 1x2; 3 rows: plain"


def test_what_is_watched(folder: Path, new_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is; neither a shape that the caller names nor rejection, whose text depends on what was drafted."""
    drafter = save_drafter(tmp_path / "drafter", _load(folder))
    model = portadraft.load(folder, dtype="float32", device="cpu", drafter=drafter)
    asked: list[int] = []
    real = Governor.choose
    monkeypatch.setattr(Governor, "choose", lambda self, live: asked.append(live) or real(self, live))
    model.generate(PROMPT, max_tokens=6)
    assert asked
    for options in ({"width": 2}, {"nodes": 4}, {"drafter": None}, {"acceptance": "rejection", "temperature": 1.0}):
        asked.clear()
        model.generate(PROMPT, max_tokens=6, **options)
        assert not asked, options


def test_what_the_caller_asks_for_wins(folder: Path, asked: Query, new_home: Path) -> None:
    save(_profile(asked))
    model = _load(folder)
    assert _chosen(model, length=5) == ("1x5", "asked for")
    assert "shape" not in model.generate(PROMPT, max_tokens=4, drafter="none").stats.chosen


def test_a_profile_that_prefers_plain_decoding(folder: Path, asked: Query, new_home: Path) -> None:
    save(_profile(asked, batches=(BatchChoice(batch_size=1, shape=None),)))
    got = _load(folder).generate("ab ab ab ab", max_tokens=20, raw=True)
    assert got.stats.chosen["shape"].value == "plain decoding"
    assert got.stats.plain_steps == got.stats.steps


def test_named_at_load(folder: Path, asked: Query, new_home: Path, tmp_path: Path) -> None:
    save(_profile(asked))
    mine = _profile(asked, batches=(BatchChoice(batch_size=1, shape=shape(1, 5, None)),))
    path = tmp_path / "mine.json"
    path.write_bytes(mine.to_bytes())
    for given in (mine, path, str(path)):
        value, reason = _chosen(_load(folder, profiles=given))
        assert value == "1x5"
        assert reason.startswith("profile, asked-for: ")
    value, reason = _chosen(_load(folder, profiles="none"))
    assert value == "1x8" and "none was asked for" in reason
    path.write_bytes(b"{}")
    with pytest.raises(CorruptFile, match=r"mine\.json: not a profile"):
        _load(folder, profiles=path)


def test_hostile_profiles_change_nothing_but_the_shape(folder: Path, asked: Query, new_home: Path) -> None:
    """A broken one is a miss with a warning; a valid one with absurd shapes is still only slow."""
    plain = _load(folder).generate(PROMPT, max_tokens=12, drafter=None).ids
    own = home.user_folder()
    own.put(b'{"schema_version": 7}')
    with pytest.warns(UserWarning, match="schema version 7"):
        assert _load(folder).generate(PROMPT, max_tokens=12).ids == plain
    save(_profile(asked, batches=(BatchChoice(batch_size=1, shape=shape(1, 64, 4097)),)))
    with pytest.warns(UserWarning, match="schema version 7"):
        got = _load(folder).generate(PROMPT, max_tokens=12)
    assert got.ids == plain
    assert got.stats.chosen["shape"].value == "1x64, 4097 slots"


def test_a_lookup_is_remembered(folder: Path, asked: Query, new_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(_profile(asked))
    model = _load(folder)
    first = model.profiles.find(model.selected)
    monkeypatch.setattr(Book, "_look", None)
    assert model.profiles.find(model.selected) is first
    assert _chosen(model)[0] == "1x3"


@pytest.mark.parametrize("wrong", [None, 3, b"auto", {}, "", "no-such-folder", "s3:/bucket", "nonsense://x"])
def test_what_names_no_profiles_is_said_at_once(wrong: Any, folder: Path, new_home: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"(profiles|store)=.*expected"):
        _load(folder, profiles=wrong)


def test_a_named_folder_that_has_gone_is_served_by_its_copy(folder: Path, asked: Query, new_home: Path) -> None:
    store = new_home / "store"
    push(Folder(store), [_profile(asked).to_bytes()])
    assert _chosen(_load(folder, profiles=store))[0] == "1x3"
    store.rename(new_home / "elsewhere")
    value, reason = _chosen(_load(folder, profiles=store))
    assert value == "1x3" and "not reachable" in reason
    assert "none was asked for" in _chosen(_load(folder, profiles="NONE"))[1]


def test_a_machine_that_cannot_be_described_is_said(
    folder: Path, asked: Query, new_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system says of itself may be outside of what profiles allow; that is no reason not to generate."""
    monkeypatch.setattr("portadraft.profiles.book.this_machine", lambda *_: Machine(name="", kind="cpu", cores=0))
    value, reason = _chosen(_load(folder))
    assert value == "1x8"
    assert "the look-up failed: " in reason and "cores" in reason


def test_describe() -> None:
    a, b = shape(4, 4, 8).beam(), shape(1, 4, None).beam()
    assert describe([a]) == describe([a, a]) == "4x4, 8 slots"
    assert describe([a, b, b, None]) == "1 row: 4x4, 8 slots; 2-3 rows: 1x4; 4 rows: plain"
    assert describe([None]) == "plain decoding"
