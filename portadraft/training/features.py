"""What the target says about texts, recorded once: tokens and last hidden states, in flat files.

A folder holds `hidden.u16` (bfloat16 bits, (tokens, D), memory-mapped), `tokens.npy`,
`offsets.npy` (documents, one more than there are) and `documents.npy`: per document the first
position worth learning from, the first of the answer, its kind and whether it is held out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portadraft.errors import InvalidArgument
from portadraft.training.loss import Block
from portadraft.tuner.replay import Recording

KINDS = ("answer", "text")


@dataclass(frozen=True)
class Document:
    """One text: token ids, where the part worth learning from starts, where the answer starts."""

    tokens: list[int]
    start: int
    answer: int
    kind: str = "answer"
    held_out: bool = False


class Features:
    """The recorded features of many documents."""

    def __init__(
        self,
        hidden: NDArray[np.uint16],
        tokens: NDArray[np.int32],
        offsets: NDArray[np.int64],
        documents: NDArray[np.int32],
    ) -> None:
        self.hidden, self.tokens, self.offsets, self.documents = hidden, tokens, offsets, documents

    @classmethod
    def load(cls, folder: Path, hidden_size: int, complete: int | None = None) -> Features:
        """Open a recorded folder; `complete` says how many documents are there already."""
        tokens = np.load(folder / "tokens.npy")
        offsets = np.load(folder / "offsets.npy")
        documents = np.load(folder / "documents.npy")
        hidden = np.memmap(folder / "hidden.u16", dtype=np.uint16, mode="r", shape=(len(tokens), hidden_size))
        n = len(documents) if complete is None else complete
        return cls(hidden, tokens, offsets[: n + 1], documents[:n])

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

    def count(self, kind: str) -> int:
        """Tokens that are learned from, of one kind of document."""
        lengths = np.diff(self.offsets) - self.documents[:, 1 if kind == "answer" else 0]
        wanted = (self.documents[:, 2] == KINDS.index(kind)) & (self.documents[:, 3] == 0)
        return int(lengths[wanted].sum())

    def recordings(self) -> list[Recording]:
        """The held-out answers, for replay."""
        out = []
        for d, (_, answer, kind, held) in enumerate(self.documents):
            low, high = int(self.offsets[d]) + int(answer), int(self.offsets[d + 1])
            if held and KINDS[kind] == "answer" and high - low > 1 and low > self.offsets[d]:
                out.append(Recording(self.tokens[low:high], self.bits(np.arange(low - 1, high - 1))))
        return out

    def bits(self, positions: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self.hidden[positions].view(np.int16)).view(torch.bfloat16)

    def block(
        self,
        segments: NDArray[np.int64],
        steps: int,
        head: Tensor,
        to_draft: NDArray[np.int64],
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Block:
        """The positions of some segments, with the target's distributions over the draft vocabulary.

        head: (V', D) rows of the target's head; to_draft: (V,) draft id of each token, -1 if none.
        """
        at = np.concatenate([np.arange(a, b) for a, b, _ in segments])
        end = np.concatenate([np.full(b - a, e) for a, b, e in segments])
        # token i+1+t for t = 0 … T; the distribution of step t stands at i+t, so its index is one less
        ahead = at[:, None] + 1 + np.arange(steps + 1)
        inside = ahead < end[:, None]
        ahead = np.minimum(ahead, end[:, None] - 1)
        tokens = self.tokens[ahead].astype(np.int64)
        draft = np.where(inside, to_draft[tokens], -1)
        wanted, rows = np.unique(np.where(inside[:, 1:], ahead[:, 1:] - 1, at[:, None] + 1), return_inverse=True)
        device = head.device
        with torch.no_grad():
            said = self.bits(wanted).to(device, dtype)
            logits = torch.nn.functional.linear(said, head.to(dtype), None if bias is None else bias.to(dtype))
            soft = torch.softmax(logits.float(), -1).to(dtype)
        return Block(
            hidden=self.bits(at).to(device, dtype),
            tokens=torch.from_numpy(tokens).to(device),
            draft=torch.from_numpy(draft).to(device),
            soft=soft,
            rows=torch.from_numpy(rows.reshape(len(at), steps)).to(device),
        )


class _Caught(BaseException):
    """Ends a forward pass at the LM head: its input is all that is wanted."""


def features_of(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """What the LM head would read at every position, (B, N, D); the head itself does not run."""
    caught: list[Tensor] = []

    def hook(_: Any, given: tuple[Tensor, ...]) -> None:
        caught.append(given[0])
        raise _Caught

    handle = model.get_output_embeddings().register_forward_pre_hook(hook)
    try:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    except _Caught:
        pass
    finally:
        handle.remove()
    return caught[0]


def record(
    model: Any,
    documents: Sequence[Document],
    folder: Path,
    batch_tokens: int = 4096,
    seed: int = 0,
    report: Callable[[int], None] | None = None,
) -> Features:
    """Run the target over documents, batched by length, and write a folder that `Features.load` reads.

    report: called with the number of tokens done.

    Raises: OSError if the disk is full; InvalidArgument if there is nothing to record.
    """
    if not documents:
        raise InvalidArgument("data: no document of at least three tokens is left to train on")
    rng = np.random.default_rng(seed)
    # Shuffled first and sorted within groups: batches of like lengths, and any part is a fair sample.
    order = rng.permutation(len(documents))
    batches: list[list[int]] = []
    for i in range(0, len(order), 512):
        group = sorted(order[i : i + 512].tolist(), key=lambda d: len(documents[d].tokens))
        for d in group:
            open_batch = batches[-1] if batches else []
            if not open_batch or d == group[0] or (len(open_batch) + 1) * len(documents[d].tokens) > batch_tokens:
                batches.append([d])
            else:
                open_batch.append(d)
    laid = [documents[d] for batch in batches for d in batch]
    offsets = np.cumsum([0, *(len(d.tokens) for d in laid)]).astype(np.int64)
    size = int(model.get_output_embeddings().weight.shape[1])
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", np.concatenate([np.array(d.tokens, np.int32) for d in laid]))
    np.save(folder / "offsets.npy", offsets)
    facts = [(d.start, d.answer, KINDS.index(d.kind), int(d.held_out)) for d in laid]
    np.save(folder / "documents.npy", np.array(facts, np.int32))
    done = 0
    with (folder / "hidden.u16").open("wb") as file:
        for batch in batches:
            lengths = [len(documents[d].tokens) for d in batch]
            ids = torch.zeros((len(batch), max(lengths)), dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, d in enumerate(batch):
                ids[row, : lengths[row]] = torch.tensor(documents[d].tokens)
                mask[row, : lengths[row]] = 1
            hidden = features_of(model, ids.to(model.device), mask.to(model.device))
            flat = torch.cat([hidden[row, :n] for row, n in enumerate(lengths)]).cpu().to(torch.bfloat16)
            file.write(flat.contiguous().view(torch.int16).numpy().tobytes())
            done += len(flat)
            if report:
                report(done)
    return Features.load(folder, size)
