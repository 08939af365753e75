"""The stages of one run, each of which goes on where it was stopped: text, draft vocabulary, training, the end."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.types import BeamShape
from portadraft.drafters.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from portadraft.training import bill, vocabulary
from portadraft.training.budget import parse_budget
from portadraft.training.config import BLOCKS, DRAFT_VOCABULARY, FitConfig, TrainConfig, config_from_json
from portadraft.training.corpus import Corpus, CorpusRequest, build_corpus
from portadraft.training.distributed import Processes
from portadraft.training.finish import computation, costs_of, facts_of, final_figures, head_for
from portadraft.training.loop import FitResult, fit
from portadraft.training.progress import Progress
from portadraft.training.resume import write_whole
from portadraft.training.teacher import load_teacher
from portadraft.training.work import BEST, CORPUS, REQUEST, STATE, VOCABULARY, Clock, check_same, discard
from portadraft.tuner.replay import Recording

SHAPES = (BeamShape(4, 4), BeamShape(1, 4), BeamShape(4, 4, 8))
"""Replayed at every evaluation; the first decides which parameters are kept. Wider ones would cost too much."""

LEAST_TRAINING = 0.25
"""The share of a time budget that training has at least, however long reading and generating took."""
GENERATING = 0.4
"""The share of a time budget that may go to prompts and answers of the model's own."""


@dataclass(frozen=True)
class Trained:
    """What came out: where, how good on held-out answers (tokens per step by shape), and the bill."""

    folder: Path
    tokens_per_step: dict[str, float]
    training: dict[str, Any]


