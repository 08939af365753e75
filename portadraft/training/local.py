"""What the target would say next at every position of a given text (paper section 3.5), in few passes.

After one pass over the text, pass t appends one slot for each position: the token that the target chose
there last. A slot attends to the text up to its own position and to the slots that were
appended for that position before, so each position is continued as if it stood alone. T + 1
passes give T drafting steps at all positions of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portadraft.backends.torch.attention import Pass, active
from portadraft.backends.torch.passes import Forward, causal
from portadraft.training.features import KINDS, Document, Features, Places
from portadraft.training.recording import Caught, bits_of
from portadraft.training.said import Said

HEAD_ROWS = 256
"""Rows of logits held at once."""

NOTHING = -1
"""Stands for a token after the end of what the target said."""


@dataclass
class BranchPass(Pass):
    """A pass over one slot for each position of a text, behind the text and the slots before.

    visible: (1, 1, N, M+N) bool, what each slot sees; keys: (M+N,) int64, the position of each key.
    """

    visible: Tensor = field(default_factory=lambda: torch.empty(0))
    keys: Tensor = field(default_factory=lambda: torch.empty(0))

    def mask(self, function: Callable[..., Tensor], plain: bool) -> Tensor | None:
        """As `Pass.mask`, but the keys do not stand in the order of their positions."""
        if plain:
            return self.visible
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=self.keys.device)
        queries, keys = self.positions[:, None, :, None], self.keys[None, None, None, :]
        return self.visible & function(zero, zero, queries, keys)


class _Trunk(Forward):
    """The model without its head, under any pass of ours."""

    def features(self, tokens: Tensor, running: Pass) -> Tensor:
        """What the LM head would read, (N, D), from tokens (1, N) written behind `running.past`."""
        caught = list[Tensor]()

        def catch(_: Any, given: tuple[Tensor, ...]) -> None:
            caught.append(given[0])
            raise Caught

        if self.limit is not None:
            self.limit.before_pass()
        self.cache.begin(slice(0, 1), running.past, tokens.shape[1])
        hook = self.head.register_forward_pre_hook(catch)
        try:
            with torch.inference_mode(), active(running):
                self.own(
                    input_ids=tokens,
                    position_ids=running.positions,
                    use_cache=True,
                    **{self._cache_name: self.cache},
                )
        except Caught:
            pass
        finally:
            hook.remove()
        return caught[0][0]


class Continuer:
    """Continues every position of texts by the target's first choices.

    model: a Hugging Face model, left as it is. steps: T. end_tokens: after which nothing is said.
    passes: how many the target has taken so far.
    """

    def __init__(self, model: Any, steps: int, end_tokens: Collection[int], said: Said | None = None) -> None:
        """Raises: UnsupportedModel where the model cannot run through our cache and attention."""
        self.forward = _Trunk(model)
        self.steps, self.said = steps, said or Said()
        self.passes = 0
        self._ends = torch.tensor(sorted(end_tokens), dtype=torch.int64, device=self.forward.device)

    @property
    def longest(self) -> int | None:
        """Tokens of the longest text, where a rotary scheme would change beyond."""
        limit = self.forward.limit
        return None if limit is None else max(1, limit.at - self.steps)

    def continuations(self, ids: Sequence[int], first: int = 0) -> tuple[Tensor, Tensor]:
        """For each position i from `first` on: tokens (P, T+1) int64 and features (P, T+1, D).

        Token 0 is what the target says after token i, the root; token t follows token t - 1. The
        feature beside each token is the one that it was chosen from. NOTHING stands after an end token.
        """
        device, count = self.forward.device, len(ids)
        at = torch.arange(first, count, device=device)
        branches = len(at)
        self.forward.cache.reserve(1, count + branches * self.steps, exact=True)
        text = torch.tensor([list(ids)], dtype=torch.int64, device=device)
        positions = torch.arange(count, device=device)[None]
        hidden = [self._run(text, Pass(positions, causal(count, device), None, 0, count - 1))[first:]]
        tokens = [self._choices(hidden[0])]
        prefix = positions <= at[:, None]
        own = torch.eye(branches, dtype=torch.bool, device=device)
        keys, visible = positions[0], prefix
        for t in range(1, self.steps + 1):
            places = at + t
            keys, visible = torch.cat([keys, places]), torch.cat([visible, own], dim=1)
            past = count + (t - 1) * branches
            running = BranchPass(places[None], own, None, past, count - 1 + t, visible=visible[None, None], keys=keys)
            hidden.append(self._run(tokens[-1][None], running))
            tokens.append(self._choices(hidden[-1]))
        out = torch.stack(tokens, 1)
        ended = torch.isin(out, self._ends).long().cumsum(1)
        over = torch.nn.functional.pad(ended[:, :-1], (1, 0)) > 0
        return torch.where(over, NOTHING, out), torch.stack(hidden, 1)

    def _run(self, tokens: Tensor, running: Pass) -> Tensor:
        self.passes += 1
        return self.forward.features(tokens, running)

    def _choices(self, hidden: Tensor) -> Tensor:
        """The target's first choice from each feature, (N,) int64; the lowest id of equals."""
        with torch.inference_mode():
            parts = [self.said(self.forward.head(hidden[i : i + HEAD_ROWS])) for i in range(0, len(hidden), HEAD_ROWS)]
            return torch.cat([part.argmax(-1) for part in parts])


