"""What a drafter's tree holds of the true continuation, at every position of recorded generations.

For each width one search at the greatest length serves all lengths, and the rank of each node
of the true path serves all node budgets: a budget N keeps the nodes ranked below N - 1, and a
node never ranks before its parent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from portadraft.core.drafter import Drafter
from portadraft.core.ops import Ops
from portadraft.core.tree import rank_nodes
from portadraft.core.types import Array, Beam
from portadraft.drafters.together import draft_lengths
from portadraft.errors import InvalidArgument
from portadraft.tuner.grid import Grid, Kind
from portadraft.tuner.recordings import Recording

OUTSIDE = np.int16(32767)
"""The rank of a token that is in no candidate."""


@dataclass(frozen=True)
class Positions:
    """One recording of n tokens; position t drafts after tokens[t], 0 ≤ t < n - 1.

    ranks: (n - 1, W, L, D) int16: rank of the node that carries the d-th true token after the root, for each width
    and length of the grid, D the greatest depth; `OUTSIDE` where there is none.
    unique: (n - 1, W, L) int16: unique nodes, root left out. found: (n - 1, W, L) bool: whether the optional part
    (see `grid.Kind`) was there.
    """

    ranks: NDArray[np.int16]
    unique: NDArray[np.int16]
    found: NDArray[np.bool_]


def positions(
    ops: Ops,
    drafter: Drafter,
    recordings: Sequence[Recording],
    grid: Grid,
    *,
    dtype: str = "float32",
    rows: int = 32,
    report: Callable[[int], None] | None = None,
) -> list[Positions]:
    """Draft at every position. Rows of recordings go side by side, one position at a time.

    drafter: has no rows, and reads at most the newest feature (what it wants of older ones is not recorded).
    dtype: of the features as the drafter gets them. report: called with the positions done.

    Raises: InvalidArgument for a drafter that wants all features.
    """
    if drafter.wants == "all":
        raise InvalidArgument(
            f"drafter={drafter.name!r}: it reads the features of every position, which replay does not record; "
            "measure it by decoding (`portadraft bench acceptance`)"
        )
    kind = Kind.of(drafter.name)
    depth = max(kind.depth(shape, True) for _, shape in grid.cells())
    w, k, _ = grid.size
    out = [
        Positions(
            np.full((max(len(r.tokens) - 1, 0), w, k, depth), OUTSIDE, np.int16),
            np.zeros((max(len(r.tokens) - 1, 0), w, k), np.int16),
            np.zeros((max(len(r.tokens) - 1, 0), w, k), bool),
        )
        for r in recordings
    ]
    order = sorted(range(len(recordings)), key=lambda i: len(recordings[i].tokens), reverse=True)
    done = 0
    for start in range(0, len(order), rows):
        part = order[start : start + rows]
        for at, live in _walk(drafter, [recordings[i] for i in part]):
            chosen = [recordings[i] for i in part[:live]]
            roots = ops.asarray(np.array([r.tokens[at] for r in chosen], np.int32), "int32")
            hidden = ops.stack([ops.asarray(r.hidden[at], dtype) for r in chosen], axis=0)
            true = np.full((live, depth), -1, np.int32)
            for row, r in enumerate(chosen):
                known = r.tokens[at + 1 : at + 1 + depth]
                true[row, : len(known)] = known
            native = ops.asarray(true, "int32")
            for j, width in enumerate(grid.widths):
                with ops.no_grad():
                    beams = draft_lengths(drafter, roots, hidden, width, len(grid.lengths))
                    read = [None if b is None else ops.to_numpy(_look(ops, b, native, width, kind)) for b in beams]
                for length, numbers in enumerate(read):
                    if numbers is None:
                        continue
                    for row, i in enumerate(part[:live]):
                        reached = numbers[row, 2:]
                        out[i].ranks[at, j, length, : len(reached)] = reached
                        out[i].unique[at, j, length] = numbers[row, 0]
                        out[i].found[at, j, length] = numbers[row, 1]
            done += live
            if report:
                report(done)
    return out


def _walk(drafter: Drafter, recordings: Sequence[Recording]) -> Iterator[tuple[int, int]]:
    """Yield (position, live rows) with the drafter in the state it has when that position drafts; longest first."""
    live = 0
    try:
        for row, r in enumerate(recordings):
            drafter.admit(row, r.prompt)
            live += 1
        at = 0
        while True:
            while live and len(recordings[live - 1].tokens) - 1 <= at:
                live -= 1
                drafter.release(live)
            if not live:
                return
            drafter.observe([[int(r.tokens[at])] for r in recordings[:live]], None, None)
            yield at, live
            at += 1
    finally:
        for row in reversed(range(live)):
            drafter.release(row)


def _look(ops: Ops, beam: Beam, true: Array, width: int, kind: Kind) -> Array:
    """Per row: unique nodes, whether the optional part is there, ranks of the true path's nodes: (B, 2 + L) int32."""
    _, candidates, length = beam.tokens.shape
    steps = ops.arange(length)
    alive = steps[None, None, :] < beam.lengths[:, :, None]
    same = (beam.tokens == true[:, None, :length]) & alive
    path = ops.cumsum(same, axis=2) == (steps + 1)[None, None, :]
    rank, none = rank_nodes(ops, beam), candidates * length
    reached = -ops.max(ops.where(path & (rank < none), -rank, -int(OUTSIDE)), axis=1)
    unique = ops.cast(rank < none, "int32").reshape(rank.shape[0], none).sum(axis=1)
    optional = beam.lengths[:, width:] if kind.always else beam.lengths
    found = ops.any(optional > 0, axis=1) if optional.shape[1] else ops.full((rank.shape[0],), 0, "bool")
    return ops.concat([ops.cast(unique, "int32")[:, None], ops.cast(found, "int32")[:, None], reached], axis=1)


