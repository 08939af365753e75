"""Prompts that the target writes itself, where the user has none.

A chat model is given its template up to the place where the user's words begin, and sampled
until the user's turn ends: what it writes there is what it was taught users say. A model
without a template begins at its begin token, and what it writes is an opening to go on from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from portadraft.detokenize import special_ids
from portadraft.errors import InvalidArgument
from portadraft.text import TextCodec

LONGEST = 160
"""Tokens of a prompt of a chat model; one that does not end before is left out."""

OPENING = 24
"""Tokens of an opening that a model without a template writes."""

_PROBE = "portadraft"


@dataclass(frozen=True)
class Seed:
    """What the target is given to write a prompt.

    ids: what comes before the prompt. end_tokens: what ends it. stop: text that ends it, where the
    template marks the end of the turn with ordinary text. longest: tokens. whole: whether a prompt
    counts only if it ended.
    """

    ids: tuple[int, ...]
    end_tokens: frozenset[int]
    stop: str
    longest: int
    whole: bool


def seed_of(codec: TextCodec) -> Seed:
    """Raises: InvalidArgument for a model without a template whose tokenizer has no token to begin with."""
    tokenizer = codec.tokenizer
    if codec.chat_template is None:
        begin = next(
            (t for t in (getattr(tokenizer, n, None) for n in ("bos_token_id", "eos_token_id")) if t is not None), None
        )
        if begin is None:
            raise InvalidArgument(
                "data=None: the model has no chat template, and its tokenizer no begin token to write prompts from; "
                "pass files of prompts or texts as data="
            )
        return Seed((int(begin),), codec.end_tokens, "", OPENING, False)
    before, _, after = codec.render([{"role": "user", "content": _PROBE}]).partition(_PROBE)
    # A space before the user's words belongs to the first of them.
    ids = [int(i) for i in tokenizer.encode(before.rstrip(" "), add_special_tokens=False)]
    if not ids:
        begin = getattr(tokenizer, "bos_token_id", None)
        ids = [int(min(codec.end_tokens, default=0) if begin is None else begin)]
    marked = special_ids(tokenizer) | frozenset(getattr(tokenizer, "all_special_ids", ()))
    tail = [int(i) for i in tokenizer.encode(after.lstrip(), add_special_tokens=False)]
    ends = codec.end_tokens | frozenset(i for i in tail[:1] if i in marked)
    stop = "" if tail[:1] and tail[0] in marked else " ".join(after.split()[:1])
    return Seed(tuple(ids), ends, stop, LONGEST, True)


def read(codec: TextCodec, seed: Seed, ids: Sequence[int]) -> str:
    """The prompt in what the target wrote, "" where there is none: nothing said, no end, or no text."""
    ended = bool(ids) and ids[-1] in seed.end_tokens
    text = codec.decode(ids[:-1] if ended else ids)
    if seed.stop and seed.stop in text:
        text, ended = text[: text.index(seed.stop)], True
    text = text.strip()
    if (seed.whole and not ended) or "\ufffd" in text or not any(c.isalnum() for c in text):
        return ""
    return text


def distinct(prompts: Sequence[str]) -> list[str]:
    """The prompts without empty ones and without those that differ in spaces and case alone, in order."""
    out: dict[str, str] = {}
    for prompt in prompts:
        if prompt:
            out.setdefault(" ".join(prompt.casefold().split()), prompt)
    return list(out.values())