def branches_of(document: Document) -> range:
    """The positions of a document that are continued: those with a feature to begin from, without its last token."""
    return range(max(document.start - 1, 0), max(len(document.tokens) - 1, 0))


def record_local(
    continuer: Continuer,
    documents: Sequence[Document],
    batches: Sequence[Sequence[int]],
    report: Callable[[int], None] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.uint16]]:
    """Of some documents, flat in that order: tokens (P, T+1) int32, features (P · (T+1), D) bfloat16 bits."""
    tokens, hidden = [], []
    for d in (d for batch in batches for d in batch):
        document = documents[d]
        at = branches_of(document)
        said, features = continuer.continuations(document.tokens[: at.stop], at.start)
        tokens.append(said.to(torch.int32).cpu().numpy())
        hidden.append(bits_of(features.flatten(0, 1)))
        if report:
            report(len(document.tokens))
    return np.concatenate(tokens), np.concatenate(hidden)


class LocalFeatures(Features):
    """Features of continuations. A position is the number of a branch; branch p has rows p · (T+1) … of `hidden`.

    branches: (P, T+1) int32, the root and what follows; `offsets` counts branches.
    """

    def __init__(
        self,
        hidden: Any,
        branches: NDArray[np.int32],
        offsets: NDArray[np.int64],
        documents: NDArray[np.int32],
        said: Said | None = None,
        named: Sequence[str] = (),
    ) -> None:
        super().__init__(hidden, branches.reshape(-1), offsets, documents, "distribution", said, named)
        self.branches = branches

    def segments(self, length: int, held_out: bool) -> NDArray[np.int64]:
        """(segments, 3): first branch, one past the last, and the document's end."""
        out = [
            (i, min(i + length, int(self.offsets[d + 1])), int(self.offsets[d + 1]))
            for d, (_, _, _, held) in enumerate(self.documents)
            if bool(held) == held_out
            for i in range(int(self.offsets[d]), int(self.offsets[d + 1]), length)
        ]
        return np.array(out, np.int64).reshape(-1, 3)

    def row_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions * self.branches.shape[1]

    def count(self, kind: str) -> int:
        """Branches of one kind of document."""
        return sum(
            int(self.offsets[d + 1] - self.offsets[d])
            for d, (_, _, k, held) in enumerate(self.documents)
            if k == KINDS.index(kind) and not held
        )

    def counted(self) -> Iterator[tuple[NDArray[np.int32], float]]:
        """The root of every branch: what the target says at each position, once."""
        yield self.branches[:, 0], 1.0

    def learned(self) -> NDArray[np.int64]:
        """The rows at which branches begin."""
        return self.at_hand(self.row_of(np.arange(len(self.branches))))

    def places(self, segments: NDArray[np.int64], steps: int) -> Places:
        at = np.concatenate([np.arange(a, b) for a, b, _ in segments])
        most = self.branches.shape[1]
        tokens = np.full((len(at), steps + 1), NOTHING, np.int32)
        tokens[:, : min(most, steps + 1)] = self.branches[at, : steps + 1]
        rows = self.row_of(at)[:, None] + np.minimum(np.arange(steps + 1), most - 1)
        # tokens[t] was chosen from the feature beside it; where nothing was said, the branch's first stands in
        inside = tokens != NOTHING
        return Places(rows[:, 0], tokens, inside, np.where(inside[:, 1:], rows[:, 1:], rows[:, :1]))
