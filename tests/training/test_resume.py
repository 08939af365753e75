"""Exact resume: a run that was stopped anywhere and went on gives the parameters of an unbroken one, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from portadraft.errors import CorruptFile, InvalidArgument
from portadraft.training import resume, trainer, work
from portadraft.training.order import Order, plain_jobs
from portadraft.training.resume import load_state, save_state
from tests.training.tiny import World, same, settings_for


@pytest.fixture(scope="module")
def world() -> World:
    torch.set_num_threads(1)
    return World()


class Stopped(Exception):
    """What stands for a kill in the same process: nothing of the run is asked to tidy up."""


def stop_at(monkeypatch: pytest.MonkeyPatch, updates: int) -> None:
    """Break off in the middle of update number `updates`, after the gradients and before the step."""
    calls = 0
    real = trainer.averaged_gradients

    def gradients(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > updates:
            raise Stopped
        return real(*arguments)

    monkeypatch.setattr(trainer, "averaged_gradients", gradients)


def broken(world: World, monkeypatch: pytest.MonkeyPatch, path: Path, updates: int, **changes: Any) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, updates)
        with pytest.raises(Stopped):
            world.fit(settings_for(**changes), state=path)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_broken_run_goes_on_bit_for_bit(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    whole = world.fit(settings_for(optimizer=optimizer))
    assert whole.updates > 30
    path = tmp_path / "state"
    every = {"optimizer": optimizer, "save_seconds": 0.0}  # a state after each update
    broken(world, monkeypatch, path, 7, **every)
    broken(world, monkeypatch, path, 9, **every)
    broken(world, monkeypatch, path, 1, **every)
    again = world.fit(settings_for(**every), state=path)
    assert not any(v.requires_grad for v in again.params.values())
    assert same(whole.params, again.params)
    assert (whole.updates, whole.positions, whole.rows) == (again.updates, again.positions, again.rows)
    figures = [[(e["updates"], e["tokens_per_step"]) for e in run.history] for run in (whole, again)]
    assert figures[0] == figures[1]


def test_a_state_between_evaluations_is_enough(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are written at evaluations alone: what came after is done again, and the same."""
    whole, path = world.fit(settings_for(epochs=2)), tmp_path / "state"
    broken(world, monkeypatch, path, 15, epochs=2)
    _, facts = load_state(path)
    assert 0 < facts["number"] < 15
    assert same(whole.params, world.fit(settings_for(epochs=2), state=path).params)


