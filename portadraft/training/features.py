"""What the target says about texts, recorded once: tokens and last hidden states.

Per document: the first position worth learning from, the first of the answer, its kind and
whether it is held out. `hidden` holds bfloat16 bits, one row a token, on disk or in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portadraft.errors import InvalidArgument
from portadraft.training.loss import Block
from portadraft.training.said import Said
from portadraft.training.store import Hidden, Store
from portadraft.tuner.replay import Recording

KINDS = ("answer", "text")

TEXT_WEIGHT = 0.25
"""What a token of a given text counts for when the draft vocabulary is chosen; one the target said counts 1."""

Teaching = Literal["distribution", "tokens"]
"""What is imitated: the target's distributions (and its first choices), or the text's own next tokens."""


@dataclass(frozen=True)
class Document:
    """One text: token ids, where the part worth learning from starts, where the answer starts.

    place: the file and line it is from, for people.
    """

    tokens: list[int]
    start: int
    answer: int
    kind: str = "answer"
    held_out: bool = False
    place: str = ""


class Features:
    """The recorded features of many documents.

    hidden: (n, D) uint16 by row number, the target's feature at each token. tokens: (n,) int32.
    offsets: (documents + 1,) first token of each. documents: (documents, 4): start, answer, kind,
    held out. teaching: what the drafter is to imitate there. said: from head products to logits.
    named: where each document is from, for people; empty where that is not known.
    """

    def __init__(
        self,
        hidden: Hidden,
        tokens: NDArray[np.int32],
        offsets: NDArray[np.int64],
        documents: NDArray[np.int32],
        teaching: Teaching = "distribution",
        said: Said | None = None,
        named: Sequence[str] = (),
    ) -> None:
        self.hidden, self.tokens, self.offsets, self.documents = hidden, tokens, offsets, documents
        self.teaching, self.said, self.named = teaching, said or Said(), named

    def __len__(self) -> int:
        return len(self.documents)

    def segments(self, length: int, held_out: bool) -> NDArray[np.int64]:
        """(segments, 3): first position, one past the last, and the document's end, for training or validation.

        A position is an i of which token i + 2 exists (see `portadraft.training.loss`).
        """
        out = []
        for d, (start, _, _, held) in enumerate(self.documents):
            if bool(held) != held_out:
                continue
            low, end = int(self.offsets[d]), int(self.offsets[d + 1])
            first = low + max(int(start) - 1, 0)
            out += [(i, min(i + length, end - 2), end) for i in range(first, end - 2, length)]
        return np.array(out, np.int64).reshape(-1, 3)

    def chunk_of(self, segments: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each segment the chunk it is streamed with, -1 where its features are at hand."""
        store = self.hidden
        if not isinstance(store, Store) or not store.streamed:
            return np.full(len(segments), -1, np.int64)
        chunks = np.searchsorted(store.bounds, self.row_of(segments[:, 0]), side="right") - 1
        return np.where(np.isin(chunks, list(store.streamed)), chunks, -1)

    def row_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of `hidden` at which a position's features begin."""
        return positions

    def count(self, kind: str) -> int:
        """Tokens that are learned from, of one kind of document."""
        lengths = np.diff(self.offsets) - self.documents[:, 1 if kind == "answer" else 0]
        wanted = (self.documents[:, 2] == KINDS.index(kind)) & (self.documents[:, 3] == 0)
        return int(lengths[wanted].sum())

    def counted(self) -> Iterator[tuple[NDArray[np.int32], float]]:
        """Tokens to choose the draft vocabulary by, with the weight of each: answers in full, nothing held out."""
        for d, (start, answer, kind, held) in enumerate(self.documents):
            if not held:
                own = KINDS[kind] == "answer"
                first = int(self.offsets[d]) + int(answer if own else start)
                yield self.tokens[first : self.offsets[d + 1]], 1.0 if own else TEXT_WEIGHT

    def learned(self) -> NDArray[np.int64]:
        """The rows of features that are learned from and at hand: nothing held out, streamed, or before `start`."""
        spans = [
            np.arange(self.offsets[d] + start, self.offsets[d + 1])
            for d, (start, _, _, held) in enumerate(self.documents)
            if not held
        ]
        return self.at_hand(np.concatenate([*spans, np.zeros(0, np.int64)]))

    def at_hand(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of some rows that need not be recorded again; if there are none, those of one chunk."""
        store = self.hidden
        if not isinstance(store, Store) or not store.streamed or not len(rows):
            return rows
        chunks = np.searchsorted(store.bounds, rows, side="right") - 1
        kept = ~np.isin(chunks, list(store.streamed))
        return rows[kept] if kept.any() else rows[chunks == chunks[0]]

    def sample(self, most: int, seed: int = 0) -> Tensor:
        """Features at up to `most` places that are learned from, (n, D) bfloat16; nothing is recorded for it
        that lies on disk already."""
        at = self.learned()
        if len(at) > most:
            at = np.sort(np.random.default_rng(seed).choice(at, most, replace=False))
        return self.bits(at)

    def recordings(self) -> list[Recording]:
        """The held-out answers, for replay."""
        out = []
        for d, (_, answer, kind, held) in enumerate(self.documents):
            low, high = int(self.offsets[d]) + int(answer), int(self.offsets[d + 1])
            if held and KINDS[kind] == "answer" and high - low > 1 and low > self.offsets[d]:
                out.append(Recording(self.tokens[low:high], self.bits(np.arange(low - 1, high - 1))))
        return out

    def bits(self, rows: NDArray[np.int64]) -> Tensor:
        """Features by row number, (n, D) bfloat16."""
        return torch.from_numpy(self.hidden[rows].view(np.int16)).view(torch.bfloat16)

    def places(self, segments: NDArray[np.int64], steps: int) -> Places:
        """Where the positions of some segments find what they need."""
        at = np.concatenate([np.arange(a, b) for a, b, _ in segments])
        end = np.concatenate([np.full(b - a, e) for a, b, e in segments])
        # token i+1+t for t = 0 … T; the distribution of step t stands at i+t, so its index is one less
        ahead = at[:, None] + 1 + np.arange(steps + 1)
        inside = ahead < end[:, None]
        ahead = np.minimum(ahead, end[:, None] - 1)
        return Places(at, self.tokens[ahead], inside, np.where(inside[:, 1:], ahead[:, 1:] - 1, at[:, None] + 1))

    def block(
        self,
        segments: NDArray[np.int64],
        steps: int,
        head: Tensor,
        to_draft: NDArray[np.int64],
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
    ) -> Block:
        """The positions of some segments, with what the target says there over the draft vocabulary.

        head: (V', D) rows of the target's head; to_draft: (V,) draft id of each token, -1 if none.
        temperature: at which the target speaks.
        """
        if len(segments) == 0:
            raise InvalidArgument("segments: none were given; expected at least one")
        places = self.places(segments, steps)
        draft = np.where(places.inside, to_draft[np.maximum(places.tokens, 0)], -1)
        device = head.device
        hidden = self.bits(places.hidden).to(device, dtype)
        tokens = torch.from_numpy(np.maximum(places.tokens, 0).astype(np.int64)).to(device)
        labels = torch.from_numpy(draft).to(device)
        if self.teaching == "tokens":
            return Block(hidden, tokens, labels)
        wanted, rows = np.unique(places.said, return_inverse=True)
        with torch.no_grad():
            said = self.bits(wanted).to(device, dtype)
            logits = torch.nn.functional.linear(said, head.to(dtype), None if bias is None else bias.to(dtype)).float()
            if not self.said.plain:
                logits = self.said(logits)
            choice = logits.argmax(-1)
            if temperature != 1.0:
                logits = logits / temperature
            soft = torch.softmax(logits, -1).to(dtype)
        return Block(hidden, tokens, labels, soft, choice, torch.from_numpy(rows.reshape(places.said.shape)).to(device))


@dataclass(frozen=True)
class Places:
    """Of n positions: hidden (n,) rows of their own features; tokens (n, T+1) root and true tokens;
    inside (n, T+1) which of these exist; said (n, T) rows of the features the true tokens were chosen from."""

    hidden: NDArray[np.int64]
    tokens: NDArray[np.int32]
    inside: NDArray[np.bool_]
    said: NDArray[np.int64]
