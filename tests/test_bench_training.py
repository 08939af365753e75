"""`portadraft bench table4` and `bench calibration` on a tiny model: what they compare, and that they go on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="the torch extra is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from portadraft.backends.numpy.ops import NumpyOps
from portadraft.bench import calibration as calibration_module
from portadraft.bench import study, table4
from portadraft.bench.calibration import best, calibration
from portadraft.bench.certainty import calibration_of, expected_error
from portadraft.bench.study import Count, difference
from portadraft.cli.app import app
from portadraft.core import recurrent
from portadraft.errors import InvalidArgument, ModelNotFound
from portadraft.training.config import FitConfig, TrainConfig
from portadraft.training.finish import Runnable
from portadraft.training.initial import initial
from portadraft.training.loss import LossConfig
from portadraft.tuner.recordings import Recording
from tests.training.tiny import ARCHITECTURE, D, V, World, model_folder

BUDGET = "24ktok"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return str(model_folder(tmp_path_factory.mktemp("target") / "model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts with references of random words, of which a drafter learns nothing about the model."""
    rng = np.random.default_rng(0)

    def words(n: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(2, V, n))

    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": words(5), "reference": words(16)}) + "\n" for _ in range(150)))
    return path


def config(**changes: Any) -> TrainConfig:
    fit = FitConfig(positions=128, segment=16, rate=3e-3, average=0.98, loss=LossConfig(steps=3), seed=1)
    return TrainConfig(**({"max_answer": 24, "fit": fit} | changes))


# the paper's table 4


