"""Which shape to draft with where no profile says it."""

from __future__ import annotations

from portadraft.core.types import BeamShape


def default_shape(drafter: str, device: str) -> tuple[BeamShape, str]:
    """A modest shape for a kind of drafter on a kind of device, and the reason.

    drafter: the drafter's name, such as "redrafter+lookup". device: as `Ops.device` names it.
    """
    if "redrafter" not in drafter:
        return BeamShape(1, 8), "default for lookup alone: one candidate of 8 tokens"
    if device == "cpu":
        return BeamShape(4, 4, 8), "default for CPUs, where every slot of a pass costs: 4 candidates of 4, 8 slots"
    return BeamShape(4, 4, 16), "default for accelerators, where a pass of 16 slots costs about as much as one"
