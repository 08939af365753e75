"""What is timed: single parts of a step, and whole steps, on the machine at hand.

Whole steps of different shapes take turns on the same rows, so that neither text nor context nor
the machine's drift decides between them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from portadraft.core.decode import Decoder
from portadraft.core.drafter import Drafter, StatelessDrafter
from portadraft.core.requests import Request
from portadraft.core.target import Target
from portadraft.core.tree import pack_beam
from portadraft.core.types import Array, Beam, BeamShape, Verdict, Verified
from portadraft.errors import InvalidArgument, OutOfMemory

DEFAULT_CONTEXT = 200
GROWTH = 192
"""Tokens that a row grows by before it is replaced by another prompt."""
_LEAST_GROWTH = 24
"""The same where the model's context limit leaves no room for more."""


_MEMORY_RAN_OUT = ("out of memory", "outofmemory", "can't allocate", "failed to allocate", "unable to alloc")


@dataclass(frozen=True)
class Chunk:
    """Some consecutive steps: milliseconds and slots of each, and the tokens over all rows."""

    ms: tuple[float, ...]
    slots: tuple[int, ...]
    tokens: int


class Machine(Protocol):
    """Something that steps can be timed on, at one batch size and context."""

    batch: int
    context: int

    def draft_ms(self, width: int, length: int) -> float:
        """One timing of drafting and packing."""

    def check_ms(self, slots: int, depth: int) -> float:
        """One timing of a step over that many slots, drafting left out; 1 slot is a plain step."""

    def steps(self, shape: BeamShape | None, count: int) -> Chunk:
        """Whole steps with a shape (None: plain)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a backend's error says that memory ran out; they have no common class."""
    if isinstance(error, (OutOfMemory, MemoryError)):
        return True
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _MEMORY_RAN_OUT)


def check_context(context: int, limit: int | None) -> None:
    """Whether steps can be measured behind a context of that many tokens. The default is brought to what a model has
    room for; another one is what somebody asked for.

    Raises: InvalidArgument.
    """
    if limit is None:
        return
    if limit <= 3 * _LEAST_GROWTH:
        raise InvalidArgument(
            f"model: its context of {limit} tokens leaves no room to measure steps in; expected more than "
            f"{3 * _LEAST_GROWTH}"
        )
    if context >= limit and context != DEFAULT_CONTEXT:
        raise InvalidArgument(f"context={context!r}: the model's context is {limit}; expected fewer tokens")


class _Switch(StatelessDrafter):
    """The drafter under test, or a given beam, or nothing, by turns; remembers the slots of its last pass."""

    wants: Literal["none", "last", "all"] = "last"

    def __init__(self, drafter: Drafter | None) -> None:
        self.inner = drafter
        self.name = "none" if drafter is None else drafter.name
        self.wants = "last" if drafter is None else drafter.wants
        self.plain = False
        self.given: Beam | None = None
        self.slots = 1
        self.seen: tuple[Array, Array] | None = None

    def candidates(self, shape: BeamShape) -> int:
        return shape.width if self.inner is None else self.inner.candidates(shape)

    def depth(self, shape: BeamShape) -> int:
        return shape.length if self.inner is None else self.inner.depth(shape)

    def admit(self, row: int, ids: Sequence[int]) -> None:
        if self.inner is not None:
            self.inner.admit(row, ids)

    def draft(self, roots: Array, features: Array, shape: BeamShape) -> Beam | None:
        self.seen = (roots, features)
        beam = self.given
        if beam is None and not self.plain and self.inner is not None:
            beam = self.inner.draft(roots, features, shape)
        if beam is None:
            self.slots = 1
        else:
            most = 1 + beam.tokens.shape[1] * beam.tokens.shape[2]
            most = most if beam.nodes is None else min(most, 1 + beam.nodes)
            self.slots = most if shape.nodes is None else min(shape.nodes, most)
        return beam

    def observe(self, tokens: Sequence[Sequence[int]], verified: Verified | None, verdict: Verdict | None) -> None:
        if self.inner is not None:
            self.inner.observe(tokens, verified, verdict)

    def truncate(self, row: int, length: int) -> None:
        if self.inner is not None:
            self.inner.truncate(row, length)

    def release(self, row: int) -> None:
        if self.inner is not None:
            self.inner.release(row)


