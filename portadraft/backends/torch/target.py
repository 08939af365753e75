"""The target protocol for unmodified Hugging Face causal language models.

Rows, prompts, trees and commits; the model's own forward stands in `passes`. On CUDA passes have
static shapes and are captured (see `graphs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from portadraft.backends.torch.graphs import ENVIRONMENT, Graphs, context_bucket, default_graphs
from portadraft.backends.torch.limits import UNLIMITED
from portadraft.backends.torch.ops import NAMES, TorchOps, to_device
from portadraft.backends.torch.passes import Forward, causal
from portadraft.backends.torch.rotary_rows import RotaryRows
from portadraft.core.admission import (
    check_commit,
    check_export,
    check_known,
    check_packed,
    check_prompts,
    check_row,
    check_truncate,
)
from portadraft.core.ops import Ops
from portadraft.core.target import Known, RowState, TargetFacts
from portadraft.core.types import PackedBeam, Verdict, Verified
from portadraft.errors import InvalidArgument, UnsupportedModel

PREFILL_CHUNK = 512
PASS = "pass"
"""The name under which passes are captured."""
SLOTS = 128
"""Slots of a pass for which a cache with static contexts has room from the start."""


class _Native(NamedTuple):
    """An exported row: one tensor (planes, heads, length, dim) for each of the cache's buffers, and whether
    its keys were turned by the frequencies past a rotary switch.
    """

    planes: tuple[Tensor, ...]
    beyond: bool


class TorchTarget:
    """A loaded Hugging Face causal LM as a target; see `portadraft.core.target.Target`.

    model: in evaluation mode; it is not modified, and works as before between our calls.
    identity: (architecture_id, weights_id); strict: check mask functions on the way (slow);
    graphs: what captures passes, None for none; "auto" is CUDA graphs on CUDA.
    Raises: UnsupportedModel where the model cannot run through our cache and attention.
    """

    def __init__(
        self,
        model: Any,
        *,
        identity: tuple[str, str] = ("", ""),
        strict: bool = False,
        graphs: Graphs | Literal["auto"] | None = "auto",
    ) -> None:
        self.model = model
        if model.training:
            raise InvalidArgument("model.training=True: expected evaluation mode; call model.eval() first")
        ops = TorchOps(model.device)
        self.ops: Ops = ops
        self._device = ops.torch_device
        self._graphs = ops.graphs = default_graphs(self._device) if graphs == "auto" else graphs
        try:
            self._forward = Forward(model, strict=strict)
        except UnsupportedModel as error:
            raise unsupported(model, str(error)) from error
        self.cache, self._limit = self._forward.cache, self._forward.limit
        self._switched = None if self._limit is None else RotaryRows(self._limit, self._device)
        self._pending: tuple[list[int], PackedBeam] | None = None
        self._owner = object()  # tells this target's exported states
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.facts = TargetFacts(
            vocabulary_size=self._forward.vocabulary_size,
            hidden_size=self._forward.hidden_size,
            context_limit=int(limit) if limit else None,
            dtype=NAMES.get(self._forward.dtype, str(self._forward.dtype)),
            cache_bytes_per_token=self.cache.bytes_per_token,
            architecture_id=identity[0],
            weights_id=identity[1],
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What runs otherwise than it should on this device, for stats; empty where all is well."""
        if self._device.type != "cuda" and self._graphs is None:
            return ()
        if self._graphs is None:
            return (f"CUDA graphs are off (${ENVIRONMENT}=0): each kernel is launched by itself",)
        out = [f"no CUDA graph for the {name} ({why})" for name, why in self._graphs.failures.items()]
        if self._limit is not None:
            out.append("no CUDA graph for the pass (its rotary frequencies change with the length)")
        return tuple(out)

    @property
    def _static(self) -> bool:
        """Whether passes have static shapes, so that they can be captured."""
        return self._graphs is not None and self._limit is None and PASS not in self._graphs.failures

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed tokens of each live row (host numbers)."""
        return tuple(self.cache.lengths)

    def room(self, row: int) -> int:
        """How many tokens a tree may reach past the row's end (its greatest depth); below 0 not even a root fits."""
        length = self.cache.lengths[row]
        room = UNLIMITED if self.facts.context_limit is None else self.facts.context_limit - 1 - length
        return room if self._limit is None else min(room, self._limit.depth(length))

    def admit(
        self, prompts: Sequence[Sequence[int]], reserve: int = 0, known: Sequence[Known] | None = None
    ) -> Verified:
        """Prefill new rows behind the live ones; logits (R, 1, V) and hidden (R, 1, D) of the last positions.

        Raises: InvalidArgument for an empty prompt, ids outside the vocabulary, or a known
        state that does not fit; whatever the allocator raises. No row was added then.
        """
        check_prompts(prompts, self.facts.vocabulary_size)
        states = check_known(prompts, known, self._owner)
        old = len(self.cache.lengths)
        longest = max([*self.cache.lengths, *(len(p) for p in prompts)])
        # One slot more: a step's root, or the extra slot of a prefill past a rotary switch.
        wanted = longest + max(reserve, 0) + 1
        if self._static:
            wanted = context_bucket(wanted) + SLOTS  # growing later would mean to capture everything again
        self._reserve(old + len(prompts), wanted, exact=True)
        if self._switched is not None:
            self._switched.grow(*self.cache.capacity)
        done = []
        for i, (prompt, entry) in enumerate(zip(prompts, states, strict=True)):
            ids = torch.tensor([prompt], dtype=torch.int64, device=self._device)
            restored = 0
            if entry is not None:
                native: _Native = entry[0].native
                if self._switched is None or self._switched.usable(native.beyond, len(prompt)):
                    restored = entry[1]
                    self.cache.write(old + i, native.planes, restored)
            done.append(self._prefill(old + i, ids, restored=restored))
        # Rows count only from here on, so an error above leaves none.
        self.cache.lengths.extend(len(p) for p in prompts)
        if self._switched is not None:
            self._switched.admit(prompts)
        return Verified(
            torch.cat([verified.logits for verified in done]), torch.cat([verified.hidden for verified in done])
        )

    def export(self, row: int, ids: Sequence[int]) -> RowState:
        """A row's committed keys and values, copied out (see `Target.export`)."""
        check_export(row, ids, self.cache.lengths)
        planes = self.cache.read(row)
        beyond = self._switched is not None and self._switched.beyond[row]
        size = sum(plane.numel() * plane.element_size() for plane in planes)
        return RowState(tuple(ids), _Native(tuple(planes), beyond), size, self._owner)

    def _prefill(self, row: int, ids: Tensor, beyond: bool | None = None, restored: int = 0) -> Verified:
        """Fill a row with ids (1, T) in chunks; what the model says at the last position.

        beyond: use the frequencies past the rotary switch (default: as T says); restored: how
        many of the ids the row holds already, fewer than T.
        """
        total = ids.shape[1]
        if beyond is None:
            beyond = self._limit is not None and total > self._limit.at
        far = total - 1
        if beyond and self._limit is not None:
            far = max(far, self._limit.at)
        verified: Verified | None = None
        for start in range(restored, total, PREFILL_CHUNK):
            chunk = ids[:, start : start + PREFILL_CHUNK]
            positions = torch.arange(start, start + chunk.shape[1], device=self._device)[None]
            extra = beyond and start + chunk.shape[1] - 1 < far
            if extra:
                # Frequencies go by the greatest position of a pass: one more slot at the far end, seen by
                # no other and overwritten later, makes this chunk be computed as the whole row would be.
                chunk = torch.cat([chunk, chunk[:, -1:]], dim=1)
                positions = torch.cat([positions, positions.new_full((1, 1), far)], dim=1)
            tree = causal(chunk.shape[1], self._device)
            verified, _ = self._forward.run(
                slice(row, row + 1), chunk, positions, tree, None, start, far, last_only=not extra
            )
        assert verified is not None
        if verified.logits.shape[1] > 1:
            last = (total - restored - 1) % PREFILL_CHUNK
            verified = Verified(verified.logits[:, last : last + 1], verified.hidden[:, last : last + 1])
        return verified

    def verify(self, packed: PackedBeam) -> Verified:
        """ONE forward pass over the N slots of every live row; logits (B, N, V), hidden (B, N, D).

        Rows on both sides of a rotary switch are run one by one (see `limits`).
        Raises: InvalidArgument where the beam's rows are not the live rows, or where a tree
        would cross a rotary switch (ask `room` first).
        """
        lengths = self.cache.lengths
        slots = packed.tokens.shape[1]
        check_packed(packed, lengths)
        depth = packed.length if slots > 1 else 0
        tokens = packed.tokens.long()
        if self._static:
            bases, verified = self._static_pass(tokens, packed)
        else:
            bases, verified = self._dynamic_pass(tokens, packed, depth)
        self._pending = (bases, packed)
        return verified

    def _dynamic_pass(self, tokens: Tensor, packed: PackedBeam, depth: int) -> tuple[list[int], Verified]:
        """A pass whose slots stand right behind the longest row, or behind each where rows must be apart.

        Also where the slots stand.
        """
        lengths = self.cache.lengths
        rows, slots = tokens.shape
        self._reserve(rows, max(lengths) + slots)
        if self._limit is not None:
            self._settle(depth)
            if self._limit.apart(lengths):
                parts = []
                for b in range(rows):
                    row = slice(b, b + 1)
                    parts.append(
                        self._pass(row, tokens[row], packed.depths[row], packed.mask[row], lengths[row], depth)
                    )
                return list(lengths), Verified(
                    torch.cat([part.logits for part in parts]), torch.cat([part.hidden for part in parts])
                )
        return [max(lengths)] * rows, self._pass(slice(0, rows), tokens, packed.depths, packed.mask, lengths, depth)

    def _pass(
        self, rows: slice, tokens: Tensor, depths: Tensor, tree: Tensor, lengths: Sequence[int], depth: int
    ) -> Verified:
        """One pass over these rows, in place behind the longest of them."""
        longest = max(lengths)
        if min(lengths) == longest:
            there, positions = None, depths.long() + longest
        else:
            there = to_device(lengths, self._device)
            positions = depths + there[:, None]
        return self._forward.run(rows, tokens, positions, tree, there, longest, longest + depth)[0]

    def _static_pass(self, tokens: Tensor, packed: PackedBeam) -> tuple[list[int], Verified]:
        """A pass whose slots stand behind a context of static size; the rows' lengths are device numbers.

        Also where the slots stand.
        """
        assert self._graphs is not None
        lengths = self.cache.lengths
        rows, slots = tokens.shape
        past = context_bucket(max(lengths))
        self._reserve(rows, past + slots)

        def run(tokens: Tensor, depths: Tensor, tree: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            positions = depths + lengths[:, None]
            verified, _ = self._forward.run(slice(0, rows), tokens, positions, tree, lengths, past, past + slots)
            return verified.logits, verified.hidden

        there = to_device(lengths, self._device)
        logits, hidden = self._graphs.run(PASS, past, run, (tokens, packed.depths, packed.mask, there))
        return [past] * rows, Verified(logits, hidden)

    def _reserve(self, rows: int, tokens: int, *, exact: bool = False) -> None:
        """Room in the cache; where its memory moves, what was captured on it goes."""
        before = self.cache.capacity
        self.cache.reserve(rows, tokens, exact=exact)
        if self._graphs is not None and self.cache.capacity != before:
            self._graphs.forget(PASS)

    def _settle(self, depth: int) -> None:
        """Before a step: refuse trees over the rotary switch, recompute rows that crossed it."""
        assert self._switched is not None
        self._switched.grow(*self.cache.capacity)
        for row, length in enumerate(self.cache.lengths):
            room = self._switched.limit.depth(length)
            if depth > room:
                raise InvalidArgument(
                    f"packed.length={depth}: row {row} has room for a depth of {room} before its "
                    "rotary frequencies change; draft no deeper than target.room(row)"
                )
            ids = self._switched.stale(row, length)
            if ids is not None:
                self._prefill(row, ids, self._switched.beyond[row])

    def commit(self, verdict: Verdict, counts: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
        """Move the accepted slots of the last `verify` behind each row's context.

        Raises: InvalidArgument without a `verify` before, or for another number of rows.
        """
        check_commit(counts, slots, None if self._pending is None else len(self._pending[0]))
        assert self._pending is not None
        bases, packed = self._pending
        before = self.cache.lengths[:]
        self.cache.move(bases, counts, slots, verdict.slots, packed.tokens.shape[1])
        if self._switched is not None:
            for b, length in enumerate(before):
                chosen = packed.tokens[b].long().gather(0, verdict.slots[b, : counts[b]].long())
                self._switched.commit(b, length, chosen)
        self._pending = None

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on (at least one stays)."""
        check_truncate(row, length, self.cache.lengths)
        self.cache.lengths[row] = length

    def release(self, row: int) -> None:
        """Drop a row; the last row takes its number."""
        check_row(row, self.cache.lengths)
        if self._switched is not None:
            self._switched.release(row)
        self._pending = None
        self.cache.release(row)

    def embeddings(self) -> Tensor:
        """The input embedding table (V, D) as stored; a scale that the model applies to it is not included."""
        table: Tensor = self.model.get_input_embeddings().weight
        return table.detach()

    def head_rows(self) -> Tensor:
        """The LM head's weight (V, D)."""
        weight: Tensor = self._forward.head.weight
        return weight.detach()

    def head_bias(self) -> Tensor | None:
        """The LM head's bias (V,), if it has one."""
        bias: Tensor | None = getattr(self._forward.head, "bias", None)
        return None if bias is None else bias.detach()


def unsupported(model: Any, reason: str) -> UnsupportedModel:
    kind = getattr(model.config, "model_type", type(model).__name__)
    error = UnsupportedModel(
        f"model type {kind!r} ({type(model).__name__}) cannot verify trees of drafted tokens: {reason}; "
        "use another model, or transformers' own generate"
    )
    error.reason = reason
    return error
