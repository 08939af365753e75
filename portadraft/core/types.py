"""What passes between the stages of a decode step: frozen dataclasses of native arrays.

Axes: B batch, W beam width, L beam length, N slots of a packed beam, V vocabulary, D hidden size.
Tokens and indices are int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from portadraft.core.scalars import as_integer
from portadraft.errors import InvalidArgument

Array: TypeAlias = Any
"""A native array of the running backend (numpy.ndarray, torch.Tensor, mlx.core.array)."""


MOST_NODES = 4096
"""Nodes of a beam above which a shape is taken for a mistake: packing compares width² · length tokens."""


@dataclass(frozen=True)
class BeamShape:
    """How wide and how long to draft.

    width: W, the number of candidate sequences.
    length: L, the number of DRAFTED tokens of a candidate; the root is not counted (the
        paper's tables and Apple's code count it: their 4 is 3 here).
    nodes: N, the most slots of a packed beam, root included; None keeps every node.
    """

    width: int = 4
    length: int = 4
    nodes: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("length", 1), ("nodes", 2)):
            value = getattr(self, name)
            if name == "nodes" and value is None:
                continue
            whole = as_integer(value)
            if whole is None or whole < least:
                hint = " (slot 0 is the root, so 2 is the least that drafts)" if name == "nodes" else ""
                raise InvalidArgument(
                    f"{name}={value!r}: expected an integer of at least {least}{hint}; "
                    "to decode without drafting take the drafter 'none'"
                )
            object.__setattr__(self, name, whole)
        if self.width * self.length > MOST_NODES:
            raise InvalidArgument(
                f"width={self.width}, length={self.length}: {self.width * self.length} drafted tokens a step; expected "
                f"at most {MOST_NODES}, of which a model would check far fewer with any gain"
            )

    def slots(self, candidates: int | None = None) -> int:
        """The static number of slots N for `candidates` sequences (default: the width)."""
        most = 1 + (self.width if candidates is None else candidates) * self.length
        return most if self.nodes is None else min(self.nodes, most)


@dataclass(frozen=True)
class Beam:
    """Candidate continuations of the root token, from any drafter.

    tokens: (B, W, L) int32; entries at or past a candidate's length are padding.
    lengths: (B, W) int32, 0…L.
    scores: (B, W, L) float32; score of each node, the sum of log-probabilities from the
        root on, so never rising along a candidate. Only the node budget reads it.
    nodes: the most unique nodes that it can hold, where that is known to be fewer than W·L
        (candidates of several drafters, padded to one length); static.
    """

    tokens: Array
    lengths: Array
    scores: Array
    nodes: int | None = None


@dataclass(frozen=True)
class PackedBeam:
    """The unique nodes of a beam in one flat row of N slots (paper section 3.2).

    tokens: (B, N) int32; slot 0 is the root.
    parents: (B, N) int32; always smaller than the slot's own number, 0 for the root.
    depths: (B, N) int32; 0 for the root. Dead slots have parent 0, depth 0.
    mask: (B, N, N) bool; [b, i, j] says that slot j is slot i or an ancestor of it.
    sizes: (B,) int32; how many leading slots are alive.
    length: L, the greatest depth a slot may have (static).
    """

    tokens: Array
    parents: Array
    depths: Array
    mask: Array
    sizes: Array
    length: int


@dataclass(frozen=True)
class Verified:
    """What the target says at every slot: logits (B, N, V), hidden (B, N, D) after the final norm."""

    logits: Array
    hidden: Array


@dataclass(frozen=True)
class Verdict:
    """The outcome of the walk through a packed beam.

    tokens: (B, L+1) int32; the target's choices along the path, `counts` of them valid.
    counts: (B,) int32; accepted draft tokens plus one, 1…L+1.
    slots: (B, L+1) int32; the path's slots, root first, `counts` of them valid. These slots'
        keys and values are to be committed; the last choice is the next root.
    """

    tokens: Array
    counts: Array
    slots: Array
