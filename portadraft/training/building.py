"""The stages of building a corpus: prompts, answers, documents, features. See `corpus`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from portadraft.core.sampling import row_seed
from portadraft.core.target import Target
from portadraft.errors import InvalidArgument
from portadraft.text import TextCodec
from portadraft.training import data as files
from portadraft.training import prompts as written
from portadraft.training.corpus import Corpus, CorpusRequest
from portadraft.training.documents import Encoder, Prompt, split_held_out, within
from portadraft.training.features import Document, Features
from portadraft.training.generate import generate
from portadraft.training.modes import OF_TEXTS
from portadraft.training.pieces import Groups, claim, sweep
from portadraft.training.progress import Progress
from portadraft.training.shelf import Shelf

GROUP = 8
"""A group of answers holds so many times as many as are generated at once; a kill loses one group."""

SPARE = 1.25
"""How many prompts the target writes for one that is wanted: some are empty, unended or repeated."""

SAMPLED_PROMPTS, SAMPLED_ANSWERS = 1 << 32, 2 << 32
"""Which seeds derived from the request's prompts and answers are sampled with."""


class Builder:
    """One process's part in building a corpus; see `corpus.build_corpus` for the arguments."""

    def __init__(
        self,
        target: Target,
        model: Any,
        codec: TextCodec,
        request: CorpusRequest,
        folder: Path,
        show: Progress,
        shard: tuple[int, int],
        barrier: Callable[[], None],
    ) -> None:
        self.target, self.model, self.codec, self.request = target, model, codec, request
        self.folder, self.show, self.shard, self.barrier = folder, show, shard, barrier
        limit = target.facts.context_limit
        self.longest = request.max_length if limit is None else min(request.max_length, limit)
        self.encoder = Encoder(codec, self.longest, target.facts.vocabulary_size)
        self.facts: dict[str, Any] = {"generated_tokens": 0, "target_passes": 0}

    def build(self) -> Corpus:
        request = self.request
        data, texts = self._read(request.data), self._read(request.text)
        self.folder.mkdir(parents=True, exist_ok=True)
        claim(self.folder, self._settings(), self.shard[0])
        if self.shard[0] == 0:
            sweep(self.folder)
        self.barrier()
        if not data and not texts:
            if set(request.mix) - {"sequence"}:
                raise InvalidArgument(
                    f"mix={dict(request.mix)!r}: {', '.join(sorted(set(request.mix) - {'sequence'}))} needs texts; "
                    "pass files as data= or text="
                )
            data = self._own_prompts()
        asking, reading = self._split(data, texts)
        answered, held, held_keys = self._answers(asking, reading)
        documents = self._texts([row for row in reading if row.key not in held_keys])
        self._tell()
        shelf = Shelf(
            self.target, self.model, self.codec.end_tokens, self.request, self.longest, self.folder, self.show,
            self.shard, self.facts,
        )  # fmt: skip
        shelf.plan(answered, documents, held)
        shelf.record()
        self.barrier()
        sources, modes = shelf.sources()
        return Corpus(sources, self._weights(sources, modes), shelf.held_out(), self.facts)

    # rows

    def _read(self, paths: Sequence[str | Path]) -> list[files.Row]:
        return [row for path in paths for row in files.read_rows(path, self.request.rows)]

    def _settings(self) -> dict[str, Any]:
        """All that decides what the corpus holds."""
        digests = {
            str(path): hashlib.sha256(Path(path).read_bytes()).hexdigest()
            for path in (*self.request.data, *self.request.text)
            if not files.names_dataset(path)
        }
        facts = self.target.facts
        model = [facts.architecture_id, facts.weights_id, facts.dtype, facts.vocabulary_size, facts.hidden_size]
        return asdict(self.request) | {"files": digests, "model": model}

    def _own_prompts(self) -> list[files.Row]:
        """Prompts that the target writes, in place of data."""
        request, seed = self.request, written.seed_of(self.codec)
        base = row_seed(request.seed, SAMPLED_PROMPTS)
        count = int(SPARE * request.own_prompts + 1)
        groups = Groups(self.folder, "prompts", self.shard)
        size = GROUP * request.batch
        longest = min(seed.longest, self.longest - len(seed.ids))
        if longest < 1:
            raise InvalidArgument(f"max_length={request.max_length}: too short for a prompt of the model's own")
        with self._task("writing prompts", count, "prompts") as advance:
            for group in groups.missing(-(-count // size)):
                some = range(group * size, min((group + 1) * size, count))
                made = generate(
                    self.target, [seed.ids] * len(some), [longest] * len(some), seed.end_tokens, batch=request.batch,
                    temperature=1.0, seeds=[row_seed(base, i + 1) for i in some], report=advance.part,
                )  # fmt: skip
                advance.add(len(some))
                texts = [written.read(self.codec, seed, ids) for ids in made.tokens]
                groups.add(group, {"texts": texts, "tokens": sum(map(len, made.tokens)), "passes": made.passes})
        self.barrier()
        done = groups.all(-(-count // size))
        self._count("generated_tokens", sum(g["tokens"] for g in done))
        self._count("target_passes", sum(g["passes"] for g in done))
        kept = written.distinct([text for g in done for text in g["texts"]])[: request.own_prompts]
        self.facts |= {"prompts_written": count, "prompts_kept": len(kept)}
        if not kept:
            raise InvalidArgument(
                "data=None: the model wrote no prompt that could be used; pass files of prompts or texts as data="
            )
        return [files.Row(text, source="self", where=f"prompt {i} of the model's own") for i, text in enumerate(kept)]

    def _split(self, data: list[files.Row], texts: list[files.Row]) -> tuple[list[files.Row], list[files.Row]]:
        """Rows whose prompts are answered, and rows whose texts are read, for the request's modes."""
        mix = self.request.mix
        if texts and not files.texts_only(texts):
            raise InvalidArgument("text: no row has a `text` or a `reference`; pass files of prompts as data=")
        if not mix:
            return [r for r in data if r.asks], [*files.texts_only(texts), *(r for r in data if not r.asks)]
        asking = (data or texts) if "sequence" in mix else []
        reading = files.texts_only([*texts, *data]) if set(mix) & set(OF_TEXTS) else []
        if set(mix) & set(OF_TEXTS) and not reading:
            wanting = next(mode for mode in mix if mode in OF_TEXTS)
            raise InvalidArgument(
                f"mix={dict(mix)!r}: {wanting!r} needs texts, but no row has a `text`, a `reference` or an answer; "
                "pass files of texts as text="
            )
        return asking, reading

    # answers

    def _answers(
        self, asking: Sequence[files.Row], reading: Sequence[files.Row]
    ) -> tuple[list[Document], list[Document], set[str]]:
        """The target's answers to train on, the held-out ones, and the keys of held-out rows."""
        request = self.request
        prompts = self.encoder.prompts(asking)
        keys = split_held_out([p.key for p in prompts] or [row.key for row in reading], request.held_out)
        if asking:
            held, rest = [p for p in prompts if p.key in keys], [p for p in prompts if p.key not in keys]
        else:
            held, rest = self.encoder.prompts([row for row in reading if row.key in keys]), []
        if asking and not rest:
            raise InvalidArgument(
                f"data: none of its {len(asking)} rows leaves a prompt to train on "
                f"({self.encoder.counts['prompts_too_long']} too long for max_length={self.longest}, "
                f"{self.encoder.counts['prompts_repeated']} repeated, {len(held)} held out)"
            )
        answers = self._answered(held, "held", 0.0), self._answered(rest, "answers", request.temperature)
        out: list[list[Document]] = []
        for some, replies, apart in ((held, answers[0], True), (rest, answers[1], False)):
            found = [self.encoder.answered(p, ids, apart) for p, ids in zip(some, replies, strict=True)]
            out.append([d for d in found if d is not None])
        self.facts["answers_empty"] = len(rest) - len(out[1])
        if asking and not out[1]:
            raise InvalidArgument("data: every answer of the model is empty, so there is nothing to train on")
        return out[1], out[0], keys

    def _answered(self, prompts: Sequence[Prompt], name: str, temperature: float) -> list[Sequence[int]]:
        """Each prompt's answer: recorded before, or generated, in groups that are complete or absent."""
        request = self.request
        answers: list[Sequence[int]] = [p.answer or () for p in prompts]
        open_ones = [i for i, p in enumerate(prompts) if p.answer is None]
        groups = Groups(self.folder, name, self.shard)
        size = GROUP * request.batch
        count = -(-len(open_ones) // size)
        base = row_seed(request.seed, SAMPLED_ANSWERS)
        if count:
            with self._task(
                f"generating {'held-out ' * (name == 'held')}answers", len(open_ones), "answers"
            ) as advance:
                missing = groups.missing(count)
                advance.add(max(0, len(open_ones) - size * len(missing)))
                for group in missing:
                    some = open_ones[group * size : (group + 1) * size]
                    most = [min(request.max_answer, self.longest - len(prompts[i].ids)) for i in some]
                    seeds = [row_seed(base, i + 1) for i in some] if temperature else None
                    made = generate(
                        self.target, [prompts[i].ids for i in some], most, self.codec.end_tokens,
                        batch=request.batch, temperature=temperature, seeds=seeds, report=advance.part,
                    )  # fmt: skip
                    advance.add(len(some))
                    groups.add(group, {"answers": made.tokens, "passes": made.passes})
        self.barrier()
        done = groups.all(count)
        for i, ids in zip(open_ones, (ids for g in done for ids in g["answers"]), strict=True):
            answers[i] = ids
        self._count("generated_tokens", sum(len(ids) for g in done for ids in g["answers"]))
        self._count("target_passes", sum(g["passes"] for g in done))
        return answers

    # texts

    def _texts(self, rows: Sequence[files.Row]) -> list[Document]:
        if not rows:
            return []
        documents = within(self.encoder.texts(rows), self.request.text_tokens, self.request.seed)
        if not documents:
            raise InvalidArgument(
                f"text: none of {len(rows)} texts leaves anything to learn from within max_length={self.longest} tokens"
            )
        return documents

    def _tell(self) -> None:
        """What was cut or left out."""
        counts = self.encoder.counts
        self.facts |= {name: counts[name] for name in sorted(counts) if counts[name]}
        for name, says in _SAID.items():
            if counts[name]:
                self.show.say(f"{counts[name]} {says.format(longest=self.longest)}")

    # mixture

    def _weights(self, sources: Sequence[Features], modes: Sequence[str]) -> list[float]:
        """What part of each source an epoch visits: all of each, or such parts that positions are as in the mixture."""
        positions = []
        for source, mode in zip(sources, modes, strict=True):
            segments = source.segments(1 << 30, held_out=False)
            positions.append(int((segments[:, 1] - segments[:, 0]).sum()))
            if not positions[-1]:
                raise InvalidArgument(f"data: no position is left to train on by {mode!r}; pass more or longer texts")
        mix = self.request.mix
        weights = [1.0] * len(sources)
        if mix:
            rates = [mix[mode] / n for mode, n in zip(modes, positions, strict=True)]
            weights = [rate / max(rates) for rate in rates]
        by_mode = zip(modes, sources, positions, weights, strict=True)
        self.facts["modes"] = {
            mode: {"positions": n, "share_of_an_epoch": round(weight, 4), "documents": len(source)}
            for mode, source, n, weight in by_mode
        }
        self.facts["answer_tokens"] = sum(
            s.count("answer") for s, m in zip(sources, modes, strict=True) if m != "local"
        )
        self.facts["text_tokens"] = max(
            (s.count("text") for s, m in zip(sources, modes, strict=True) if m != "local"), default=0
        )
        return weights

    # helpers

    def _count(self, name: str, more: int) -> None:
        self.facts[name] = self.facts.get(name, 0) + more

    @contextmanager
    def _task(self, name: str, total: int, unit: str) -> Iterator[_Advance]:
        with self.show.task(name, total, unit) as report:
            yield _Advance(report)


class _Advance:
    """Counts what is done of a stage: whole groups, and how far the present one is."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report, self._done = report, 0

    def add(self, more: int) -> None:
        self._done += more
        self._report(self._done)

    def part(self, done: int) -> None:
        self._report(self._done + done)


_SAID = {
    "prompts_too_long": "prompts are longer than {longest} tokens and are left out",
    "prompts_repeated": "rows repeat a prompt and are left out",
    "texts_cut": "texts are cut at {longest} tokens",
    "texts_split": "texts are longer than {longest} tokens and are split",
    "texts_too_short": "texts are too short to learn from and are left out",
}
