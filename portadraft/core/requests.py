"""What goes into a decoder and what comes out: requests and progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from portadraft.core.logprobs import TokenLogprob
from portadraft.core.target import RowState, TargetFacts
from portadraft.errors import InvalidArgument

FinishReason = Literal["end", "length", "context", "stop"]
"""Why a row ended: an end token, max_tokens, the model's context limit, or the caller (a stop string)."""


@dataclass(frozen=True)
class Request:
    """One row's work: the prompt's ids, the most tokens to generate, and the seed of its uniforms.

    prefix: a state of the same target and how many of its leading tokens to restore instead of
    computing them (fewer than the prompt has, and the same ids). keep: hand the row's state out
    when it ends. answered: how many of the last ids are answer already, not prompt: an answer
    that goes on. It counts for penalties and `min_tokens`, and not for max_tokens.
    """

    ids: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    prefix: tuple[RowState, int] | None = None
    keep: bool = False
    answered: int = 0

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.ids[: len(self.ids) - self.answered]

    @property
    def answer(self) -> tuple[int, ...]:
        return self.ids[len(self.ids) - self.answered :]

    def check(self, facts: TargetFacts) -> None:
        """Raises: InvalidArgument for an empty prompt, one that leaves no room in the context, ids outside
        the vocabulary, or max_tokens below 1.
        """
        if not self.ids:
            raise InvalidArgument("prompt: it has no tokens; expected at least one")
        if self.max_tokens < 1:
            raise InvalidArgument(f"max_tokens={self.max_tokens!r}: expected an integer of at least 1")
        if not 0 <= self.answered <= len(self.ids):
            raise InvalidArgument(f"answered={self.answered!r}: expected 0 to {len(self.ids)}, the number of ids")
        if facts.context_limit is not None and len(self.ids) >= facts.context_limit:
            raise InvalidArgument(
                f"prompt: {len(self.ids)} tokens, but the model's context holds {facts.context_limit} "
                "with at least one to generate; shorten the prompt"
            )
        low, high = min(self.ids), max(self.ids)
        if low < 0 or high >= facts.vocabulary_size:
            bad = low if low < 0 else high
            raise InvalidArgument(f"prompt: token id {bad} is outside the vocabulary 0…{facts.vocabulary_size - 1}")


@dataclass(frozen=True)
class Progress:
    """What one call gave one request.

    key: what `admit` returned for it. tokens: the new ids; an end token is the last of them.
    accepted: drafted tokens that were accepted, or None where the step was not a whole one
    (the prefill's own token, or a step cut by an end or a limit). drafted: whether the step
    drafted at all. logprobs: one for each new token, where they were asked for. state: of a
    request that ended and asked to keep it; its ids are prompt and answer, the last token left
    out where it is not in the cache.
    """

    key: int
    tokens: tuple[int, ...]
    finish: FinishReason | None
    accepted: int | None
    drafted: bool
    logprobs: tuple[TokenLogprob, ...] | None = None
    state: RowState | None = None


@dataclass
class Row:
    """A live request, as the decoder keeps it.

    length: prompt and answer so far, the root included. answer: its ids, kept only where the
    state is asked for.
    """

    key: int
    request: Request
    length: int
    generated: int = 0
    answer: list[int] = field(default_factory=list)

    def cut(
        self, tokens: list[int], end_tokens: frozenset[int], context_limit: int | None
    ) -> tuple[list[int], FinishReason | None]:
        """What of a step's tokens belongs to the answer, and why it ends there, if it does."""
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            if token in end_tokens:
                return kept, "end"
            if self.generated + len(kept) >= self.request.max_tokens:
                return kept, "length"
            if context_limit is not None and self.length + len(kept) >= context_limit:
                return kept, "context"
        return kept, None

    def take(self, tokens: list[int]) -> None:
        """Append what `cut` kept."""
        self.generated += len(tokens)
        self.length += len(tokens)
        if self.request.keep:
            self.answer.extend(tokens)
