"""The target's own greedy answers, many at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from portadraft.core.decode import Decoder, Request
from portadraft.core.target import Target


def greedy_answers(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    end_tokens: Collection[int],
    batch: int = 32,
    report: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """The ids of each prompt's greedy answer, end token included.

    Up to `batch` rows are decoded together, and new ones join as rows end: in the order of their
    lengths, so that a prefill's rows are alike. report: called with the number of finished answers.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    waiting = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    decoder = Decoder(target, end_tokens=sorted(end_tokens))
    keys: list[int] = []  # the decoder numbers requests in the order of their admission
    done = 0
    try:
        while waiting or decoder.live:
            new: list[int] = []
            # Joining costs a prefill and a growing cache, so rows join in groups.
            if waiting and decoder.live <= batch // 2:
                while waiting and decoder.live + len(new) < batch:
                    new.append(waiting.pop())
            keys += new
            progress = decoder.admit([Request(tuple(prompts[i]), max_tokens) for i in new])
            for one in progress + (decoder.step() if decoder.live else []):
                answers[keys[one.key]].extend(one.tokens)
                done += one.finish is not None
            if report:
                report(done)
    finally:
        decoder.close()
    return answers
