"""Runs as a whole: budgets, plans, skipped updates, starting drafters, what is refused, full disks, the bill."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from typer.testing import CliRunner

from portadraft.cli.app import app
from portadraft.core.recurrent import RecurrentConfig
from portadraft.drafters.checkpoint import read_checkpoint
from portadraft.errors import IncompatibleDrafter, InvalidArgument
from portadraft.training import bill, stages
from portadraft.training.bill import StepCosts, flops, repayment
from portadraft.training.budget import Budget, parse_budget
from portadraft.training.config import TrainConfig, config_from_json, parse_bytes
from portadraft.training.features import Features
from portadraft.training.initial import initial
from portadraft.training.plan import Plan, planned
from portadraft.training.progress import Progress, evaluation_line, skipped_line
from portadraft.training.run import stored_config, train
from portadraft.training.steps import Guard
from tests.training.tiny import D, V, World, model_folder, prompts_file, same, settings_for

# budgets and plans


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("90s", Budget(seconds=90)),
        ("20m", Budget(seconds=1200)),
        ("1.5h", Budget(seconds=5400)),
        ("1h30m", Budget(seconds=5400)),
        (" 2 H ", Budget(seconds=7200)),
        ("3Mtok", Budget(tokens=3_000_000)),
        ("500ktok", Budget(tokens=500_000)),
        ("0.1mtokens", Budget(tokens=100_000)),
    ],
)
def test_budgets(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["", "20", "m", "20 minutes", "-5m", "0m", "0tok", "1m30", "3M", "nan h"])
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"budget=.*expected a time"):
        parse_budget(text)


def test_sizes() -> None:
    assert (parse_bytes("20GB"), parse_bytes("1.5 MB"), parse_bytes("7")) == (20 * 10**9, 1_500_000, 7)
    for text in ("", "much", "-1GB", "0"):
        with pytest.raises(InvalidArgument, match="cache_limit"):
            parse_bytes(text)


def test_plans() -> None:
    common = {"per_epoch": 10, "positions_per_epoch": 1000, "evaluations": 5}
    times = {"update_seconds": 0.5, "evaluation_seconds": 1.0}

    def plan(epochs: float | None, tokens: int | None, seconds: float | None, **changes: Any) -> Plan:
        return planned(epochs=epochs, tokens=tokens, seconds=seconds, **(common | times | changes))

    assert plan(None, None, None) == Plan(40, 8)  # four passes
    assert plan(2.5, None, None) == Plan(25, 5)
    assert plan(None, 12_345, None) == Plan(124, 25)
    assert plan(100.0, 500, None).updates == 5
    assert plan(None, None, 105.0) == Plan(200, 40)  # five evaluations take 5 seconds
    assert plan(3.0, None, 105.0).updates == 30
    # Evaluations that would eat the budget become fewer; there is always one update.
    few = plan(None, None, 100.0, evaluation_seconds=10.0)
    assert few == Plan(160, 80)
    assert plan(None, None, 0.1).updates == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("minutes", 0),
        ("epochs", -1),
        ("rate", 0.0),
        ("positions", 0),
        ("tokens", 0),
        ("optimizer", "sgd"),
        ("average", 1.0),
        ("patience", 0),
    ],
)
def test_bounds_of_a_fit(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}={value!r}"):
        settings_for(**{name: value})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"blocks": -1}, "blocks=-1"),
        ({"batch": 0}, "batch=0"),
        ({"temperature": -0.5}, r"temperature=-0\.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"mix": {"echo": 1.0}}, "echo"),
        ({"draft_vocabulary": 10, "ship_vocabulary": 11}, "ship_vocabulary=11: more than"),
        ({"budget": "long"}, "budget='long'"),
    ],
)
def test_bounds_of_a_run(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        TrainConfig(**changes)


def test_a_configuration_survives_json() -> None:
    from dataclasses import asdict

    config = TrainConfig(budget="20m", mix={"text": 0.5}, fit=settings_for(epochs=None, tokens=7))
    assert config_from_json(json.loads(json.dumps(asdict(config)))) == config


# updates that are left out


@pytest.fixture(scope="module")
def world() -> World:
    torch.set_num_threads(1)
    return World()


def spoiled(features: Features, document: int, bits: int) -> Features:
    """With every feature in the middle of a document replaced."""
    hidden = np.asarray(features.hidden).copy()
    low = int(features.offsets[document])
    hidden[low + 10 : low + 20] = bits
    named = [f"texts.jsonl, line {d + 1}" for d in range(len(features))]
    return Features(hidden, features.tokens, features.offsets, features.documents, named=named)


def test_a_nan_is_skipped_counted_and_named(world: World) -> None:
    said: list[dict[str, Any]] = []
    broken = spoiled(world.features, 7, 0x7FC0)
    result = world.fit(settings_for(epochs=2), sources=[broken], report=said.append)
    assert 0 < result.skipped == len(result.skipped_where) < result.planned == result.updates + result.skipped
    for entry in result.skipped_where:
        assert entry["reason"] == "the gradient is not finite"
        assert entry["where"][0]["source"] == 0 and 7 in entry["where"][0]["documents"]
        json.dumps(entry, allow_nan=False)
        assert "texts.jsonl, line 8" in entry["where"][0]["places"]  # document 7
        shown = skipped_line(entry)
        assert "not finite" in shown and "texts.jsonl, line " in shown
    assert [e["skipped"] for e in said if "skipped" in e] == result.skipped_where
    assert all(torch.isfinite(v).all() for v in result.params.values())
    entry["where"][0]["places"] = []  # of features made by hand nothing else is known
    assert "documents" in skipped_line(entry) and "of source 0" in skipped_line(entry)
    assert world.fit(settings_for(epochs=2)).skipped == 0  # negative control


def test_a_step_that_explodes_is_skipped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from portadraft.training import trainer

    real, calls = trainer.averaged_gradients, 0

    def gradients(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        mean = real(*arguments)
        return replace(mean, norm=mean.norm * (1000 if calls == 25 else 1))

    monkeypatch.setattr(trainer, "averaged_gradients", gradients)
    result = world.fit()
    (entry,) = result.skipped_where
    assert entry["update"] == 24 and "times the running median" in entry["reason"]


def test_the_guard() -> None:
    guard = Guard(10.0, [])
    assert [guard.objection(1.0 + i / 100) for i in range(20)] == [None] * 20
    assert guard.objection(9.0) is None
    assert "11 times" in str(guard.objection(12.0))
    assert guard.objection(float("nan")) == guard.objection(float("inf")) == "the gradient is not finite"
    # A larger scale that lasts is no explosion.
    answers = [guard.objection(50.0) for _ in range(80)]
    assert answers[0] is not None and answers[-1] is None
    assert Guard(10.0, []).objection(1e9) is None


def test_training_stops_when_nothing_gets_better(world: World) -> None:
    still = world.fit(settings_for(rate=1e-12, evaluations=8, patience=3))
    assert still.ended == "no better in 3 evaluations"
    assert len(still.history) == 4 and still.updates < still.planned
    assert world.fit(settings_for(rate=1e-12, evaluations=8)).updates == still.planned  # negative control


def test_a_start_that_is_not_bettered_is_kept(world: World) -> None:
    good = world.fit(settings_for(epochs=6)).params
    kept = world.fit(settings_for(rate=0.5, epochs=1, average=0.0), start=good)
    assert same(kept.params, good)
    assert kept.history[0]["updates"] == 0
    assert not same(world.fit(settings_for(rate=1e-3, epochs=1)).params, initial(RecurrentConfig(D, D, 2 * D, 1, V), 0))


# the whole way


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return model_folder(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prompts_file(tmp_path_factory.mktemp("data") / "prompts.jsonl", 30)


def config(**changes: Any) -> TrainConfig:
    fit = settings_for(**({"epochs": 2, "evaluations": 2} | changes.pop("fit", {})))
    return TrainConfig(**({"draft_vocabulary": 40, "max_answer": 12, "batch": 8, "fit": fit} | changes))


@pytest.fixture(scope="module")
def drafter(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("drafter") / "out"
    train(model, data, out=out, config=config(), dtype="float32", progress=False)
    return out


def test_the_bill(model: Path, data: Path, drafter: Path) -> None:
    training = read_checkpoint(drafter).training
    assert training["generated_tokens"] > 100 and training["target_passes"] > 10
    assert training["updates"] == training["planned_updates"] > 0
    assert training["minutes_total"] >= training["minutes_training"] >= 0
    assert training["peak_memory_bytes"] > 50 << 20
    assert training["parameters"] == sum(v.size for v in read_checkpoint(drafter).params.values())
    assert training["flops"]["target"] > 0 and training["flops"]["drafter"] > 0
    costs, repaid = training["step_costs"], training["repayment"]
    assert 0 < costs["draft_ms"] < costs["drafted_ms"] and costs["shape"] == "4x4/8"
    assert 0 < costs["draft_share"] < 20
    assert set(training["tokens_per_step"]) == {"4x4", "1x4", "4x4/8", "16x5", "8x4"}
    assert repaid["speedup"] > 0 and "one request at a time" in repaid["assumes"]
    assert training["data"][0]["name"] == "prompts.jsonl" and len(training["data"][0]["sha256"]) == 64
    text = "\n".join(bill.lines(training))
    assert str(data.parent) not in json.dumps(dict(training)) and "PFLOP" in text and "of a plain step" in text


def test_operations_are_counted() -> None:
    config = RecurrentConfig(4, 4, 8, 1, 10)  # U, W: 16 each, 4; block 64 + 8; project 32
    own, head = 16 + 4 + 16 + 72 + 32, 10 * 4
    assert flops(config, 1000, 7, 20, 5) == {"target": 14_000.0, "drafter": 20 * (6 * own + 4 * head) + 4 * 2 * head}
    untied = replace(config, tied_head=False)
    own -= 32
    assert flops(untied, 0, 0, 5, 5)["drafter"] == 5 * (6 * own + 6 * 10 * 8) + 2 * 40


def test_repayment() -> None:
    costs = StepCosts(plain_ms=40.0, draft_ms=5.0, drafted_ms=50.0, draft_share=0.125, step_ratio=1.25)
    found = repayment(costs, 2.5, 3600.0)  # 20 ms a token instead of 40
    assert found["speedup"] == 2.0 and found["repaid_after_tokens"] == 180_000
    assert repayment(costs, 1.2, 3600.0)["repaid_after_tokens"] is None


def test_a_drafter_to_begin_with(model: Path, data: Path, drafter: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"init": drafter, "dtype": "float32", "progress": False}
    plain = config(draft_vocabulary=None, fit={"rate": 1e-12, "average": 0.0})
    before = read_checkpoint(drafter)
    again = train(model, data, out=tmp_path / "again", config=plain, **options)
    after = read_checkpoint(again.folder)
    assert after.config == before.config
    np.testing.assert_array_equal(after.draft_vocabulary, before.draft_vocabulary)
    for name, value in before.params.items():
        np.testing.assert_allclose(after.params[name], value, atol=1e-3)
    assert again.training["history"][0]["updates"] == 0 and again.training["init"] == "out"
    with pytest.raises(InvalidArgument, match=r"draft_vocabulary=40: with init="):
        train(model, data, out=tmp_path / "x", config=config(), **options)
    other = model_folder(tmp_path / "other", hidden_size=24)
    with pytest.raises(IncompatibleDrafter, match=r"hidden size 16\), but the model has 48 and 24"):
        train(other, data, out=tmp_path / "x", config=plain, **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "other"]


def test_shapes_that_can_be_asked_for(model: Path, data: Path, tmp_path: Path) -> None:
    asked = config(tied_head=False, blocks=1, inner_size=20, ship_vocabulary=24, fit={"epochs": 1})
    train(model, data, out=tmp_path / "out", config=asked, dtype="float32", progress=False)
    loaded = read_checkpoint(tmp_path / "out")
    assert loaded.config == RecurrentConfig(D, D, 20, 1, 24, tied_head=False)
    assert loaded.draft_vocabulary is not None and {0, 1} <= set(loaded.draft_vocabulary.tolist())
    assert loaded.training["settings"]["draft_vocabulary"] == 40


def test_without_data_it_writes_its_own_prompts_within_the_budget(model: Path, tmp_path: Path) -> None:
    asked = config(budget="10s", max_answer=8, fit={"epochs": None})
    done = train(model, out=tmp_path / "out", config=asked, dtype="float32", progress=False)
    assert done.training["prompts_kept"] > 8 and done.training["own_prompts"] >= done.training["prompts_kept"]
    assert done.training["planned_updates"] > 1
    assert done.training["minutes_total"] < 1.0


# stopped and refused


def stopped(monkeypatch: pytest.MonkeyPatch, error: BaseException, call: Any) -> None:
    """Have the run break off at its very end."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(stages, "costs_of", fail)
        with pytest.raises(type(error)):
            call()


