"""The target protocol: what the loop needs of a language model.

Rows are dense: a target serves rows 0 … n-1, and `release(row)` moves the last row into the
freed place, so that a pass never computes for a finished row. The loop keeps its own
per-row state in the same order. Only the target's cache is mutable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from portadraft.core.ops import Ops
from portadraft.core.types import Array, PackedBeam, Verdict, Verified


@dataclass(frozen=True)
class TargetFacts:
    """What does not change while a target lives.

    vocabulary_size: V, the width of the logits.
    hidden_size: D, the width of the features.
    context_limit: the most tokens a row may hold, or None where the model names no limit.
    dtype: of weights and features ("float32", "bfloat16", "float16").
    cache_bytes_per_token: keys and values of one token over all layers.
    architecture_id: what costs depend on: shapes, dtype and quantisation.
    weights_id: what acceptance depends on (see portadraft.identity).
    """

    vocabulary_size: int
    hidden_size: int
    context_limit: int | None
    dtype: str
    cache_bytes_per_token: int
    architecture_id: str
    weights_id: str


@dataclass(frozen=True)
class RowState:
    """A row's committed keys and values, copied out: what `Target.export` gives and `Target.admit` restores.

    It outlives the row, and is valid for the target that made it, and no other.

    ids: the committed token ids, in order; native: keys and values in the target's own form;
    nbytes: what it occupies on the device; owner: whatever the target tells its own states by.
    """

    ids: tuple[int, ...]
    native: Any = field(repr=False)
    nbytes: int
    owner: object = field(default=None, repr=False, compare=False)


Known: TypeAlias = "tuple[RowState, int] | None"
"""A state and how many of its leading tokens to restore, or None for a row that starts from nothing."""


@runtime_checkable
class Target(Protocol):
    """A causal language model with a cache for several rows of different lengths."""

    ops: Ops
    facts: TargetFacts

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed tokens of each live row (host numbers; no device read)."""

    def room(self, row: int) -> int:
        """How deep a tree below the root may be at this row's length (its greatest depth), by the
        context limit and whatever else bounds it; a large number where nothing does. Below 0 not
        even a root fits. No device read.
        """

    def admit(
        self, prompts: Sequence[Sequence[int]], reserve: int = 0, known: Sequence[Known] | None = None
    ) -> Verified:
        """Prefill new rows after the live ones, in chunks.

        prompts: token ids, each at least one; reserve: tokens that each row is expected to
        grow by, so that the cache need not grow later; known: for each prompt a state and how
        many of its leading tokens to restore (0 ≤ length < len(prompt), and the state's first
        `length` ids are the prompt's), or None; only what follows is computed. Rows with and
        without may mix. Returns the LAST position only, as logits (R, 1, V) and hidden
        (R, 1, D), as if all had been computed. The whole prompt is committed. If it raises,
        no row was added.

        Raises: InvalidArgument for an empty prompt, ids outside the vocabulary, and a known
        state that does not fit its prompt or belongs to another target.
        """

    def export(self, row: int, ids: Sequence[int]) -> RowState:
        """A row's committed keys and values, copied out; the row is unchanged.

        ids: the row's committed token ids, as many as lengths[row]: the caller keeps them.
        Raises: InvalidArgument for a row that is not live or another number of ids.
        """

    def verify(self, packed: PackedBeam) -> Verified:
        """ONE forward pass over the N slots of every live row.

        Each slot attends to its row's committed context, its ancestors and itself; its
        position is the row's length plus its depth. Nothing is committed. N = 1 is a plain
        step. The cache must hold length + N; it grows here, before the pass, if it must.
        """

    def commit(self, verdict: Verdict, counts: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
        """Move the path's keys and values into place behind each row's context.

        Follows the `verify` whose slots the verdict names. `counts` and `slots` are the
        verdict's as host numbers. Nothing but the accepted entries moves.
        """

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""

    def release(self, row: int) -> None:
        """Drop a row; the last row takes its number."""

    def embeddings(self) -> Array:
        """The input embedding table as the model applies it, (V, D), without a copy where possible."""

    def head_rows(self) -> Array:
        """The LM head's weight, (V, D); float where the model is quantised."""

    def head_bias(self) -> Array | None:
        """The LM head's bias, (V,), if it has one."""
