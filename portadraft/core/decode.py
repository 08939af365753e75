"""The loop: draft, pack, verify, accept, commit, for rows of different lengths.

A plain step is the same step with the root as its only slot. There is one target pass and
one host read a step. The decoder knows tokens, not text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from portadraft.core.accept import accept
from portadraft.core.drafter import Drafter
from portadraft.core.ops import Ops
from portadraft.core.sampling import choose, uniforms
from portadraft.core.target import Target
from portadraft.core.tree import pack_beam, root_only
from portadraft.core.types import Array, BeamShape, PackedBeam, Verdict
from portadraft.errors import InvalidArgument

RESERVE = 1024
"""The most tokens of an answer that the cache is made ready for at once."""

FinishReason = Literal["end", "length", "context", "stop"]
"""Why a row ended: an end token, max_tokens, the model's context limit, or the caller (a stop string)."""


@dataclass(frozen=True)
class Request:
    """One row's work: the prompt's ids, the most tokens to generate, and the seed of its uniforms."""

    ids: tuple[int, ...]
    max_tokens: int
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    """What one call gave one request.

    key: what `admit` returned for it. tokens: the new ids; an end token is the last of them.
    accepted: drafted tokens that were accepted, or None where the step was not a whole one
    (the prefill's own token, or a step cut by an end or a limit). drafted: whether the step
    drafted at all.
    """

    key: int
    tokens: tuple[int, ...]
    finish: FinishReason | None
    accepted: int | None
    drafted: bool


@dataclass
class _Row:
    key: int
    request: Request
    length: int  # prompt and answer so far, the root included
    generated: int = 0


@dataclass
class StageTimes:
    """Seconds per stage, measured between synchronisations, so only under profiling."""

    seconds: dict[str, float] = field(default_factory=dict)
    steps: int = 0


