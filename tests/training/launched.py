"""Train a tiny model as one of several processes; run by a launcher with a folder to work in and a name.

Each process writes what it ended with, so that the test can compare them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import save_file

from portadraft.training import stages
from portadraft.training.config import FitConfig
from portadraft.training.loss import LossConfig
from portadraft.training.run import TrainConfig, train


def config() -> TrainConfig:
    fit = FitConfig(
        epochs=10, positions=128, segment=16, rate=3e-3, average=0.98, evaluations=3, patience=None,
        loss=LossConfig(steps=3),
    )  # fmt: skip
    return TrainConfig(max_answer=24, batch=16, fit=fit)


def main(place: Path, name: str, resume: bool) -> None:
    torch.set_num_threads(1)
    real = stages.fit

    def fit(*arguments: object, **options: object) -> object:
        result = real(*arguments, **options)  # type: ignore[arg-type]
        rank = os.environ.get("RANK", "0")
        save_file({k: v.detach().clone() for k, v in result.params.items()}, str(place / f"{name}-{rank}.safetensors"))
        return result

    stages.fit = fit  # type: ignore[assignment]
    trained = train(
        place / "model", place / "data.jsonl", out=place / name, config=config(), dtype="float32", progress=False,
        resume=resume,
    )  # fmt: skip
    print(trained.tokens_per_step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "--resume" in sys.argv)
