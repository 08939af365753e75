"""From rows of files to token ids: prompts to answer, texts to read, and which of them are held out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from portadraft.errors import InvalidArgument
from portadraft.text import TextCodec
from portadraft.training.data import Row
from portadraft.training.features import Document

HELD_OUT_PERCENT = 3
LEAST = 3
"""Tokens of the shortest document: a feature, a root, and a token to draft."""

OPENING = 48
"""The most tokens of a plain text that serve as a prompt where there is no other."""


@dataclass(frozen=True)
class Prompt:
    """A prompt's ids. key: of the row it is from; answer: the target's own, recorded before; place: file and line."""

    ids: tuple[int, ...]
    key: str
    answer: tuple[int, ...] | None = None
    place: str = ""


class Encoder:
    """Turns rows into ids for one model, and counts what had to be cut or left out.

    longest: tokens of the longest document. counts: `prompts_too_long`, `prompts_repeated`,
    `texts_cut`, `texts_too_short`, `texts_split`.
    """

    def __init__(self, codec: TextCodec, longest: int, vocabulary_size: int) -> None:
        self.codec, self.longest, self.vocabulary_size = codec, longest, vocabulary_size
        self.counts: Counter[str] = Counter()
        self._prefix = _template_prefix(codec)
        self._end = min(codec.end_tokens, default=None)

    def start(self, ids: Sequence[int]) -> int:
        """How many leading tokens are the chat template's own, the same for every prompt: they teach nothing."""
        for i, (a, b) in enumerate(zip(self._prefix, ids, strict=False)):
            if a != b:
                return i
        return min(len(self._prefix), len(ids))

    def prompts(self, rows: Sequence[Row]) -> list[Prompt]:
        """The prompt of each row that fits, in order, without repetitions; of a plain text its opening.

        Raises: InvalidArgument for a row whose `response_ids` are of another tokenizer, or whose
        conversation the template refuses.
        """
        out, seen = [], set()
        for row in rows:
            if row.key in seen:
                self.counts["prompts_repeated"] += 1
                continue
            seen.add(row.key)
            if row.asks:
                ids = self._prompt(row)
            else:
                ids = self._encode(row, special=True)
                ids = ids[: max(1, min(OPENING, len(ids) // 2))]
            if len(ids) + LEAST - 1 > self.longest:
                self.counts["prompts_too_long"] += 1
                continue
            self._check(row)
            out.append(Prompt(tuple(ids), row.key, row.answer_ids or None, row.place))
        return out

    def answered(self, prompt: Prompt, answer: Sequence[int], held: bool) -> Document | None:
        """A prompt with the target's answer; None where too little was answered."""
        ids = [*prompt.ids, *answer][: self.longest]
        if not answer or len(ids) < LEAST:
            return None
        return Document(ids, self.start(prompt.ids), len(prompt.ids), "answer", held, prompt.place)

    def texts(self, rows: Sequence[Row]) -> list[Document]:
        """Texts that the target only reads: a chat turn where there is a prompt, else the text as it is.

        A plain text longer than `longest` is split; a reference is cut.
        """
        out = []
        for row in rows:
            if not row.text:
                continue
            if not row.asks:
                out += self._pieces(self._encode(row, special=True), row.place)
                continue
            prompt = self._prompt(row)
            # The answer continues a templated prompt, so it is encoded without special tokens of its own.
            ids = prompt + self._encode(row, special=False)
            if self._end is not None:
                ids.append(self._end)
            if len(ids) > self.longest:
                self.counts["texts_cut"] += 1
                ids = ids[: self.longest]
            start = self.start(ids)
            if len(ids) < start + LEAST or len(ids) <= len(prompt):
                self.counts["texts_too_short"] += 1
                continue
            out.append(Document(ids, start, len(prompt), "text", place=row.place))
        return out

    def _pieces(self, ids: list[int], place: str) -> list[Document]:
        starts = range(0, len(ids), self.longest)
        self.counts["texts_split"] += len(starts) > 1
        kept = [
            Document(ids[i : i + self.longest], 0, 0, "text", place=f"{place}, from token {i}" if i else place)
            for i in starts
            if len(ids) - i >= LEAST
        ]
        if not kept:
            self.counts["texts_too_short"] += 1
        return kept

    def _prompt(self, row: Row) -> list[int]:
        try:
            if row.messages is None:
                return self.codec.encode_prompt(row.prompt)
            return self.codec.encode_prompt([{"role": role, "content": text} for role, text in row.messages])
        except InvalidArgument as error:
            raise InvalidArgument(f"{row.where or 'data'}: {error}") from error

    def _encode(self, row: Row, special: bool) -> list[int]:
        try:
            return [int(i) for i in self.codec.tokenizer.encode(row.text, add_special_tokens=special)]
        except UnicodeEncodeError:
            raise InvalidArgument(f"{row.where or 'data'}: half of a surrogate pair, which is no text") from None

    def _check(self, row: Row) -> None:
        if row.answer_ids and max(row.answer_ids) >= self.vocabulary_size:
            raise InvalidArgument(
                f"{row.where or 'data'}: response_ids of {row.key[:40]!r}: ids outside 0…{self.vocabulary_size - 1}; "
                "they belong to another tokenizer"
            )


def _template_prefix(codec: TextCodec) -> list[int]:
    """The leading tokens that every chat prompt shares."""
    if codec.chat_template is None:
        return []
    a, b = (codec.encode_prompt(x) for x in ("Why?", "In 1854"))
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return a[:shared]


def split_held_out(keys: Sequence[str], most: int) -> set[str]:
    """Which rows are held out for validation: three in a hundred by a hash of the row alone, at most `most`.

    So a row stands on the same side in every run and order. Few rows: those of the least hashes,
    one in sixteen, but none of fewer than four.
    """
    if len(set(keys)) < 4:
        return set()
    ranked = sorted((int(hashlib.sha256(key.encode("utf-8", "replace")).hexdigest(), 16), key) for key in set(keys))
    chosen = [key for value, key in ranked if value % 100 < HELD_OUT_PERCENT]
    least = max(1, min(len(ranked) // 16, 8))
    if len(chosen) < least:
        rest = [key for value, key in ranked if value % 100 >= HELD_OUT_PERCENT]
        chosen += rest[: least - len(chosen)]
    return set(chosen[:most])


def within(documents: Sequence[Document], budget: int | None, seed: int) -> list[Document]:
    """A random choice of whole documents of about `budget` tokens, in random order; all of them without one."""
    out, total = [], 0
    for i in np.random.default_rng(seed).permutation(len(documents)):
        if budget is not None and total >= budget:
            break
        out.append(documents[i])
        total += len(documents[i].tokens)
    return out
