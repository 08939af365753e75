"""How long and how fast a drafter is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from portadraft.errors import InvalidArgument
from portadraft.training.loss import LossConfig


@dataclass(frozen=True)
class FitConfig:
    """How long and how fast. The run ends at whichever of `epochs`, `tokens` and `minutes` comes first.

    epochs: passes over the data. tokens: positions trained on, repeats counted. minutes: the speed is
    measured first and the number of updates fixed by it.
    positions: of texts in one update, over all processes. segment: consecutive positions that stay together.
    optimizer: "adamw" or "muon". average: decay of the averaged parameters, which are what is kept.
    explode: an update whose gradient is so many times the running median is left out.
    evaluations: how many, evenly spread. patience: end after so many without a better one (None: never).
    save_seconds: between states of the run; report_seconds: between reports.
    dtype: of the computation; the parameters themselves are float32.
    """

    epochs: float = 4.0
    tokens: int | None = None
    minutes: float | None = None
    positions: int = 512
    segment: int = 32
    optimizer: str = "adamw"
    rate: float = 1e-3
    weight_decay: float = 0.02
    average: float = 0.999
    clip: float = 1.0
    explode: float = 20.0
    evaluations: int = 12
    patience: int | None = 5
    save_seconds: float = 120.0
    report_seconds: float = 20.0
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    loss: LossConfig = field(default_factory=LossConfig)

    def __post_init__(self) -> None:
        names = ("epochs", "tokens", "minutes", "positions", "segment", "rate", "clip", "explode", "evaluations")
        for name in (*names, "patience"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidArgument(f"{name}={value!r}: expected a number above 0")
        if self.optimizer not in ("adamw", "muon"):
            raise InvalidArgument(f"optimizer={self.optimizer!r}: expected 'adamw' or 'muon'")
        if not 0 <= self.average < 1:
            raise InvalidArgument(f"average={self.average!r}: expected a number from 0 to below 1")
