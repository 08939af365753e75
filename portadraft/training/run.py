"""From a model and texts to a trained drafter's folder."""

from __future__ import annotations

import ctypes
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from portadraft import models
from portadraft.backends.torch import make_target
from portadraft.backends.torch.loading import load_model
from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.types import BeamShape
from portadraft.drafters.checkpoint import Checkpoint, Identity, write_checkpoint
from portadraft.errors import InvalidArgument
from portadraft.identity import tokenizer_fingerprint
from portadraft.text import TextCodec
from portadraft.training import data as files
from portadraft.training import vocabulary
from portadraft.training.features import Document, Features, record
from portadraft.training.generate import greedy_answers
from portadraft.training.loop import FitConfig, fit
from portadraft.training.progress import Progress
from portadraft.tuner.replay import Recording

SHAPES = (BeamShape(4, 4), BeamShape(1, 4), BeamShape(8, 4))
"""Replayed at every evaluation; the first decides which parameters are kept."""


@dataclass(frozen=True)
class TrainConfig:
    """What is trained, and on how much.

    draft_vocabulary: how many tokens the drafter may predict (the whole vocabulary if that is smaller).
    inner_size: width of the residual blocks (None: 2D, without an input projection). blocks: how many.
    max_answer: the most tokens of a generated answer. max_length: of a whole document.
    text_tokens: the most tokens of plain text to learn from. batch: answers generated at once.
    evaluate_answers: how many held-out answers each evaluation replays.
    """

    draft_vocabulary: int = 8192
    inner_size: int | None = None
    blocks: int = 2
    max_answer: int = 224
    max_length: int = 1024
    text_tokens: int | None = None
    batch: int = 32
    evaluate_answers: int = 60
    fit: FitConfig = field(default_factory=FitConfig)


@dataclass(frozen=True)
class Trained:
    """What came out: where, how good on held-out answers (tokens per step by shape), and the bill."""

    folder: Path
    tokens_per_step: dict[str, float]
    training: dict[str, Any]


