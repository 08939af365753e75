"""The target protocol for unmodified Hugging Face causal language models.

The model's own forward runs, with our cache, explicit position ids and our attention; its
features are what its LM head reads, caught by a hook that lives for the length of the call.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from portadraft.backends.torch.attention import Pass, active, use_our_attention
from portadraft.backends.torch.cache import ProbeCache, RowCache
from portadraft.backends.torch.limits import UNLIMITED, rotary_limit
from portadraft.backends.torch.ops import NAMES, TorchOps
from portadraft.core.admission import check_export, check_known, check_prompts
from portadraft.core.target import Known, RowState, TargetFacts
from portadraft.core.types import PackedBeam, Verdict, Verified
from portadraft.errors import InvalidArgument, UnsupportedModel

PREFILL_CHUNK = 512


class _Native(NamedTuple):
    """An exported row: one tensor (planes, heads, length, dim) for each of the cache's buffers, and whether
    its keys were turned by the frequencies past a rotary switch.
    """

    planes: tuple[Tensor, ...]
    beyond: bool


class TorchTarget:
    """A loaded Hugging Face causal LM as a target; see `portadraft.core.target.Target`.

    model: in evaluation mode; it is not modified, and works as before between our calls.
    identity: (architecture_id, weights_id); strict: check mask functions on the way (slow).
    Raises: UnsupportedModel where the model cannot run through our cache and attention.
    """

    def __init__(self, model: Any, *, identity: tuple[str, str] = ("", ""), strict: bool = False) -> None:
        self.model = model
        self.strict = strict
        if model.training:
            raise InvalidArgument("model.training=True: expected evaluation mode; call model.eval() first")
        self.ops = TorchOps(model.device)
        self._device = self.ops.torch_device
        self._own = _own_copy(model)
        self._head = self._own.get_output_embeddings()
        if self._head is None:
            raise unsupported(model, "it names no output embeddings (LM head)")
        parameters = inspect.signature(model.forward).parameters
        names = [n for n in ("cache", "past_key_values") if n in parameters]
        if not names:
            raise unsupported(model, "its forward takes no key-value cache (a recurrent model?)")
        if "position_ids" not in parameters:
            raise unsupported(model, "its forward takes no position_ids (ALiBi, or learned positions by cache length)")
        self._cache_name = names[0]
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        text = model.config.get_text_config()
        try:
            self._limit = rotary_limit(self._own)
            self._probe(int(text.num_hidden_layers))
        except UnsupportedModel as error:
            raise unsupported(model, str(error)) from error
        # Tokens of each row, kept only where a rotary switch may make us compute a row again.
        self._ids = torch.zeros((0, 0), dtype=torch.int64, device=self._device)
        self._beyond: list[bool] = []
        self._pending: tuple[list[int], PackedBeam] | None = None
        self._owner = object()  # tells this target's exported states
        limit = getattr(text, "max_position_embeddings", None)
        self.facts = TargetFacts(
            vocabulary_size=self._shape[0],
            hidden_size=self._shape[1],
            context_limit=int(limit) if limit else None,
            dtype=NAMES.get(self._dtype, str(self._dtype)),
            cache_bytes_per_token=self.cache.bytes_per_token,
            architecture_id=identity[0],
            weights_id=identity[1],
        )

    def _probe(self, layers: int) -> None:
        """One pass over two tokens: what the layers store, and whether our attention is used at all."""
        probe = ProbeCache(layers)
        self.cache: RowCache = probe
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=self._device)
        try:
            verified, running = self._run(slice(0, 1), tokens, None, _causal(2, self._device), [0], 0, 1)
        except (UnsupportedModel, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnsupportedModel(f"a trial pass failed with {type(error).__name__}: {error}") from error
        if not probe.updates:
            raise UnsupportedModel("its forward stores no keys and values in the cache (a recurrent model?)")
        if running.calls < probe.updates:
            raise UnsupportedModel(
                f"its attention does not go through transformers' attention interface "
                f"({running.calls} of {probe.updates} layers did)"
            )
        self._shape = (verified.logits.shape[-1], verified.hidden.shape[-1])
        self._dtype = verified.hidden.dtype
        self.cache = RowCache(probe.shapes())

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
        self.cache.reserve(old + len(prompts), longest + max(reserve, 0) + 1, exact=True)
        if self._limit is not None:
            self._grow_ids()
        done = []
        for i, (prompt, entry) in enumerate(zip(prompts, states, strict=True)):
            ids = torch.tensor([prompt], dtype=torch.int64, device=self._device)
            restored = 0
            if entry is not None and self._usable(entry[0].native, len(prompt)):
                restored = entry[1]
                self.cache.write(old + i, entry[0].native.planes, restored)
            done.append(self._prefill(old + i, ids, restored=restored))
        # Rows count only from here on, so an error above leaves none.
        self.cache.lengths.extend(len(p) for p in prompts)
        if self._limit is not None:
            for i, prompt in enumerate(prompts):
                self._ids[old + i, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64, device=self._device)
                self._beyond.append(len(prompt) > self._limit.at)
        return Verified(
            torch.cat([verified.logits for verified in done]), torch.cat([verified.hidden for verified in done])
        )

    def export(self, row: int, ids: Sequence[int]) -> RowState:
        """A row's committed keys and values, copied out (see `Target.export`)."""
        check_export(row, ids, self.cache.lengths)
        planes = self.cache.read(row)
        beyond = self._limit is not None and self._beyond[row]
        size = sum(plane.numel() * plane.element_size() for plane in planes)
        return RowState(tuple(ids), _Native(tuple(planes), beyond), size, self._owner)

    def _usable(self, state: _Native, total: int) -> bool:
        """Whether a row of `total` tokens would have these keys: past a rotary switch all of them differ."""
        if self._limit is None:
            return True
        beyond = total > self._limit.at
        return not beyond and not state.beyond if self._limit.kind == "dynamic" else beyond == state.beyond

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
            size = chunk.shape[1]
            keep = not extra
            verified, _ = self._run(
                slice(row, row + 1), chunk, positions, _causal(size, self._device), [start], 0, far, keep
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
        rows, slots = packed.tokens.shape
        if rows != len(lengths):
            raise InvalidArgument(f"packed has {rows} rows: expected one for each of the {len(lengths)} live rows")
        depth = packed.length if slots > 1 else 0
        self.cache.reserve(rows, max(lengths) + slots)
        if self._limit is not None:
            self._settle(depth)
        tokens = packed.tokens.long()
        if self._limit is None or not self._limit.apart(lengths):
            bases = [max(lengths)] * rows
            verified, _ = self._run(slice(0, rows), tokens, packed.depths, packed.mask, lengths, depth, None)
        else:
            bases = list(lengths)
            parts = [
                self._run(slice(b, b + 1), tokens[b : b + 1], packed.depths[b : b + 1], packed.mask[b : b + 1],
                          lengths[b : b + 1], depth, None)[0]
                for b in range(rows)
            ]  # fmt: skip
            verified = Verified(torch.cat([p.logits for p in parts]), torch.cat([p.hidden for p in parts]))
        self._pending = (bases, packed)
        return verified

    def _settle(self, depth: int) -> None:
        """Before a step: refuse trees over the rotary switch, recompute rows that crossed it."""
        assert self._limit is not None
        self._grow_ids()
        for row, length in enumerate(self.cache.lengths):
            if depth > self._limit.depth(length):
                raise InvalidArgument(
                    f"packed.length={depth}: row {row} has room for a depth of {self._limit.depth(length)} before its "
                    "rotary frequencies change; draft no deeper than target.room(row)"
                )
            beyond = self._limit.beyond(length)
            if beyond != self._beyond[row] and (self._limit.kind == "longrope" or not beyond):
                # All keys change with the frequencies; transformers' own generate starts anew here too. (With
                # dynamic NTK only new keys do, but a row cut back before the switch has keys from past it.)
                self._prefill(row, self._ids[row : row + 1, :length].clone(), beyond)
            self._beyond[row] = beyond

    def _grow_ids(self) -> None:
        rows, tokens = self.cache.capacity
        if self._ids.shape != (rows, tokens):
            ids = torch.zeros((rows, tokens), dtype=torch.int64, device=self._device)
            ids[: self._ids.shape[0], : self._ids.shape[1]] = self._ids
            self._ids = ids

    def _run(
        self,
        rows: slice,
        tokens: Tensor,
        places: Tensor | None,
        tree: Tensor,
        lengths: Sequence[int],
        depth: int,
        far: int | None,
        last_only: bool = False,
    ) -> tuple[Verified, Pass]:
        """One forward pass.

        tokens: (B, N); places: (B, N) positions if `far` (the greatest) is given, else depths
        behind each row's length.
        """
        longest = max(lengths)
        lengths_on_device: Tensor | None = None
        if far is None:
            assert places is not None
            if min(lengths) == longest:
                positions = places.long() + longest
            else:
                lengths_on_device = torch.tensor(lengths, dtype=torch.int64, device=self._device)
                positions = places + lengths_on_device[:, None]
            far = longest + depth
        elif places is None:
            positions = torch.arange(tokens.shape[1], device=self._device)[None]
        else:
            positions = places
        if self._limit is not None:
            self._limit.before_pass()
        running = Pass(positions, tree, lengths_on_device, longest, far, self.strict)
        self.cache.begin(rows, longest, tokens.shape[1])
        read: list[Tensor] = []

        def catch(_: Any, args: tuple[Any, ...]) -> None:
            read.append(args[0])

        hook = self._head.register_forward_pre_hook(catch)
        try:
            with torch.inference_mode(), active(running):
                out = self._own(
                    input_ids=tokens,
                    position_ids=positions,
                    use_cache=True,
                    **{self._cache_name: self.cache},
                    **(self._keep_last if last_only else {}),
                )
        finally:
            hook.remove()
        if len(read) != 1:
            raise UnsupportedModel(f"its forward reads the LM head {len(read)} times, expected once")
        return Verified(out.logits, read[0]), running

    def commit(self, verdict: Verdict, counts: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
        """Move the accepted slots of the last `verify` behind each row's context.

        Raises: InvalidArgument without a `verify` before, or for another number of rows.
        """
        if self._pending is None:
            raise InvalidArgument("commit without a verify before it: call verify first")
        bases, packed = self._pending
        if len(counts) != len(bases) or len(slots) != len(bases):
            raise InvalidArgument(f"counts has {len(counts)} rows: expected {len(bases)}, as in the last verify")
        before = self.cache.lengths[:]
        self.cache.move(bases, counts, slots, verdict.slots)
        if self._limit is not None:
            for b, length in enumerate(before):
                chosen = packed.tokens[b].long().gather(0, verdict.slots[b, : counts[b]].long())
                self._ids[b, length : length + counts[b]] = chosen
        self._pending = None

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on (at least one stays)."""
        have = self.cache.lengths[row]
        if not 1 <= length <= have:
            raise InvalidArgument(f"length={length}: expected 1…{have}, what row {row} holds")
        self.cache.lengths[row] = length

    def release(self, row: int) -> None:
        """Drop a row; the last row takes its number."""
        if not 0 <= row < len(self.cache.lengths):
            raise InvalidArgument(f"row={row}: expected one of the {len(self.cache.lengths)} live rows")
        if self._limit is not None:
            self._ids[row] = self._ids[len(self.cache.lengths) - 1]
            self._beyond[row] = self._beyond[-1]
            self._beyond.pop()
        self._pending = None
        self.cache.release(row)

    def embeddings(self) -> Tensor:
        """The input embedding table (V, D) as stored; a scale that the model applies to it is not included."""
        table: Tensor = self.model.get_input_embeddings().weight
        return table.detach()

    def head_rows(self) -> Tensor:
        """The LM head's weight (V, D)."""
        weight: Tensor = self._head.weight
        return weight.detach()

    def head_bias(self) -> Tensor | None:
        """The LM head's bias (V,), if it has one."""
        bias: Tensor | None = getattr(self._head, "bias", None)
        return None if bias is None else bias.detach()


def _own_copy(model: Any) -> Any:
    """The model's modules and configurations once more, on the same weights, with our attention.

    So nothing of the caller's model changes, not even while a pass of ours runs in another thread.
    Modules that are replaced in the caller's model later are not seen.
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    own = copy.deepcopy(model, shared)
    use_our_attention(m.config for m in own.modules() if hasattr(m, "config"))
    return own


def _causal(size: int, device: torch.device) -> Tensor:
    places = torch.arange(size, dtype=torch.int32, device=device)
    return places <= places[:, None]


def unsupported(model: Any, reason: str) -> UnsupportedModel:
    kind = getattr(model.config, "model_type", type(model).__name__)
    error = UnsupportedModel(
        f"model type {kind!r} ({type(model).__name__}) cannot verify trees of drafted tokens: {reason}; "
        "use another model, or transformers' own generate"
    )
    error.reason = reason
    return error