def follow(one: Positions, grid: Grid) -> Chains:
    """Follow the chain that decoding would take, for every shape of the grid."""
    n = one.ranks.shape[0] + 1
    limits = np.array([np.inf if b == 0 else b - 1 for b in grid.budgets])
    counts = (one.ranks[:, :, :, None, :] < np.minimum(limits, int(OUTSIDE))[:, None]).sum(axis=-1, dtype=np.int32)
    w, k, b = grid.size
    index_w, index_k, index_b = np.indices((w, k, b))
    at = np.zeros((w, k, b), np.int64)
    steps, accepted, found, nodes = (np.zeros((w, k, b), np.int64) for _ in range(4))
    sequence: list[NDArray[np.int32]] = []
    while n > 1:
        inside = np.minimum(at, n - 2)
        got = counts[inside, index_w, index_k, index_b]
        going = (at < n - 1) & (at + got + 1 < n)
        if not going.any():
            break
        steps += going
        accepted += got * going
        found += one.found[inside, index_w, index_k] & going
        alive = 1 + one.unique[inside, index_w, index_k].astype(np.int64)
        budget = np.where(limits == np.inf, alive, limits[None, None, :] + 1).astype(np.int64)
        nodes += np.minimum(alive, budget) * going
        sequence.append(np.where(going, got, -1).astype(np.int32))
        at = np.where(going, at + got + 1, n)
    return Chains(steps, accepted, found, nodes, np.stack(sequence) if sequence else np.zeros((0, w, k, b), np.int32))


@dataclass(frozen=True)
class Chains:
    """Sums over the steps of one recording's chain, each (W, L, N); a last step past the end is left out.

    nodes: verified nodes, root included. sequence: (steps, W, L, N) accepted counts in order, -1 after the last.
    """

    steps: NDArray[np.int64]
    accepted: NDArray[np.int64]
    found: NDArray[np.int64]
    nodes: NDArray[np.int64]
    sequence: NDArray[np.int32]
