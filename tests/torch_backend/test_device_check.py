"""The device check runs from end to end at toy size, and its figures are what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from portadraft.backends.torch.target import TorchTarget
from portadraft.bench import devices
from portadraft.bench.devices_models import SHAPES, TOYS, build, chain, traffic

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def test_the_script_ends_with_one_document() -> None:
    done = subprocess.run(
        ["sh", str(ROOT / "scripts" / "device_check.sh"), "--toy", "--device", "cpu"],
        env={**os.environ, "PYTHON": sys.executable, "SUITE": "0", "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["toy"] and report["suite"] == "left out" and report["left_out"] == []
    assert [m["model"] for m in report["models"]] == [shape.name for shape in TOYS]
    first = report["models"][0]
    assert [row["slots"] for row in first["passes"] if row["batch"] == 1] == [1, 4, 8]
    assert {row["batch"] for row in first["batches"]} == {2}
    assert {(row["width"], row["length"]) for row in first["drafts"]} == {(1, 4), (4, 4)}
    drafted = [row for model in report["models"] for row in model["steps"] if row["shape"] != "plain"]
    assert len(drafted) == 4
    assert all(row["same_as_plain"] and row["tokens_per_step"] > 2 and row["step_ms"] > 0 for row in drafted)
    assert "Verification passes" in done.stdout and "toy llama" in done.stdout


def test_what_there_is_no_time_for_is_said() -> None:
    report = devices.measure("cpu", toy=True, seconds=0.0)
    assert report["models"] == []
    assert report["left_out"] == [f"{shape.name}: no time left" for shape in TOYS]


@pytest.mark.parametrize("shape", TOYS, ids=lambda shape: shape.name)
def test_the_next_token_is_clear(shape: devices.Shape) -> None:
    """Far clearer than rounding in bfloat16 could change: so drafted and plain texts are the same on a GPU too."""
    model = build(shape, CPU, torch.float32)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(shape.parameters(), rel=0.02)
    ids = torch.arange(3, 23)[None]
    logits = model(input_ids=ids).logits[0]
    expected = ids[0] if shape.tied else ids[0] + 1
    best = logits.topk(2, dim=-1)
    assert best.indices[:, 0].tolist() == expected.tolist()
    assert float(((best.values[:, 0] - best.values[:, 1]) / best.values[:, 0].abs()).min()) > 0.05


def test_sizes_of_the_real_shapes() -> None:
    assert [round(shape.parameters() / 1e9, 1) for shape in SHAPES] == [6.7, 1.2, 32.5]


def test_traffic_counts_what_a_pass_reads() -> None:
    untied, tied = (build(shape, CPU, torch.float32) for shape in TOYS)
    whole = sum(p.numel() for p in untied.parameters())
    assert traffic(untied, 10, 6) == 4 * (whole - 199 * 64) + 60
    assert traffic(tied, 0, 6) == 4 * sum(p.numel() for p in tied.parameters())


@pytest.mark.parametrize(
    ("tokens", "length", "expected"), [(1.0, 4, 0.0), (5.0, 4, 1.0), (2.7731, 4, 0.7), (1.75, 2, 0.5), (6.0, 4, None)]
)
def test_break_even(tokens: float, length: int, expected: float | None) -> None:
    got = devices.acceptance_for(tokens, length)
    assert got == pytest.approx(expected, abs=1e-3) if expected is not None else got is None


@pytest.mark.parametrize("slots", [1, 2, 4, 16, 33])
def test_chains_fill_their_slots(slots: int) -> None:
    target = TorchTarget(build(TOYS[0], CPU, torch.float32))
    packed = chain(target.ops, 2, slots)
    assert packed.tokens.shape == (2, slots)
    assert packed.sizes.tolist() == [slots] * 2
