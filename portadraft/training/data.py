"""Where training text comes from: files of prompts, of answers and of conversations, plain texts, datasets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portadraft.errors import InvalidArgument, ModelNotFound

PLAIN = (".txt", ".md")
"""Endings of plain text files; every other file is read as JSONL."""

BLOCK = 16_384
"""Characters of a plain text file that become one row, cut at an empty line where there is one."""


@dataclass(frozen=True)
class Row:
    """One prompt with or without its answer, or one plain text.

    prompt: what the user says, "" for a plain text. messages: the conversation before the answer,
    where it is more than one user's turn: (role, content) pairs. answer_ids: the target's own
    answer, recorded before. text: the reference, or the plain text. where: for error messages.
    """

    prompt: str = ""
    answer_ids: tuple[int, ...] | None = None
    text: str | None = None
    source: str = ""
    messages: tuple[tuple[str, str], ...] | None = None
    where: str = ""

    @property
    def asks(self) -> bool:
        """Whether there is a prompt to answer."""
        return bool(self.prompt or self.messages)

    @property
    def place(self) -> str:
        """File (without its folders) and line, for people: `prompts.jsonl, line 3`."""
        found = re.fullmatch(r"data=(['\"])(.*)\1(, .*)", self.where, re.DOTALL)
        if found is None:
            return self.where
        return (found[2] if found[2].startswith("hf:") else Path(found[2]).name) + found[3]

    @property
    def key(self) -> str:
        """What makes the row this row: duplicates and the held-out split go by it."""
        if self.messages is not None:
            return json.dumps(self.messages, ensure_ascii=False)
        return self.prompt or self.text or ""


def read_rows(path: str | Path, limit: int | None = None) -> list[Row]:
    """The rows of a file or of a dataset, at most `limit` of them.

    A file that ends in .txt or .md is plain text. Any other is JSONL, with an object a line:
    `messages` (a conversation of `role` and `content`), or `prompt` alone, with `response_ids` (the
    model's own answer, recorded before) or with `reference` (a text that is not the model's), or
    `text` alone. `hf:NAME`, or OWNER/NAME where no such file exists, is a dataset of the Hugging
    Face hub with the same columns.

    Raises: ModelNotFound if there is no such file; InvalidArgument naming the line that is wrong.
    """
    if names_dataset(path):
        from portadraft.training.hub import read_dataset

        return read_dataset(str(path), limit)
    path = Path(path)
    shown = f"data={str(path)!r}"
    try:
        content = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ModelNotFound(f"{shown}: no such file") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{shown}: not UTF-8 text ({error})") from None
    except OSError as error:
        raise InvalidArgument(f"{shown}: cannot be read ({error}); expected a JSONL or a plain text file") from None
    rows = _plain(shown, content) if path.suffix.lower() in PLAIN else _json_lines(shown, content)
    out = [row for _, row in zip(range(limit or len(content) + 1), rows, strict=False)]
    if not out:
        expected = "some text" if path.suffix.lower() in PLAIN else "one JSON object a line"
        raise InvalidArgument(f"{shown}: no rows; expected {expected}")
    return out


def names_dataset(path: str | Path) -> bool:
    """Whether a `data` argument means a dataset of the hub rather than a file."""
    name = str(path)
    if name.startswith("hf:"):
        return True
    return bool(
        re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?(@[\w.-]+)?", name)
        and Path(name).suffix.lower() not in (*PLAIN, ".jsonl", ".json")
        and not Path(name).exists()
        and not Path(name).parent.exists()
    )


def _json_lines(shown: str, content: str) -> Iterator[Row]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{shown}, line {number}"
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InvalidArgument(f"{where}: not JSON ({error})") from None
        yield row(where, value)


def _plain(shown: str, content: str) -> Iterator[Row]:
    start = 0
    while start < len(content):
        end = min(start + BLOCK, len(content))
        if end < len(content):
            half = start + BLOCK // 2
            breaks = ((content.rfind(mark, half, end), len(mark)) for mark in ("\n\n", "\n", " "))
            end = next((at + width for at, width in breaks if at >= half), end)
        if content[start:end].strip():
            yield Row(text=content[start:end], where=f"{shown}, from character {start}")
        start = end


def row(where: str, value: Any) -> Row:
    """A row from a JSON object or a dataset's columns.

    Raises: InvalidArgument that begins with `where`.
    """
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{where}: expected a JSON object")
    prompt, text = value.get("prompt") or "", value.get("text") or value.get("reference")
    if not isinstance(prompt, str) or not (text is None or isinstance(text, str)):
        raise InvalidArgument(f"{where}: prompt, text and reference must be strings")
    messages = value.get("messages")
    if messages is not None:
        if prompt:
            raise InvalidArgument(f"{where}: it has a `prompt` and `messages`; expected one of them")
        return _conversation(where, messages, value)
    if not prompt and not text:
        raise InvalidArgument(f"{where}: expected a `prompt` or a `text` (or `messages`), which are missing or empty")
    return Row(prompt, _answer(where, value), text, str(value.get("source") or ""), where=where)


def _answer(where: str, value: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids = value.get("response_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)):
        raise InvalidArgument(f"{where}: response_ids must be a list of token ids")
    return None if ids is None else tuple(ids)


def _conversation(where: str, messages: Any, value: Mapping[str, Any]) -> Row:
    """A row of a conversation; if it ends with the assistant's turn, that is the reference."""
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument(f"{where}: messages must be a list of at least one message")
    turns: list[tuple[str, str]] = []
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or not isinstance(role, str):
            raise InvalidArgument(f"{where}: messages[{i}] must be an object with a `role` and a `content`")
        content = message.get("content")
        if not isinstance(content, str):
            raise InvalidArgument(
                f"{where}: messages[{i}].content is {_kind(content)}; expected a string (parts other than text are not "
                "supported)"
            )
        turns.append((role, content))
    text = None
    if turns[-1][0] == "assistant":
        text = turns.pop()[1] or None
    if not any(content for _, content in turns) and text is None:
        raise InvalidArgument(f"{where}: every message is empty; expected at least one character")
    source, answer = str(value.get("source") or ""), _answer(where, value)
    if not turns:
        return Row(text=text, source=source, where=where)
    if len(turns) == 1 and turns[0][0] == "user":
        if not turns[0][1]:
            raise InvalidArgument(f"{where}: messages[0].content is empty; expected what the user says")
        return Row(turns[0][1], answer, text, source, where=where)
    return Row("", answer, text, source, tuple(turns), where)


def _kind(value: Any) -> str:
    if value is None:
        return "null or missing"
    return {list: "a list", dict: "an object", bool: "a boolean", int: "a number", float: "a number"}.get(
        type(value), type(value).__name__
    )


def texts_only(rows: Iterable[Row]) -> list[Row]:
    """The rows that bring a text of their own."""
    return [row for row in rows if row.text]