class Stages:
    """The stages of one run, as one of its processes goes through them.

    made_something: whether there is work that would be a loss.
    """

    made_something = False

    def __init__(
        self,
        out: Path,
        folder: Path,
        request: dict[str, Any],
        processes: Processes,
        progress: bool,
    ) -> None:
        self.out, self.folder, self.request, self.processes = out, folder, request, processes
        self.config: TrainConfig = config_from_json(request["config"])
        self.start = None if request["init"] is None else read_checkpoint(request["init"])
        self.clock = Clock(folder, processes.main)
        self.show = Progress(progress and processes.main, self.clock.tick)

    def all(self, device: str) -> Trained:
        """Run them all, in every process alike. device: where this one computes."""
        self.teacher = load_teacher(self.request["model"], self.request["dtype"], device)
        self.target, self.identity = self.teacher.target, self.teacher.identity
        self._check_target()
        self.teacher.check_sizes(self.config)
        corpus = self._corpus()
        self.made_something = True
        chosen = self._vocabulary(corpus)
        architecture = self._architecture(len(chosen))
        result = self._fit(corpus, chosen, architecture)
        # The other processes have no part in what follows, but give the same answer.
        checkpoint = self._checkpoint(result.params, chosen, architecture, {})
        trained = self._finish(corpus, checkpoint, result) if self.processes.main else None
        shared = self.processes.agree(None if trained is None else [trained.tokens_per_step, trained.training])
        return Trained(self.out, *shared)

    def _check_target(self) -> None:
        """The same model as in the sessions before, and one that the given drafter belongs to."""
        facts, path = asdict(self.identity) | {"dtype": self.target.facts.dtype}, self.folder / "target.json"
        if path.exists():
            check_same(self.folder, {"model": json.loads(path.read_text("utf-8"))}, {"model": facts})
        elif self.processes.main:
            write_whole(path, json.dumps(facts).encode())
        if self.start is not None:
            self.teacher.check_start(self.start, self.request["init"])

    # text and targets

    def _corpus(self) -> Corpus:
        config, processes = self.config, self.processes
        budget = parse_budget(config.budget) if config.budget else None
        own = self.request.get("own_prompts")
        if own is None:
            own = config.own_prompts or 2000
            if not self.request["data"] and config.own_prompts is None and budget and budget.seconds:
                own = self._affordable_prompts(budget.seconds)
            own = processes.agree(own)
            if processes.main:
                self.request["own_prompts"] = own
                write_whole(self.folder / REQUEST, json.dumps(self.request, indent=1).encode())
        wanted = CorpusRequest(
            data=self.request["data"],
            text=self.request["text"],
            mix=config.mix,
            temperature=config.temperature,
            own_prompts=own,
            max_answer=config.max_answer,
            max_length=config.max_length,
            text_tokens=config.text_tokens,
            rows=config.rows,
            steps=config.fit.loss.steps,
            held_out=max(100, config.evaluate_answers),
            batch=config.batch,
            seed=config.fit.seed,
            cache_bytes=config.cache_bytes,
        )
        corpus = build_corpus(
            self.target, self.teacher.loaded.model, self.teacher.codec, wanted, self.folder / CORPUS, self.show,
            (processes.rank, processes.world), processes.barrier,
        )  # fmt: skip
        processes.barrier()
        return corpus

    def _affordable_prompts(self, seconds: float) -> int:
        """How many prompts and answers of its own the model can make in its share of the time, by a short trial."""
        from portadraft.training.generate import greedy_answers

        began, ticks = self.clock.seconds, 24
        prompt = self.teacher.codec.encode_prompt("Write a short story about the sea.")
        made = greedy_answers(self.target, [prompt] * self.config.batch, ticks, (), self.config.batch)
        tokens_per_s = sum(map(len, made)) / max(self.clock.seconds - began, 1e-9) * self.processes.world
        each = 48 + 0.7 * self.config.max_answer  # a prompt, and an answer that mostly ends by itself
        return max(8, int(GENERATING * seconds * tokens_per_s / each))

    def _vocabulary(self, corpus: Corpus) -> NDArray[np.int32]:
        """The draft vocabulary: the given drafter's, or chosen once and kept."""
        whole = np.arange(self.identity.vocabulary_size, dtype=np.int32)
        if self.start is not None:
            return whole if self.start.draft_vocabulary is None else self.start.draft_vocabulary
        path, processes = self.folder / VOCABULARY, self.processes
        if processes.main and not path.exists():
            size = min(self.config.draft_vocabulary or DRAFT_VOCABULARY, self.identity.vocabulary_size)
            buffer = io.BytesIO()
            chosen = corpus.choose_vocabulary(self.target, size, self.teacher.always, self.config.fit.seed)
            np.save(buffer, chosen, allow_pickle=False)
            write_whole(path, buffer.getvalue())
        processes.barrier()
        return np.asarray(np.load(path, allow_pickle=False), np.int32)

    def _shipped(self, corpus: Corpus, checkpoint: Checkpoint) -> Checkpoint:
        """The drafter cut to the tokens that are worth most, if that was asked for."""
        size = self.config.ship_vocabulary
        if size is None or size >= checkpoint.config.vocabulary_size:
            return checkpoint
        occurrences = vocabulary.counts(corpus.sources, self.identity.vocabulary_size)
        head, bias = self.target.head_rows(), self.target.head_bias()
        mean = vocabulary.mean_prediction(corpus.sources, head, bias, seed=self.config.fit.seed)
        kept = vocabulary.choose(
            occurrences, mean, size, self.teacher.always, among=checkpoint.draft_vocabulary, name="ship_vocabulary"
        )
        return vocabulary.cut(checkpoint, kept)

    # training

    def _architecture(self, size: int) -> RecurrentConfig:
        if self.start is not None:
            return self.start.config
        config, hidden = self.config, self.identity.hidden_size
        return RecurrentConfig(
            hidden_size=hidden,
            embedding_size=int(self.target.embeddings().shape[1]),
            inner_size=config.inner_size or 2 * hidden,
            blocks=BLOCKS if config.blocks is None else config.blocks,
            vocabulary_size=size,
            tied_head=config.tied_head is not False,
        )

    def _settings(self, head: Tensor) -> FitConfig:
        """The schedule, with what the budget says."""
        settings = replace(self.config.fit, device=str(head.device), dtype=computation(head))
        budget = parse_budget(self.config.budget) if self.config.budget else None
        if budget is None:
            return settings
        if budget.tokens is not None:
            return replace(settings, tokens=budget.tokens)
        assert budget.seconds is not None
        spent, least = self.clock.seconds, LEAST_TRAINING * budget.seconds
        left = max(budget.seconds - spent, least)
        if left == least:
            self.show.say(
                f"reading and generating took {spent / 60:.1f} of {budget.seconds / 60:g} min; training takes "
                f"{left / 60:.1f} more, since less would not be worth it"
            )
        return replace(settings, minutes=left / 60)

    def _fit(self, corpus: Corpus, chosen: NDArray[np.int32], architecture: RecurrentConfig) -> FitResult:
        rows, head_bias = head_for(self.target, chosen)
        given = self.start
        start = None
        if given is not None:
            start = {k: torch.from_numpy(np.array(v, np.float32)) for k, v in given.params.items()}

        def save(params: dict[str, Tensor], entry: dict[str, Any]) -> None:
            """The best so far, usable if the run never ends."""
            facts = {"unfinished": True, "settings": self.request["config"]} | entry
            write_checkpoint(self.folder / BEST, self._checkpoint(params, chosen, architecture, facts), overwrite=True)

        with self.show.training() as report:
            return fit(
                architecture,
                self.target.embeddings(),
                rows,
                chosen,
                corpus.sources,
                _spread(corpus.recordings(), self.config.evaluate_answers),
                self._settings(rows),
                head_bias=head_bias,
                jobs=corpus.jobs,
                start=start,
                report=report,
                save=save,
                shapes=[s for s in SHAPES if s.width <= len(chosen)],
                state=self.folder / STATE,
                processes=self.processes,
            )

    def _checkpoint(
        self, params: dict[str, Tensor], chosen: NDArray[np.int32], architecture: RecurrentConfig, facts: dict[str, Any]
    ) -> Checkpoint:
        state = {k: v.detach().cpu().float().numpy() for k, v in params.items()}
        whole = len(chosen) == self.identity.vocabulary_size
        return Checkpoint(architecture, state, self.identity, None if whole else chosen, facts)

    def _asked(self) -> dict[str, Any]:
        """The request, for the drafter's config.json: names and digests of files, and not where they lie."""
        request = self.request
        listed = {
            name: [{"name": Path(p).name, "sha256": request["sha256"].get(p)} for p in request[name]]
            for name in ("data", "text")
        }
        init = request["init"] and Path(request["init"]).name
        out = {"settings": request["config"], **listed, "init": init, "processes": request["processes"]}
        return out if request["data"] or request["text"] else out | {"own_prompts": request["own_prompts"]}

    def _finish(self, corpus: Corpus, checkpoint: Checkpoint, result: FitResult) -> Trained:
        """Measure the best drafter, write it, and remove what was only for the way there."""
        recordings = corpus.recordings()
        checkpoint = self._shipped(corpus, checkpoint)
        figures = final_figures(self.target, checkpoint, recordings, SHAPES)
        training = self._asked() | corpus.facts | facts_of(checkpoint, recordings, result, figures)
        training |= costs_of(
            self.target, checkpoint, self.teacher.parameters, corpus.facts, figures, result.rows,
            self.config.fit.loss.steps, self.clock.seconds,
        )  # fmt: skip
        write_checkpoint(self.out, replace(checkpoint, training=training), overwrite=True)
        discard(self.folder)
        for line in bill.lines(training):
            self.show.say(line)
        return Trained(self.out, figures, training)


def _spread(recordings: Sequence[Recording], most: int) -> list[Recording]:
    """At most so many, evenly taken."""
    step = max(1, -(-len(recordings) // most))
    return list(recordings[::step])