class Decoder:
    """Decodes rows of one target, with a drafter or plainly.

    target: its rows must all be free. drafter: None decodes plainly. temperature: 0 is greedy.
    end_tokens: ids that end a row. profile: keep `times`, at the cost of a synchronisation
    per stage.

    Not safe for threads: callers take turns.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        shape: BeamShape | None = None,
        *,
        temperature: float = 0.0,
        end_tokens: Sequence[int] = (),
        profile: bool = False,
    ) -> None:
        if target.lengths:
            raise InvalidArgument(f"target: {len(target.lengths)} of its rows are in use; release them first")
        self.target = target
        self.drafter = drafter
        self.shape = shape or BeamShape()
        self.temperature = temperature
        self.end_tokens = frozenset(end_tokens)
        self.times = StageTimes() if profile else None
        self._ops = target.ops
        self._rows: list[_Row] = []
        self._roots: Array = None
        self._features: Array = None
        self._keys = 0

    @property
    def live(self) -> int:
        """Rows that are still being decoded."""
        return len(self._rows)

    # admission

    def admit(self, requests: Sequence[Request]) -> list[Progress]:
        """Prefill new rows and choose their first token (one host read for all of them).

        Raises: InvalidArgument for an empty prompt, a prompt that leaves no room in the
        context, ids outside the vocabulary, or max_tokens below 1; no row is then added.
        """
        for request in requests:
            self._check(request)
        if not requests:
            return []
        ops, first = self._ops, len(self._rows)
        with ops.no_grad():
            with self._stage("prefill"):
                # More than that is grown into: a huge max_tokens is a wish, not a size.
                reserve = min(max(r.max_tokens for r in requests), RESERVE) + self._most_slots()
                verified = self.target.admit([r.ids for r in requests], reserve=reserve)
            self._introduce(first, requests)
            rows = [_Row(self._keys + i, r, len(r.ids)) for i, r in enumerate(requests)]
            self._keys += len(rows)
            logits, features = verified.logits[:, 0], verified.hidden[:, 0]
            numbers = self._uniforms(rows, 1)
            roots = choose(ops, logits, self.temperature, None if numbers is None else numbers[:, 0])
            if self._rows:
                self._roots = ops.concat([self._roots, roots], axis=0)
                self._features = ops.concat([self._features, features], axis=0)
            else:
                self._roots, self._features = roots, features
            self._rows.extend(rows)
            chosen = ops.to_numpy(roots).tolist()
            if self.drafter is not None:
                self.drafter.observe([[]] * first + [[token] for token in chosen], None, None)
            return self._deliver(first, [[token] for token in chosen], drafted=False, whole=False)

    def _introduce(self, first: int, requests: Sequence[Request]) -> None:
        """Tell the drafter of new rows; where it refuses one, none of them stays in the target."""
        if self.drafter is None:
            return
        known = first
        try:
            for request in requests:
                self.drafter.admit(known, request.ids)
                known += 1
        except BaseException:
            for row in reversed(range(first, first + len(requests))):
                self.target.release(row)
                if row < known:
                    self.drafter.release(row)
            raise

    def _check(self, request: Request) -> None:
        facts = self.target.facts
        if not request.ids:
            raise InvalidArgument("prompt: it has no tokens; expected at least one")
        if request.max_tokens < 1:
            raise InvalidArgument(f"max_tokens={request.max_tokens!r}: expected an integer of at least 1")
        if facts.context_limit is not None and len(request.ids) >= facts.context_limit:
            raise InvalidArgument(
                f"prompt: {len(request.ids)} tokens, but the model's context holds {facts.context_limit} "
                "with at least one to generate; shorten the prompt"
            )
        low, high = min(request.ids), max(request.ids)
        if low < 0 or high >= facts.vocabulary_size:
            bad = low if low < 0 else high
            raise InvalidArgument(f"prompt: token id {bad} is outside the vocabulary 0…{facts.vocabulary_size - 1}")

    # one step

    def step(self) -> list[Progress]:
        """One step of every live row; [] when none is left."""
        if not self._rows:
            return []
        ops = self._ops
        with ops.no_grad():
            packed = self._draft()
            with self._stage("verify"):
                verified = self.target.verify(packed)
            with self._stage("accept"):
                verdict = accept(
                    ops, packed, verified.logits, self.temperature, self._uniforms(self._rows, packed.length + 1)
                )
                tokens, counts, slots = self._read(verdict)
            with self._stage("commit"):
                self.target.commit(verdict, counts, slots)
                last = (verdict.counts - 1)[:, None]
                self._roots = ops.gather(verdict.tokens, last, axis=1)[:, 0]
                self._features = _at_slots(ops, verified.hidden, ops.gather(verdict.slots, last, axis=1)[:, 0])
            given = [row[:count] for row, count in zip(tokens, counts, strict=True)]
            if self.drafter is not None:
                with self._stage("observe"):
                    self.drafter.observe(given, verified, verdict)
            if self.times is not None:
                self.times.steps += 1
            return self._deliver(0, given, drafted=packed.length > 0, whole=True)

    def _draft(self) -> PackedBeam:
        ops, shape = self._ops, self.shape
        room = min(self.target.room(row) for row in range(len(self._rows)))
        beam = None
        if self.drafter is not None and room >= self.drafter.depth(shape):
            with self._stage("draft"):
                beam = self.drafter.draft(self._roots, self._features, shape)
        if beam is None:
            return root_only(ops, self._roots)
        with self._stage("pack"):
            return pack_beam(ops, self._roots, beam, shape.nodes)

    def _read(self, verdict: Verdict) -> tuple[list[list[int]], list[int], list[list[int]]]:
        """The step's one host read."""
        ops, steps = self._ops, verdict.tokens.shape[1]
        packed = ops.concat([verdict.tokens, verdict.slots, verdict.counts[:, None]], axis=1)
        rows = ops.to_numpy(packed).tolist()
        return [r[:steps] for r in rows], [r[-1] for r in rows], [r[steps:-1] for r in rows]

    def _uniforms(self, rows: Sequence[_Row], count: int) -> Array | None:
        """Uniforms (B, count) for the next choices of the rows: the position is that of the chosen token."""
        if self.temperature == 0:
            return None
        values = uniforms([r.request.seed for r in rows], [r.length for r in rows], count)
        return self._ops.asarray(values.astype(np.float32), "float32")

    # delivery

    def _deliver(self, first: int, given: Sequence[Sequence[int]], *, drafted: bool, whole: bool) -> list[Progress]:
        """Cut each row's tokens at its end, and let go of the rows that ended."""
        out = []
        for row, tokens in zip(self._rows[first:], given, strict=True):
            kept, finish = self._cut(row, tokens)
            row.generated += len(kept)
            row.length += len(kept)
            cut = not whole or len(kept) < len(tokens)
            out.append(Progress(row.key, kept, finish, None if cut else len(tokens) - 1, drafted))
        self._release([i for i, p in enumerate(out, start=first) if p.finish is not None])
        return out

    def _cut(self, row: _Row, tokens: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        kept: list[int] = []
        limit = self.target.facts.context_limit
        for token in tokens:
            kept.append(token)
            if token in self.end_tokens:
                return tuple(kept), "end"
            if row.generated + len(kept) >= row.request.max_tokens:
                return tuple(kept), "length"
            if limit is not None and row.length + len(kept) >= limit:
                return tuple(kept), "context"
        return tuple(kept), None

    def stop(self, key: int) -> None:
        """End a live request (a stop string was met); unknown or finished keys are ignored."""
        self._release([i for i, row in enumerate(self._rows) if row.key == key])

    def close(self) -> None:
        """Let go of every row, so that the target is free for the next caller."""
        self._release(list(range(len(self._rows))))

    def _release(self, places: Sequence[int]) -> None:
        """Drop rows, the last one first, so that no number moves before its turn."""
        if not places:
            return
        order = list(range(len(self._rows)))
        for place in sorted(places, reverse=True):
            self.target.release(place)
            if self.drafter is not None:
                self.drafter.release(place)
            order[place] = order[-1]
            order.pop()
        self._rows = [self._rows[i] for i in order]
        if order:
            index = self._ops.asarray(order)
            self._roots = self._ops.take(self._roots, index)
            self._features = self._ops.take(self._features, index)
        else:
            self._roots = self._features = None

    # helpers

    def _most_slots(self) -> int:
        drafter, shape = self.drafter, self.shape
        if drafter is None:
            return 1
        most = 1 + drafter.candidates(shape) * drafter.depth(shape)
        return most if shape.nodes is None else min(shape.nodes, most)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        assert self.times is not None
        self._ops.synchronize()
        start = time.perf_counter()
        yield
        self._ops.synchronize()
        seconds = self.times.seconds
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return _UNTIMED if self.times is None else self._timed(name)


_UNTIMED: AbstractContextManager[None] = nullcontext()


def _at_slots(ops: Ops, hidden: Array, slots: Array) -> Array:
    """hidden (B, N, D) at one slot per row (B,): (B, D)."""
    batch, width, size = hidden.shape
    return ops.take(hidden.reshape(batch * width, size), ops.arange(batch) * width + slots)
