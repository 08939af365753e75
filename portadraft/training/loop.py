"""The training loop: from recorded features to a drafter, the best by replay kept.

What update n does depends on the seed, n and the parameters alone, and never on the clock: the number of
updates is fixed before the first one, and the learning rate, evaluations and the end follow from it. So a
run that was killed and went on from its state gives the same parameters, bit for bit, as one that was not.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.types import BeamShape
from portadraft.training.config import FitConfig
from portadraft.training.counters import FitResult, Params, Report
from portadraft.training.distributed import Processes
from portadraft.training.features import Features
from portadraft.training.initial import initial
from portadraft.training.order import Jobs, plain_jobs
from portadraft.training.trainer import Trainer
from portadraft.tuner.replay import Recording

__all__ = ["FitConfig", "FitResult", "fit", "initial"]


def fit(
    config: RecurrentConfig,
    embeddings: Tensor,
    head: Tensor,
    draft_vocabulary: NDArray[np.int32],
    sources: Sequence[Features],
    held_out: Sequence[Recording],
    settings: FitConfig,
    weights: Sequence[float] | None = None,
    jobs: Jobs | None = None,
    start: Mapping[str, Tensor] | None = None,
    report: Report | None = None,
    save: Callable[[Params, dict[str, Any]], None] | None = None,
    shapes: Sequence[BeamShape] = (BeamShape(4, 4),),
    head_bias: Tensor | None = None,
    state: Path | None = None,
    processes: Processes | None = None,
) -> FitResult:
    """Train the drafter's own parameters on recorded features.

    embeddings: (V, E) and head: (V', D), the target's frozen tables, the head cut to the draft
    vocabulary. held_out: generations to replay; the averaged parameters that give the most
    tokens per step for the first of `shapes` are kept, and `save` is called with them at once.
    weights: the share of each source that an epoch visits; jobs: decides instead what an epoch is (`Corpus.jobs`).
    start: parameters to begin with.
    state: a file that the run's state is written to, and taken up from where it exists.
    processes: all of which call this alike; `report` and `save` are called in the main one.

    Ctrl-C waits for the update to end, writes the state and then raises KeyboardInterrupt.

    Raises: InvalidArgument if there is nothing to train on; OSError for a full disk, the last state unharmed.
    """
    run = Trainer(
        config, embeddings, head, head_bias, draft_vocabulary, sources, held_out, settings,
        jobs or plain_jobs(sources, weights or [1.0] * len(sources)), start, shapes, processes or Processes(),
    )  # fmt: skip
    main = run.processes.main
    run.report, run.save = (report, save) if main else (None, None)
    with _own_randomness(run.device), _postponed_interrupt(run.processes.world == 1) as interrupted:
        if state is not None and state.exists():
            run.restore(state)
        run.clock = time.monotonic() - run.at.seconds
        if run.at.plan is None:
            run.at.plan = asdict(run.make_plan())
            if start is not None and held_out:
                run.evaluate()  # what it starts from counts: training may not better it
            if state is not None and main:
                run.write(state)  # a plan that came from the clock is made once
        saved = time.monotonic()
        while not run.at.ended:
            evaluated = run.advance()
            due = evaluated or run.at.ended or interrupted() or time.monotonic() - saved > settings.save_seconds
            if state is not None and main and due:
                run.write(state)
                saved = time.monotonic()
            if interrupted():
                raise KeyboardInterrupt
    return run.result()


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Drop-out draws from torch's global generators: give the caller's back afterwards."""
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def _postponed_interrupt(wanted: bool) -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C wait for the end of an update; the second one does not wait."""
    asked = False
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield lambda: asked
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        nonlocal asked
        if asked or not callable(before):
            raise KeyboardInterrupt
        asked = True

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
