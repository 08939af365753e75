"""Acceptance by the walk: follow the target's own choices through the packed beam."""

from __future__ import annotations

from portadraft.core.ops import Ops
from portadraft.core.sampling import choose
from portadraft.core.types import Array, PackedBeam, Verdict


def accept(
    ops: Ops, packed: PackedBeam, logits: Array, temperature: float = 0.0, uniforms: Array | None = None
) -> Verdict:
    """Walk from the root: the target's choice is the next token; a child that carries it is accepted.

    logits: (B, N, V) at the slots. uniforms: (B, L+1) float32, one per depth, or None for
    greedy. At most L+1 choices per row are computed, each at a slot whose history is exactly
    its path. After the walk has stopped the rest of `tokens` and `slots` repeats the stop.
    """
    batch, slots, vocabulary = logits.shape
    flat = logits.reshape(batch * slots, vocabulary)
    rows = ops.arange(batch) * slots
    numbers = ops.arange(slots)
    # A dead slot's parent is 0 as well: only living slots can be children.
    child = (numbers[None, :] > 0) & (numbers[None, :] < packed.sizes[:, None])

    slot = ops.full((batch,), 0, "int32")
    counts = ops.full((batch,), 1, "int32")
    walking = ops.full((batch,), 1, "bool")
    tokens, path = [], []
    for depth in range(packed.length + 1):
        at = ops.take(flat, rows + slot) if slots > 1 else flat
        token = choose(ops, at, temperature, None if uniforms is None else uniforms[:, depth])
        tokens.append(token)
        path.append(slot)
        if depth == packed.length:
            break
        match = child & (packed.parents == slot[:, None]) & (packed.tokens == token[:, None])
        walking = walking & ops.any(match, axis=1)
        slot = ops.where(walking, ops.argmax(match, axis=1), slot)
        counts = counts + ops.cast(walking, "int32")
    return Verdict(ops.stack(tokens, axis=1), counts, ops.stack(path, axis=1))
