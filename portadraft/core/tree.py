"""Dynamic tree attention (paper section 3.2): from a beam to one packed row of unique nodes.

Everything works on rectangles: broadcast compares, a cumulative sum, an argmax and a stable
sort. There is no trie, no loop over tokens and no data-dependent shape, so the same code can
be captured on any device. The only Python loops are over L or log2 L.
"""

from __future__ import annotations

from portadraft.core.ops import Ops
from portadraft.core.types import Array, Beam, PackedBeam
from portadraft.errors import InvalidArgument

_WORST = -3.0e38
"""The worst score of a node: finite, so that it still ranks before what is no node."""


def dedup_prefix(ops: Ops, tokens: Array, lengths: Array | None = None) -> Array:
    """For each node of each candidate, the first candidate that has the same prefix up to it.

    tokens: (B, W, L) int32. lengths: (B, W) int32, 0…L; None means that all are L long.
    Returns owners (B, W, L) int32: owners[b, i, l] is the smallest j with
    tokens[b, j, :l+1] == tokens[b, i, :l+1] and lengths[b, j] > l. A node is unique exactly
    where owners[b, i, l] == i. Padding owns itself.
    """
    _, width, length = tokens.shape
    same = tokens[:, :, None, :] == tokens[:, None, :, :]  # (B, i, j, L)
    steps = ops.arange(length)
    if lengths is not None:
        alive = steps[None, None, :] < lengths[:, :, None]
        same = same & alive[:, :, None, :] & alive[:, None, :, :]
    shared = ops.cumsum(same, axis=3) == (steps + 1)[None, None, None, :]
    owners = ops.argmax(shared, axis=2)
    if lengths is None:
        return owners
    return ops.where(alive, owners, ops.broadcast_to(ops.arange(width)[None, :, None], owners.shape))


def tree_mask(ops: Ops, parents: Array, depth: int) -> Array:
    """Which slots are ancestors of which, by pointer doubling.

    parents: (B, N) int32, the root (slot 0) being its own parent; depth: the greatest depth.
    Returns (B, N, N) bool: [b, i, j] says that j is i or an ancestor of i. The root is an
    ancestor of every slot whose parents lead to it.
    """
    batch, slots = parents.shape
    numbers = ops.arange(slots)
    mask = numbers[None, :, None] == numbers[None, None, :]
    mask = mask | (parents[:, :, None] == numbers[None, None, :])
    jump, reach = parents, 1
    while reach < depth:
        # mask covers `reach` ancestors; jump points at the reach-th one.
        index = ops.broadcast_to(jump[:, :, None], (batch, slots, slots))
        mask = mask | ops.gather(mask, index, axis=1)
        jump = ops.gather(jump, jump, axis=1)
        reach *= 2
    return mask