@pytest.fixture(scope="module")
def compared(model: str, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    work = tmp_path_factory.mktemp("table4")
    return work, run_table4(model, data, work)


def run_table4(model: str, data: Path, work: Path, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "data": [data], "budget": BUDGET, "epochs": 8, "widths": (1, 4), "length": 3, "prompts": 8, "repeats": 2,
        "config": config(), "work": work, "dtype": "float32", "progress": False,
    }  # fmt: skip
    return table4.table4(model, **(given | changes))


def test_what_the_model_would_say_teaches_more_than_the_text(compared: tuple[Path, dict[str, Any]]) -> None:
    report = compared[1]
    assert report["held_out_prompts"] >= 4
    seen = report["positions"]
    assert seen.keys() == {"local", "ground-truth", "half"}
    assert max(seen.values()) - min(seen.values()) <= 128, "not the same budget"
    assert [(r["temperature"], r["width"]) for r in report["rows"]] == [(0.0, 1), (0.0, 4), (0.7, 1), (0.7, 4)]
    for row in report["rows"]:
        assert row["gain"] == pytest.approx(row["local"] - row["ground-truth"], abs=2e-3)
        assert row["speedup local"] == pytest.approx(row["local"] / row["step_ratio"], rel=0.01)
        assert 1 < row["nodes"] <= 1 + row["width"] * 3
    greedy = report["rows"][:2]
    assert all(row["gain"] > 3 * row["error"] > 0 for row in greedy), greedy
    # Noise teaches nothing: the negative control.
    assert all(row["ground-truth"] < row["half"] for row in greedy)
    json.dumps(report, allow_nan=False)
    for lines in table4.tables(report).values():
        assert len(lines) == 4


@pytest.mark.parametrize("mode", ["text", "sequence"])
def test_other_ways_to_distil(model: str, data: Path, tmp_path: Path, mode: str) -> None:
    given: dict[str, Any] = {"budget": "2ktok", "epochs": 1, "widths": (2,), "temperatures": (0.0,), "nodes": 4}
    report = run_table4(model, data, tmp_path / "w", distilled=mode, **given)
    (row,) = report["rows"]
    assert row["width"] == 2 and 1 <= row[mode] <= 4 and 1 < row["nodes"] <= 4
    assert list(report["positions"]) == [mode, "ground-truth", "half"]
    assert all(2000 <= n <= 2300 for n in report["positions"].values())


def test_it_goes_on_where_it_was_and_measures_costs_again(
    model: str, data: Path, compared: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    work, before = compared
    kept = {p: p.stat().st_mtime_ns for p in work.rglob("*") if p.is_file()}
    monkeypatch.setattr(study, "fit", lambda *_, **__: pytest.fail("a drafter was trained again"))
    again = run_table4(model, data, work)
    timed = ("speedup local", "speedup ground-truth", "speedup half", "step_ratio")
    for a, b in zip(before["rows"], again["rows"], strict=True):
        assert {k: v for k, v in a.items() if k not in timed} == {k: v for k, v in b.items() if k not in timed}
    assert {p: p.stat().st_mtime_ns for p in work.rglob("*") if p.is_file()} == kept
    with pytest.raises(InvalidArgument, match="config="):
        run_table4(model, data, work, config=config(draft_vocabulary=20))
    with pytest.raises(InvalidArgument, match="held_out=5"):
        run_table4(model, data, work, prompts=5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budget": "20m"}, "budget='20m': expected tokens"),
        ({"budget": "soon"}, "budget='soon'"),
        ({"epochs": 0}, "epochs=0"),
        ({"distilled": "ground-truth"}, "distilled='ground-truth': expected one of local"),
        ({"widths": ()}, "widths=0: expected at least 1"),
        ({"widths": (0,)}, "width=0"),
        ({"length": 0}, "length=0"),
        ({"nodes": 1}, "nodes=1"),
        ({"temperatures": (-1.0,)}, "temperatures="),
        ({"prompts": 0}, "prompts=0"),
        ({"repeats": 0}, "repeats=0"),
    ],
)
def test_options_are_checked_before_the_model(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(table4, "load_teacher", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(InvalidArgument, match=says):
        run_table4("no-such-model", data, tmp_path / "w", **changes)
    assert not (tmp_path / "w").exists()


def test_data_are_checked_before_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table4, "load_teacher", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(calibration_module, "load_teacher", lambda *_: pytest.fail("the model was loaded"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "why"}\n{"prompt": 3}\n')
    with pytest.raises(InvalidArgument, match=r"prompts\.jsonl', line 2"):
        run_table4("m", prompts, tmp_path / "w")
    with pytest.raises(InvalidArgument, match=r"prompts\.jsonl', line 2"):
        calibration("m", data=[prompts])
    prompts.write_text('{"prompt": "why"}\n')
    with pytest.raises(InvalidArgument, match="no row has a `reference`"):
        run_table4("m", prompts, tmp_path / "w")
    with pytest.raises(InvalidArgument, match="at least one file"):
        table4.table4("m", data=[])
    with pytest.raises(ModelNotFound, match="no such file"):
        calibration("m", data=[tmp_path / "none"])
    for changes, says in (({"budget": "1h"}, "expected tokens"), ({"rows": 0}, "rows=0"), ({"shapes": ()}, "shapes=0")):
        with pytest.raises(InvalidArgument, match=says):
            calibration("m", data=[prompts], **changes)


# greedy-only against soft


def test_the_command_for_calibration(model: str, data: Path, tmp_path: Path) -> None:
    line = ["bench", "calibration", model, "--data", str(data), "--budget", "6ktok", "--prompts", "6", "-n", "12",
            "--shape", "1x2", "--shape", "4x3x6", "--temperature", "0", "--temperature", "0.9", "--dtype", "float32",
            "--work", str(tmp_path / "w")]  # fmt: skip
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert [(r["trained"], r["temperature"]) for r in report["rows"]] == [
        (name, t) for t in (0.0, 0.9) for name in ("soft", "default", "greedy-only")
    ]
    assert report["best"] in report["hard"]
    for row in report["rows"]:
        assert 1 <= row["1x2"] <= 3 and 1 <= row["4x3/6"] <= 4
        assert len(row["ece"]) == len(row["divergence"]) == 5
        assert all(0 <= e <= 1 and kl > 0 for e, kl in zip(row["ece"], row["divergence"], strict=True))
        assert (row["difference"] == 0) if row["trained"] == "default" else row["error"] >= 0
    assert len({tuple(r["ece"]) for r in report["rows"]}) == 6, "they were all trained alike"


def test_the_best_has_most_tokens_a_step_over_all_temperatures() -> None:
    rows = [{"trained": n, "4x4": v} for n, v in (("a", 1.5), ("b", 1.4), ("a", 1.1), ("b", 1.3))]
    assert best(rows, "4x4") == "b"
    assert best(rows[:2], "4x4") == "a"


# the measures


def test_calibration_error_of_the_calibrated_and_of_the_sure() -> None:
    rng = np.random.default_rng(0)
    sure = rng.random(40_000)
    right = rng.random(40_000) < sure
    assert expected_error(sure, right) < 0.02
    assert expected_error(np.sqrt(sure), right) == pytest.approx(float((np.sqrt(sure) - sure).mean()), abs=0.02)
    assert expected_error(np.array([1.0, 1.0, 0.2]), np.array([True, False, False])) == pytest.approx(1.2 / 3)
    assert math.isnan(expected_error(np.zeros(0), np.zeros(0, bool)))


def test_differences_and_their_errors() -> None:
    rng = np.random.default_rng(1)
    a = Count([rng.integers(0, 4, rng.integers(5, 30)).tolist() for _ in range(60)], 5.0)
    b = Count([[x - (x > 0) for x in one] for one in a.accepted], 5.0)
    more, error = difference(a, b)
    assert more == pytest.approx(a.tokens_per_step - b.tokens_per_step) and more > 0.5
    assert difference(a, a) == (0.0, 0.0)
    drawn = []
    for _ in range(2000):
        at = rng.integers(0, 60, 60)
        drawn.append(difference_of([a.accepted[i] for i in at], [b.accepted[i] for i in at]))
    assert error == pytest.approx(float(np.std(drawn)), rel=0.15)
    assert math.isnan(difference(Count([[1]], 1.0), Count([[0]], 1.0))[1])


def difference_of(a: list[list[int]], b: list[list[int]]) -> float:
    return float(np.mean(np.concatenate(a)) - np.mean(np.concatenate(b)))


def by_hand(
    world: World, params: dict[str, Any], kept: list[int], recordings: list[Recording], temperature: float, steps: int
) -> list[list[tuple[float, bool, float]]]:
    """(probability of the best guess, whether it was right, divergence) by step, one position at a time."""
    ops = NumpyOps()
    table, head = world.table.numpy(), world.head.numpy()[kept]
    own = {k: v.numpy() for k, v in params.items()} | {"head.weight": head}
    out: list[list[tuple[float, bool, float]]] = [[] for _ in range(steps)]
    for r in recordings:
        tokens, hidden = r.tokens.tolist(), np.asarray(r.hidden.float())
        for at in range(len(tokens) - 1):
            state = recurrent.first_state(ops, own, ARCHITECTURE, table[tokens[at]][None])
            for t in range(1, steps + 1):
                if at + t >= len(tokens):
                    break
                x = recurrent.trunk(ops, own, ARCHITECTURE, state, hidden[at][None])
                q = np.exp(ops.log_softmax(recurrent.head(ops, own, ARCHITECTURE, x), axis=-1))[0].astype(np.float64)
                z = (head @ hidden[at + t - 1]).astype(np.float64)
                if temperature:
                    p = np.exp(z / temperature - (z / temperature).max())
                    p /= p.sum()
                    kl = float((p * np.log(p / q)).sum())
                else:
                    kl = -math.log(q[z.argmax()])
                out[t - 1].append((float(q.max()), kept[int(q.argmax())] == tokens[at + t], kl))
                if tokens[at + t] not in kept:
                    break
                state = recurrent.next_state(ops, own, state, table[tokens[at + t]][None])
    return out


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_calibration_is_that_of_one_position_after_the_other(temperature: float) -> None:
    world = World(texts=20, length=20)
    recordings = world.features.recordings()
    kept = [i for i in range(V) if i % 4]
    arch = recurrent.RecurrentConfig(D, D, 2 * D, 1, len(kept))
    params = initial(arch, 0)
    one = Runnable(
        params | {"head.weight": world.head[kept]}, world.table, np.array(kept, np.int32), "float32"
    )  # fmt: skip
    found = calibration_of(arch, one, recordings, 3, temperature)
    wanted = by_hand(world, params, kept, recordings, temperature, 3)
    for t, rows in enumerate(wanted):
        sure, right, kl = (np.array(column, np.float64) for column in zip(*rows, strict=True))
        assert found.positions[t] == len(rows)
        assert found.sure[t] == pytest.approx(sure.mean(), rel=1e-5)
        assert found.right[t] == pytest.approx(right.mean())
        assert found.divergence[t] == pytest.approx(kl.mean(), rel=1e-4)
        assert found.ece[t] == pytest.approx(expected_error(sure, right > 0), abs=1e-5)
    # Negative control: features of the wrong places.
    shifted = [Recording(r.tokens, torch.roll(r.hidden, 1, 0)) for r in recordings]
    assert calibration_of(arch, one, shifted, 3, temperature).divergence != found.divergence
