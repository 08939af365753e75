"""Drafters that are taught differently from the same recorded features, and compared by replay.

Everything costly (features, the target's own generations, drafters, replays) is kept in a folder, so
that a comparison that was stopped goes on, and costs can be measured again without the rest.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from portadraft.backends.torch.ops import TorchOps
from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.types import BeamShape
from portadraft.core.uniforms import row_seed
from portadraft.drafters.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from portadraft.drafters.redrafter import ReDrafter
from portadraft.errors import InvalidArgument
from portadraft.training.config import BLOCKS, DRAFT_VOCABULARY, FitConfig, TrainConfig
from portadraft.training.corpus import CorpusRequest, build_corpus
from portadraft.training.features import Features
from portadraft.training.finish import computation, head_for, runnable
from portadraft.training.loop import fit
from portadraft.training.loss import LossConfig
from portadraft.training.order import Job, Jobs
from portadraft.training.pieces import claim, write_array
from portadraft.training.progress import Progress
from portadraft.training.recording import bits_of
from portadraft.training.resume import write_whole
from portadraft.training.teacher import Teacher
from portadraft.tuner.recordings import Recording, record
from portadraft.tuner.replay import replay

SAMPLED = 3 << 32
"""Which seeds derived from the configuration's the sampled generations have."""

CANDIDATES = 512
"""Of all the rows that are drafted at once."""


@dataclass(frozen=True)
class Count:
    """A replay: accepted counts of the steps of each prompt's answer; nodes: verified a step, root included."""

    accepted: list[list[int]]
    nodes: float

    @property
    def tokens_per_step(self) -> float:
        return _mean(self.accepted)


def difference(a: Count, b: Count) -> tuple[float, float]:
    """Tokens per step of `a` above those of `b`, and the standard error over prompts, which both have (jackknife)."""
    n = len(a.accepted)
    whole = a.tokens_per_step - b.tokens_per_step
    if n < 2:
        return whole, math.nan
    left = [_mean(a.accepted[:i] + a.accepted[i + 1 :]) - _mean(b.accepted[:i] + b.accepted[i + 1 :]) for i in range(n)]
    middle = sum(left) / n
    return whole, math.sqrt((n - 1) / n * sum((x - middle) ** 2 for x in left))


def shared(sources: Sequence[Features], shares: Sequence[float]) -> Jobs:
    """Every source in random order; of each an epoch visits so large a share of its positions, to within a segment."""

    def jobs(positions: int, segment: int, rng: np.random.Generator) -> list[Job]:
        out: list[Job] = []
        for source, share in zip(sources, shares, strict=True):
            segments = source.segments(segment, held_out=False)
            segments = segments[rng.permutation(len(segments))]
            reached = np.cumsum(segments[:, 1] - segments[:, 0])
            wanted = round(share * int(reached[-1]))
            taken = segments[: int(np.searchsorted(reached, wanted)) + 1]
            # How many segments that takes differs between epochs; how many jobs must not.
            out += [(source, part) for part in np.array_split(taken, max(1, round(wanted / positions)))]
        return [out[k] for k in rng.permutation(len(out))]

    return jobs


def _mean(accepted: Sequence[Sequence[int]]) -> float:
    return 1.0 + sum(map(sum, accepted)) / max(sum(map(len, accepted)), 1)


