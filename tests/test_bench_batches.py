"""`portadraft bench batches` at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="the torch extra is not installed")

from portadraft.bench.batches import spread
from portadraft.cli.app import app
from tests.test_api import save_model


def test_texts_of_all_lengths_long_beside_short() -> None:
    texts = ["x" * n for n in range(1, 101)]
    taken = spread(texts, 20)
    assert (len(taken), len(set(taken))) == (20, 20)
    assert (min(map(len, taken)), max(map(len, taken))) == (1, 100)
    assert taken != sorted(taken, key=len)
    for count in (1, 7, 91):
        assert len(set(spread(texts, count))) == count
    assert sorted(spread(texts, 200), key=len) == texts


def test_the_command_on_a_tiny_model(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "word " * n}) + "\n" for n in range(1, 12)))
    line = ["bench", "batches", str(prompts), "--model", str(tmp_path / "tiny"), "--count", "6", "-n", "5"]
    result = CliRunner().invoke(app, [*line, "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["prompts"] == 6
    assert [(r["drafter"], r["slots"]) for r in report["runs"]] == [("none", 1), ("none", 4), ("auto", 1), ("auto", 4)]
    assert {r["same_text"] for r in report["runs"]} == {6}
    assert len({r["tokens"] for r in report["runs"]}) == 1
    assert report["prompt_tokens"]["least"] < report["prompt_tokens"]["most"]
    prompts.write_text(json.dumps({"prompt": "x"}) + "\n\n" + json.dumps({"prompt": "word " * 5000}) + "\n")
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 2
    assert "error: prompt #2: " in result.stderr, "by its place in the file, whatever the order of the runs"
