"""What a shape should give, from an acceptance table (of model and drafter) and a cost curve (of a device).

    tokens/s = rows × tokens per step ÷ (drafting + verifying + overhead)

A device of the same generation weighs many slots against one in a similar way, and a common factor of all its costs
cancels in the comparison of shapes, so its curve may stand in for a missing one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from portadraft.profiles.nearness import same_temperature
from portadraft.profiles.schema import (
    MOST_RATE,
    MOST_SPEEDUP,
    Acceptance,
    BatchChoice,
    Costs,
    DraftCost,
    Shape,
    VerifyCost,
)
from portadraft.tuner.grid import Kind

MARGIN = 1.03
"""How much faster than plain decoding a shape must be predicted to be."""


def predict(
    acceptance: Sequence[Acceptance],
    costs: Costs,
    *,
    drafter: str = "redrafter",
    temperature: float = 0.0,
    context: int = 0,
) -> tuple[BatchChoice, ...]:
    """The best shape at every batch size that the cost curve knows; () where the two do not suffice.

    drafter: its name, which says how many slots a shape's pass has. A trained drafter's passes are padded to all slots
    of the shape, those of a lookup beside it included; lookup alone often finds nothing, so its steps cost
    what their mean number of slots does. Shapes whose costs lie outside what was measured are left out rather than
    guessed.
    """
    kind = Kind.of(drafter)
    table = [a for a in acceptance if same_temperature(a.temperature, temperature)]
    sizes = sorted({point.batch_size for point in costs.verify})
    choices = (_best(size, table, costs, context, kind) for size in sizes if table)
    return tuple(choice for choice in choices if choice is not None)


def _best(size: int, table: Sequence[Acceptance], costs: Costs, context: int, kind: Kind) -> BatchChoice | None:
    verify = verify_curve(costs.verify, size, context)
    one = verify(1)
    if one is None or one <= 0:
        return None
    plain = 1000.0 * size / (one + costs.overhead_ms)
    best, best_speed = None, plain * MARGIN
    for line in table:
        drafting = draft_ms(costs.draft, size, line.shape)
        # Whether a lookup beside a trained drafter found something is not known here: taken for found, the dearer case.
        mean = None if kind.always else line.slots
        verifying = verify(kind.slots(line.shape.beam(), True) if mean is None else mean)
        if drafting is None or verifying is None:
            continue
        speed = 1000.0 * size * line.tokens_per_step / max(drafting + verifying + costs.overhead_ms, 1e-6)
        if speed > best_speed:
            best, best_speed = line.shape, speed
    speed = best_speed if best is not None else plain
    if not 0 < speed <= MOST_RATE or not 0 < plain <= MOST_RATE or speed / plain > MOST_SPEEDUP:
        return None  # no device does that
    return BatchChoice(
        batch_size=size,
        shape=best,
        tokens_per_s=speed,
        plain_tokens_per_s=plain,
        speedup=speed / plain,
    )


def verify_curve(points: Iterable[VerifyCost], size: int, context: int) -> Callable[[float], float | None]:
    """Milliseconds of a pass by slots at one batch size, at the measured context that is nearest; linear between the
    measured slots, None outside of them.
    """
    of_size = [p for p in points if p.batch_size == size]
    if not of_size:
        return lambda slots: None
    nearest = min({p.context for p in of_size}, key=lambda c: (abs(math.log((c + 64) / (context + 64))), c))
    known: dict[int, float] = {}
    for point in of_size:
        if point.context == nearest:
            known[point.slots] = min(point.ms, known.get(point.slots, math.inf))
    slots = sorted(known)

    def at(n: float) -> float | None:
        if not slots[0] <= n <= slots[-1]:
            return None
        above = next(s for s in slots if s >= n)
        below = max(s for s in slots if s <= n)
        if above == below:
            return known[above]
        return known[below] + (known[above] - known[below]) * (n - below) / (above - below)

    return at


def draft_ms(points: Sequence[DraftCost], size: int, shape: Shape) -> float | None:
    """Milliseconds of drafting: as measured, else between or below measured widths and lengths; None above them.

    With no measurement at all, drafting is taken to be free, as prompt lookup's is.
    """
    if not points:
        return 0.0
    exact = [p.ms for p in points if (p.batch_size, p.width, p.length) == (size, shape.width, shape.length)]
    if exact:
        return min(exact)
    # A draft costs no more than a wider or longer one does.
    above = [p.ms for p in points if p.batch_size >= size and p.width >= shape.width and p.length >= shape.length]
    return min(above) if above else None
