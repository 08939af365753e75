"""One call of generate or stream: its prompts run through the slots of a batch.

Everything that a caller can get wrong is found when a `Call` is made, before the model does
anything. A finished row's slot goes to the next prompt at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portadraft.core.decode import Decoder
from portadraft.core.rejection import check_rejection
from portadraft.core.requests import Progress, Request
from portadraft.core.target import RowState
from portadraft.core.types import BeamShape
from portadraft.drafters.select import Selected
from portadraft.errors import BrokenLogits
from portadraft.generation import Choice, Delta, FinishReason, Generation, Stats, Tally, TokenLogprob
from portadraft.options import DEFAULT_BATCH_SIZE, Options, check_ids, parse
from portadraft.prefix import PrefixCache
from portadraft.profiles.evidence import Evidence
from portadraft.profiles.governor import Governor
from portadraft.profiles.nearness import context_class
from portadraft.profiles.policy import FixedShape, ShapePolicy
from portadraft.profiles.shape import default_shape
from portadraft.prompts import encode_prompts, is_ids, split_prompts
from portadraft.text import NO_TEMPLATE, AnswerText

if TYPE_CHECKING:
    from portadraft.api import Model


@dataclass
class _Row:
    """One prompt while it is being decoded."""

    index: int
    prompt_tokens: int
    text: AnswerText
    started: float
    tally: Tally = field(default_factory=Tally)
    out: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of all tokens seen, certain or not
    notices: list[str] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    reused: int = 0


class Call:
    """The arguments of a call, checked, and its run.

    batch: whether a list of prompts was passed.
    """

    def __init__(self, model: Model, prompt: Any, options: Mapping[str, Any]) -> None:
        """Raises: TypeError, InvalidArgument, and what selecting a drafter raises."""
        self._model = model
        self.batch, prompts = split_prompts(prompt)
        self.options: Options = parse(options, len(prompts), self.batch, model.codec)
        check_ids(self.options, options, model.target.facts.vocabulary_size)
        self._prompts = encode_prompts(model.codec, model.target.facts, prompts, self.options.raw, self.batch)
        asks = self.options.drafter is not ...
        selected = model.drafter_for(self.options.drafter) if asks else model.selected
        self._drafter = selected.drafter
        self._slots = min(self.options.batch_size or DEFAULT_BATCH_SIZE, len(prompts))
        self._policy, shown = policy_for(model, selected, self.options, self._slots, max(map(len, self._prompts)))
        widest = self._policy.widest()
        check_rejection(self.options.acceptance, self._drafter, widest or BeamShape(), self.options.sampling)
        self._prefixes = self._prefix_cache()
        self._chosen = {**model.chosen, **shown}
        if asks:
            self._chosen["drafter"] = Choice(selected.name, selected.reason)
        if self.batch:
            why = "asked for" if self.options.batch_size else f"default: at most {DEFAULT_BATCH_SIZE} rows at once"
            self._chosen["batch_size"] = Choice(str(self._slots), why)
        encoded = not self.options.raw and not all(is_ids(one) for one in prompts)
        self._notices = [NO_TEMPLATE] if encoded and model.codec.chat_template is None else []

    @property
    def count(self) -> int:
        """How many prompts."""
        return len(self._prompts)

    def _prefix_cache(self) -> PrefixCache | None:
        reuse = self.options.reuse
        if reuse is False:
            return None
        prefixes = self._model.prefixes if reuse is True else reuse
        prefixes.bind(self._model.target)
        return prefixes

    # the run

    def run(self) -> Generator[list[tuple[int, Delta]], None, None]:
        """Decode all prompts, each step giving what it settled: (number of the prompt, piece) pairs.

        The list may be empty; a prompt's last piece carries its `Generation`. Closing the
        iterator frees all rows.
        """
        with self._decoder() as decoder:
            waiting = deque(range(len(self._prompts)))
            # The decoder numbers requests in the order of their admission, as the prompts are numbered.
            rows: dict[int, _Row] = {}
            while waiting or rows:
                free = self._slots - len(rows)
                if waiting and free > 0:
                    new = [waiting.popleft() for _ in range(min(free, len(waiting)))]
                    pieces = self._admit(decoder, rows, new)
                else:
                    pieces = self._step(decoder, rows)
                yield pieces
                del pieces  # the consumer alone decides how long an answer lives

    @contextmanager
    def _decoder(self) -> Iterator[Decoder]:
        decoder = Decoder(
            self._model.target,
            self._drafter,
            self._policy.widest(),
            sampling=self.options.sampling,
            end_tokens=sorted(self.options.end_tokens),
            logprobs=self.options.logprobs,
            acceptance=self.options.acceptance,
            profile=self.options.profile,
        )
        try:
            yield decoder
        except BrokenLogits as error:
            raise BrokenLogits(f"model={self._model.name!r}: {error}") from None
        finally:
            decoder.close()  # also after an error or an abandoned stream

    def _admit(self, decoder: Decoder, rows: dict[int, _Row], new: Sequence[int]) -> list[tuple[int, Delta]]:
        """Prefill the next prompts beside the rows that are being decoded."""
        start = time.perf_counter()
        requests = []
        for index in new:
            ids = self._prompts[index]
            row = rows[index] = _Row(index, len(ids), AnswerText(self._model.codec, self.options.stop), start)
            known = None if self._prefixes is None else self._prefixes.find(ids)
            row.reused = 0 if known is None else known[1]
            requests.append(
                Request(
                    ids,
                    self.options.max_tokens,
                    self.options.seeds[index],
                    prefix=known,
                    keep=self._prefixes is not None,
                )
            )
            self._prompts[index] = ()  # the decoder has it now; a long list should not keep them all
        decoder.shape = self._policy.widest()
        progress = decoder.admit(requests)
        seconds = time.perf_counter() - start
        for index in new:
            rows[index].prefill_s = seconds
        return [self._take(decoder, rows, one) for one in progress]

    def _step(self, decoder: Decoder, rows: dict[int, _Row]) -> list[tuple[int, Delta]]:
        live = len(rows)
        shape = decoder.shape = self._policy.choose(live)
        start = time.perf_counter()
        progress = decoder.step()
        now = time.perf_counter()
        drafted = shape if any(one.drafted for one in progress) else None  # a lookup may have found nothing
        self._policy.observe(live, drafted, sum(len(one.tokens) for one in progress), now - start)
        for one in progress:
            rows[one.key].decode_s += now - start
            rows[one.key].tally.add(one)
        pieces = [self._take(decoder, rows, one) for one in progress]
        return [piece for piece in pieces if piece[1].ids or piece[1].text or piece[1].generation] + self._late(
            decoder, rows, now
        )

    def _take(self, decoder: Decoder, rows: dict[int, _Row], progress: Progress) -> tuple[int, Delta]:
        """What a row's new tokens settle; the row ends where they end it."""
        row = rows[progress.key]
        if progress.logprobs is not None:
            row.logprobs.extend(progress.logprobs)
        piece = row.text.push(progress.tokens, ended=progress.finish == "end", last=progress.finish is not None)
        finish: FinishReason | None = progress.finish
        state = progress.state
        if piece.stop is not None:
            if finish is None:
                state = decoder.stop(progress.key)
            finish = "stop"
        return self._give(rows, row, piece.text, piece.ids, finish, state, decoder)

    def _late(self, decoder: Decoder, rows: dict[int, _Row], now: float) -> list[tuple[int, Delta]]:
        """End the rows whose time is up."""
        limit = self.options.timeout_s
        if limit is None:
            return []
        out = []
        for row in [row for row in rows.values() if now - row.started >= limit]:
            state = decoder.stop(row.index)
            piece = row.text.push([], last=True)
            finish: FinishReason = "timeout" if piece.stop is None else "stop"
            out.append(self._give(rows, row, piece.text, piece.ids, finish, state, decoder))
        return out

    def _give(
        self,
        rows: dict[int, _Row],
        row: _Row,
        text: str,
        ids: tuple[int, ...],
        finish: FinishReason | None,
        state: RowState | None,
        decoder: Decoder,
    ) -> tuple[int, Delta]:
        asked = self.options.logprobs is not None
        logprobs = tuple(row.logprobs[len(row.out) : len(row.out) + len(ids)]) if asked else None
        row.out.extend(ids)
        generation = None
        if finish is not None:
            del rows[row.index]
            if state is not None and self._prefixes is not None:
                notice = self._prefixes.keep(state)
                row.notices += [] if notice is None else [notice]
            generation = self._generation(row, finish, decoder)
        return row.index, Delta(text, ids, generation, logprobs)

    def _generation(self, row: _Row, finish: FinishReason, decoder: Decoder) -> Generation:
        stats = Stats(
            prompt_tokens=row.prompt_tokens,
            generated_tokens=len(row.out),
            steps=row.tally.steps,
            plain_steps=row.tally.plain_steps,
            accepted=dict(row.tally.accepted),
            prefill_s=row.prefill_s,
            decode_s=row.decode_s,
            chosen=self._said(),
            stages_s=None if decoder.times is None else dict(decoder.times.seconds),
            reused_tokens=row.reused,
        )
        logprobs = None if self.options.logprobs is None else tuple(row.logprobs[: len(row.out)])
        # What a backend runs otherwise than it should, if it says so.
        notices = (*self._notices, *row.notices, *getattr(self._model.target, "notes", ()))
        return Generation(row.text.text, tuple(row.out), finish, stats, notices, logprobs)

    def _said(self) -> Mapping[str, Choice]:
        """What was chosen, and what came of the shape so far."""
        said = self._policy.said()
        if said is None:
            return self._chosen
        shape = self._chosen["shape"]
        return {**self._chosen, "shape": Choice(shape.value, f"{shape.reason}; {said}")}


