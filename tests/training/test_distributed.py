"""Several processes: the same weights in all of them, and a drafter as good as one process's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
if not torch.distributed.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

from safetensors.torch import load_file

from portadraft.drafters.checkpoint import read_checkpoint
from portadraft.errors import InvalidArgument
from portadraft.training import distributed
from portadraft.training.distributed import Processes
from portadraft.training.order import Order, plain_jobs
from portadraft.training.steps import averaged_gradients
from tests.training.tiny import World, model_folder, prompts_file, same

ROOT = Path(__file__).resolve().parents[2]


def launch(launcher: list[str], *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *launcher, *arguments],
        capture_output=True, text=True, timeout=300, check=False, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SCRIPT = str(Path(__file__).with_name("launched.py"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with drafters from one process and from two."""
    place = tmp_path_factory.mktemp("launched")
    model_folder(place / "model")
    prompts_file(place / "data.jsonl", 120)
    launch([SCRIPT], str(place), "one")
    launch([*TORCHRUN, SCRIPT], str(place), "two")
    return place


def test_weights_are_the_same_on_both(place: Path) -> None:
    a, b, alone = (load_file(place / name) for name in ("two-0.safetensors", "two-1.safetensors", "one-0.safetensors"))
    assert same(a, b)
    assert not same(a, alone)  # negative control: another order of texts, other random numbers


def test_two_are_as_good_as_one(place: Path) -> None:
    one, two = (read_checkpoint(place / name).training for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2)
    # Both saw the same texts as often, and one process wrote.
    assert one["generated_tokens"] == two["generated_tokens"]
    assert one["positions"] == two["positions"]
    assert {p.name for p in place.iterdir()} >= {"one", "two"}
    assert not list(place.glob("*.partial"))
    for shape in ("1x4", "4x4"):
        ratio = two["tokens_per_step"][shape] / one["tokens_per_step"][shape]
        assert abs(ratio - 1) <= 0.03, (shape, one["tokens_per_step"], two["tokens_per_step"])
    assert one["tokens_per_step"]["4x4"] > 1.3, "there was nothing to learn"


@pytest.mark.slow
def test_the_command_under_accelerate(place: Path) -> None:
    """Its switch for several GPUs starts two processes here, which find none and take the CPU."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    out = launch(
        ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
         "--mixed_precision", "no", "--dynamo_backend", "no", "-m", "portadraft"],
        "train", str(place / "model"), "--data", str(place / "data.jsonl"), "--out", str(place / "three"), "--quiet",
        "--epochs", "1", "--max-answer", "8", "--dtype", "float32", "--json",
    )  # fmt: skip
    assert len(out.splitlines()) == 1, "one process speaks"
    assert json.loads(out)["training"]["processes"] == 2
    assert read_checkpoint(place / "three").training["processes"] == 2


# what they agree on


class Pretended(Processes):
    """One of two processes, of which the other has the same gradients with other rows."""

    def add(self, x: Any) -> Any:
        other = x.clone()
        other[:4] = 4 * torch.tensor([1.0, 2.0, 3.0, float("nan") if self.device == "broken" else 4.0])
        other[4], other[5], other[6] = 3.0, 5.0, 4.0
        other[7:9] = torch.tensor([0.0, float(self.device == "broken")])
        return x.add_(other)


def test_gradients_are_weighted_by_rows() -> None:
    mine = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([[1.0, 1.0]])}
    mean = averaged_gradients(Pretended(0, 2), mine, 11.0, 10, 12.0)
    expected = (12 * torch.ones(4) + 4 * torch.tensor([1.0, 2.0, 3.0, 4.0])) / 16
    assert torch.equal(torch.cat([mean.grads["a"], mean.grads["b"][0]]), expected)
    assert (mean.rows, mean.positions, mean.broken) == (14, 15, ())
    broken = averaged_gradients(Pretended(0, 2, "broken"), mine, 11.0, 10, 12.0)
    assert broken.broken == (1,) and not torch.isfinite(torch.tensor(broken.norm))


def test_every_position_is_taken_once_by_one_process() -> None:
    world = World(texts=20)
    for number in (1, 2, 3):
        order = Order(plain_jobs([world.features], [1.0]), 96, 8, 0, number)
        taken: list[tuple[int, ...]] = []
        for n in range(order.per_epoch):
            jobs = order[n].jobs
            assert 1 <= len(jobs) <= number
            assert sum(int((s[:, 1] - s[:, 0]).sum()) for _, s in jobs) <= 96
            taken += [tuple(row) for _, segments in jobs for row in segments.tolist()]
        assert sorted(taken) == sorted(map(tuple, world.features.segments(8, False).tolist()))


@pytest.mark.parametrize(("device", "says"), [("mps", "start one process"), ("cuda:1", "a GPU of its own")])
def test_devices_that_several_cannot_share(monkeypatch: pytest.MonkeyPatch, device: str, says: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgument, match=says), distributed.join(device):
        pass


def test_alone_nothing_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with distributed.join("cpu") as processes:
        assert processes == Processes(0, 1, "cpu") and processes.main
        assert processes.agree({"a": 1}) == {"a": 1}
        assert not torch.distributed.is_initialized()
