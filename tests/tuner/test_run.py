"""All of tuning on a tiny model: tables beside the drafter, stored profiles, the command, the benchmarks."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")
pytest.importorskip("skopt", reason="the tune extra is not installed")

import numpy as np
import platformdirs
from typer.testing import CliRunner

import portadraft
from portadraft import profiles
from portadraft.bench.predictions import rank_correlation, spread
from portadraft.bench.table3 import table3
from portadraft.bench.tuner import tuner_bench
from portadraft.cli.app import app
from portadraft.core.tree import pack_beam
from portadraft.core.types import BeamShape
from portadraft.errors import InvalidArgument
from portadraft.profiles.home import user_folder
from portadraft.tuner import memory
from portadraft.tuner.acceptance import AcceptanceTable
from portadraft.tuner.config import TuneConfig
from portadraft.tuner.devices import MOST_ROUNDS, SimulatedMachine, parse_curve, read_curve
from portadraft.tuner.fitting import fitted
from portadraft.tuner.grid import Grid
from portadraft.tuner.machine import LiveMachine, is_out_of_memory
from portadraft.tuner.measure import Disturbance
from portadraft.tuner.plan import plan
from portadraft.tuner.recordings import Prompt, read_prompts
from portadraft.tuner.report import as_dict, to_profile
from portadraft.tuner.run import Tuner
from portadraft.tuner.search import SCORE_ROUNDS
from tests.test_api import save_drafter, save_model
from tests.tuner import synthetic

GRID = Grid((1, 2, 4), (1, 2, 3), (4, 0))
END_OF_PARTS = Disturbance.end_of_parts
PROMPTS = [("abc abc abc", "chat"), ("one two three one two", "code"), ("0123456789 0123456", "code")]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("user_data_path", "user_config_path", "user_cache_path"):
        monkeypatch.setattr(platformdirs, name, lambda app, kind=name: tmp_path / "home" / kind)
    # Tests share the machine with others; whether it is disturbed is tested on its own.
    monkeypatch.setattr(Disturbance, "end", lambda self, plain: False)
    monkeypatch.setattr(Disturbance, "end_of_parts", lambda self, timed: False)
    return tmp_path / "home"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a drafter for it and a file of prompts."""
    path = tmp_path_factory.mktemp("tune")
    save_model(path / "model", max_position_embeddings=2048)
    save_drafter(path / "drafter", portadraft.load(path / "model", dtype="float32", device="cpu"))
    lines = [json.dumps({"prompt": p, "category": c}) for p, c in PROMPTS]
    (path / "prompts.jsonl").write_text("\n".join(lines), "utf-8")
    return path


@pytest.fixture(scope="module")
def model(place: Path) -> Any:
    return portadraft.load(place / "model", dtype="float32", device="cpu", drafter=place / "drafter")


def config(place: Path, **changes: Any) -> TuneConfig:
    options: dict[str, Any] = {
        "budget_s": 3.0, "prompts": place / "prompts.jsonl", "drafters": (str(place / "drafter"),),
        "max_tokens": 24, "grid": GRID, "context": 20,
    }  # fmt: skip
    return TuneConfig(**(options | changes))


def test_from_nothing_to_a_profile_and_again(model: Any, place: Path) -> None:
    lines: list[str] = []
    outcome = Tuner(model, config(place, batch_sizes=(1, 2), objective="throughput"), lines.append).run()
    (one,) = outcome.drafters
    assert [r.batch for r in one.results] == [1, 2]
    assert any("replaying" in line for line in lines)
    assert any(line.startswith("best so far") for line in lines)
    tables = list((place / "drafter" / "acceptance").glob("redrafter-t0-*.safetensors"))
    assert len(tables) == 1
    assert outcome.recommended_batch_size in (1, 2)
    for r in one.results:
        # 10 %, and the turn that was running when the time was over.
        assert r.seconds < 1.1 * 3.0 + 1.0
        assert r.plain_tokens_per_s > 0
        assert (r.shape is None) == (r.speedup == pytest.approx(1.0))

    identity = profiles.save(to_profile(model, outcome, one))
    stored = profiles.parse(user_folder().get(identity))
    assert stored.origin == "measured"
    assert stored.drafter.name == "redrafter"
    assert stored.drafter.id == model.selected.drafter.id
    assert stored.model.tokenizer
    assert [b.batch_size for b in stored.batches] == [1, 2]
    assert {s.phase for s in stored.samples} == {"search", "score"}
    assert {p.batch_size for p in stored.costs.verify} == {1, 2}
    assert stored.acceptance
    assert as_dict(outcome)["best_drafter"] == "redrafter"

    one.results[1].measured = []  # as on a device so slow that the budget held no round
    assert to_profile(model, outcome, one).origin == "predicted"

    lines.clear()
    Tuner(model, config(place), lines.append).prepare()
    assert not any("recording" in line or "replaying" in line for line in lines)
    assert any(str(tables[0]) in line for line in lines)
    Tuner(model, config(place, temperature=0.7), lines.append).prepare()  # another text, another table
    assert any("replaying" in line for line in lines)


