"""What a profile says: the schema, version 1.

A profile comes from other people's machines, so it is read as untrusted input: `portadraft.profiles.read`
bounds its size and depth before it is parsed, and every field here has a type, a range and a length. Names
in it are for people; none of them is ever used as a file name.

Units: `_ms` milliseconds, `_gb` gibibytes rounded as `portadraft.profiles.device` does, `tokens_per_s` over all rows
of the batch. A beam length counts drafted tokens; the root is not counted.
"""

from __future__ import annotations

import hashlib
import json
import math
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from portadraft.core.types import MOST_NODES, BeamShape

SCHEMA_VERSION = 1
"""Raised when an older portadraft would misread a file; new optional fields do not raise it."""

MOST_LENGTH = 64
MOST_SAMPLES = 20_000
MOST_POINTS = 20_000


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected printable text (no control characters, line breaks or lone surrogates)")
    return text


Text = Annotated[str, Field(max_length=200), AfterValidator(_printable)]
Long = Annotated[str, Field(max_length=2000), AfterValidator(_printable)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
BatchSize = Annotated[int, Field(ge=1, le=4096)]
MOST_CONTEXT = 100_000_000
Context = Annotated[int, Field(ge=0, le=MOST_CONTEXT)]
MOST_RATE = 1e9
Rate = Annotated[float, Field(gt=0, le=MOST_RATE)]
MOST_SPREAD = 1e3
MOST_SPEEDUP = 1e4
ROUNDING = 0.05
"""Relative: figures may be stated to two digits, as papers do."""
Spread = Annotated[float, Field(ge=0, le=MOST_SPREAD)]
Milliseconds = Annotated[float, Field(ge=0, le=1e8)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Width = Annotated[int, Field(ge=1, le=MOST_NODES)]
Length = Annotated[int, Field(ge=1, le=MOST_LENGTH)]
Nodes = Annotated[int, Field(ge=2, le=MOST_NODES + 1)]
Slots = Annotated[int, Field(ge=1, le=MOST_NODES + 1)]

Origin = Literal["measured", "published", "predicted"]
Objective = Literal["latency", "throughput"]


class _Part(BaseModel):
    """Frozen, strict (a number in quotes is no number), finite; fields that it does not know are passed over."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="ignore")


class Machine(_Part):
    """Where it was measured.

    name: canonical (`device.canonical_name`); reported: as the driver said it. kind: "cpu" or "gpu".
    memory_gb: of the device, None where unknown. cores: of the processor that was used, None for GPUs.
    threads: used by the backend on a CPU.
    """

    name: Text
    kind: Literal["cpu", "gpu"]
    memory_gb: Count | None = None
    cores: Count | None = None
    threads: Count | None = None
    driver: Text = ""
    reported: Text = ""


class Software(_Part):
    """What it was measured with. versions: by distribution, such as {"torch": "2.13.0", "transformers": "5.24.0"}."""

    portadraft: Text = ""
    backend: Text
    versions: Annotated[dict[Text, Text], Field(max_length=32)] = {}


class ModelIdentity(_Part):
    """Which model: a name for people, and the ids of `portadraft.identity`.

    architecture_id: what costs depend on. weights_id: what acceptance depends on. tokenizer: its fingerprint.
    An empty id is unknown, as in published profiles; these are matched by name.
    """

    name: Text = ""
    architecture_id: Annotated[Text, Field(max_length=64)] = ""
    weights_id: Annotated[Text, Field(max_length=512)] = ""
    tokenizer: Annotated[Text, Field(max_length=64)] = ""


class DrafterIdentity(_Part):
    """Which drafter: its kind ("redrafter+lookup"), and an id of its weights and settings ("" unknown)."""

    name: Text
    id: Annotated[str, Field(max_length=2000), AfterValidator(_printable)] = ""


class Conditions(_Part):
    """Under which conditions. context: tokens before the answer, about. quantization: None where there is none."""

    dtype: Text
    quantization: Text | None = None
    temperature: Temperature = 0.0
    context: Context = 0
    objective: Objective = "latency"


class Shape(_Part):
    """A beam's shape: W, L and the node budget N (None keeps every node)."""

    width: Width
    length: Length
    nodes: Nodes | None = None

    @model_validator(mode="after")
    def _bounded(self) -> Shape:
        if self.width * self.length > MOST_NODES:
            raise ValueError(f"width {self.width} x length {self.length}: expected at most {MOST_NODES} drafted tokens")
        return self

    def beam(self) -> BeamShape:
        """As the decode loop takes it."""
        return BeamShape(self.width, self.length, self.nodes)

    @staticmethod
    def of(shape: BeamShape | None) -> Shape | None:
        """From the decode loop's; None is plain decoding."""
        return None if shape is None else Shape(width=shape.width, length=shape.length, nodes=shape.nodes)

    def __str__(self) -> str:
        return f"{self.width}x{self.length}" + (f", {self.nodes} slots" if self.nodes else "")


class BatchChoice(_Part):
    """What to do at one batch size.

    shape: None decodes plainly, since that was fastest. tokens_per_s, plain_tokens_per_s: medians, over all rows.
    spread: relative, half the interquartile range ÷ the median. speedup: over plain decoding measured in turns with
    it, which is tokens_per_s ÷ plain_tokens_per_s up to ROUNDING. Figures may be absent in published profiles.
    """

    batch_size: BatchSize
    shape: Shape | None
    tokens_per_s: Rate | None = None
    spread: Spread | None = None
    plain_tokens_per_s: Rate | None = None
    speedup: Annotated[float, Field(gt=0, le=MOST_SPEEDUP)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> BatchChoice:
        rate, plain, stated = self.tokens_per_s, self.plain_tokens_per_s, self.speedup
        if rate is not None and plain is not None:
            if self.shape is None and not _near(rate, plain):
                raise ValueError(f"tokens_per_s {rate:g}: expected plain_tokens_per_s {plain:g}, since shape is null")
            if stated is not None and not _near(stated * plain, rate):
                raise ValueError(
                    f"speedup {stated:g}: expected tokens_per_s / plain_tokens_per_s, {rate:g} / {plain:g}"
                )
        if self.shape is None and stated is not None and not _near(stated, 1.0):
            raise ValueError(f"speedup {stated:g}: expected 1, since shape is null (plain decoding)")
        return self


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= ROUNDING * max(a, b)


class VerifyCost(_Part):
    """Milliseconds of one target pass over `slots` slots for `batch_size` rows at `context` tokens; 1 slot is plain."""

    batch_size: BatchSize
    context: Context
    slots: Slots
    ms: Milliseconds
    spread: Spread = 0.0


class DraftCost(_Part):
    """Milliseconds of drafting and packing one beam for `batch_size` rows."""

    batch_size: BatchSize
    width: Width
    length: Length
    ms: Milliseconds
    spread: Spread = 0.0


class Costs(_Part):
    """The machine's cost curve for this architecture. overhead_ms: of a step beside drafting and verifying."""

    verify: Annotated[tuple[VerifyCost, ...], Field(max_length=MOST_POINTS)] = ()
    draft: Annotated[tuple[DraftCost, ...], Field(max_length=MOST_POINTS)] = ()
    overhead_ms: Milliseconds = 0.0


class Acceptance(_Part):
    """Tokens per step of a shape by replay (no device in it); slots: mean verified slots, root included."""

    shape: Shape
    temperature: Temperature
    tokens_per_step: Annotated[float, Field(ge=1, le=MOST_LENGTH + 1)]
    low: Annotated[float, Field(ge=1, le=MOST_LENGTH + 1)] | None = None
    high: Annotated[float, Field(ge=1, le=MOST_LENGTH + 1)] | None = None
    slots: Annotated[float, Field(ge=1, le=MOST_NODES + 1)] | None = None


class Sample(_Part):
    """One end-to-end measurement, kept raw so that profiles of equal machines can be pooled.

    submitter: who measured (`portadraft.profiles.submitter`: random, made once per home folder). run: of one tuner
    run, random. round: number of the interleaved round. phase: "search" samples chose the shape, "score"
    samples judged it afterwards. shape: None is plain decoding. disturbed: the machine was busy.
    """

    submitter: Annotated[Text, Field(min_length=1, max_length=64)]
    run: Annotated[Text, Field(min_length=1, max_length=64)]
    round: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    phase: Literal["search", "score"] = "search"
    batch_size: BatchSize
    shape: Shape | None
    tokens_per_s: Rate
    disturbed: bool = False


class Profile(_Part):
    """One profile document.

    schema_version: `SCHEMA_VERSION`. origin: "measured" by the tuner, "published" by others, or "predicted".
    batches: by batch size, each once. recommended_batch_size: for the objective "throughput". disturbed: measured on
    a busy machine and stored by force. source: where published figures come from, or a note.
    """

    schema_version: Literal[1] = 1
    origin: Origin
    created: AwareDatetime
    machine: Machine
    software: Software
    model: ModelIdentity
    drafter: DrafterIdentity
    conditions: Conditions
    batches: Annotated[tuple[BatchChoice, ...], Field(min_length=1, max_length=256)]
    recommended_batch_size: BatchSize | None = None
    costs: Costs = Costs()
    acceptance: Annotated[tuple[Acceptance, ...], Field(max_length=MOST_POINTS)] = ()
    samples: Annotated[tuple[Sample, ...], Field(max_length=MOST_SAMPLES)] = ()
    disturbed: bool = False
    source: Long = ""

    @model_validator(mode="after")
    def _one_choice_per_batch_size(self) -> Profile:
        sizes = [choice.batch_size for choice in self.batches]
        if len(set(sizes)) != len(sizes):
            raise ValueError("batches: a batch size is named twice; expected each once")
        return self

    def to_bytes(self) -> bytes:
        """The canonical text of this profile: sorted keys, no spaces, ASCII. Equal profiles give equal bytes."""
        document = self.model_dump(mode="json", exclude_none=False)
        document["created"] = self.created.astimezone(UTC).isoformat()
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")

    @property
    def id(self) -> str:
        """sha256 of `to_bytes()`, 64 hexadecimal digits: the name of the submission."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def now() -> datetime:
    """The time for `created`, in whole seconds, UTC."""
    return datetime.now(UTC).replace(microsecond=0)


def spread_of(values: list[float]) -> float:
    """Half the interquartile range ÷ the median, at most MOST_SPREAD; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    ordered = sorted(values)
    half, middle = (_quantile(ordered, 0.75) - _quantile(ordered, 0.25)) / 2, _quantile(ordered, 0.5)
    return min(half / middle, MOST_SPREAD) if middle > 0 else (MOST_SPREAD if half > 0 else 0.0)


def _quantile(ordered: list[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def as_document(profile: Profile) -> dict[str, Any]:
    """For people and JSON output."""
    document: dict[str, Any] = json.loads(profile.to_bytes())
    return document