def train(
    model: str | Path,
    data: Sequence[str | Path] | str | Path | None = None,
    *,
    out: str | Path,
    text: Sequence[str | Path] | str | Path | None = None,
    config: TrainConfig | None = None,
    dtype: str = "auto",
    device: str = "auto",
    work: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Trained:
    """Train a drafter for a model and write its folder, the best so far at every evaluation.

    model: a name, Hugging Face id, folder or GGUF file. data: JSONL files of prompts; the model
    answers each greedily, unless the row brings its `response_ids`. text: JSONL files of `text`, or
    `prompt` and `reference`, which the model only reads: no generation, so three times cheaper.
    work: where features (2 bytes × hidden size a token) are kept while it runs.

    Raises: InvalidArgument, ModelNotFound and what loading a model raises; OSError for a full disk.
    """
    config = config or TrainConfig()
    out = Path(out)
    if out.exists() and not overwrite:
        raise InvalidArgument(f"out={str(out)!r}: exists already; choose another folder, or pass overwrite=True")
    prompts, texts = _rows("data", data), _rows("text", text)
    if not prompts and not texts:
        raise InvalidArgument("data=None, text=None: expected JSONL files of prompts, of texts, or of both")
    if work is not None:
        Path(work).mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    _keep_freed_memory()
    source = models.resolve(model)
    loaded = load_model(source, dtype=dtype, device=device)
    codec = TextCodec(loaded.tokenizer, loaded.generation_config, template=source.template)
    target = make_target(loaded.model)
    identity = Identity(
        vocabulary_size=target.facts.vocabulary_size,
        hidden_size=target.facts.hidden_size,
        name=source.label,
        tokenizer=tokenizer_fingerprint(loaded.tokenizer),
        weights_id=target.facts.weights_id,
    )
    with Progress(progress) as show, tempfile.TemporaryDirectory(prefix="portadraft-", dir=work) as folder:
        answers, generated = _answers(target, codec, prompts, config, show)
        documents = _documents(prompts, answers, texts, codec, config, identity.vocabulary_size)
        total = sum(len(d.tokens) for d in documents)
        with show.task("reading texts", total, "tokens") as advance:
            features = record(loaded.model, documents, Path(folder), seed=config.fit.seed, report=advance)
        return _fit(target, codec, features, identity, config, out, overwrite, show, began, generated)


def _rows(name: str, paths: Sequence[str | Path] | str | Path | None) -> list[files.Row]:
    listed = [paths] if isinstance(paths, (str, Path)) else list(paths or ())
    rows = [row for path in listed for row in files.read_rows(path)]
    if name == "data" and any(not row.prompt for row in rows):
        raise InvalidArgument("data: every row needs a `prompt`; pass files of plain texts as text=")
    if name == "text" and rows and not any(row.text for row in rows):
        raise InvalidArgument("text: no row has a `text` or a `reference`; pass files of prompts as data=")
    return rows


def _answers(
    target: Any, codec: TextCodec, rows: Sequence[files.Row], config: TrainConfig, show: Progress
) -> tuple[list[Sequence[int]], int]:
    """The model's greedy answer to each prompt, and how many tokens had to be generated."""
    answers: list[Sequence[int]] = [row.answer_ids or () for row in rows]
    prompts = {i: codec.encode_prompt(row.prompt) for i, row in enumerate(rows) if row.answer_ids is None}
    prompts = {i: ids for i, ids in prompts.items() if len(ids) + 2 < config.max_length}
    if not prompts:
        return answers, 0
    with show.task("generating answers", len(prompts), "answers") as advance:
        made = greedy_answers(
            target, list(prompts.values()), config.max_answer, codec.end_tokens, config.batch, report=advance
        )
    for i, ids in zip(prompts, made, strict=True):
        answers[i] = ids
    return answers, sum(map(len, made))


def _documents(
    prompts: Sequence[files.Row],
    answers: Sequence[Sequence[int]],
    texts: Sequence[files.Row],
    codec: TextCodec,
    config: TrainConfig,
    vocabulary_size: int,
) -> list[Document]:
    out = list(files.answer_documents(prompts, answers, codec, config.max_length, vocabulary_size))
    shuffled = [texts[i] for i in np.random.default_rng(config.fit.seed).permutation(len(texts))]
    end = min(codec.end_tokens, default=None)
    return out + files.within(files.text_documents(shuffled, codec, config.max_length, end), config.text_tokens)


def _fit(
    target: Any,
    codec: TextCodec,
    features: Features,
    identity: Identity,
    config: TrainConfig,
    out: Path,
    overwrite: bool,
    show: Progress,
    began: float,
    generated: int,
) -> Trained:
    """Choose the draft vocabulary and train on recorded features."""
    head, bias, table = target.head_rows(), target.head_bias(), target.embeddings()
    recordings = features.recordings()
    size = min(config.draft_vocabulary, identity.vocabulary_size)
    chosen = vocabulary.choose(
        vocabulary.counts([features], identity.vocabulary_size),
        vocabulary.mean_prediction(features, head, bias, seed=config.fit.seed),
        size,
        always={*codec.end_tokens, *map(int, getattr(codec.tokenizer, "all_special_ids", ()))},
    )
    covered = vocabulary.coverage(chosen, [r.tokens for r in recordings], identity.vocabulary_size)
    architecture = RecurrentConfig(
        hidden_size=identity.hidden_size,
        embedding_size=int(table.shape[1]),
        inner_size=config.inner_size or 2 * identity.hidden_size,
        blocks=config.blocks,
        vocabulary_size=size,
    )
    bill: dict[str, Any] = {
        "answer_tokens": features.count("answer"),
        "text_tokens": features.count("text"),
        "generated_tokens": generated,
        "held_out_answers": len(recordings),
        "coverage_held_out": None if np.isnan(covered) else round(covered, 4),
        "parameters": sum(int(np.prod(s)) for s in architecture.shapes().values()),
        "settings": asdict(config),
    }
    written = False

    def save(params: dict[str, Tensor], entry: dict[str, Any]) -> None:
        nonlocal written
        state = {k: v.detach().cpu().float().numpy() for k, v in params.items()}
        done = bill | {"minutes_total": round((time.monotonic() - began) / 60, 1)} | entry
        whole = size == identity.vocabulary_size
        checkpoint = Checkpoint(architecture, state, identity, None if whole else chosen, done)
        write_checkpoint(out, checkpoint, overwrite=overwrite or written)
        written = True

    rows = head[torch.from_numpy(chosen).long().to(head.device)]
    head_bias = None if bias is None else bias[torch.from_numpy(chosen).long().to(head.device)]
    settings = replace(config.fit, device=str(head.device), dtype=computation(head))
    with show.training() as report:
        result = fit(
            architecture,
            table,
            rows,
            chosen,
            [features],
            _spread(recordings, config.evaluate_answers),
            settings,
            head_bias=head_bias,
            report=report,
            save=save,
            shapes=SHAPES,
        )
    if not written:
        save(result.params, {"updates": result.updates, "positions": result.positions})
    bill |= {"updates": result.updates, "positions": result.positions, "skipped_updates": result.skipped}
    bill["minutes_training"] = round(result.seconds / 60, 1)
    first = f"{SHAPES[0].width}x{SHAPES[0].length}"
    none: dict[str, Any] = {"tokens_per_step": {}}
    best = max(result.history, key=lambda e: e["tokens_per_step"][first], default=none)
    save(result.params, {k: v for k, v in best.items() if k not in bill})
    return Trained(out, dict(best["tokens_per_step"]), bill)


def computation(head: Tensor) -> str:
    """In which type the drafter is trained: bfloat16 where the target runs in it, else float32."""
    return "bfloat16" if head.dtype == torch.bfloat16 else "float32"


def _spread(recordings: Sequence[Recording], most: int) -> list[Recording]:
    """At most so many, evenly taken."""
    step = max(1, -(-len(recordings) // most))
    return list(recordings[::step])


def _keep_freed_memory() -> None:
    """Ask glibc to keep freed blocks: the page faults of large temporaries cost up to half the time."""
    if sys.platform != "linux":
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block of its own mapping
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass  # another C library; only speed is lost