@dataclass
class LiveMachine:
    """This machine, with a loaded target. Use as a context manager: rows are let go at the end.

    prompts: token ids, taken in turns and brought to `context` tokens by what stands before them in the list.
    context: less than was asked for where the model's limit leaves no room for steps behind it.
    """

    target: Target
    drafter: Drafter | None
    prompts: Sequence[Sequence[int]]
    batch: int
    context: int
    temperature: float = 0.0
    seed: int = 0
    _decoder: Decoder | None = None
    _switch: _Switch = field(init=False)
    _growth: int = field(init=False)
    _grown: int = 0
    _next: int = 0

    def __post_init__(self) -> None:
        if not self.prompts:
            raise InvalidArgument("prompts=[]: expected at least one, to measure on")
        self._switch = _Switch(self.drafter)
        self._growth, limit = GROWTH, self.target.facts.context_limit
        if limit is not None:
            self.context = max(1, min(self.context, limit - 3 * _LEAST_GROWTH))
            self._growth = max(_LEAST_GROWTH, min(GROWTH, (limit - self.context) // 3))

    def __enter__(self) -> LiveMachine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the rows, so that the target is free."""
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None

    # parts

    def draft_ms(self, width: int, length: int) -> float:
        self._rows(0)
        if self.drafter is None:
            return 0.0
        ops, switch = self.target.ops, self._switch
        if switch.seen is None:
            self.steps(None, 1)
        assert switch.seen is not None
        roots, features = switch.seen
        with ops.no_grad():
            ops.synchronize()
            start = time.perf_counter()
            beam = self.drafter.draft(roots, features, BeamShape(width, length))
            if beam is not None:
                pack_beam(ops, roots, beam, 16)
            ops.synchronize()
            return (time.perf_counter() - start) * 1000

    def check_ms(self, slots: int, depth: int) -> float:
        ops, switch = self.target.ops, self._switch
        if slots <= 1:
            return self.steps(None, 1).ms[0]
        beam = self._chains(slots, depth)
        self._rows(depth + 1)
        if switch.seen is None:
            self.steps(None, 1)
        assert switch.seen is not None
        with ops.no_grad():
            ops.synchronize()
            start = time.perf_counter()
            pack_beam(ops, switch.seen[0], beam, slots)
            ops.synchronize()
            packing = (time.perf_counter() - start) * 1000
        switch.given = beam
        try:
            (ms,) = self.steps(BeamShape(beam.tokens.shape[1], beam.tokens.shape[2], slots), 1).ms
        finally:
            switch.given = None
        # A step contains its packing: where that alone seems to take as long, it was disturbed when it was timed.
        return max(ms - packing, 0.1 * ms)

    def _chains(self, slots: int, depth: int) -> Beam:
        """Chains below the root with that many nodes at least; a budget cuts the rest."""
        ops = self.target.ops
        depth = min(depth, slots - 1)
        width = -(-(slots - 1) // depth)
        numbers = np.arange(width * depth).reshape(1, width, depth)
        tokens = np.broadcast_to(3 + numbers % (self.target.facts.vocabulary_size - 3), (self.batch, width, depth))
        scores = np.broadcast_to(-(1.0 + np.arange(depth)), tokens.shape)
        return Beam(
            ops.asarray(tokens.astype(np.int32)),
            ops.full((self.batch, width), depth, "int32"),
            ops.asarray(scores.astype(np.float32), "float32"),
        )

    # whole steps

    def steps(self, shape: BeamShape | None, count: int) -> Chunk:
        most = 1 if shape is None else max(shape.length, self._switch.depth(shape)) + 1
        decoder = self._rows(count * most)
        ops, switch = self.target.ops, self._switch
        switch.plain = shape is None
        if shape is not None:
            decoder.shape = shape
        ms, slots, tokens = [], [], 0
        for _ in range(count):
            ops.synchronize()
            start = time.perf_counter()
            progress = decoder.step()
            ops.synchronize()
            ms.append((time.perf_counter() - start) * 1000)
            slots.append(switch.slots)
            tokens += sum(len(p.tokens) for p in progress)
        self._grown += count * most
        return Chunk(tuple(ms), tuple(slots), tokens)

    def _rows(self, need: int) -> Decoder:
        """The live rows, replaced by the next prompts once they have grown."""
        if self._decoder is not None and self._grown + need <= max(self._growth, need):
            return self._decoder
        self.close()
        prompts = [self._prompt(self._next + i) for i in range(self.batch)]
        self._next = (self._next + self.batch) % len(self.prompts)
        decoder = Decoder(self.target, self._switch, BeamShape(4, 8), temperature=self.temperature)
        most = 2 * max(self._growth, need)
        try:
            decoder.admit([Request(p, most, self.seed + i) for i, p in enumerate(prompts)])
        except BaseException:
            decoder.close()
            raise
        self._decoder, self._grown = decoder, need
        self._switch.seen = None
        return decoder

    def _prompt(self, number: int) -> tuple[int, ...]:
        """Prompt `number`, with those before it in front until there are `context` tokens."""
        number %= len(self.prompts)
        ids = list(self.prompts[number])
        before = number - 1
        while len(ids) < self.context:
            more = list(self.prompts[before % len(self.prompts)])
            ids = more[max(0, len(more) + len(ids) - self.context) :] + ids
            before -= 1
        limit = self.target.facts.context_limit
        if limit is not None and len(ids) + 3 * self._growth > limit:
            ids = ids[-max(1, limit - 3 * self._growth) :]
        return tuple(ids)