def test_resume_remembers_and_refuses(model: Path, data: Path, drafter: Path, tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    mine = Path(shutil.copy(data, tmp_path / "prompts.jsonl"))
    out = tmp_path / "out"
    quiet: dict[str, Any] = {"out": out, "dtype": "float32", "progress": False}
    stopped(monkeypatch, KeyboardInterrupt(), lambda: train(model, mine, config=config(), **quiet))
    assert not out.exists() and stored_config(out) == config()
    # The best so far is usable as it is.
    assert read_checkpoint(tmp_path / "out.partial" / "best").training["unfinished"]
    with pytest.raises(InvalidArgument, match=r"unfinished run is in .*out\.partial; go on with --resume"):
        train(model, mine, config=config(), **quiet)
    with pytest.raises(InvalidArgument, match=r"config\.batch was 8, now 9"):
        train(model, mine, config=config(batch=9), resume=True, **quiet)
    with mine.open("a") as file:
        file.write('{"prompt": "w2 w3"}\n')
    with pytest.raises(InvalidArgument, match=r"sha256\..*prompts\.jsonl was"):
        train(model, resume=True, **quiet)
    shutil.copy(data, mine)
    done = train(model, resume=True, out=out, progress=False)  # all else as it was
    assert not (tmp_path / "out.partial").exists()
    wanted, found = read_checkpoint(drafter), read_checkpoint(done.folder)
    assert all(np.array_equal(wanted.params[k], found.params[k]) for k in wanted.params)
    with pytest.raises(InvalidArgument, match="finished"):
        train(model, resume=True, **quiet)
    with pytest.raises(InvalidArgument, match="exists already"):
        train(model, mine, **quiet)


def test_a_full_disk_at_the_end(
    model: Path, data: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    real = stages.write_checkpoint

    def full(folder: Path, *arguments: Any, **options: Any) -> Any:
        if Path(folder) == out:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        return real(folder, *arguments, **options)

    options: dict[str, Any] = {"out": out, "dtype": "float32", "progress": False}
    with monkeypatch.context() as patch:
        patch.setattr(stages, "write_checkpoint", full)
        with pytest.raises(OSError, match="No space left"):
            train(model, data, config=config(), **options)
    assert [p.name for p in tmp_path.iterdir()] == ["out.partial"]
    train(model, resume=True, **options)
    wanted, found = read_checkpoint(drafter), read_checkpoint(out)
    assert all(np.array_equal(wanted.params[k], found.params[k]) for k in wanted.params)


def test_overwrite_leaves_the_old_one_until_the_new_is_there(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")
    options: dict[str, Any] = {"out": out, "config": config(fit={"epochs": 1}), "dtype": "float32", "progress": False}
    stopped(monkeypatch, OSError(5, "broken"), lambda: train(model, data, overwrite=True, **options))
    assert (out / "config.json").read_text() == "old"
    train(model, data, resume=True, **options)
    assert read_checkpoint(out).training["updates"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_mistake_leaves_nothing(model: Path, data: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(json.dumps({"prompt": "w2", "response_ids": [V]}) + "\n")
    for given, asked in ((wrong, config()), (data, config(draft_vocabulary=V + 1)), (data, config(draft_vocabulary=1))):
        with pytest.raises(InvalidArgument, match=r"another tokenizer|draft_vocabulary=(1|49): expected 3 to 48"):
            train(model, given, out=tmp_path / "out", config=asked, dtype="float32", progress=False)
        assert [p.name for p in tmp_path.iterdir()] == ["wrong.jsonl"]


# the command


def test_the_command(model: Path, data: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    monkeypatch.setattr("warnings.showwarning", lambda *rest: None)
    out = tmp_path / "out"
    line = ["train", str(model), "--data", str(data), "--out", str(out), "--epochs", "1", "--dtype", "float32",
            "--max-answer", "8", "--draft-vocabulary", "40"]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(stages, "costs_of", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        broken = runner.invoke(app, line)
    assert broken.exit_code == 130
    assert broken.stderr.splitlines()[-1].endswith(f"train {model} --out {out} --resume")
    refused = runner.invoke(app, ["train", str(model), "--out", str(out), "--resume", "--seed", "5"])
    assert refused.exit_code == 2 and "seed was 0, now 5" in refused.stderr
    done = runner.invoke(app, ["train", str(model), "--out", str(out), "--resume", "--json"])
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["training"]["settings"]["max_answer"] == 8
    assert "tokens per step 4x4" in broken.stderr and "of a plain step" in done.stderr


def test_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"minutes": 1.0, "updates": 9, "tokens_per_step": {"4x4/8": 1.5}, "loss": 2.0}
    assert evaluation_line(entry) == "1.0 min, 9 updates, loss 2.000: tokens per step 4x4/8: 1.50"
    ticks: list[int] = []
    with Progress(True, lambda: ticks.append(1)).training() as report:
        report(entry)
        report({"minutes": 2.0, "loss": 1.5, "top1": [0.5, 0.25], "positions_per_s": 99.6, "progress": 0.5,
                "minutes_left": 2.0})  # fmt: skip
    shown = capsys.readouterr().err
    assert "tokens per step 4x4/8: 1.50" in shown
    assert "2.0 min, loss 1.500, top-1 0.50 0.25, 100 tokens/s, 2.0 min left" in shown
    assert len(ticks) == 2