def test_without_a_trained_drafter_lookup_is_tuned_and_training_is_explained(
    model: Any, place: Path, home: Path
) -> None:
    outcome = Tuner(model, config(place, drafters=("auto",), budget_s=1.5)).run()
    assert [d.name for d in outcome.drafters] == ["lookup"]
    assert any("portadraft train" in note for note in outcome.notes)
    assert list((home / "user_data_path" / "acceptance").glob("lookup-*"))


def test_interrupted_it_keeps_what_was_found(model: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = LiveMachine.steps, 0

    def steps(self: LiveMachine, shape: BeamShape | None, count: int) -> Any:
        nonlocal calls
        if count > 1:  # turns of the search; single steps belong to the costs
            calls += 1
            if calls > 5:
                raise KeyboardInterrupt
        return real(self, shape, count)

    monkeypatch.setattr(LiveMachine, "steps", steps)
    tuner = Tuner(model, config(place, batch_sizes=(1, 2), budget_s=10.0))
    outcome = tuner.run()
    assert outcome.interrupted
    assert [r.batch for r in outcome.best.results] == [1]
    assert any("interrupted" in note for note in outcome.notes)
    assert not any("kept" in note for note in outcome.notes)  # whether it is stored is said elsewhere
    assert to_profile(model, outcome, outcome.best).batches
    assert model.target.lengths == ()  # the rows are let go


@pytest.mark.parametrize("moment", ["first round", "costs of the second batch size"])
def test_interrupted_at_other_moments(moment: str, model: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction alone is nothing found; a batch size that was done is kept, and the outcome says that it stopped."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    curve = read_curve(Path("apple-m1-max-vicuna-7b-float16"))
    tuner = Tuner(model, config(place, device_curve=curve, budget_s=30, batch_sizes=(1, 2)))
    if moment == "first round":
        monkeypatch.setattr(SimulatedMachine, "steps", stop)
        with pytest.raises(KeyboardInterrupt):
            tuner.run()
        return
    real = SimulatedMachine.check_ms
    monkeypatch.setattr(SimulatedMachine, "check_ms", lambda self, *of: stop() if self.batch == 2 else real(self, *of))
    outcome = tuner.run()
    assert [r.batch for r in outcome.best.results] == [1]
    assert outcome.interrupted and as_dict(outcome)["interrupted"]


@pytest.mark.parametrize("after", [0, 1, 6])
def test_the_command_interrupted(after: int, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While recording; in the first turn of the search; when rounds are there, which are stored and shown."""
    real, calls = LiveMachine.steps, 0

    def steps(self: LiveMachine, shape: BeamShape | None, count: int) -> Any:
        nonlocal calls
        calls += count > 1
        if calls >= after and count > 1:
            raise KeyboardInterrupt
        return real(self, shape, count)

    monkeypatch.setattr(LiveMachine, "steps", steps)
    if not after:
        monkeypatch.setattr(Tuner, "recordings", steps_of_nobody)
    result = run(
        "--model", str(place / "model"), "--drafter", "lookup", "--budget", "9s", "--dtype", "float32", "-n", "16",
        "--prompts", str(place / "prompts.jsonl"), "--context", "20", "--json",
    )  # fmt: skip
    assert result.exit_code == 130
    if after == 6:
        document = json.loads(result.stdout)
        assert document["interrupted"] and document["stored"].startswith("1 profile")
        assert user_folder().ids() == document["profiles"]
    else:
        assert result.stdout == ""
        reason = "no batch size was measured yet" if after else "not all answers were recorded yet"
        assert f"interrupted: nothing is stored, since {reason}" in result.stderr
        assert user_folder().ids() == []


def steps_of_nobody(*_: Any) -> None:
    raise KeyboardInterrupt


def test_several_drafters_the_fastest_is_named(model: Any, place: Path) -> None:
    outcome = Tuner(model, config(place, drafters=("lookup", str(place / "drafter")), predict_only=True)).run()
    assert {d.name for d in outcome.drafters} == {"lookup", "redrafter"}
    assert outcome.best.score() == max(d.score() for d in outcome.drafters)
    assert all(not r.measured for d in outcome.drafters for r in d.results)


def test_drafters_are_compared_at_batch_sizes_that_all_have(model: Any, place: Path) -> None:
    """Interrupted or out of memory: a larger batch has more tokens per second, whichever drafter came so far."""
    outcome = Tuner(model, config(place, drafters=("lookup", str(place / "drafter")), predict_only=True)).run()
    slow, fast = outcome.drafters
    (small,) = slow.results
    slow.results = [small, replace(small, batch=8, tokens_per_s=50 * small.tokens_per_s)]
    fast.results = [replace(small, tokens_per_s=1.2 * small.tokens_per_s)]
    assert outcome.best is fast
    fast.results = []
    assert outcome.best is slow


def test_prompts_may_hold_any_line_separator_and_must_be_utf8(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        read_prompts(path)
    path.write_text('{"prompt": "one\u2028two"}\r\n', "utf-8")
    assert [p.text for p in read_prompts(path)] == ["one\u2028two"]
    path.write_text('{"prompt": "one"}\n{"prompt": "two", "category": 3}\n', "utf-8")
    with pytest.raises(InvalidArgument, match="line 2: category=3: expected"):
        read_prompts(path)
    path.write_text(json.dumps({"prompt": "one", "category": "\x1b[31mred"}), "utf-8")
    with pytest.raises(InvalidArgument, match=r"line 1: category=.*: expected a short name of the kind of text"):
        read_prompts(path)


def test_a_simulated_device_is_tuned_with_the_models_acceptance(model: Any, place: Path) -> None:
    curve = read_curve(Path("apple-m1-max-vicuna-7b-float16"))
    outcome = Tuner(model, config(place, device_curve=curve, budget_s=30)).run()
    (r,) = outcome.best.results
    assert r.plain_tokens_per_s == pytest.approx(1000 / curve.at(1).plain_ms, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_s": 0}, "budget=0"),
        ({"batch_sizes": ()}, "batch_sizes"),
        ({"batch_sizes": (0,)}, "batch_sizes"),
        ({"objective": "fun"}, "objective='fun'"),
        ({"context": 0}, "context=0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"drafters": ()}, "drafters"),
    ],
)
def test_what_is_asked_wrongly_is_named(place: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        config(place, **changes)


def test_plain_decoding_has_nothing_to_tune(model: Any, place: Path) -> None:
    with pytest.raises(InvalidArgument, match="nothing to tune"):
        Tuner(model, config(place, drafters=("none",))).run()


def test_prompts_that_leave_no_room_are_refused(model: Any, place: Path) -> None:
    with pytest.raises(InvalidArgument, match="pass shorter prompts"):
        Tuner(model, config(place, max_tokens=2048))


def test_a_small_context_is_tuned_with_what_fits(place: Path, tmp_path: Path) -> None:
    """The built-in prompts are cut, the user's left out, and both is said; a context for no step is refused."""
    save_model(tmp_path / "256", max_position_embeddings=256)
    small = portadraft.load(tmp_path / "256", dtype="float32", device="cpu", drafter="lookup")
    tuner = Tuner(small, TuneConfig())
    whole = [small.codec.encode_prompt(p.text) for p in tuner.prompts]
    assert len(tuner.ids) == 30 and max(map(len, whole)) > 256 and max(map(len, tuner.ids)) == 128
    assert all(cut == one[-128:] for cut, one in zip(tuner.ids, whole, strict=True))
    lines = [json.dumps({"prompt": "x" * n}) for n in (20, 250, 30)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines), "utf-8")
    few = TuneConfig(prompts=tmp_path / "p.jsonl", max_tokens=8, predict_only=True, budget_s=0.3, grid=GRID)
    outcome = Tuner(small, few).run()
    assert any("1 of 3 prompts are left out" in note for note in outcome.notes)
    assert len(outcome.best.table.categories) == 2
    save_model(tmp_path / "64", max_position_embeddings=64)
    with pytest.raises(InvalidArgument, match="context of 64 tokens leaves no room to measure"):
        Tuner(portadraft.load(tmp_path / "64", dtype="float32", device="cpu"), TuneConfig())


def test_fitting() -> None:
    prompts, ids = [Prompt("a"), Prompt("b")], [[1, 2, 3], list(range(50))]
    assert fitted(prompts, ids, 50, 100, built_in=True).note is None
    assert fitted(prompts, ids, 128, None, built_in=True).max_tokens == 128
    cut = fitted(prompts, ids, 128, 80, built_in=True)
    assert (cut.ids, cut.max_tokens, cut.prompts) == ([[1, 2, 3], list(range(10, 50))], 40, prompts)
    assert (
        cut.note is not None and "1 of the 2 built-in prompts are cut to 40 tokens, answers have at most 40" in cut.note
    )
    left = fitted(prompts, ids, 60, 80, built_in=False)
    assert (left.ids, left.max_tokens, left.prompts) == ([[1, 2, 3]], 60, prompts[:1])
    with pytest.raises(InvalidArgument, match="leaves no room for a prompt"):
        fitted(prompts, ids, 60, 8, built_in=True)


# this machine


def test_live_steps_are_steps_of_the_loop(model: Any) -> None:
    """Turns of several shapes on the same rows: each gives at least a token a row, and its passes have its slots."""
    prompts = [model.codec.encode_prompt(p) for p, _ in PROMPTS]
    with LiveMachine(model.target, model.selected.drafter, prompts, 2, 40) as machine:
        for shape, slots in ((None, 1), (BeamShape(2, 3), 7), (BeamShape(4, 3, 5), 5), (None, 1)):
            chunk = machine.steps(shape, 3)
            assert chunk.slots == (slots,) * 3
            assert chunk.tokens >= 3 * 2
            assert len(chunk.ms) == 3
        assert min(model.target.lengths) >= 40
        assert machine.check_ms(9, 4) > 0
        assert machine.draft_ms(4, 2) > 0
        for _ in range(30):  # rows are replaced before they grow without bound
            machine.steps(BeamShape(4, 3), 10)
        assert max(model.target.lengths) < 500
    assert model.target.lengths == ()


def test_a_pass_takes_time_however_slow_its_packing_seemed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models: a hiccup while packing is timed is longer than a step."""

    def slow(*arguments: Any) -> Any:
        time.sleep(0.2)
        return pack_beam(*arguments)

    monkeypatch.setattr("portadraft.tuner.machine.pack_beam", slow)
    prompts = [model.codec.encode_prompt(p) for p, _ in PROMPTS]
    with LiveMachine(model.target, model.selected.drafter, prompts, 1, 40) as machine:
        assert machine.check_ms(9, 4) > 0


def test_a_context_that_leaves_no_room_is_cut_and_named_as_it_was(place: Path, tmp_path: Path) -> None:
    """A model of 96 tokens, asked for 80 before the steps: 24 are left, and the profile says so."""
    save_model(tmp_path / "small", max_position_embeddings=96)
    small = portadraft.load(tmp_path / "small", dtype="float32", device="cpu")
    few = config(place, drafters=("lookup",), context=80, budget_s=0.5)
    outcome = Tuner(small, few).run()
    assert as_dict(outcome)["context"] == 24
    assert to_profile(small, outcome, outcome.best).conditions.context == 24
    roomy = config(place, drafters=("lookup",), context=20, budget_s=0.5)
    assert as_dict(Tuner(small, roomy).run())["context"] == 20


def test_a_context_beyond_the_models_is_refused(model: Any, place: Path) -> None:
    with pytest.raises(InvalidArgument, match="context=2048: the model's context is 2048"):
        Tuner(model, config(place, context=2048))


def test_memory_is_estimated_and_its_errors_are_known(model: Any) -> None:
    facts = model.target.facts
    need = memory.need_bytes(facts, 1, 8, 100)
    assert memory.need_bytes(facts, 4, 8, 100) > 3 * need
    assert memory.need_bytes(facts, 1, 64, 100) > 6 * need
    free = memory.free_bytes(model.target.ops)
    assert free is None or free > need
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_shapes_that_cannot_fit_are_not_tried(model: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner(model, config(place, predict_only=True))
    limit = memory.need_bytes(model.target.facts, 1, 6, 20)
    monkeypatch.setattr("portadraft.tuner.run.free_bytes", lambda ops: limit)
    (r,) = tuner.run().best.results
    assert r.prediction.step_ms.shape == GRID.size
    kind = r.prediction.table.kind
    slots = {kind.slots(s, True) for s in r.prediction.distinct()}
    assert max(slots) < 6
    assert max(kind.slots(s, True) for _, s in GRID.cells()) == 13


# the command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_the_command_prints_one_document_and_draws(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the tune extra is not installed")
    result = run(
        "--model", str(place / "model"), "--drafter", "lookup", "--budget", "1s", "--dtype", "float32", "-n", "16",
        "--prompts", str(place / "prompts.jsonl"), "--context", "20", "--json", "--plot", str(tmp_path / "plots"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["drafters"][0]["batches"][0]["batch_size"] == 1
    (identity,) = document["profiles"]
    assert profiles.parse(user_folder().get(identity)).drafter.name == "lookup"
    assert sorted(Path(p).name for p in document["plots"]) == ["tuning-lookup-batch1.png", "tuning-lookup-costs.png"]
    for path in document["plots"]:
        assert Path(path).read_bytes()[:4] == b"\x89PNG"
        assert Path(path).stat().st_size < 100_000


def test_a_busy_machine_stores_nothing_unless_forced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disturbance, "end", lambda self, plain: True)
    arguments = (
        "--model", str(place / "model"), "--drafter", "lookup", "--budget", "1s", "--dtype", "float32", "-n", "16",
        "--prompts", str(place / "prompts.jsonl"), "--context", "20", "--json",
    )  # fmt: skip
    document = json.loads(run(*arguments).stdout)
    assert document["disturbed"]
    assert document["profiles"] == []
    assert "--force" in document["stored"]
    document = json.loads(run(*arguments, "--force").stdout)
    (identity,) = document["profiles"]
    assert profiles.parse(user_folder().get(identity)).disturbed


def test_what_cannot_be_drawn_is_shown_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the tune extra is not installed")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", ".tuning.tmp.png")

    monkeypatch.setattr("portadraft.tuner.plot._save", full)
    where = str(tmp_path / "plots")
    result = plan_of(tmp_path, "--json", "--plot", where)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["plots"] == []
    assert f"nothing was drawn: plot='{where}': cannot be written to (No space left on device)" in result.stderr


@pytest.mark.parametrize("busy", [False, True])
def test_a_prediction_is_judged_by_its_costs(busy: bool, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else uses the machine but where passes jump about; the steps are as they are, so their times are not."""
    real, calls = LiveMachine.check_ms, 0

    def check_ms(self: LiveMachine, slots: int, depth: int) -> float:
        nonlocal calls
        calls += 1
        real(self, slots, depth)
        return (5.0 + 0.1 * slots) * (3.0 if busy and calls % 2 else 1.0)

    monkeypatch.setattr(LiveMachine, "check_ms", check_ms)
    monkeypatch.setattr(Disturbance, "end_of_parts", END_OF_PARTS)
    monkeypatch.setattr("portadraft.tuner.measure.others_seconds", lambda: None)
    arguments = (
        "--model", str(place / "model"), "--drafter", "lookup", "--budget", "1s", "--dtype", "float32", "-n", "16",
        "--prompts", str(place / "prompts.jsonl"), "--context", "20", "--predict-only",
    )  # fmt: skip
    document = json.loads(run(*arguments, "--json").stdout)
    assert document["disturbed"] is busy
    assert document["drafters"][0]["batches"][0]["spread"] is None
    assert ("--force" in document["stored"]) is busy
    assert len(document["profiles"]) == (not busy)
    text = run(*arguments, "--force").stdout
    assert "± -" in text and "± 0.0 %" not in text
    (identity,) = user_folder().ids()[:1] if busy else document["profiles"]
    stored = profiles.parse(user_folder().get(identity))
    assert (stored.origin, stored.disturbed, stored.batches[0].spread) == ("predicted", busy, None)


def plan_of(tmp_path: Path, *arguments: str, temperature: float = 0.0) -> Any:
    made = synthetic.table()
    made = replace(made, origin=replace(made.origin, temperature=temperature))
    made.save(tmp_path / "t.safetensors")
    curve = "apple-m2-ultra-vicuna-7b-float16"
    return run("--acceptance", str(tmp_path / "t.safetensors"), "--device-curve", curve, "--budget", "20s", *arguments)


def test_no_figure_is_cut_where_a_table_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    wide = plan_of(tmp_path).stdout
    assert "┃" in wide
    monkeypatch.setenv("COLUMNS", "40")
    narrow = plan_of(tmp_path).stdout
    assert "┃" not in narrow and "…" not in narrow
    assert "; tokens/s " in narrow and "; speedup " in narrow


def test_the_temperature_of_a_plan_is_that_of_its_table(tmp_path: Path) -> None:
    assert json.loads(plan_of(tmp_path, "--json", temperature=0.7).stdout)["temperature"] == 0.7


def test_what_cannot_be_stored_is_shown_all_the_same(place: Path, home: Path) -> None:
    home.write_text("a file where the folder should be", "utf-8")
    result = run(
        "--model", str(place / "model"), "--drafter", str(place / "drafter"), "--budget", "1s", "--dtype", "float32",
        "-n", "16", "--prompts", str(place / "prompts.jsonl"), "--context", "20", "--json",
    )  # fmt: skip
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["drafters"][0]["batches"][0]["plain_tokens_per_s"] > 0
    assert document["profiles"] == []
    assert (
        any(note.startswith("acceptance of redrafter: ") for note in document["notes"]) is False
    )  # beside the drafter
    folder = user_folder().path
    warning, error = result.stderr.splitlines()[0], result.stderr.splitlines()[-1]
    assert warning.startswith("portadraft: warning: what is found will be shown and not stored: ")
    assert "no profile was stored" in error
    for text in (warning, error, document["stored"]):
        assert f"your folder {folder}: cannot be written to (Not a directory); expected one that can be" in text
        assert "Errno" not in text


def test_drafters_are_named_as_generate_names_them(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    asked: list[Any] = []

    def load(*_: Any, drafter: str, **__: Any) -> Any:
        asked.append(drafter)
        raise InvalidArgument("enough")

    monkeypatch.setattr("portadraft.api.load", load)
    run("--model", str(place / "model"), "--drafter", "both")
    assert asked == ["redrafter+lookup"]


def test_an_absurd_budget_of_a_fast_device_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated minute of steps of a microsecond is days of ours."""
    assert MOST_ROUNDS < 1000
    monkeypatch.setattr("portadraft.tuner.plan.MOST_ROUNDS", 4)
    synthetic.table(grid=GRID).save(tmp_path / "t.safetensors")
    fast = parse_curve({"name": "fast", "check": {"slots": [1, 32], "ms": [0.001, 0.002]}})
    outcome = plan(tmp_path / "t.safetensors", TuneConfig(budget_s=3600, device_curve=fast))
    (r,) = outcome.best.results
    assert 4 <= max(m.round for m in r.measured) <= 4 + SCORE_ROUNDS
    assert math.isfinite(r.tokens_per_s)


def test_planning_needs_no_model(tmp_path: Path) -> None:
    synthetic.table().save(tmp_path / "t.safetensors")
    result = run(
        "--acceptance", str(tmp_path / "t.safetensors"), "--device-curve", "apple-m2-ultra-vicuna-7b-float16", "--json",
        "--batch-sizes", "1,4", "--budget", "30s",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    first, second = document["drafters"][0]["batches"]
    # The cliff of that machine is at 16 rows in all.
    assert first["shape"]["nodes"] is None or first["shape"]["nodes"] <= 16
    assert first["speedup"] > second["speedup"]
    assert document["profiles"] == []


def test_prompts_are_read_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portadraft.cli.tune._load", lambda *a, **k: pytest.fail("it loaded a model"))
    (tmp_path / "p.jsonl").write_text("no JSON", "utf-8")
    for name, message in (("p.jsonl", "line 1: expected a JSON object"), ("none.jsonl", "no such file")):
        result = run("--prompts", str(tmp_path / name))
        assert result.exit_code == 2
        assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "soon"), "budget='soon'"),
        (("--budget", "0s"), "budget='0s'"),
        (("--batch-sizes", "1,x"), "batch_sizes='1,x'"),
        (("--batch-sizes", "1,,2"), "batch_sizes='1,,2'"),
        (("--batch-sizes", ""), "batch_sizes=''"),
        (("--device-curve", ""), "device_curve=''"),
        (("--device-curve", "apple-m2-vicuna-7b-float16", "--acceptance", "none"), "acceptance='none': no such file"),
        (("--device-curve", "apple-m2-vicuna-7b-float16", "--acceptance", "/"), "acceptance='/': not a file"),
        (("--plot", "/dev/null"), "plot='/dev/null': cannot be written to (it is a file)"),
        (("--device-curve", "no-such"), "no-such"),
        (("--acceptance", "x.safetensors"), "--device-curve"),
        (("--objective", "fun"), "objective='fun'"),
        (("--plot", "figure.pdf"), "plot='figure.pdf'"),
        (("--prompts", "/no/such/file", "--model", "/no/such/model"), "no such"),
    ],
)
def test_wrong_options_are_named_before_a_model_is_loaded(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portadraft.api.load", lambda *a, **k: pytest.fail("it loaded a model"))
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


# benchmarks


def test_bench_tuner_reports_choice_truth_and_predictions(place: Path) -> None:
    report = tuner_bench(
        str(place / "model"), budget_s=2.0, drafter=str(place / "drafter"), dtype="float32", rounds=2, turns=1, cells=6,
        tokens=12, config=config(place),
    )  # fmt: skip
    assert 0 < report["chosen_of_best"] < 3
    assert 0 < report["chosen_of_best_by_cost"] <= 1
    assert report["cells"] == len(report["predictions"]) == 6
    assert -1 <= report["rank_correlation"] <= 1
    assert "plain" in report["confirmed"]
    json.dumps(report)


def test_bench_tuner_says_at_once_where_it_cannot_draw() -> None:
    pytest.importorskip("matplotlib", reason="the tune extra is not installed")
    result = CliRunner().invoke(app, ["bench", "tuner", "--model", "/no/such", "--plot", "/dev/null"])
    assert result.exit_code == 2
    assert "plot='/dev/null': cannot be written to (it is a file)" in result.output


def test_bench_table3_has_out_of_memory_as_a_cell(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LiveMachine.steps

    def steps(self: LiveMachine, shape: BeamShape | None, count: int) -> Any:
        if shape is not None and shape.width == 4 and self.batch == 2:
            raise RuntimeError("CUDA out of memory")
        return real(self, shape, count)

    monkeypatch.setattr(LiveMachine, "steps", steps)
    report = table3(
        str(place / "model"), drafter=str(place / "drafter"), dtype="float32", widths=(1, 4), batches=(1, 2), length=2,
        config=config(place),
    )  # fmt: skip
    cells = {(c["batch"], c["width"]): c for c in report["cells"]}
    assert len(cells) == 4
    assert cells[2, 4]["note"] == "out of memory"
    assert cells[2, 4]["total"] is None
    assert cells[2, 1]["total"] == pytest.approx(2 * cells[2, 1]["per_request"], rel=0.01)
    assert set(report["best_width_by_batch"]) == {"1", "2"}


def test_rank_correlation_and_spread() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2, 3], [1, 2, 2, 3]) == pytest.approx(0.8333, abs=1e-3)
    from portadraft.tuner.predict import predict

    prediction = predict(synthetic.table(), synthetic.device(per_slot=4))
    shapes = spread(prediction, 25)
    order = prediction.distinct()
    assert len(set(shapes)) == 25
    slow = [prediction.of(s) / prediction.of(order[0]) < 0.3 for s in order]
    assert any(slow)
    assert (shapes[0], shapes[-1]) == (order[0], order[slow.index(True) - 1])
    steps = np.diff(np.log([prediction.of(s) for s in shapes]))
    assert min(steps) > 2.5 * np.mean(steps)  # falling, without a gap


def test_tables_of_the_drafter_that_comes_with_the_package_can_be_read() -> None:
    folder = Path(portadraft.__file__).parent / "drafters" / "pretrained" / "smollm2-135m-instruct" / "acceptance"
    for path in folder.glob("*.safetensors"):
        table = AcceptanceTable.load(path)
        assert table.steps.sum() > 0
