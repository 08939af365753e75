"""What a drafter learns from: from a model and what the user asked for to recorded features.

A corpus is built in a folder, stage by stage, and every stage consists of pieces that are
complete or absent: prompts and answers are appended to files group by group, features are
written chunk by chunk. So a run that was killed goes on where it was, and makes the same bytes
as one that was not. The stages themselves stand in `building`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from portadraft.core.target import Target
from portadraft.errors import InvalidArgument
from portadraft.text import TextCodec
from portadraft.training import vocabulary
from portadraft.training.features import Features
from portadraft.training.modes import MODES, check_mix, parse_mix
from portadraft.training.progress import Progress
from portadraft.tuner.replay import Recording

__all__ = ["MODES", "Corpus", "CorpusRequest", "build_corpus", "parse_mix"]


@dataclass(frozen=True)
class CorpusRequest:
    """What the user asked for. Everything that decides what the corpus holds; equal requests make equal corpora.

    data: files of rows (JSONL), of plain text (.txt, .md), or names of Hugging Face datasets; none at
        all: the target writes its own prompts. See `portadraft.training.data.read_rows`.
    text: more of the same, from which only texts are taken (the modes but "sequence").
    mix: weight of each mode (see MODES): shares of the positions that an epoch visits. Empty: answers
        to the prompts of `data` and the texts of `text`, each once.
    temperature: of the answers to learn from; 0 is greedy. Held-out answers are always greedy.
    own_prompts: how many prompts the target writes where neither `data` nor `text` is given.
    max_answer: the most tokens of a generated answer. max_length: of a document.
    text_tokens: the most tokens of texts to learn from. rows: the most rows of one file or dataset.
    steps: T, drafting steps, for which "local" targets are made.
    held_out: the most held-out answers. batch: answers generated at once.
    cache_bytes: the most bytes of recorded features on disk; what goes beyond is recorded again in
        every epoch. None: no limit.
    """

    data: Sequence[str | Path] = ()
    text: Sequence[str | Path] = ()
    mix: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 0.0
    own_prompts: int = 2000
    max_answer: int = 224
    max_length: int = 1024
    text_tokens: int | None = None
    rows: int | None = None
    steps: int = 5
    held_out: int = 100
    batch: int = 32
    seed: int = 0
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("data", "text"):
            value = getattr(self, name)
            listed = [value] if isinstance(value, (str, Path)) else list(value or ())
            object.__setattr__(self, name, tuple(str(path) for path in listed))
        object.__setattr__(self, "mix", check_mix(self.mix or {}))
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidArgument(f"temperature={self.temperature!r}: expected a finite number of at least 0")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in ("text_tokens", "rows", "cache_bytes"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidArgument(f"{name}={value!r}: expected an integer of at least {least}")


_LEAST = {
    "own_prompts": 1, "max_answer": 1, "max_length": 3, "text_tokens": 1, "rows": 1, "steps": 1, "held_out": 0,
    "batch": 1, "seed": 0, "cache_bytes": 1,
}  # fmt: skip


@dataclass
class Corpus:
    """What there is to learn from.

    sources: one for each mode. weights: the share of each source's segments that an epoch visits.
    held_out: documents with the target's greedy answers, which are not trained on; None without any.
    facts: plain JSON for the bill: tokens generated, passes of the target, tokens and positions
    by mode, what was cut or left out, bytes on disk.
    """

    sources: list[Features]
    weights: list[float]
    held_out: Features | None
    facts: dict[str, Any]

    def recordings(self) -> list[Recording]:
        """The held-out answers, for replay."""
        return [] if self.held_out is None else self.held_out.recordings()

    def jobs(self, positions: int, segment: int, rng: np.random.Generator) -> list[tuple[Features, NDArray[np.int64]]]:
        """The updates of one epoch in their order: (source, segments of about `positions` positions).

        The next call with the same generator gives the next epoch, of as many jobs. Several processes
        make the same list and take every world-th entry. Use this rather than the sources' own
        segments: where features are streamed, the order keeps those together that are recorded together.
        """
        per = max(1, positions // segment)
        queues = [
            _in_order(source, source.segments(segment, held_out=False), weight, per, rng)
            for source, weight in zip(self.sources, self.weights, strict=True)
        ]
        # Shuffled together, each queue keeping its own order.
        flat = [queue for source in queues for queue in source]
        turns = rng.permutation(np.repeat(np.arange(len(flat)), [len(queue) for _, queue in flat]))
        waiting = [iter(queue) for _, queue in flat]
        return [(flat[k][0], next(waiting[k])) for k in turns.tolist()]

    def choose_vocabulary(
        self, target: Target, size: int, always: Iterable[int], seed: int = 0, name: str = "draft_vocabulary"
    ) -> NDArray[np.int32]:
        """The draft vocabulary for this corpus; what it covers of the held-out answers is added to `facts`.

        Raises: InvalidArgument for a size that is larger than the vocabulary or does not hold `always`.
        """
        whole = target.facts.vocabulary_size
        counted = vocabulary.counts(self.sources, whole)
        mean = vocabulary.mean_prediction(self.sources, target.head_rows(), target.head_bias(), seed=seed)
        chosen = vocabulary.choose(counted, mean, size, always, name=name)
        covered = vocabulary.coverage(chosen, [r.tokens for r in self.recordings()], whole)
        self.facts["coverage_held_out"] = None if math.isnan(covered) else round(covered, 4)
        return chosen


def _in_order(
    source: Features, segments: NDArray[np.int64], weight: float, per: int, rng: np.random.Generator
) -> list[tuple[Features, list[NDArray[np.int64]]]]:
    """One queue of updates for the segments whose features are at hand, and one for those that are streamed,
    chunk after chunk."""

    def some(segments: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        taken = segments[rng.permutation(len(segments))[: math.ceil(len(segments) * weight)]]
        return [taken[i : i + per] for i in range(0, len(taken), per)]

    chunks = source.chunk_of(segments)
    streamed: list[NDArray[np.int64]] = []
    for chunk in rng.permutation(np.unique(chunks[chunks >= 0])).tolist():
        streamed += some(segments[chunks == chunk])
    return [(source, some(segments[chunks < 0])), (source, streamed)]


def build_corpus(
    target: Target,
    model: Any,
    codec: TextCodec,
    request: CorpusRequest,
    folder: Path,
    show: Progress,
    shard: tuple[int, int] = (0, 1),
    barrier: Callable[[], None] = lambda: None,
) -> Corpus:
    """Build a corpus in `folder`, or go on with one that was begun there.

    model: the Hugging Face model behind the target. shard: (rank, number of processes): each makes
    its share of prompts, answers and features in the same folder, which all must see. barrier:
    waits for all processes; called between the stages and at the end.

    Raises: InvalidArgument for data that cannot be used, naming file and line, and for a folder
    that holds another request's work; ModelNotFound for a file that does not exist;
    MissingDependency for a dataset's name without `datasets`; OSError for a full disk.
    """
    from portadraft.training.building import Builder

    return Builder(target, model, codec, request, folder, show, shard, barrier).build()
