"""What generation returns: text, ids, why it ended, and how it went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from portadraft.core.logprobs import TokenLogprob as TokenLogprob
from portadraft.core.requests import Progress

FinishReason = Literal["end", "length", "context", "stop", "timeout"]
"""Why an answer ended: an end token, max_tokens, the model's context limit, a stop string, or timeout_s."""


@dataclass(frozen=True)
class Choice:
    """Something that was chosen, and why."""

    value: str
    reason: str


@dataclass(frozen=True)
class Stats:
    """How one answer was made.

    prompt_tokens, generated_tokens: counts, the end token included.
    steps: steps after the prefill; plain_steps: those of them that drafted nothing.
    accepted: how many whole steps accepted 0, 1, 2, … drafted tokens. Left out are the prefill's
        own token and a last step that an end or a limit cut.
    prefill_s: wall seconds of the prefill that began this answer; prompts that began together share it.
    decode_s: wall seconds of the steps that this answer took part in; rows of a batch share them.
    reused_tokens: how many of the prompt's tokens came from a kept state instead of a pass.
    chosen: backend, device, dtype, drafter and shape, each with its reason.
    stages_s: seconds by stage over the call, only under profile=True.
    """

    prompt_tokens: int
    generated_tokens: int
    steps: int
    plain_steps: int
    accepted: Mapping[int, int]
    prefill_s: float
    decode_s: float
    chosen: Mapping[str, Choice]
    stages_s: Mapping[str, float] | None = None
    reused_tokens: int = 0

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens of a whole step (accepted + 1); None where there was none."""
        steps = sum(self.accepted.values())
        return sum((n + 1) * count for n, count in self.accepted.items()) / steps if steps else None

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens after the first, per second of decoding; for a row of a batch its own tokens only."""
        return (self.generated_tokens - 1) / self.decode_s if self.decode_s > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        out = asdict(self)
        out["accepted"] = {str(k): v for k, v in sorted(self.accepted.items())}
        out["tokens_per_step"] = self.tokens_per_step
        out["tokens_per_s"] = self.tokens_per_s
        return out


@dataclass(frozen=True)
class Generation:
    """One answer.

    text: without end tokens and without the stop string. ids: the answer's ids; an end token
    is the last of them, if it ended so. finish_reason: "end", "length" (max_tokens), "context"
    (the model's limit), "stop" (a stop string) or "timeout" (timeout_s). notices: what the caller
    may want to know (a model without a chat template was prompted raw …). logprobs: one for
    each of `ids`, if they were asked for.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    notices: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        out = {
            "text": self.text,
            "ids": list(self.ids),
            "finish_reason": self.finish_reason,
            "notices": list(self.notices),
            "stats": self.stats.as_dict(),
        }
        if self.logprobs is not None:
            out["logprobs"] = [asdict(one) for one in self.logprobs]
        return out


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed answer; `generation` is set in the last one. The texts joined are the whole text.

    logprobs: one for each of `ids`, if they were asked for.
    """

    text: str
    ids: tuple[int, ...]
    generation: Generation | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass
class Tally:
    """Counts one request's steps while it runs."""

    steps: int = 0
    plain_steps: int = 0
    accepted: Counter[int] = field(default_factory=Counter)

    def add(self, progress: Progress) -> None:
        self.steps += 1
        self.plain_steps += not progress.drafted
        if progress.accepted is not None:
            self.accepted[progress.accepted] += 1