def test_the_comparison_notices(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: a state without the optimiser's moments, or one update behind, gives other parameters."""
    whole, path = world.fit(settings_for(epochs=2)), tmp_path / "state"
    broken(world, monkeypatch, path, 10, epochs=2, save_seconds=0.0)
    tensors, facts = load_state(path)
    for spoiled, other in (
        ({k: torch.zeros_like(v) if ".first." in k else v for k, v in tensors.items()}, facts),
        (tensors, facts | {"number": facts["number"] - 1}),
        (tensors, facts | {"optimizer_steps": 1}),
    ):
        save_state(path, spoiled, other)
        assert not same(whole.params, world.fit(settings_for(epochs=2), state=path).params)
    save_state(path, tensors, facts)
    assert same(whole.params, world.fit(settings_for(epochs=2), state=path).params)


def test_a_finished_state_is_not_trained_again(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    whole = world.fit(settings_for(epochs=1), state=path)
    stop_at(monkeypatch, 0)
    again = world.fit(settings_for(epochs=1), state=path)
    assert same(whole.params, again.params) and again.score == whole.score and again.ended == whole.ended


def test_interrupt_writes_the_state_and_then_stops(world: World, tmp_path: Path) -> None:
    whole, path = world.fit(settings_for(epochs=2)), tmp_path / "state"
    seen = 0

    def report(entry: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        if seen == 8:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        world.fit(settings_for(epochs=2, report_seconds=0.0), state=path, report=report)
    assert signal.getsignal(signal.SIGINT) is before
    _, facts = load_state(path)
    assert facts["number"] >= 7 and not facts["ended"]
    assert same(whole.params, world.fit(settings_for(epochs=2), state=path).params)


def test_the_callers_random_numbers_are_left_alone(world: World) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    world.fit(settings_for(epochs=0.3))
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_time_budget_is_measured_once(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of updates comes from the clock, but only before the first; it is kept in the state."""
    path = tmp_path / "state"
    timed = {"minutes": 1.0, "epochs": None, "save_seconds": 0.0}
    with monkeypatch.context() as patch:
        real, pilot = trainer.Trainer.advance, trainer.Trainer.pilot

        def slow(self: Any, seconds: float) -> tuple[float, float]:
            assert min(pilot(self, seconds / 30)) > 0
            return 1.5, 0.5  # whatever was measured: as if updates took so long

        patch.setattr(trainer.Trainer, "pilot", slow)

        def advance(self: Any) -> bool:
            if self.at.number == 6:
                raise Stopped
            return real(self)

        patch.setattr(trainer.Trainer, "advance", advance)
        with pytest.raises(Stopped):
            world.fit(settings_for(**timed), state=path)
    _, facts = load_state(path)
    monkeypatch.setattr(trainer.Trainer, "pilot", lambda *_: pytest.fail("measured again"))
    done = world.fit(settings_for(**timed), state=path)
    assert done.updates == done.planned == facts["plan"]["updates"] > 6
    # As many updates asked for in another way give the same parameters: measuring changed nothing.
    epochs = done.planned / Order(plain_jobs([world.features], [1.0]), 96, 8, 0).per_epoch
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "planned", lambda *_: trainer.Plan(**facts["plan"]))
        assert same(done.params, world.fit(settings_for(epochs=epochs)).params)


# the file


def test_a_state_comes_back_exactly(tmp_path: Path) -> None:
    shared = torch.randn(3, 4)
    tensors = {"a": shared, "b": shared, "c": torch.tensor([float("nan"), 1e-45, -0.0]), "d": shared[:, 1:]}
    facts = {"x": 0.1 + 0.2, "n": 2**60, "list": [1e-320], "name": "é"}
    save_state(tmp_path / "s", tensors, facts)
    got, known = load_state(tmp_path / "s")
    assert known == facts and got.keys() == tensors.keys()
    assert all(got[k].numpy().tobytes() == v.contiguous().numpy().tobytes() for k, v in tensors.items())
    with pytest.raises(ValueError, match="JSON compliant"):
        save_state(tmp_path / "s", tensors, {"x": float("nan")})
    assert load_state(tmp_path / "s")[1] == facts


@pytest.mark.parametrize("at", ["open", "write", "fsync", "replace"])
def test_a_full_disk_leaves_the_last_state(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    path = tmp_path / "state"
    broken(world, monkeypatch, path, 6, epochs=1, save_seconds=0.0)
    before = path.read_bytes()
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_: Any, **__: Any) -> Any:
        raise full

    with monkeypatch.context() as patch:
        if at == "fsync":
            patch.setattr(resume.os, "fsync", fail)
        elif at == "replace":
            patch.setattr(Path, "replace", fail)
        elif at == "open":
            patch.setattr(Path, "open", fail)
        else:
            real = Path.open

            def opened(self: Path, *arguments: Any, **options: Any) -> Any:
                file = real(self, *arguments, **options)
                return Limited(file, 50) if self.suffix == ".part" else file

            patch.setattr(Path, "open", opened)
        with pytest.raises(OSError, match=r"No space left.*unharmed.*state"):
            world.fit(settings_for(epochs=1, save_seconds=0.0), state=path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    assert same(world.fit(settings_for(epochs=1)).params, world.fit(settings_for(epochs=1), state=path).params)


class Limited:
    """A file on a disk that is full after some bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self) -> Limited:
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()

    def write(self, data: bytes) -> int:
        self.file.write(data[: self.room])
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("damage", ["cut", "other", "empty"])
def test_a_damaged_state_is_refused(world: World, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state"
    save_state(path, {"a": torch.zeros(8)}, {"number": 3})
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "other":
        path.write_bytes(resume.save({"a": torch.zeros(8)}, metadata={"format": "pt"}))
    else:
        path.write_bytes(b"")
    with pytest.raises(CorruptFile, match="--overwrite"):
        world.fit(settings_for(epochs=1), state=path)


# the folder of an unfinished run


def test_folders_are_checked(tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    folder = work.work_folder(out, None)
    assert folder == tmp_path / "drafter.partial"
    assert work.work_folder(out, tmp_path / "big") == tmp_path / "big" / "drafter.partial"
    work.check_folders(out, folder, resume=False, overwrite=False)
    work.check_folders(out, folder, resume=True, overwrite=False)  # begins where there is nothing yet
    work.begin(folder, {"a": 1})
    with pytest.raises(InvalidArgument, match=r"unfinished run is in .*--resume"):
        work.check_folders(out, folder, resume=False, overwrite=False)
    for resume_it in (True, False):
        work.check_folders(out, folder, resume=resume_it, overwrite=not resume_it)
    with pytest.raises(InvalidArgument, match="expected one of them"):
        work.check_folders(out, folder, resume=True, overwrite=True)
    work.discard(folder)
    out.mkdir()
    with pytest.raises(InvalidArgument, match="exists already"):
        work.check_folders(out, folder, resume=False, overwrite=False)
    with pytest.raises(InvalidArgument, match="finished"):
        work.check_folders(out, folder, resume=True, overwrite=False)
    work.check_folders(out, folder, resume=False, overwrite=True)
    folder.mkdir()
    (folder / "precious").touch()
    with pytest.raises(InvalidArgument, match="something else"):
        work.check_folders(out, folder, resume=False, overwrite=True)


def test_another_request_is_refused_by_name(tmp_path: Path) -> None:
    before = {"config": {"rate": 0.1, "mix": {"text": 1.0}}, "data": ["a"]}
    work.check_same(tmp_path, before, json.loads(json.dumps(before)))
    with pytest.raises(InvalidArgument, match=r"config\.rate was 0\.1, now 0\.2"):
        work.check_same(tmp_path, before, {"config": {"rate": 0.2, "mix": {"text": 1.0}}, "data": ["a"]})
    with pytest.raises(InvalidArgument, match=r"config\.mix"):
        work.check_same(tmp_path, before, {"config": {"rate": 0.1, "mix": {}}, "data": ["a"]})


# kill -9, anywhere


@pytest.mark.parametrize("moment", ["generating", "reading", "saving", "training", "finishing"])
def test_killed_and_resumed(killed_runs: dict[str, Any], moment: str) -> None:
    """Real processes on a tiny model, killed by SIGKILL; see `killed.py`."""
    assert killed_runs["kills"][moment] >= 1, "it was never killed at that moment"
    assert killed_runs["sha256"][moment] == killed_runs["sha256"]["unbroken"]
    assert killed_runs["left"][moment] == []


def test_other_seeds_give_other_weights(killed_runs: dict[str, Any]) -> None:
    assert killed_runs["sha256"]["another seed"] != killed_runs["sha256"]["unbroken"]


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("transformers", reason="transformers is not installed")
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork, to spare the imports")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("killed.py")), str(tmp_path_factory.mktemp("killed"))],
        capture_output=True, text=True, timeout=500, check=False, cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_is_pickled() -> None:
    """States and work folders are data: no module of training imports pickle or loads with it."""
    for path in Path(trainer.__file__).parent.glob("*.py"):
        text = path.read_text("utf-8")
        assert "import pickle" not in text and "torch.load(" not in text and "torch.save(" not in text, path.name
