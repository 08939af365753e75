"""Runs the target over documents and keeps what its LM head reads: the features a drafter learns from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portadraft.errors import InvalidArgument
from portadraft.training.features import KINDS, Document, Features, Teaching
from portadraft.training.said import Said
from portadraft.training.store import Store

BATCH_TOKENS = 4096
"""Tokens of one pass of the target, padding included."""

CHUNK_BYTES = 64 * 2**20
"""Of recorded features in one file."""


class Caught(BaseException):
    """Ends a forward pass at the LM head: its input is all that is wanted."""


def features_of(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """What the LM head would read at every position, (B, N, D); the head itself does not run."""
    caught: list[Tensor] = []

    def hook(_: Any, given: tuple[Tensor, ...]) -> None:
        caught.append(given[0])
        raise Caught

    handle = model.get_output_embeddings().register_forward_pre_hook(hook)
    try:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    except Caught:
        pass
    finally:
        handle.remove()
    return caught[0]


def batches_of(lengths: Sequence[int], batch_tokens: int, seed: int) -> list[list[int]]:
    """Documents in batches of like lengths, in an order of which any part is a fair sample."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    out: list[list[int]] = []
    for i in range(0, len(order), 512):
        group = sorted(order[i : i + 512].tolist(), key=lambda d: lengths[d])
        for d in group:
            if out and d != group[0] and (len(out[-1]) + 1) * lengths[d] <= batch_tokens:
                out[-1].append(d)
            else:
                out.append([d])
    return out


def chunks_of(batches: Sequence[Sequence[int]], rows: Sequence[int], most: int) -> list[list[list[int]]]:
    """Batches in chunks of at most `most` rows of features, or one batch. rows: of each document."""
    out: list[list[list[int]]] = []
    held = most
    for batch in batches:
        more = sum(rows[d] for d in batch)
        if held + more > most:
            out.append([])
            held = 0
        out[-1].append(list(batch))
        held += more
    return out


def bits_of(hidden: Tensor) -> NDArray[np.uint16]:
    """Features as bfloat16 bits on the host."""
    return hidden.cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)


def record_batches(
    model: Any,
    documents: Sequence[Document],
    batches: Sequence[Sequence[int]],
    report: Callable[[int], None] | None = None,
) -> NDArray[np.uint16]:
    """The features of some batches of documents, flat in that order, (tokens, D) uint16."""
    out = []
    for batch in batches:
        lengths = [len(documents[d].tokens) for d in batch]
        ids = torch.zeros((len(batch), max(lengths)), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, d in enumerate(batch):
            ids[row, : lengths[row]] = torch.tensor(documents[d].tokens)
            mask[row, : lengths[row]] = 1
        hidden = features_of(model, ids.to(model.device), mask.to(model.device))
        out.append(bits_of(torch.cat([hidden[row, :n] for row, n in enumerate(lengths)])))
        if report:
            report(sum(lengths))
    return np.concatenate(out)


class Plan:
    """How documents are laid out: in which batches they are read, and in which chunks they are kept."""

    def __init__(
        self,
        documents: Sequence[Document],
        chunk_rows: int,
        batch_tokens: int = BATCH_TOKENS,
        seed: int = 0,
        rows: Sequence[int] | None = None,
    ) -> None:
        """rows: of features that each document takes; one a token by default.

        Raises: InvalidArgument if there is nothing to record.
        """
        if not documents:
            raise InvalidArgument("data: no document of at least three tokens is left to train on")
        lengths = [len(d.tokens) for d in documents]
        rows = rows or lengths
        self.documents = documents
        self.chunks = chunks_of(batches_of(lengths, batch_tokens, seed), rows, chunk_rows)
        self.order = [d for chunk in self.chunks for batch in chunk for d in batch]
        self.rows = [sum(rows[d] for batch in chunk for d in batch) for chunk in self.chunks]
        self.passes = sum(map(len, self.chunks))

    def tokens(self, chunk: int) -> int:
        """Of the documents of a chunk."""
        return sum(len(self.documents[d].tokens) for batch in self.chunks[chunk] for d in batch)

    @property
    def bounds(self) -> list[int]:
        """First row of each chunk, and the end."""
        return [0, *np.cumsum(self.rows).tolist()]

    @property
    def laid(self) -> list[Document]:
        """The documents in the order in which they are recorded."""
        return [self.documents[d] for d in self.order]

    @property
    def table(self) -> NDArray[np.int32]:
        """What `Features.documents` says of them."""
        return np.array([(d.start, d.answer, KINDS.index(d.kind), int(d.held_out)) for d in self.laid], np.int32)

    @property
    def places(self) -> list[str]:
        """Where each document is from, in that order."""
        return [d.place for d in self.laid]

    def features(self, hidden: Any, teaching: Teaching, said: Said) -> Features:
        """The features of all tokens."""
        laid = self.laid
        tokens = np.concatenate([np.array(d.tokens, np.int32) for d in laid])
        offsets = np.cumsum([0, *(len(d.tokens) for d in laid)]).astype(np.int64)
        return Features(hidden, tokens, offsets, self.table, teaching, said, self.places)


def record(
    model: Any,
    documents: Sequence[Document],
    folder: Path,
    batch_tokens: int = BATCH_TOKENS,
    seed: int = 0,
    report: Callable[[int], None] | None = None,
    said: Said | None = None,
) -> Features:
    """Record all documents in a folder, without a limit. report: called with the number of tokens done.

    Raises: OSError if the disk is full; InvalidArgument if there is nothing to record.
    """
    size = int(model.get_output_embeddings().weight.shape[1])
    plan = Plan(documents, CHUNK_BYTES // (2 * size), batch_tokens, seed)
    folder.mkdir(parents=True, exist_ok=True)
    done = 0

    def more(tokens: int) -> None:
        nonlocal done
        done += tokens
        if report:
            report(done)

    store = Store(
        folder, "features", plan.bounds, size, lambda c: record_batches(model, documents, plan.chunks[c], more)
    )
    for chunk in range(len(plan.chunks)):
        store.write(chunk)
    return plan.features(store, "distribution", said or Said())
