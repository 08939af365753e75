"""`portadraft bench sampling` and `bench temperatures` at toy size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="the torch extra is not installed")

import portadraft
from portadraft.bench.sampling import KINDS
from portadraft.cli.app import app
from tests.test_api import save_drafter, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_model(path)
    return path


def bench(*arguments: Any) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments), "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


def test_costs(folder: Path) -> None:
    report = bench("sampling", "--model", folder, "--repeats", 1)
    assert [row["sampling"] for row in report["kinds"]] == list(KINDS)
    assert report["kinds"][0]["over_greedy"] == "0.0%"
    for row in report["kinds"]:
        assert 0 < row["choice_ms"] < report["plain_step_ms"] * 20 and row["walk_ms"] > 0
        assert all(row[name].endswith("%") for name in ("of_a_drafted_step", "of_a_plain_step"))


def test_temperatures(folder: Path, tmp_path: Path) -> None:
    drafter = save_drafter(tmp_path / "random", portadraft.load(folder, dtype="float32"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "word " * n}) + "\n" for n in range(1, 6)))
    line = ["temperatures", prompts, "--model", folder, "--drafter", drafter, "--width", 1, "--width", 2, "-n", 6]
    report = bench(*line, "--temperature", 0, "--temperature", 0.9, "--limit", 2)
    assert report["prompts"] == 2
    assert [(r["temperature"], r["rule"], r["width"]) for r in report["rows"]] == [
        (0.0, "plain", 0), (0.0, "match", 1), (0.0, "match", 2),
        (0.9, "plain", 0), (0.9, "match", 1), (0.9, "match", 2), (0.9, "rejection", 1),
    ]  # fmt: skip
    for row in report["rows"]:
        if row["rule"] == "plain":
            assert (row["speedup"], row["tokens_per_step"]) == (1.0, 1.0)
        else:
            assert row["speedup"] > 0 and 1 <= row["tokens_per_step"] <= 5


def test_a_missing_file_is_named(folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "temperatures", str(tmp_path / "absent.jsonl"), "--model", str(folder)])
    assert result.exit_code == 2 and "no such file" in result.output
