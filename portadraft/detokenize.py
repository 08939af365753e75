"""Text that grows with the tokens: the deltas of a stream, joined, equal the decoding of the whole.

Decoding token by token is not decoding the whole: a character may take several tokens, byte-fallback
tokenizers turn a whole run of bytes into replacement characters if any of it is invalid, and sentencepiece ones
drop the space of the very first token. `TextStream` gives text out as soon as no later token can
change it. It costs a constant number of short decodings per token.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

TOKENIZER = threading.Lock()
"""Tokenizers of transformers change themselves while they encode, so threads take turns with them as well."""

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONGEST_HOLD = 64


@lru_cache(maxsize=1)
def _byte_of_character() -> Mapping[str, int]:
    """GPT-2's printable stand-ins for bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + i): byte for i, byte in enumerate(rest)})
    return table


def _decoder_types(tokenizer: Any) -> list[str] | None:
    """The kinds of the fast tokenizer's decoder steps, or None where it has none to show."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return None
    try:
        state = json.loads(decoder.__getstate__())
    except (AttributeError, TypeError, ValueError):
        return None
    steps = state.get("decoders", [state]) if state.get("type") == "Sequence" else [state]
    return [str(step.get("type")) for step in steps]


class TextStream:
    """The text of a growing list of token ids.

    tokenizer: a Hugging Face tokenizer, or anything with its `decode`, `all_special_ids` and
    `convert_ids_to_tokens`. Special tokens are left out of the text unless
    `skip_special_tokens` is False. One stream serves one generation; it is not thread-safe.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._special = special_ids(tokenizer) if skip_special_tokens else frozenset()
        kinds = _decoder_types(tokenizer)
        self._byte_level = kinds is not None and "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}
        self._byte_fallback = kinds is None or "ByteFallback" in kinds
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[int] = []
        self._context: list[int] = []
        self._context_text = ""
        self._length = 0
        self._reach: list[int] = []
        self._finished = False

    @property
    def length(self) -> int:
        """Characters given out so far."""
        return self._length

    @property
    def reach(self) -> list[int]:
        """For each token whose text is settled: the characters that it and the tokens before it take part in.

        A token that holds the first bytes of a character takes part in it. Grows with the stream;
        do not change it.
        """
        return self._reach

    def push(self, ids: int | Iterable[int]) -> str:
        """Add tokens; returns the text that they settle, which may be empty."""
        return "".join([self._push(int(i)) for i in ([ids] if isinstance(ids, int) else ids)])

    def finish(self) -> str:
        """The end of the stream: the text still held back. Later calls return nothing."""
        if self._finished:
            return ""
        self._finished = True
        if self._byte_level:
            rest = self._utf8.decode(b"", final=True)
            self._length += len(rest)
            return rest
        return self._settle() if self._held else ""

    def _push(self, token: int) -> str:
        if self._byte_level:
            return self._push_bytes(token)
        if token in self._special:
            if self._held:
                self._held.append(token)
            else:
                self._reach.append(self._length)
            return ""
        self._held.append(token)
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(self._spelling(token)):
            return ""
        return self._settle(may_hold=True)

    def _push_bytes(self, token: int) -> str:
        text = "" if token in self._special else self._utf8.decode(self._bytes(token))
        self._length += len(text)
        self._reach.append(self._length + bool(self._utf8.getstate()[0]))
        return text

    def _bytes(self, token: int) -> bytes:
        spelling = self._spelling(token)
        table = _byte_of_character()
        try:
            return bytes([table[character] for character in spelling])
        except KeyError:
            return spelling.encode("utf-8", "replace")

    def _spelling(self, token: int) -> str:
        spelling = self._tokenizer.convert_ids_to_tokens(token)
        return spelling if isinstance(spelling, str) else ""

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids, skip_special_tokens=self._skip)

    def _settle(self, may_hold: bool = False) -> str:
        """Give out what the held tokens say; with may_hold, wait while the last character may be unfinished."""
        delta = self._decode(self._context + self._held)[len(self._context_text) :]
        if may_hold and delta.endswith(REPLACEMENT) and len(self._held) < _LONGEST_HOLD:
            return ""
        self._attribute(delta)
        self._length += len(delta)
        visible = [token for token in self._held if token not in self._special]
        if visible:
            self._context = visible[-1:]
            self._context_text = self._decode(self._context)
        self._held = []
        return delta

    def _attribute(self, delta: str) -> None:
        """Append the reach of each held token, the last of which reaches to the end."""
        reach, seen = 0, b""
        matches = [_BYTE_TOKEN.fullmatch(self._spelling(token)) for token in self._held]
        run = bytes(int(match[1], 16) for match in matches if match)
        valid = _is_utf8(run)
        for index, match in enumerate(matches):
            if match:
                seen += bytes([int(match[1], 16)])
                reach = sum(byte & 0xC0 != 0x80 for byte in seen[-1:]) + reach if valid else len(seen)
            elif index < len(matches) - 1 and self._held[index] not in self._special:
                reach = max(reach, 1)
            self._reach.append(self._length + min(reach, len(delta)))
        if self._held[-1] not in self._special and not matches[-1]:
            self._reach[-1] = self._length + len(delta)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids that `skip_special_tokens` leaves out of the text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "get_added_tokens_decoder"):
        return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
    return frozenset(getattr(tokenizer, "all_special_ids", ()))


def decode(tokenizer: Any, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    """The text of ids, without the tokenizer's clean-up of spaces, which would change text already given out."""
    with TOKENIZER:
        text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return str(text)
