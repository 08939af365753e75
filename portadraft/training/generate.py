"""The target's own texts, many rows at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from portadraft.core.decode import Decoder
from portadraft.core.requests import Request
from portadraft.core.target import Target


@dataclass(frozen=True)
class Generated:
    """One list of ids for each prompt, end token included, and how many passes the target took."""

    tokens: list[list[int]]
    passes: int


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    end_tokens: Collection[int],
    *,
    batch: int = 32,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    report: Callable[[int], None] | None = None,
) -> Generated:
    """What the target says after each prompt: greedily, or sampled with a seed for each prompt.

    Up to `batch` rows are decoded together, and new ones join as rows end: in the order of their
    lengths, so that a prefill's rows are alike. report: called with the number of finished answers.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    waiting = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    decoder = Decoder(target, temperature=temperature, end_tokens=sorted(end_tokens))
    keys: list[int] = []  # the decoder numbers requests in the order of their admission
    done = passes = 0
    try:
        while waiting or decoder.live:
            new: list[int] = []
            # Joining costs a prefill and a growing cache, so rows join in groups.
            if waiting and decoder.live <= batch // 2:
                while waiting and decoder.live + len(new) < batch:
                    new.append(waiting.pop())
            keys += new
            requests = [Request(tuple(prompts[i]), max_tokens[i], seeds[i] if seeds else 0) for i in new]
            progress = decoder.admit(requests)
            passes += len(new)
            if decoder.live:
                progress += decoder.step()
                passes += 1
            for one in progress:
                answers[keys[one.key]].extend(one.tokens)
                done += one.finish is not None
            if report:
                report(done)
    finally:
        decoder.close()
    return Generated(answers, passes)


def greedy_answers(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    end_tokens: Collection[int],
    batch: int = 32,
    report: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """The ids of each prompt's greedy answer of at most `max_tokens`, end token included."""
    return generate(target, prompts, [max_tokens] * len(prompts), end_tokens, batch=batch, report=report).tokens
