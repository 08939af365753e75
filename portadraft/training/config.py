"""What is trained, on how much, how long and how fast: every choice of a run, checked before anything is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from portadraft.errors import InvalidArgument
from portadraft.training.budget import parse_budget
from portadraft.training.loss import LossConfig
from portadraft.training.modes import check_mix

DRAFT_VOCABULARY, BLOCKS = 8192, 2
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True)
class FitConfig:
    """How long and how fast. The run ends at whichever of `epochs`, `tokens` and `minutes` comes first.

    epochs: passes over the data (4 where nothing else ends the run). tokens: positions trained on, repeats
    counted. minutes: the speed is measured first and the number of updates fixed by it.
    positions: of texts in one update, over all processes. segment: consecutive positions that stay together.
    optimizer: "adamw" or "muon". average: decay of the averaged parameters, which are what is kept.
    explode: an update whose gradient is so many times the running median is left out.
    evaluations: how many, evenly spread. patience: end after so many without a better one (None: never).
    save_seconds: between states of the run; report_seconds: between reports.
    dtype: of the computation; the parameters themselves are float32.
    """

    epochs: float | None = None
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


@dataclass(frozen=True)
class TrainConfig:
    """What is trained, and on what.

    budget: for the whole run, as `parse_budget` reads it ("20m", "3Mtok"); None: `fit` alone says.
    draft_vocabulary: how many tokens the drafter may predict (the whole vocabulary if that is smaller; None: 8,192).
    ship_vocabulary: cut the finished drafter to so many.
    inner_size: width of the residual blocks (None: 2D, without an input projection). blocks: how many (None: 2).
    tied_head: whether the head is the target's own (None: it is). With an `init` drafter these four are its own.
    mix: weight of each mode (`portadraft.training.modes`); empty: what the data allow.
    temperature: of the answers to learn from; 0 is greedy.
    own_prompts: how many prompts the model writes where no data are given (None: 2,000, or what a time budget allows).
    max_answer: the most tokens of a generated answer. max_length: of a whole document.
    text_tokens: the most tokens of plain text to learn from. rows: the most of one file or data set.
    batch: answers generated at once. cache_bytes: the most bytes of features on disk.
    evaluate_answers: how many held-out answers each evaluation replays.
    """

    budget: str | None = None
    draft_vocabulary: int | None = None
    ship_vocabulary: int | None = None
    inner_size: int | None = None
    blocks: int | None = None
    tied_head: bool | None = None
    mix: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 0.0
    own_prompts: int | None = None
    max_answer: int = 224
    max_length: int = 1024
    text_tokens: int | None = None
    rows: int | None = None
    batch: int = 32
    cache_bytes: int | None = None
    evaluate_answers: int = 60
    fit: FitConfig = field(default_factory=FitConfig)

    def __post_init__(self) -> None:
        if self.budget is not None:
            parse_budget(self.budget)
        for name in (
            "draft_vocabulary", "ship_vocabulary", "inner_size", "own_prompts", "max_answer", "max_length",
            "text_tokens", "rows", "batch", "cache_bytes", "evaluate_answers",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidArgument(f"{name}={value!r}: expected a whole number of at least 1")
        if self.blocks is not None and self.blocks < 0:
            raise InvalidArgument(f"blocks={self.blocks!r}: expected a whole number of at least 0")
        if not 0 <= self.temperature < math.inf:
            raise InvalidArgument(f"temperature={self.temperature!r}: expected a number of at least 0")
        check_mix(self.mix)
        size, shipped = self.draft_vocabulary or DRAFT_VOCABULARY, self.ship_vocabulary
        if shipped is not None and shipped > size:
            raise InvalidArgument(
                f"ship_vocabulary={shipped}: more than the draft vocabulary that is trained; expected at most {size}"
            )


def parse_bytes(text: str, name: str = "cache_limit") -> int:
    """Read `20GB`, `500MB` or a number of bytes. Raises: InvalidArgument."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)i?b?", text.strip().lower().replace(" ", ""))
    size = round(float(match[1]) * _BYTES[match[2]]) if match else 0
    if size < 1:
        raise InvalidArgument(f"{name}={text!r}: expected a size such as 20GB or 500MB")
    return size


def config_from_json(document: Mapping[str, Any]) -> TrainConfig:
    """A configuration from what `dataclasses.asdict` and JSON made of it."""

    def known(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        names = {f.name for f in fields(kind)}
        return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names}

    fit = dict(document["fit"])
    loss = LossConfig(**known(LossConfig, fit.pop("loss")))
    top = {k: v for k, v in document.items() if k != "fit"}
    return TrainConfig(**known(TrainConfig, top), fit=FitConfig(**known(FitConfig, fit), loss=loss))