def policy_for(
    model: Model, selected: Selected, options: Options, rows: int, context: int = 0
) -> tuple[ShapePolicy, Mapping[str, Choice]]:
    """Which shapes a call drafts with, and what `stats.chosen` says about it.

    rows: the most that are decoded together. context: tokens of the longest prompt. The one place
    where it is decided: an explicit shape, else this machine's profile, else the default of
    drafter and device.
    Raises: InvalidArgument for a shape outside what is allowed.
    """
    base, reason = default_shape(selected.name, model.target.ops.device)
    chain = options.acceptance == "rejection"
    if chain:
        base, reason = BeamShape(1, 4), "default for rejection, which holds for one chain: 4 tokens"
    shape = base
    explicit = not (options.width is None and options.length is None and options.nodes is None)
    if explicit:
        # A shape that the caller began is not cut by a budget that was meant for the default.
        shape = BeamShape(
            base.width if options.width is None else options.width,
            base.length if options.length is None else options.length,
            options.nodes,
        )
        reason = "asked for"
    if selected.drafter is None:
        return FixedShape(None), {}
    if not explicit and not chain:
        temperature = options.sampling.temperature
        policy, found = model.profiles.policy(selected, rows, temperature=temperature, context=context)
        if policy is not None:
            trusted = found.trusted or found.step == "asked-for"
            governed = _governed(model, selected, options, policy, context, trusted)
            return governed, {"shape": Choice(policy.describe(), found.reason)}
        reason = f"{reason}; {found.reason}"
    text = f"{shape.width}x{shape.length}" + (f", {shape.nodes} slots" if shape.nodes else "")
    said = {"shape": Choice(text, reason)}
    # What a caller asks for is not watched; nor is rejection, whose text depends on what was drafted.
    if explicit or chain:
        return FixedShape(shape), said
    return _governed(model, selected, options, FixedShape(shape), context, trusted=True), said


def _governed(
    model: Model, selected: Selected, options: Options, policy: ShapePolicy, context: int, trusted: bool
) -> Governor:
    """The policy while it pays (see `portadraft.profiles.governor`), with what earlier calls have learned.

    context: tokens of the longest prompt; what steps cost is learned for contexts of about that size.
    """
    drafter = selected.drafter
    key = (selected.name, getattr(drafter, "id", "") or id(drafter), options.sampling.greedy, context_class(context))
    return Governor(policy, model.evidence.setdefault(key, Evidence()), trusted=trusted)
