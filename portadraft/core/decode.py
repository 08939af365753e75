"""The loop: draft, pack, verify, accept, commit, for rows of different lengths.

A plain step is the same step with the root as its only slot. There is one target pass and
one host read a step. The decoder knows tokens, not text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from portadraft.core.choice import Chooser, Situation
from portadraft.core.compiled import accept_compiled as accept
from portadraft.core.compiled import pack_compiled
from portadraft.core.drafter import Drafter
from portadraft.core.draw import numbers
from portadraft.core.logprobs import TokenLogprob, gather_logprobs, read_logprobs
from portadraft.core.ops import Ops
from portadraft.core.penalties import History
from portadraft.core.rejection import Acceptance, Chain, accept_chain, check_rejection, draft_chain
from portadraft.core.requests import FinishReason as FinishReason
from portadraft.core.requests import Progress as Progress
from portadraft.core.requests import Request as Request
from portadraft.core.requests import Row
from portadraft.core.sampling import Sampling
from portadraft.core.scalars import as_integer
from portadraft.core.target import RowState, Target
from portadraft.core.tree import root_only
from portadraft.core.types import Array, BeamShape, PackedBeam, Verdict
from portadraft.core.uniforms import CHOICE, COIN, DRAFT, uniforms
from portadraft.errors import BrokenLogits, InvalidArgument

RESERVE = 1024
"""The most tokens of an answer that the cache is made ready for at once."""


@dataclass
class StageTimes:
    """Seconds per stage, measured between synchronisations, so only under profiling."""

    seconds: dict[str, float] = field(default_factory=dict)
    steps: int = 0


class Decoder:
    """Decodes rows of one target, with a drafter or plainly.

    target: its rows must all be free. drafter: None decodes plainly. shape: may be set between
    steps; None then decodes plainly while the drafter keeps observing. sampling: how tokens are
    chosen, but for the seeds, which the rows bring. temperature: short for a `Sampling` of that
    temperature. end_tokens: ids that end a row. logprobs: report the log-probability of every
    token, and so many of the likeliest ones in its place (0: none); None reports nothing.
    acceptance: "match" accepts drafted tokens that the target itself chooses; "rejection" is the
    classical rule for chains (`portadraft.core.rejection`). profile: keep `times`, at the cost of
    a synchronisation per stage.

    Not safe for threads: callers take turns.
    Raises: InvalidArgument.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        shape: BeamShape | None = None,
        *,
        sampling: Sampling | None = None,
        temperature: float | None = None,
        end_tokens: Sequence[int] = (),
        logprobs: int | None = None,
        acceptance: Acceptance = "match",
        profile: bool = False,
    ) -> None:
        if target.lengths:
            raise InvalidArgument(f"target: {len(target.lengths)} of its rows are in use; release them first")
        if sampling is None:
            sampling = Sampling(0.0 if temperature is None else temperature)
        elif temperature is not None:
            raise InvalidArgument(f"temperature={temperature!r}: `sampling` brings one already; pass one of the two")
        vocabulary = target.facts.vocabulary_size
        _check_logprobs(logprobs, vocabulary)
        self.target = target
        self.drafter = drafter
        self.shape: BeamShape | None = shape or BeamShape()
        self.sampling = sampling
        self.end_tokens = frozenset(end_tokens)
        self.times = StageTimes() if profile else None
        self._logprobs = logprobs
        self._rejection = check_rejection(acceptance, drafter, self.shape, sampling)
        self._ops = target.ops
        self._chooser = Chooser(target.ops, sampling, vocabulary, sorted(self.end_tokens))
        self._rows: list[Row] = []
        self._roots: Array = None
        self._features: Array = None
        self._history: History | None = None
        self._keys = 0

    @property
    def live(self) -> int:
        """Rows that are still being decoded."""
        return len(self._rows)

    # admission

    def admit(self, requests: Sequence[Request]) -> list[Progress]:
        """Prefill new rows and choose their first token (one host read for all of them).

        Raises: InvalidArgument as `Request.check` says, and for a prefix that is not the prompt's;
        no row is then added.
        """
        for request in requests:
            request.check(self.target.facts)
        if not requests:
            return []
        ops, first = self._ops, len(self._rows)
        with ops.no_grad():
            with self._stage("prefill"):
                # More than that is grown into: a huge max_tokens is a wish, not a size.
                reserve = min(max(r.max_tokens for r in requests), RESERVE) + self._most_slots()
                more: dict[str, Any] = {}
                if any(r.prefix is not None for r in requests):
                    more["known"] = [r.prefix for r in requests]
                verified = self.target.admit([r.ids for r in requests], reserve=reserve, **more)
            self._introduce(first, requests)
            rows = [Row(self._keys + i, r, len(r.ids)) for i, r in enumerate(requests)]
            self._keys += len(rows)
            logits = verified.logits[:, 0]
            history = History.of(ops, self.sampling, [(r.prompt, r.answer) for r in requests], self._chooser.vocabulary)
            roots = self._chooser.choose(logits, self._situation(rows, 1, history), 0, history)
            if history is not None:
                history = history.after(ops, roots, ops.full((len(rows),), 1, "bool"))
            self._append(rows, roots, verified.hidden[:, 0], history)
            read = ops.to_numpy(self._with_logprobs(roots[:, None], logits, roots))
            given = read[:, :1].tolist()
            self._check(rows, given)
            if self.drafter is not None:
                self.drafter.observe([[]] * first + given, None, None)
            return self._deliver(first, given, read[:, 1:], drafted=False, whole=False)

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

    def _append(self, rows: list[Row], roots: Array, features: Array, history: History | None) -> None:
        ops = self._ops
        if self._rows:
            roots = ops.concat([self._roots, roots], axis=0)
            features = ops.concat([self._features, features], axis=0)
            if history is not None and self._history is not None:
                history = self._history.joined(ops, history)
        self._roots, self._features, self._history = roots, features, history
        self._rows.extend(rows)

    # one step

    def step(self) -> list[Progress]:
        """One step of every live row; [] when none is left."""
        if not self._rows:
            return []
        ops = self._ops
        with ops.no_grad():
            packed, chain = self._draft()
            with self._stage("verify"):
                verified = self.target.verify(packed)
            with self._stage("accept"):
                situation = self._situation(self._rows, packed.length + 1, self._history)
                if chain is None:
                    verdict, history = accept(ops, packed, verified.logits, self._chooser, situation)
                else:
                    coins = self._ops.asarray(self._uniforms(self._rows, packed.length, COIN), self._ops.wide)
                    verdict, history = accept_chain(ops, chain, verified.logits, coins, self._chooser, situation)
                tokens, counts, slots, rest = self._read(verdict, verified.logits)
                given = [row[:count] for row, count in zip(tokens, counts, strict=True)]
                self._check(self._rows, given)
            with self._stage("commit"):
                self.target.commit(verdict, counts, slots)
                last = (verdict.counts - 1)[:, None]
                self._roots = ops.gather(verdict.tokens, last, axis=1)[:, 0]
                self._features = _at_slots(ops, verified.hidden, ops.gather(verdict.slots, last, axis=1))[:, 0]
                self._history = history
            if self.drafter is not None:
                with self._stage("observe"):
                    self.drafter.observe(given, verified, verdict)
            if self.times is not None:
                self.times.steps += 1
            return self._deliver(0, given, rest, drafted=packed.length > 0, whole=True)

    def _draft(self) -> tuple[PackedBeam, Chain | None]:
        """The step's packed beam, and for rejection the distributions that it was drawn from."""
        ops, shape = self._ops, self._shape_that_fits()
        if self.drafter is None or shape is None:
            return root_only(ops, self._roots), None
        if self._rejection:
            with self._stage("draft"):
                length = shape.length if shape.nodes is None else min(shape.length, shape.nodes - 1)
                drawn = numbers(ops, self._uniforms(self._rows, length, DRAFT))
                return draft_chain(ops, self.drafter, self._roots, self._features, self.sampling.temperature, drawn)
        with self._stage("draft"):
            beam = self.drafter.draft(self._roots, self._features, shape)
        if beam is None:
            return root_only(ops, self._roots), None
        with self._stage("pack"):
            return pack_compiled(ops, self._roots, beam, shape.nodes), None

    def _shape_that_fits(self) -> BeamShape | None:
        """The shape, made shallower where a row is close to its limit; None for a plain step."""
        drafter, shape = self.drafter, self.shape
        if drafter is None or shape is None:
            return None
        room = min(self.target.room(row) for row in range(len(self._rows)))
        if room >= drafter.depth(shape):
            return shape
        shape = replace(shape, length=max(1, min(room, shape.length)))
        return shape if room >= drafter.depth(shape) else None

    def _read(self, verdict: Verdict, logits: Array) -> tuple[list[list[int]], list[int], list[list[int]], _Host]:
        """The step's one host read: tokens, counts and slots, and packed log-probabilities (B, S·n)."""
        ops = self._ops
        rows, steps = verdict.tokens.shape
        packed = ops.concat([verdict.tokens, verdict.slots, verdict.counts[:, None]], axis=1)
        if self._logprobs is not None:
            at = _at_slots(ops, logits, verdict.slots).reshape(rows * steps, -1)
            packed = self._with_logprobs(packed, at, verdict.tokens.reshape(-1))
        read = ops.to_numpy(packed)
        small = read[:, : 2 * steps + 1].tolist()
        return (
            [r[:steps] for r in small],
            [r[-1] for r in small],
            [r[steps:-1] for r in small],
            read[:, 2 * steps + 1 :],
        )

    def _check(self, rows: Sequence[Row], given: Sequence[Sequence[int]]) -> None:
        """Raises: BrokenLogits where a choice could not be made."""
        for row, tokens in zip(rows, given, strict=True):
            if min(tokens) < 0:
                dtype, position = self.target.facts.dtype, row.length + tokens.index(-1)
                other = "bfloat16" if dtype == "float32" else "float32"
                raise BrokenLogits(
                    f"logits: NaN or infinite at position {position} of row {row.key}, computed in {dtype} on "
                    f"{self._ops.device}; expected finite numbers. Load the model with dtype={other!r}; if they are so "
                    "then, too, its weights are damaged"
                )

    def _with_logprobs(self, packed: Array, logits: Array, tokens: Array) -> Array:
        """packed (B, …), and behind it the rows' log-probabilities at their S places: logits (B·S, V)."""
        if self._logprobs is None:
            return packed
        ops = self._ops
        found = gather_logprobs(ops, logits, tokens, self._logprobs)
        return ops.concat([packed, found.reshape(packed.shape[0], -1)], axis=1)

    def _situation(self, rows: Sequence[Row], count: int, history: History | None) -> Situation:
        may_end = None
        if self._chooser.processors.bans_ends:
            missing = [self.sampling.min_tokens - row.request.answered - row.generated for row in rows]
            if max(missing) > 0:
                host = np.arange(count)[None, :] >= np.asarray(missing)[:, None]
                may_end = self._ops.asarray(host, "bool")
        drawn = None if self.sampling.greedy else numbers(self._ops, self._uniforms(rows, count, CHOICE))
        return Situation(drawn, may_end, history)

    @staticmethod
    def _uniforms(rows: Sequence[Row], count: int, stream: int) -> _Host:
        """Uniforms (B, count) for the rows' next tokens: the position is that of the token."""
        return uniforms([r.request.seed for r in rows], [r.length for r in rows], count, stream)

    # delivery

    def _deliver(
        self, first: int, given: list[list[int]], logprobs: _Host, *, drafted: bool, whole: bool
    ) -> list[Progress]:
        """Cut each row's tokens at its end, and let go of the rows that ended."""
        out = []
        limit = self.target.facts.context_limit
        for i, tokens in enumerate(given, start=first):
            row = self._rows[i]
            kept, finish = row.cut(tokens, self.end_tokens, limit)
            row.take(kept)
            accepted = len(tokens) - 1 if whole and len(kept) == len(tokens) else None
            state = self._state(i) if finish is not None else None
            found = self._found(logprobs[i - first], kept)
            out.append(Progress(row.key, tuple(kept), finish, accepted, drafted, found, state))
        self._release([i for i, p in enumerate(out, start=first) if p.finish is not None])
        return out

    def _found(self, packed: _Host, tokens: list[int]) -> tuple[TokenLogprob, ...] | None:
        return None if self._logprobs is None else read_logprobs(packed.reshape(-1, 1 + 2 * self._logprobs), tokens)

    def _state(self, place: int) -> RowState | None:
        """The state of a row that ends, cut to what belongs to its answer; None where it is not kept."""
        row = self._rows[place]
        if not row.request.keep:
            return None
        ids = [*row.request.ids, *row.answer]
        committed = self.target.lengths[place]
        if committed > len(ids):  # the end came in the middle of an accepted block
            self.target.truncate(place, len(ids))
        return self.target.export(place, ids[:committed])

    def stop(self, key: int) -> RowState | None:
        """End a live request (a stop string was met), and return its state if it is kept; other keys are ignored."""
        for place, row in enumerate(self._rows):
            if row.key == key:
                with self._ops.no_grad():
                    state = self._state(place)
                    self._release([place])
                return state
        return None

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
            self._history = None if self._history is None else self._history.rows(self._ops, index)
        else:
            self._roots = self._features = self._history = None

    # helpers

    def _most_slots(self) -> int:
        drafter, shape = self.drafter, self.shape
        if drafter is None or shape is None:
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


_Host = np.ndarray[Any, Any]
_UNTIMED: AbstractContextManager[None] = nullcontext()


def _check_logprobs(count: int | None, vocabulary: int) -> None:
    if count is None:
        return
    whole = as_integer(count)
    if whole is None or not 0 <= whole <= vocabulary:
        raise InvalidArgument(
            f"logprobs={count!r}: expected how many alternatives to report, 0 to {vocabulary}, or None for no "
            "log-probabilities"
        )


def _at_slots(ops: Ops, x: Array, slots: Array) -> Array:
    """x (B, N, D) at some slots of each row (B, S): (B, S, D)."""
    batch, width, size = x.shape
    return ops.take(x.reshape(batch * width, size), ops.arange(batch)[:, None] * width + slots)
