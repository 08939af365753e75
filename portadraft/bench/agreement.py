"""Where drafted decoding leaves plain decoding, and by how much the logits differed there.

In float32 the two are the same text. In half precision a packed pass and a one-token pass
round differently, so a tie may fall the other way; everything after it is then another text.
Here each divergence is measured, plain decoding's token is forced, and the comparison goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from portadraft.core.target import Target


@dataclass(frozen=True)
class Divergence:
    """position: index in the answer. plain, drafted: the two tokens. gap: by how much the logit
    of plain's token exceeds the drafted one's where both are recomputed in one pass."""

    position: int
    plain: int
    drafted: int
    gap: float


def divergences(
    target: Target,
    prompt: Sequence[int],
    plain: Sequence[int],
    drafted: Sequence[int],
    continue_from: Callable[[Sequence[int], int], Sequence[int]],
    most: int = 32,
) -> list[Divergence]:
    """Every place where drafted decoding chooses another token than plain decoding did.

    continue_from(ids, count): at most `count` tokens of drafted decoding after these ids.
    Stops after `most` of them.
    """
    found: list[Divergence] = []
    start = 0
    while start < len(plain) and len(found) < most:
        where = _first_difference(plain[start:], drafted)
        if where is None:
            break
        position = start + where
        other = drafted[where]
        found.append(
            Divergence(
                position,
                plain[position],
                other,
                logit_gap(target, [*prompt, *plain[:position]], plain[position], other),
            )
        )
        start = position + 1
        if start < len(plain):
            drafted = continue_from([*prompt, *plain[:start]], len(plain) - start)
    return found


def _first_difference(plain: Sequence[int], drafted: Sequence[int]) -> int | None:
    for i, (a, b) in enumerate(zip(plain, drafted, strict=False)):
        if a != b:
            return i
    return None


def logit_gap(target: Target, ids: Sequence[int], token: int, other: int) -> float:
    """logit(token) - logit(other) after these ids, from one pass of the target."""
    ops = target.ops
    with ops.no_grad():
        verified = target.admit([list(ids)])
        try:
            logits = ops.to_numpy(verified.logits[0, 0])
        finally:
            target.release(len(target.lengths) - 1)
    return float(logits[token]) - float(logits[other])
