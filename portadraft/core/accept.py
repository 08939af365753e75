"""Acceptance by the walk: follow the target's own choices through the packed beam."""

from __future__ import annotations

from portadraft.core.choice import Chooser, Situation
from portadraft.core.ops import Ops
from portadraft.core.penalties import History
from portadraft.core.types import Array, PackedBeam, Verdict


def accept(
    ops: Ops, packed: PackedBeam, logits: Array, chooser: Chooser, situation: Situation
) -> tuple[Verdict, History | None]:
    """Walk from the root: the target's choice is the next token; a child that carries it is accepted.

    logits: (B, N, V) at the slots. situation: uniforms and so on for L+1 depths. At most L+1
    choices per row are computed, each at a slot whose history is exactly its path, and none after
    all rows have stopped where that shows at no cost. Returns the verdict, and the history with the
    `counts` tokens that it gives. After the walk has stopped `slots` repeats the stop, and `tokens`
    says nothing.
    """
    batch, slots, vocabulary = logits.shape
    if packed.length == 0:
        return _plain(ops, logits[:, 0], chooser, situation)
    flat = logits.reshape(batch * slots, vocabulary)
    rows = ops.arange(batch) * slots
    numbers = ops.arange(slots)
    # A dead slot's parent is 0 as well: only living slots can be children.
    child = (numbers[None, :] > 0) & (numbers[None, :] < packed.sizes[:, None])

    slot = ops.full((batch,), 0, "int32")
    counts = ops.full((batch,), 1, "int32")
    walking = ops.full((batch,), 1, "bool")
    history = situation.history
    tokens, path = [], []
    for depth in range(packed.length + 1):
        at = ops.take(flat, rows + slot)
        token = chooser.choose(at, situation, depth, history)
        tokens.append(token)
        path.append(slot)
        if history is not None:
            history = history.after(ops, token, walking)
        if depth == packed.length:
            break
        match = child & (packed.parents == slot[:, None]) & (packed.tokens == token[:, None])
        walking = walking & ops.any(match, axis=1)
        slot = ops.where(walking, ops.argmax(match, axis=1), slot)
        counts = counts + ops.cast(walking, "int32")
        if ops.surely_none(walking):
            rest = packed.length - depth
            tokens, path = tokens + [token] * rest, path + [slot] * rest
            break
    return Verdict(ops.stack(tokens, axis=1), counts, ops.stack(path, axis=1)), history


def _plain(ops: Ops, logits: Array, chooser: Chooser, situation: Situation) -> tuple[Verdict, History | None]:
    """One choice, and nothing to walk to: logits (B, V) at the roots."""
    history = situation.history
    token = chooser.choose(logits, situation, 0, history)
    counts = ops.full((logits.shape[0],), 1, "int32")
    if history is not None:
        history = history.after(ops, token, counts > 0)
    return Verdict(token[:, None], counts, ops.full((logits.shape[0], 1), 0, "int32")), history
