"""Prompts and answers that a model's context has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from portadraft.errors import InvalidArgument
from portadraft.tuner.recordings import Prompt

MARGIN = 8
"""Tokens of a built-in prompt at least, however little room there is."""


@dataclass(frozen=True)
class Fitted:
    """What is recorded: prompts with their ids, and the most tokens of an answer. note: what was changed, or None."""

    prompts: list[Prompt]
    ids: list[list[int]]
    max_tokens: int
    note: str | None = None


def fitted(
    prompts: Sequence[Prompt], ids: Sequence[Sequence[int]], max_tokens: int, limit: int | None, *, built_in: bool
) -> Fitted:
    """Bring prompts to what a context of `limit` tokens (None: without an end) has room for.

    built_in: our own prompts lose their beginnings, and answers become shorter, so that every kind of text is there in
    the smallest model, too. Of the user's, those that are too long are left out: what is measured is not ours to
    change.

    Raises: InvalidArgument where nothing is left.
    """
    whole = Fitted(list(prompts), [list(one) for one in ids], max_tokens)
    if limit is None or max(map(len, ids)) + max_tokens <= limit:
        return whole
    if built_in:
        answer = min(max_tokens, limit // 2)
        room = limit - answer
        if answer < 2 or room < MARGIN:
            raise InvalidArgument(f"model: its context of {limit} tokens leaves no room for a prompt and an answer")
        cut = sum(len(one) > room for one in whole.ids)
        return Fitted(
            whole.prompts,
            [one[-room:] for one in whole.ids],
            answer,
            f"the model's context of {limit} tokens: {cut} of the {len(ids)} built-in prompts are cut to {room} "
            f"tokens, answers have at most {answer}",
        )
    kept = [i for i, one in enumerate(whole.ids) if len(one) + max_tokens <= limit]
    if not kept:
        raise InvalidArgument(
            f"prompts: the shortest has {min(map(len, ids))} tokens, which leaves less than {max_tokens} of the "
            f"model's context of {limit}; pass shorter prompts or a smaller max_tokens"
        )
    return Fitted(
        [whole.prompts[i] for i in kept],
        [whole.ids[i] for i in kept],
        max_tokens,
        f"{len(ids) - len(kept)} of {len(ids)} prompts are left out: with an answer of {max_tokens} tokens they are "
        f"longer than the model's context of {limit}",
    )
