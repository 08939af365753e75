"""Where a corpus keeps its features: which documents lie in which files, what is missing, what is streamed.

Kept apart by what is learned from them: answers, texts, continuations of texts, held-out answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from portadraft.core.target import Target
from portadraft.errors import InvalidArgument
from portadraft.training.features import Document, Features
from portadraft.training.local import Continuer, LocalFeatures, branches_of, record_local
from portadraft.training.pieces import write_array
from portadraft.training.progress import Progress
from portadraft.training.recording import BATCH_TOKENS, CHUNK_BYTES, Plan, record_batches
from portadraft.training.said import said_by
from portadraft.training.store import Store, stream_beyond

if TYPE_CHECKING:
    from portadraft.training.corpus import CorpusRequest

NPY_HEADER = 128
"""Bytes before the numbers of a file of features."""

HELD, ANSWERS, TEXTS, LOCAL = "held", "answers", "texts", "local"


class Shelf:
    """One process's part in recording a corpus's features.

    longest: tokens of the longest document. facts: what there is to say about it is added.
    Use: `plan`, then `record`, then, when all processes have recorded, `sources` and `held_out`.
    """

    def __init__(
        self,
        target: Target,
        model: Any,
        end_tokens: Collection[int],
        request: CorpusRequest,
        longest: int,
        folder: Path,
        show: Progress,
        shard: tuple[int, int],
        facts: dict[str, Any],
    ) -> None:
        """Raises: UnsupportedModel where what the model says cannot be computed from features."""
        self.model, self.request, self.longest = model, request, longest
        self.folder, self.show, self.shard, self.facts = folder, show, shard, facts
        self.size, self.context = target.facts.hidden_size, target.facts.context_limit
        self.said = said_by(model)
        self.plans: dict[str, Plan] = {}
        self.stores: dict[str, Store] = {}
        self.reading: list[str] = []
        self._end_tokens = end_tokens
        self._continuer: Continuer | None = None
        self._done = 0
        self._report: Callable[[int], None] = _silent

    def plan(self, answered: list[Document], texts: list[Document], held: list[Document]) -> None:
        """Decide what is recorded for the modes of the request.

        Raises: InvalidArgument if nothing is left to train on, or the limit of bytes is too low.
        """
        request = self.request
        mix = request.mix or {"sequence": 1.0, "text": 1.0}
        self.reading = [mode for mode in ("text", "ground-truth") if mode in mix] if texts else []
        rows = self._rows()
        for name, documents in ((HELD, held), (ANSWERS, answered), (TEXTS, texts if self.reading else [])):
            if documents:
                self.plans[name] = Plan(documents, rows, min(BATCH_TOKENS, rows), request.seed)
        if "local" in mix and texts:
            self._continuer = Continuer(self.model, request.steps, self._end_tokens, self.said)
            cut = self._cut_for(self._continuer, texts)
            each = [len(branches_of(d)) * (request.steps + 1) for d in cut]
            self.plans[LOCAL] = Plan(cut, rows, 1, request.seed, each)  # a text at a time
        if not set(self.plans) - {HELD}:
            raise InvalidArgument("data: nothing is left to train on; pass more or longer texts")
        streamed = self._streamed()
        for name, plan in self.plans.items():
            make = self._local if name == LOCAL else self._plain(plan)
            self.stores[name] = Store(self.folder, name, plan.bounds, self.size, make, streamed[name], self.shard[0])
            passes = plan.passes if name != LOCAL else len(plan.order) * (request.steps + 1)
            self.facts["target_passes"] += passes
            self.facts[f"{name}_tokens_read"] = sum(len(d.tokens) for d in plan.documents)

    def record(self) -> None:
        """Record this process's share of what is missing. Raises: OSError for a full disk."""
        work = [(name, c) for name in self.stores for c in self._absent(name)]
        if not work:
            return
        total = sum(self.plans[name].tokens(c) for name, c in work)
        with self.show.task("reading texts", total, "tokens") as report:
            self._done, self._report = 0, report
            for name, c in work:
                store = self.stores[name]
                if c in store.streamed:
                    store.make(c)  # for its tokens; the features are made again when they are needed
                else:
                    store.write(c)
            self._report = _silent

    def sources(self) -> tuple[list[Features], list[str]]:
        """What to train on, and the mode of each."""
        sources: list[Features] = []
        modes: list[str] = []
        if ANSWERS in self.plans:
            sources.append(self.plans[ANSWERS].features(self.stores[ANSWERS], "distribution", self.said))
            modes.append("sequence")
        for mode in self.reading:
            teaching: Any = "tokens" if mode == "ground-truth" else "distribution"
            sources.append(self.plans[TEXTS].features(self.stores[TEXTS], teaching, self.said))
            modes.append(mode)
        if LOCAL in self.plans:
            plan, store = self.plans[LOCAL], self.stores[LOCAL]
            branches = np.concatenate([np.load(self._tokens(c), allow_pickle=False) for c in range(len(plan.chunks))])
            offsets = np.cumsum([0, *(len(branches_of(d)) for d in plan.laid)]).astype(np.int64)
            sources.append(LocalFeatures(store, branches, offsets, plan.table, self.said, plan.places))
            modes.append("local")
        return sources, modes

    def held_out(self) -> Features | None:
        """The held-out answers."""
        return self.plans[HELD].features(self.stores[HELD], "distribution", self.said) if HELD in self.plans else None

    # how large

    def _rows(self) -> int:
        """Of features in one file."""
        limit, bytes_each = self.request.cache_bytes, 2 * self.size
        most = CHUNK_BYTES if limit is None else min(CHUNK_BYTES, limit // (16 * self.shard[1]))
        return max(1, most // bytes_each)

    def _streamed(self) -> dict[str, list[int]]:
        """Which chunks of each store go beyond the limit; the held-out answers are always kept."""
        limit, facts = self.request.cache_bytes, self.facts
        sizes = {name: [NPY_HEADER + 2 * self.size * n for n in plan.rows] for name, plan in self.plans.items()}
        facts["feature_bytes"] = sum(map(sum, sizes.values()))
        out: dict[str, list[int]] = {name: [] for name in self.plans}
        if limit is None:
            return out
        held = sum(sizes.pop(HELD, []))
        found = stream_beyond(list(sizes.values()), limit - held, self.shard[1])
        if isinstance(found, int):
            raise InvalidArgument(
                f"cache_bytes={limit}: too little even to record one part after another; expected at least "
                f"{held + found}, or a lower max_length or held_out"
            )
        out |= dict(zip(sizes, found, strict=True))
        facts["streamed_bytes"] = sum(sizes[name][c] for name in sizes for c in out[name])
        if facts["streamed_bytes"]:
            self.show.say(
                f"{facts['streamed_bytes'] / 2**20:.1f} of {facts['feature_bytes'] / 2**20:.1f} MiB of features are "
                "beyond the limit of the disk cache: they are recorded again in every epoch"
            )
        return out

    def _cut_for(self, continuer: Continuer, texts: Sequence[Document]) -> list[Document]:
        """Texts whose continuations stay within the context and the model's rotary scheme."""
        limit, steps = self.context, self.request.steps
        longest = min(self.longest, continuer.longest or self.longest, limit - steps if limit else self.longest)
        out = [
            Document(d.tokens[:longest], d.start, min(d.answer, longest), d.kind, place=d.place)
            for d in texts
            if min(len(d.tokens), longest) >= d.start + 2
        ]
        self.facts["local_texts_cut"] = sum(len(d.tokens) > longest for d in texts)
        if not out:
            raise InvalidArgument(
                f"steps={steps}: no text leaves room for so many tokens more within the model's context of {limit} "
                f"and max_length={self.request.max_length}"
            )
        return out

    # recording

    def _plain(self, plan: Plan) -> Callable[[int], NDArray[np.uint16]]:
        return lambda c: record_batches(self.model, plan.documents, plan.chunks[c], self._more)

    def _local(self, chunk: int) -> NDArray[np.uint16]:
        plan = self.plans[LOCAL]
        assert self._continuer is not None
        tokens, hidden = record_local(self._continuer, plan.documents, plan.chunks[chunk], self._more)
        if not self._tokens(chunk).exists():
            write_array(self._tokens(chunk), tokens)
        return hidden

    def _more(self, tokens: int) -> None:
        self._done += tokens
        self._report(self._done)

    def _tokens(self, chunk: int) -> Path:
        """Where the tokens of a chunk of continuations lie: they are always kept."""
        return self.folder / f"{LOCAL}-tokens-{chunk:05d}.npy"

    def _absent(self, name: str) -> list[int]:
        store = self.stores[name]
        missing = set(store.absent(self.shard))
        if name == LOCAL:
            chunks = range(self.shard[0], len(store.bounds) - 1, self.shard[1])
            missing |= {c for c in chunks if not self._tokens(c).exists()}
        return sorted(missing)


def _silent(_: int) -> None: ...
