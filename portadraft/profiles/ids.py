"""Which drafter is this? Comparison of the ids that profiles keep of drafters."""

from __future__ import annotations

from typing import Any

from portadraft.identity import same_weights
from portadraft.profiles.schema import DrafterIdentity, ModelIdentity


def drafter_identity(drafter: Any, name: str | None = None) -> DrafterIdentity:
    """Of a `Drafter`; its attribute `id`, where it has one, names weights and settings. None is plain decoding."""
    if drafter is None:
        return DrafterIdentity(name="none")
    return DrafterIdentity(name=name or str(drafter.name), id=str(getattr(drafter, "id", "")))


def model_identity(target: Any, name: str = "", tokenizer: str = "") -> ModelIdentity:
    """Of a `Target`. name: for people; tokenizer: its fingerprint."""
    facts = target.facts
    return ModelIdentity(
        name="".join(c if c.isprintable() else " " for c in name)[-200:],
        architecture_id=facts.architecture_id,
        weights_id=facts.weights_id,
        tokenizer=tokenizer,
    )


def same_drafter(a: DrafterIdentity, b: DrafterIdentity) -> bool:
    """Whether two ids name the same drafter: kind by kind, weights up to half-precision rounding."""
    if a.name != b.name:
        return False
    if a.id == b.id:
        return a.id != "" or a.name in ("none",)
    left, right = a.id.split("+"), b.id.split("+")
    return len(left) == len(right) and all(x == y or same_weights(x, y) for x, y in zip(left, right, strict=True))


def same_model(a: ModelIdentity, b: ModelIdentity) -> bool:
    """Whether two models have the same weights (acceptance) and the same architecture and type (costs)."""
    return a.architecture_id == b.architecture_id != "" and same_weights(a.weights_id, b.weights_id)