def pack_beam(ops: Ops, roots: Array, beam: Beam, nodes: int | None = None) -> PackedBeam:
    """Lay the unique nodes of a beam out as one row of N slots, best first within the budget.

    roots: (B,) int32, the tokens at slot 0. nodes: the node budget N, root included; None
    keeps every node. N = min(nodes, 1 + W·L, 1 + beam.nodes) is static; rows with fewer unique nodes end in
    dead slots. Nodes are kept by (score, then smaller depth, then candidate), so that a kept
    node's parent is always kept, equal scores included; slots are in order of depth, then
    candidate. Where candidates of several drafters share a node, its best score counts.
    A score that is not a number counts as the worst, one above its parent's as the parent's.

    Raises: InvalidArgument for a budget below 2.
    """
    if nodes is not None and nodes < 2:
        raise InvalidArgument(
            f"nodes={nodes}: expected at least 2 (slot 0 is the root); to decode plainly draft nothing"
        )
    batch, width, length = beam.tokens.shape
    most = 1 + (width * length if beam.nodes is None else min(beam.nodes, width * length))
    slots = most if nodes is None else min(nodes, most)
    steps = ops.arange(length)
    owners = dedup_prefix(ops, beam.tokens, beam.lengths)
    unique = (owners == ops.arange(width)[None, :, None]) & (steps[None, None, :] < beam.lengths[:, :, None])

    # From here on flat and depth-major: index = depth·W + candidate, so that a stable sort
    # by score alone breaks ties by depth, then candidate.
    unique = _depth_major(ops, unique)
    kept = unique
    if slots < 1 + width * length:
        kept = unique & (_ranks(ops, beam.scores, owners, unique) < slots - 1)
    number = ops.where(kept, ops.cumsum(kept, axis=1), 0)  # a kept node's slot; 0 elsewhere
    sizes = ops.max(number, axis=1) + 1

    # The parent of (l, i) is the node at l-1 that owns i's prefix.
    owner_index = _depth_major(ops, owners + (steps * width)[None, None, :])
    first = ops.full((batch, width), 0, "int32")
    if length > 1:
        above = ops.gather(number, owner_index[:, : (length - 1) * width], axis=1)
        parent = ops.concat([first, above], axis=1)
    else:
        parent = first
    depth = ops.broadcast_to(((ops.arange(width * length) // width) + 1)[None, :], number.shape)

    # Scatter into the slots; whatever is not kept lands in a spill slot that is cut off.
    target = ops.where(kept, number, slots)
    blank = ops.full((batch, slots + 1), 0, "int32")
    parents = ops.scatter(blank, target, parent, axis=1)[:, :slots]
    depths = ops.scatter(blank, target, depth, axis=1)[:, :slots]
    tokens = ops.scatter(blank, target, _depth_major(ops, beam.tokens), axis=1)[:, :slots]
    tokens = ops.concat([roots[:, None], tokens[:, 1:]], axis=1)
    mask = tree_mask(ops, parents, length)
    return PackedBeam(tokens, parents, depths, mask, sizes, length)


def rank_nodes(ops: Ops, beam: Beam) -> Array:
    """The order in which a node budget takes the nodes: (B, W, L) int32, W·L where there is no unique node.

    `pack_beam` with the budget N keeps exactly the nodes whose rank is below N - 1.
    """
    batch, width, length = beam.tokens.shape
    owners = dedup_prefix(ops, beam.tokens, beam.lengths)
    alive = ops.arange(length)[None, None, :] < beam.lengths[:, :, None]
    unique = _depth_major(ops, (owners == ops.arange(width)[None, :, None]) & alive)
    rank = ops.where(unique, _ranks(ops, beam.scores, owners, unique), width * length)
    return ops.transpose(rank.reshape(batch, length, width), (0, 2, 1))


def root_only(ops: Ops, roots: Array) -> PackedBeam:
    """The packed beam of a plain step: the root alone."""
    batch = roots.shape[0]
    zeros = ops.full((batch, 1), 0, "int32")
    return PackedBeam(
        tokens=roots[:, None],
        parents=zeros,
        depths=zeros,
        mask=ops.full((batch, 1, 1), 1, "bool"),
        sizes=ops.full((batch,), 1, "int32"),
        length=0,
    )


def _depth_major(ops: Ops, x: Array) -> Array:
    """(B, W, L) as (B, L·W)."""
    batch, width, length = x.shape
    return ops.transpose(x, (0, 2, 1)).reshape(batch, length * width)


def _ranks(ops: Ops, scores: Array, owners: Array, unique: Array) -> Array:
    """The place of each node by (score, depth, candidate), what is not unique last; depth-major as `unique`."""
    by_score = _depth_major(ops, _node_scores(ops, scores, owners))
    order = ops.argsort(ops.where(unique, -by_score, float("inf")), axis=1)
    places = ops.broadcast_to(ops.arange(unique.shape[1])[None, :], order.shape)
    return ops.scatter(order, order, places, axis=1)


def _node_scores(ops: Ops, scores: Array, owners: Array) -> Array:
    """Each node's best score over the candidates that share it, at its owner: (B, W, L).

    Finite, and never above the parent's, whatever the drafter scored: an orphan would be read
    as a child of the root, at a wrong position.
    """
    width, length = scores.shape[1], scores.shape[2]
    scores = ops.where(scores > _WORST, scores, _WORST)  # not a number and -inf as well
    falling = [scores[:, :, 0]]
    for step in range(1, length):
        falling.append(ops.where(scores[:, :, step] < falling[-1], scores[:, :, step], falling[-1]))
    scores = ops.stack(falling, axis=2)
    shares = owners[:, None, :, :] == ops.arange(width)[None, :, None, None]  # (B, owner, j, L)
    return ops.max(ops.where(shares, scores[:, None, :, :], float("-inf")), axis=2)
