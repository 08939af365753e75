"""Train a tiny model in processes that are killed by SIGKILL at many moments, and go on each time.

Run as a script with a folder to work in; prints one JSON document. Processes are forked after the
imports, which take longer than the runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")


from portadraft.training import corpus as corpus_module
from portadraft.training import resume, shelf, stages
from portadraft.training.run import TrainConfig, train
from portadraft.training.trainer import Trainer
from tests.killing import forked
from tests.training.tiny import model_folder, prompts_file, settings_for


def config(seed: int = 0) -> TrainConfig:
    fit = settings_for(epochs=2, seed=seed, evaluations=3, save_seconds=0.05)
    return TrainConfig(draft_vocabulary=40, max_answer=16, batch=4, fit=fit)


def suicide_at(moment: str, nth: int) -> None:
    """Have this process killed at the nth call of what happens at a moment."""
    left = nth

    def counted(real: Callable[..., Any], before: bool = True) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **options)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    if moment == "generating":
        from portadraft.core.decode import Decoder

        Decoder.step = counted(Decoder.step)  # type: ignore[method-assign]
    elif moment == "reading":  # features are recorded, and not yet on the disk
        shelf.record_batches = counted(shelf.record_batches, before=False)
    elif moment == "saving":  # the state's bytes are written, and not yet in their place
        real_fsync = resume.os.fsync
        in_state = resume.save_state

        def save_state(*arguments: Any, **options: Any) -> None:
            resume.os.fsync = counted(real_fsync, before=False)
            in_state(*arguments, **options)

        sys.modules["portadraft.training.trainer"].save_state = save_state  # type: ignore[attr-defined]
    elif moment == "training":
        Trainer.gradients = counted(Trainer.gradients, before=False)  # type: ignore[method-assign]
    else:
        stages.write_checkpoint = counted(stages.write_checkpoint)


MOMENTS = {"generating": (3, 9, 30), "reading": (1, 2), "saving": (1, 4), "training": (1, 5, 9), "finishing": (1, 2, 3)}


def main(place: Path) -> None:
    model, data = model_folder(place / "model"), prompts_file(place / "data.jsonl", 24)

    def run(name: str, seed: int = 0, resumed: bool = False) -> None:
        train(model, data, out=place / name / "out", config=config(seed), dtype="float32", progress=False,
              resume=resumed)  # fmt: skip

    def sha(name: str) -> str:
        return hashlib.sha256((place / name / "out" / "model.safetensors").read_bytes()).hexdigest()

    report: dict[str, Any] = {"sha256": {}, "kills": {}, "left": {}, "seconds": {}}
    for name, seed in (("unbroken", 0), ("another seed", 1)):
        (place / name).mkdir()
        assert forked(lambda name=name, seed=seed: run(name, seed)) == 0
        report["sha256"][name] = sha(name)
    for moment, times in MOMENTS.items():
        (place / moment).mkdir()
        kills = 0
        for nth in times:

            def work(moment: str = moment, nth: int = nth) -> None:
                suicide_at(moment, nth)
                run(moment, resumed=True)

            if not (place / moment / "out").exists() or (place / moment / "out.partial").exists():
                kills += forked(work) == signal.SIGKILL
        if (place / moment / "out.partial").exists():
            assert forked(lambda moment=moment: run(moment, resumed=True)) == 0
        report["kills"][moment] = kills
        report["sha256"][moment] = sha(moment)
        report["left"][moment] = [p.name for p in (place / moment).iterdir() if p.name != "out"]
    print(json.dumps(report))


if __name__ == "__main__":
    began = time.monotonic()
    main(Path(sys.argv[1]))
    print(f"{corpus_module.__name__}: {time.monotonic() - began:.1f} s", file=sys.stderr)
