"""Profiles for tests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from portadraft.profiles.nearness import Query
from portadraft.profiles.schema import (
    Acceptance,
    BatchChoice,
    Conditions,
    Costs,
    DraftCost,
    DrafterIdentity,
    Machine,
    ModelIdentity,
    Profile,
    Sample,
    Shape,
    Software,
    VerifyCost,
)

WEIGHTS = "0123456789abcdef.gD8"
OTHER_WEIGHTS = "0123456789abcdef.AMA"
MACHINE = Machine(name="NVIDIA L40S", kind="gpu", memory_gb=48, driver="550.54", reported="NVIDIA L40S")
SOFTWARE = Software(portadraft="0.1.0", backend="torch", versions={"torch": "2.13.0+cu126", "transformers": "5.24.0"})
MODEL = ModelIdentity(name="smollm2-135m", architecture_id="a" * 16, weights_id=WEIGHTS, tokenizer="t" * 16)
DRAFTER = DrafterIdentity(name="redrafter+lookup", id="fedcba9876543210.gD8+lookup-2-6-8")
WHEN = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


def shape(width: int = 4, length: int = 4, nodes: int | None = 8) -> Shape:
    return Shape(width=width, length=length, nodes=nodes)


def make(**changes: Any) -> Profile:
    """A whole, measured profile; changes: of its fields."""
    fields: dict[str, Any] = {
        "origin": "measured",
        "created": WHEN,
        "machine": MACHINE,
        "software": SOFTWARE,
        "model": MODEL,
        "drafter": DRAFTER,
        "conditions": Conditions(dtype="bfloat16", context=200),
        "batches": (BatchChoice(batch_size=1, shape=shape(), tokens_per_s=37.0, plain_tokens_per_s=22.0, speedup=1.7),),
    }
    return Profile(**{**fields, **changes})


def query(**changes: Any) -> Query:
    """What `make()` fits exactly."""
    fields: dict[str, Any] = {
        "machine": MACHINE,
        "software": SOFTWARE,
        "model": MODEL,
        "drafter": DRAFTER,
        "dtype": "bfloat16",
        "context": 200,
    }
    return Query(**{**fields, **changes})


def sample(submitter: str, speed: float, of: Shape | None, **changes: Any) -> Sample:
    fields: dict[str, Any] = {"submitter": submitter, "run": "r1", "batch_size": 1, "shape": of, "tokens_per_s": speed}
    return Sample(**{**fields, **changes})


def costs(scale: float = 1.0) -> Costs:
    """A pass costs 20 ms and half a millisecond per slot above 8."""
    slots = (1, 2, 4, 8, 16, 32, 64)
    return Costs(
        verify=tuple(
            VerifyCost(batch_size=b, context=200, slots=n, ms=scale * (20 + 0.5 * max(0, n * b - 8)))
            for b in (1, 4)
            for n in slots
        ),
        draft=tuple(
            DraftCost(batch_size=b, width=w, length=n, ms=scale * (1 + 0.1 * w * n))
            for b in (1, 4)
            for w in (1, 4)
            for n in (2, 4)
        ),
    )


def table(temperature: float = 0.0) -> tuple[Acceptance, ...]:
    given = {(1, 2, None): 1.6, (1, 4, None): 1.8, (4, 4, 8): 2.2, (4, 4, 16): 2.25}
    return tuple(
        Acceptance(shape=shape(*key), temperature=temperature, tokens_per_step=value) for key, value in given.items()
    )


# hypothesis

shapes = st.one_of(
    st.none(),
    st.builds(shape, st.integers(1, 4), st.integers(1, 3), st.one_of(st.none(), st.integers(2, 6))),
)
samples = st.builds(
    Sample,
    submitter=st.sampled_from(["ann", "bob", "eve"]),
    run=st.sampled_from(["r1", "r2"]),
    round=st.integers(0, 2),
    phase=st.sampled_from(["search", "score"]),
    batch_size=st.sampled_from([1, 2]),
    shape=shapes,
    tokens_per_s=st.floats(0.5, 100.0),
    disturbed=st.booleans(),
)


@st.composite
def pooled_parts(draw: st.DrawFn) -> Profile:
    """Profiles that may be pooled with each other."""
    minute = draw(st.integers(0, 59))
    sizes = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3, unique=True))
    return make(
        created=WHEN.replace(minute=minute),
        batches=tuple(BatchChoice(batch_size=size, shape=draw(shapes)) for size in sizes),
        samples=tuple(draw(st.lists(samples, max_size=8))),
        disturbed=draw(st.booleans()),
        source=draw(st.sampled_from(["", "a", "b"])),
        software=SOFTWARE.model_copy(update={"versions": {"torch": draw(st.sampled_from(["2.13.0", "2.13.1"]))}}),
        acceptance=draw(st.sampled_from([(), table()])),
        costs=draw(st.sampled_from([Costs(), costs(), costs(2.0)])),
    )
