"""What is asked of `tune`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from portadraft.errors import InvalidArgument
from portadraft.tuner.devices import DeviceCurve
from portadraft.tuner.grid import Grid
from portadraft.tuner.machine import DEFAULT_CONTEXT
from portadraft.tuner.recordings import MAX_TOKENS


@dataclass(frozen=True)
class TuneConfig:
    """What is asked for.

    budget_s: seconds of measuring for each batch size (and drafter), after loading and with the acceptance table at
    hand. context: tokens before the steps that are measured, about. objective: "latency" (tokens/s of a request at
    that batch size) or "throughput" (which also recommends a batch size). predict_only: no whole steps are measured.
    device_curve: a device that is not here; nothing is measured and no profile is stored. prompts: a file in place of
    the built-in ones. grid: of shapes.
    """

    budget_s: float = 60.0
    batch_sizes: tuple[int, ...] = (1,)
    objective: Literal["latency", "throughput"] = "latency"
    context: int = DEFAULT_CONTEXT
    temperature: float = 0.0
    seed: int = 0
    prompts: Path | None = None
    drafters: tuple[str, ...] = ("auto",)
    max_tokens: int = MAX_TOKENS
    exhaustive: bool = False
    predict_only: bool = False
    device_curve: DeviceCurve | None = None
    grid: Grid = field(default_factory=Grid)

    def __post_init__(self) -> None:
        if not 0 < self.budget_s <= 7 * 24 * 3600:
            raise InvalidArgument(f"budget={self.budget_s!r}: expected more than 0 seconds and at most a week")
        if not self.batch_sizes or any(not 1 <= b <= 4096 for b in self.batch_sizes):
            raise InvalidArgument(f"batch_sizes={self.batch_sizes!r}: expected numbers from 1 to 4096")
        if self.objective not in ("latency", "throughput"):
            raise InvalidArgument(f"objective={self.objective!r}: expected 'latency' or 'throughput'")
        if self.context < 1 or self.max_tokens < 2:
            raise InvalidArgument(
                f"context={self.context!r}, max_tokens={self.max_tokens!r}: expected at least 1 and at least 2"
            )
        if not self.temperature >= 0 or self.temperature > 100:
            raise InvalidArgument(f"temperature={self.temperature!r}: expected 0 (greedy) to 100")
        if not self.drafters:
            raise InvalidArgument("drafters=(): expected at least one")
