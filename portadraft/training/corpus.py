"""What a drafter learns from: from a model and what the user asked for to recorded features.

A corpus is built in a folder, stage by stage, and every stage consists of pieces that are
complete or absent: prompts and answers are appended to files group by group, features are
written chunk by chunk. So a run that was killed goes on where it was, and makes the same bytes
as one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from portadraft.core.target import Target
from portadraft.errors import InvalidArgument
from portadraft.text import TextCodec
from portadraft.training import data as files
from portadraft.training.features import Features, record
from portadraft.training.generate import greedy_answers
from portadraft.training.progress import Progress
from portadraft.tuner.replay import Recording

MODES = ("sequence", "text", "local", "ground-truth")
"""What a drafter may imitate: the target's own answers; its distributions over a given text; what
it would say next at each position of a given text; the text itself."""


@dataclass(frozen=True)
class CorpusRequest:
    """What the user asked for. Everything that decides what the corpus holds; equal requests make equal corpora.

    data: files of rows (JSONL), of plain text (.txt, .md), or names of Hugging Face datasets; none at
        all: the target writes its own prompts.
    text: more of the same, from which only texts are taken (the modes but "sequence").
    mix: weight of each mode (see MODES): shares of the positions that are trained on. Empty: what
        the rows allow, each once.
    temperature: of the answers to learn from; 0 is greedy. Held-out answers are always greedy.
    own_prompts: how many prompts the target writes where no `data` is given.
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


@dataclass
class Corpus:
    """What there is to learn from.

    sources: one for each mode. weights: the share of each source's segments that an epoch visits.
    held_out: documents with the target's greedy answers, which are not trained on.
    facts: plain JSON for the bill: tokens generated, passes of the target, tokens and positions
    by mode, what was cut or left out, bytes on disk.
    """

    sources: list[Features]
    weights: list[float]
    held_out: Features
    facts: dict[str, Any]

    def recordings(self) -> list[Recording]:
        """The held-out answers, for replay."""
        return self.held_out.recordings()

    def jobs(self, positions: int, segment: int, rng: np.random.Generator) -> list[tuple[Features, NDArray[np.int64]]]:
        """The updates of one epoch in their order: (source, segments of about `positions` positions).

        The next call with the same generator gives the next epoch. Several processes make the same
        list and take every world-th entry. Use this rather than the sources' own segments: where
        features are streamed, the order keeps those together that are recorded together.
        """
        out: list[tuple[Features, NDArray[np.int64]]] = []
        per = max(1, positions // segment)
        for source, weight in zip(self.sources, self.weights, strict=True):
            segments = source.segments(segment, held_out=False)
            segments = segments[rng.permutation(len(segments))[: int(len(segments) * weight)]]
            out += [(source, segments[i : i + per]) for i in range(0, len(segments), per)]
        return [out[k] for k in rng.permutation(len(out))]


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
    rows = [row for path in request.data for row in files.read_rows(path)]
    texts = [row for path in request.text for row in files.read_rows(path)]
    prompts = {i: codec.encode_prompt(row.prompt) for i, row in enumerate(rows) if row.answer_ids is None}
    with show.task("generating answers", len(prompts), "answers") as advance:
        made = greedy_answers(
            target, list(prompts.values()), request.max_answer, codec.end_tokens, request.batch, report=advance
        )
    answers: list[Sequence[int]] = [row.answer_ids or () for row in rows]
    for i, ids in zip(prompts, made, strict=True):
        answers[i] = ids
    size = target.facts.vocabulary_size
    documents = list(files.answer_documents(rows, answers, codec, request.max_length, size))
    end = min(codec.end_tokens, default=None)
    documents += files.within(files.text_documents(texts, codec, request.max_length, end), request.text_tokens)
    if not documents:
        raise InvalidArgument("data: nothing is left to train on")
    with show.task("reading texts", sum(len(d.tokens) for d in documents), "tokens") as advance:
        features = record(model, documents, folder / "features", seed=request.seed, report=advance)
    barrier()
    return Corpus([features], [1.0], features, {"generated_tokens": sum(map(len, made))})