class Study:
    """One model, one corpus and one draft vocabulary in a folder.

    config: `fit.tokens` positions are trained on by every drafter; `max_answer` is also the longest of the
    generations that are replayed. request: of the corpus; it holds answers out.
    """

    def __init__(
        self, teacher: Teacher, folder: Path, request: CorpusRequest, config: TrainConfig, show: Progress
    ) -> None:
        """Raises: InvalidArgument for data that cannot be used, or a folder of another study."""
        self.teacher, self.target, self.folder, self.config, self.show = teacher, teacher.target, folder, config, show
        teacher.check_sizes(config)
        folder.mkdir(parents=True, exist_ok=True)
        claim(folder, {"config": asdict(config)})
        self.corpus = build_corpus(
            self.target, teacher.loaded.model, teacher.codec, request, folder / "corpus", show
        )  # fmt: skip
        self.sources: dict[str, Features] = dict(zip(self.corpus.facts["modes"], self.corpus.sources, strict=True))
        size = min(config.draft_vocabulary or DRAFT_VOCABULARY, teacher.identity.vocabulary_size)
        self.chosen = self._kept_array(
            folder / "vocabulary.npy",
            lambda: self.corpus.choose_vocabulary(self.target, size, teacher.always, config.fit.seed),
        )
        if not any(len(r.tokens) > 1 for r in self.corpus.recordings()):
            raise InvalidArgument(
                "data: no prompt is held out to compare by; pass more rows, or allow more held-out prompts"
            )

    @staticmethod
    def _kept_array(path: Path, make: Callable[[], Any]) -> Any:
        if not path.exists():
            write_array(path, np.asarray(make()))
        return np.load(path, allow_pickle=False)

    @property
    def architecture(self) -> RecurrentConfig:
        config, hidden = self.config, self.teacher.identity.hidden_size
        return RecurrentConfig(
            hidden_size=hidden,
            embedding_size=int(self.target.embeddings().shape[1]),
            inner_size=config.inner_size or 2 * hidden,
            blocks=BLOCKS if config.blocks is None else config.blocks,
            vocabulary_size=len(self.chosen),
            tied_head=config.tied_head is not False,
        )

    def drafter(self, name: str, sources: Sequence[Features], weights: Sequence[float], loss: LossConfig) -> Checkpoint:
        """Train a drafter, or read the one that was trained before.

        weights: the share of each source that an epoch visits. Nothing is selected: what is kept is the averaged
        parameters at the end.
        """
        place = self.folder / "drafters" / name
        if place.exists():
            return read_checkpoint(place)
        rows, bias = head_for(self.target, self.chosen)
        settings = self._settings(rows, loss)
        self.show.say(f"training {name!r} on {settings.tokens:,} positions")
        with self.show.training() as report:
            result = fit(
                self.architecture, self.target.embeddings(), rows, self.chosen, sources, [], settings,
                jobs=shared(sources, weights), head_bias=bias, report=report, state=self.folder / f"{name}.safetensors",
            )  # fmt: skip
        state = {k: v.detach().cpu().float().numpy() for k, v in result.params.items()}
        whole = len(self.chosen) == self.teacher.identity.vocabulary_size
        facts = {"study": name, "positions": result.positions, "updates": result.updates, "seconds": result.seconds}
        made = Checkpoint(self.architecture, state, self.teacher.identity, None if whole else self.chosen, facts)
        place.parent.mkdir(exist_ok=True)
        write_checkpoint(place, made)
        (self.folder / f"{name}.safetensors").unlink(missing_ok=True)
        return read_checkpoint(place)

    def _settings(self, rows: torch.Tensor, loss: LossConfig) -> FitConfig:
        values = {k: getattr(self.config.fit, k) for k in self.config.fit.__dataclass_fields__}
        values |= {"loss": loss, "device": str(rows.device), "dtype": computation(rows), "evaluations": 1}
        return FitConfig(**values)

    def bound(self, checkpoint: Checkpoint) -> ReDrafter:
        """As decoding takes it, for timing."""
        return ReDrafter(self.target, checkpoint.config, checkpoint.params, checkpoint.draft_vocabulary)

    def recordings(self, temperature: float) -> list[Recording]:
        """The target's own generations for the held-out prompts, which are made once."""
        most = self.config.max_answer
        if temperature == 0:
            return [Recording(r.tokens[:most], r.hidden[:most], r.prompt) for r in self.corpus.recordings()]
        path = self.folder / f"generations-{temperature:g}.npz"
        if not path.exists():
            write_whole(path, self._generated(temperature))
        with np.load(path, allow_pickle=False) as file:
            tokens, bits, lengths = file["tokens"], file["hidden"], file["lengths"]
        hidden = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        out, at, row = [], 0, 0
        for n in lengths.tolist():
            out.append(Recording(tokens[at : at + n], hidden[row : row + n - 1]))
            at, row = at + n, row + n - 1
        return out

    def _generated(self, temperature: float) -> bytes:
        held = self.corpus.held_out
        assert held is not None
        prompts = [
            held.tokens[held.offsets[d] : held.offsets[d] + answer].tolist()
            for d, (_, answer, _, _) in enumerate(held.documents)
        ]
        with self.show.task(f"generating at temperature {temperature:g}", len(prompts), "answers") as report:
            made = record(
                self.target, prompts, max_tokens=self.config.max_answer, temperature=temperature,
                seed=row_seed(self.config.fit.seed, SAMPLED), end_tokens=self.teacher.codec.end_tokens, report=report,
            )  # fmt: skip
        kept = [r for r in made if len(r.tokens) > 1]
        buffer = io.BytesIO()
        np.savez(
            buffer,
            tokens=np.concatenate([r.tokens for r in kept]),
            hidden=np.concatenate([bits_of(torch.as_tensor(np.asarray(r.hidden)))[: len(r.tokens) - 1] for r in kept]),
            lengths=np.array([len(r.tokens) for r in kept], np.int64),
        )
        return buffer.getvalue()

    def replayed(
        self, name: str, checkpoint: Checkpoint, temperature: float, shapes: Sequence[BeamShape]
    ) -> list[Count]:
        """What each shape would accept along the generations at a temperature; replayed once and kept."""
        out = []
        for shape in shapes:
            budget = "" if shape.nodes is None else f"-{shape.nodes}"
            path = self.folder / f"replay-{name}-{temperature:g}-{shape.width}x{shape.length}{budget}.json"
            if not path.exists():
                self.show.say(f"replaying {name!r} at temperature {temperature:g}, {shape.width} x {shape.length}")
                one = runnable(self.target, checkpoint)
                (result,) = replay(
                    TorchOps(one.table.device), checkpoint.config, one.params, one.table, self.recordings(temperature),
                    [shape], one.vocabulary, rows=max(1, CANDIDATES // shape.width), dtype=one.dtype,
                )  # fmt: skip
                write_whole(path, json.dumps({"accepted": result.accepted, "nodes": result.nodes}).encode())
            out.append(Count(**json.loads(path.read_text("utf-8"))))
        return out
