"""The target protocol for unmodified mlx-lm models, quantised ones included.

The model's own forward runs, with our cache, which gives it the masks, and with rotary positions
per token; what its LM head reads is caught on the way. Nothing is evaluated in a step but by the
one read at its end.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from portadraft.backends.mlx import heads, rotary
from portadraft.backends.mlx.cache import RowCache
from portadraft.backends.mlx.limits import context_limit
from portadraft.backends.mlx.ops import NAMES, MlxOps
from portadraft.backends.mlx.passes import Pass
from portadraft.core.admission import (
    check_commit,
    check_export,
    check_known,
    check_packed,
    check_prompts,
    check_row,
    check_truncate,
)
from portadraft.core.target import Known, RowState, TargetFacts
from portadraft.core.types import PackedBeam, Verdict, Verified
from portadraft.errors import InvalidArgument, UnsupportedModel

Array = Any

PREFILL_CHUNK = 512
TIDY = 256
"""After so many passes mlx gives back memory that it keeps for reuse: masks grow with the context, and fit once."""
UNLIMITED = 1 << 30
_PROBE_ROWS = 11
"""Rows of the probe: no likely number of heads, so that a mask cannot fit by accident."""
_building = threading.RLock()
"""Held while a pass's graph is built: modules and mlx's rope are dressed up for that time."""


class MlxTarget:
    """A loaded mlx-lm model as a target; see `portadraft.core.target.Target`.

    model: it is not modified, and works as before between our calls. limit: the context limit in
    tokens, None to ask the model's arguments.

    Raises: UnsupportedModel with the reason where the model cannot run through our cache.
    """

    def __init__(self, model: Any, *, limit: int | None = None) -> None:
        self.model = model
        self.ops = MlxOps()
        # Constants such as rotary frequencies are computed on first use, and then belong to one thread.
        mx.eval([x for module in model.modules() for x in module.values() if isinstance(x, mx.array)])
        self._pending: tuple[int, int] | None = None
        self._passes = 0
        self._owner = object()  # tells this target's exported states
        self._extra_axis = False
        try:
            self.cache = RowCache(model)
            facts = self._probe()
            limit = context_limit(model, limit)
        except UnsupportedModel as error:
            raise unsupported(model, str(error)) from error
        vocabulary, size, dtype, token_bytes = facts
        self._tables: dict[int, Array] = {}
        self.facts = TargetFacts(
            vocabulary_size=vocabulary,
            hidden_size=size,
            context_limit=limit,
            dtype=NAMES.get(dtype, str(dtype)),
            cache_bytes_per_token=token_bytes,
            architecture_id="",
            weights_id="",
        )

    def named(self, architecture_id: str, weights_id: str) -> MlxTarget:
        """The same target, with its identities."""
        self.facts = replace(self.facts, architecture_id=architecture_id, weights_id=weights_id)
        return self

    def _probe(self) -> tuple[int, int, Any, int]:
        """Build, and never run, the graph of a small pass: sizes, the head, and which masks fit."""
        candidates = heads.candidates(self.model)
        reason = ""
        for self._extra_axis in (False, True):
            watch = heads.Watch()
            self.cache.reserve(_PROBE_ROWS, 2)
            tokens = mx.zeros((_PROBE_ROWS, 2), dtype=mx.int32)
            depths = mx.broadcast_to(mx.arange(2, dtype=mx.int32), (_PROBE_ROWS, 2))
            tree = mx.broadcast_to(mx.tri(2, dtype=mx.int32).astype(mx.bool_), (_PROBE_ROWS, 2, 2))
            try:
                logits = self._run(
                    Pass(0, [0] * _PROBE_ROWS, 2, depths, tree, self._extra_axis), tokens, candidates, watch
                )
                if not all(layer.keys is not None for layer in self.cache.layers):
                    raise UnsupportedModel("some of its layers store no keys and values")
                ends = heads.find_ends(watch, logits.shape[-1])
                self.ends = ends
                read = [x for module, x in watch.read if module is ends.head]
                return logits.shape[-1], read[-1].shape[-1], read[-1].dtype, self.cache.bytes_per_token
            except UnsupportedModel:
                raise
            except Exception as error:  # whatever a model's code raises about a mask that it does not take
                reason = reason or f"a trial pass failed with {type(error).__name__}: {error}"
            finally:
                self.cache.drop_pass()
                self.cache.clear()
        raise UnsupportedModel(reason)

    def _run(self, running: Pass, tokens: Array, watched: Sequence[Any], watch: heads.Watch) -> Array:
        """Build one forward pass: logits (B, N, V), or (B, 1, V) where the watch lets only the last through."""
        with _building:
            self.cache.begin(running)
            try:
                with heads.watching(watched, watch), rotary.positions(running.positions):
                    logits = self.model(tokens, cache=self.cache.faces)
            finally:
                self.cache.end()
        return logits

    def _pass(self, running: Pass, tokens: Array, last_only: bool = False) -> Verified:
        watch = heads.Watch(last_only)
        logits = self._run(running, tokens, [self.ends.head], watch)
        if len(watch.read) != 1:
            raise UnsupportedModel(f"its forward reads the LM head {len(watch.read)} times, expected once")
        return Verified(logits, watch.read[0][1])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed tokens of each live row (host numbers)."""
        return tuple(self.cache.lengths)

    def room(self, row: int) -> int:
        """How deep a tree below the root may be at this row's length; below 0 not even a root fits."""
        limit = self.facts.context_limit
        return UNLIMITED if limit is None else limit - 1 - self.cache.lengths[row]

    def admit(
        self, prompts: Sequence[Sequence[int]], reserve: int = 0, known: Sequence[Known] | None = None
    ) -> Verified:
        """Prefill new rows behind the live ones; logits (R, 1, V) and hidden (R, 1, D) of the last positions.

        Raises: InvalidArgument for an empty prompt, ids outside the vocabulary, or a known state that
        does not fit; no row was added then.
        """
        check_prompts(prompts, self.facts.vocabulary_size)
        states = check_known(prompts, known, self._owner)
        old = len(self.cache.lengths)
        longest = max([*self.cache.lengths, *(len(p) for p in prompts)])
        self._pending = None
        self.cache.drop_pass()
        self.cache.reserve(old + len(prompts), longest + max(reserve, 0) + 1, exact=True)
        try:
            done = []
            for i, (prompt, entry) in enumerate(zip(prompts, states, strict=True)):
                start = 0
                if entry is not None and entry[1]:
                    start = entry[1]
                    self.cache.write(old + i, entry[0].native, start)
                done.append(self._prefill(old + i, prompt, start))
        except BaseException:
            self.cache.drop_pass()
            if not old:
                self.cache.clear()
            raise
        # Rows count only from here on, so an error above leaves none.
        self.cache.lengths.extend(len(p) for p in prompts)
        if len(done) == 1:
            return done[0]
        return Verified(
            mx.concatenate([v.logits for v in done], axis=0), mx.concatenate([v.hidden for v in done], axis=0)
        )

    def export(self, row: int, ids: Sequence[int]) -> RowState:
        """A row's committed keys and values, copied out (see `Target.export`)."""
        check_export(row, ids, self.cache.lengths)
        layers = self.cache.read(row)
        return RowState(tuple(ids), layers, sum(x.nbytes for layer in layers for x in layer), self._owner)

    def _prefill(self, row: int, prompt: Sequence[int], restored: int) -> Verified:
        """Fill a row that holds the first `restored` tokens of its prompt; what the model says at the last one."""
        ids = mx.array([list(prompt)], dtype=mx.int32)
        verified: Verified | None = None
        for start in range(restored, len(prompt), PREFILL_CHUNK):
            chunk = ids[:, start : start + PREFILL_CHUNK]
            verified = self._pass(
                Pass(row, [start], chunk.shape[1], extra_axis=self._extra_axis), chunk, last_only=True
            )
            self.cache.drop_pass()
            # A chunk at a time, so that the graph and its intermediate arrays stay small.
            mx.eval(self.cache.buffers())
            if start + PREFILL_CHUNK < len(prompt):
                mx.clear_cache()
        assert verified is not None
        return verified

    def verify(self, packed: PackedBeam) -> Verified:
        """ONE forward pass over the N slots of every live row; logits (B, N, V), hidden (B, N, D).

        Raises: InvalidArgument where the beam's rows are not the live rows, or a tree is deeper than `room`.
        """
        lengths = self.cache.lengths
        rows, slots = packed.tokens.shape
        check_packed(packed, lengths)
        depth = packed.length if slots > 1 else 0
        for row in range(rows):
            if depth > self.room(row):
                raise InvalidArgument(
                    f"packed.length={depth}: row {row} has room for a depth of {self.room(row)}; draft no deeper"
                )
        self._passes += 1
        if self._passes % TIDY == 0:
            mx.clear_cache()
        # The device drafts and packs while the host builds the pass: some milliseconds for a deep model.
        _start(packed.tokens, packed.depths, packed.mask)
        self.cache.drop_pass()
        # A commit may write as many slots behind the longest row as the path has.
        self.cache.reserve(rows, max(lengths) + slots + depth + 1)
        running = Pass(0, lengths, slots, packed.depths, packed.mask, self._extra_axis, runs=True)
        verified = self._pass(running, packed.tokens)
        # And runs the pass while the host goes on to accept.
        _start(verified.logits, verified.hidden)
        self._pending = (running.past, rows)
        return verified

    def commit(self, verdict: Verdict, counts: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
        """Write the accepted slots of the last `verify` behind each row's context; lazy, and in place.

        Raises: InvalidArgument without a `verify` before, or for another number of rows.
        """
        check_commit(counts, slots, None if self._pending is None else self._pending[1])
        assert self._pending is not None
        past, _ = self._pending
        self.cache.commit(past, verdict.slots, counts, slots)
        _start(*self.cache.buffers())
        self._pending = None

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on (at least one stays)."""
        check_truncate(row, length, self.cache.lengths)
        self._pending = None
        self.cache.lengths[row] = length

    def release(self, row: int) -> None:
        """Drop a row; the last row takes its number."""
        check_row(row, self.cache.lengths)
        self._pending = None
        self.cache.release(row)

    def embeddings(self) -> Array:
        """The input embedding table (V, D) as stored; a scale that the model applies to it is not included."""
        return self._dense(self.ends.table)

    def head_rows(self) -> Array:
        """The LM head's weight (V, D), unpacked where it is quantised."""
        return self._dense(self.ends.head)

    def head_bias(self) -> Array | None:
        """The LM head's bias (V,), if it has one."""
        return self.ends.head.get("bias")

    def _dense(self, module: Any) -> Array:
        if "scales" not in module:
            return module.weight
        if id(module) not in self._tables:
            table = heads.dense(module)
            mx.eval(table)
            self._tables[id(module)] = table
        return self._tables[id(module)]


def _start(*arrays: Array) -> None:
    """Have the device begin with what is asked for so far, without waiting for it."""
    begin: Any = mx.async_eval
    begin(*arrays)


def model_type(model: Any) -> str:
    """The model's name in mlx-lm: its type, or its module's name."""
    return str(getattr(model, "model_type", None) or type(model).__module__.rpartition(".")[2])


def unsupported(model: Any, reason: str) -> UnsupportedModel:
    error = UnsupportedModel(
        f"model type {model_type(model)!r} cannot verify trees of drafted tokens with mlx: {reason}; "
        "use another model, or mlx-lm's own generate"
    )
    error.reason = reason
    return error
