"""Where training text comes from: files of prompts, of answers, and of plain text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portadraft.errors import InvalidArgument, ModelNotFound
from portadraft.text import TextCodec
from portadraft.training.features import Document

HELD_OUT_PERCENT = 3


@dataclass(frozen=True)
class Row:
    """One line of a file: a prompt with or without its answer, or a plain text."""

    prompt: str
    answer_ids: tuple[int, ...] | None = None
    text: str | None = None
    source: str = ""


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a JSONL file.

    Known keys: `prompt` with `response_ids` (the model's own answer, recorded before), `prompt`
    with `reference` (a text to learn from, not the model's), `prompt` alone, or `text` alone.

    Raises: ModelNotFound if there is no such file; InvalidArgument naming the line that is wrong.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise ModelNotFound(f"data={str(path)!r}: no such file") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"data={str(path)!r}: not UTF-8 text ({error})") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"data={str(path)!r}, line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidArgument(f"{where}: not JSON ({error})") from None
        rows.append(_row(where, value))
    if not rows:
        raise InvalidArgument(f"data={str(path)!r}: no rows; expected one JSON object a line")
    return rows


def _row(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise InvalidArgument(f"{where}: expected a JSON object")
    prompt, text = value.get("prompt", ""), value.get("text") or value.get("reference")
    if not isinstance(prompt, str) or not (text is None or isinstance(text, str)):
        raise InvalidArgument(f"{where}: prompt, text and reference must be strings")
    if not prompt and not text:
        raise InvalidArgument(f"{where}: expected a `prompt` or a `text`, which are missing or empty")
    ids = value.get("response_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)):
        raise InvalidArgument(f"{where}: response_ids must be a list of token ids")
    return Row(prompt, None if ids is None else tuple(ids), text, str(value.get("source", "")))


def held_out(key: str, percent: int = HELD_OUT_PERCENT) -> bool:
    """Whether a row serves validation: by its text alone, so that it is the same in every run and order."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 100 < percent


def template_length(codec: TextCodec) -> int:
    """How many leading tokens every chat prompt shares (a fixed system prompt teaches nothing)."""
    if codec.chat_template is None:
        return 0
    a, b = (codec.encode_prompt(x) for x in ("Why?", "In 1854"))
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return 0


def answer_documents(
    rows: Sequence[Row], answers: Sequence[Sequence[int]], codec: TextCodec, longest: int, vocabulary: int
) -> Iterator[Document]:
    """Prompts with the model's own answers. Repeated prompts and empty answers are passed over."""
    shared, seen = template_length(codec), set()
    for row, answer in zip(rows, answers, strict=True):
        if row.prompt in seen or not answer:
            continue
        seen.add(row.prompt)
        if max(answer) >= vocabulary:
            raise InvalidArgument(
                f"response_ids of {row.prompt[:40]!r}: ids outside 0…{vocabulary - 1}; they belong to another tokenizer"
            )
        prompt = codec.encode_prompt(row.prompt)
        if len(prompt) + 2 < longest:
            ids = [*prompt, *answer][:longest]
            yield Document(ids, shared, len(prompt), "answer", held_out(row.prompt))


def text_documents(rows: Sequence[Row], codec: TextCodec, longest: int, end_token: int | None) -> Iterator[Document]:
    """Texts that the model only reads: a chat turn where there is a prompt, else the text as it is."""
    shared = template_length(codec)
    for row in rows:
        if row.text is None or held_out(row.prompt or row.text):
            continue
        if row.prompt:
            prompt, start = codec.encode_prompt(row.prompt), shared
        else:
            prompt, start = [], 0
        # The answer continues a templated prompt, so it is encoded without special tokens of its own.
        ids = [*prompt, *(int(i) for i in codec.tokenizer.encode(row.text, add_special_tokens=not prompt))]
        if prompt and end_token is not None:
            ids.append(end_token)
        ids = ids[:longest]
        if len(ids) >= start + 3:
            yield Document(ids, start, min(len(prompt), len(ids)), "text")


def within(documents: Iterator[Document], budget: int | None) -> list[Document]:
    """As many documents as fit into a budget of tokens."""
    out, total = [], 0
    for document in documents:
        if budget is not None and total >= budget:
            break
        out.append(document)
        total += len(document.tokens)
    return out
