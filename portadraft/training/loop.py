"""The training loop: from recorded features to a drafter, the best by replay kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portadraft.backends.torch.ops import TorchOps
from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.types import BeamShape
from portadraft.errors import InvalidArgument
from portadraft.training.features import Features
from portadraft.training.loss import DropoutOps, LossConfig, Tally, distil
from portadraft.training.optim import Optimizer, schedule
from portadraft.tuner.replay import Recording, replay


@dataclass(frozen=True)
class FitConfig:
    """How long and how fast. The run ends at whichever of `epochs` and `minutes` comes first.

    positions: of texts in one update. segment: consecutive positions that stay together.
    optimizer: "adamw" or "muon". average: decay of the averaged parameters, which are what is kept.
    report_seconds: between reports. dtype: of the computation; the parameters themselves are float32.
    """

    epochs: float = 4.0
    minutes: float | None = None
    positions: int = 512
    segment: int = 32
    optimizer: str = "adamw"
    rate: float = 1e-3
    weight_decay: float = 0.02
    average: float = 0.999
    clip: float = 1.0
    evaluate_minutes: float = 5.0
    report_seconds: float = 20.0
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    loss: LossConfig = field(default_factory=LossConfig)

    def __post_init__(self) -> None:
        for name in ("epochs", "minutes", "positions", "segment", "rate", "clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidArgument(f"{name}={value!r}: expected a number above 0")


def initial(config: RecurrentConfig, seed: int) -> dict[str, Tensor]:
    """Small random parameters; residual blocks start near the identity."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in config.shapes().items():
        if len(shape) == 1:
            out[name] = torch.zeros(shape)
        else:
            out[name] = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
            if name.startswith("lm_head.") and ".linear." in name:
                out[name] *= 0.5
    return out


def column_scales(config: RecurrentConfig, sources: Sequence[Features], sample: int = 4096) -> dict[str, Tensor]:
    """Smaller steps (and a smaller start) for the weights that read a feature which varies much.

    A few of a language model's features are ten times the others; Adam's steps are equal for
    every weight, so those few would shake the drafter's outputs. Matrices that read [s, h]:
    every residual block and the projection while the inner size is 2D, else the input projection.
    """
    source = max(sources, key=lambda f: len(f.tokens))
    at = np.linspace(0, int(source.offsets[-1]) - 1, sample).astype(np.int64)
    seen = source.bits(at).float()
    spread = seen[torch.isfinite(seen).all(-1)].std(0).nan_to_num(1.0)
    columns = torch.cat([torch.ones(config.hidden_size), 1.0 / spread.clamp(min=1.0)])
    if config.inner_size != 2 * config.hidden_size:
        return {"input_proj.weight": columns}
    names = [f"lm_head.{i}.linear.weight" for i in range(config.blocks)]
    names.append("project.weight" if config.tied_head else f"lm_head.{config.blocks}.weight")
    return dict.fromkeys(names, columns)


def batches(
    sources: Sequence[Features], weights: Sequence[float], fit: FitConfig, generator: np.random.Generator
) -> Iterator[tuple[float, Features, NDArray[np.int64]]]:
    """Epoch after epoch in random order: (epochs so far, features, segments of about `positions`)."""
    epoch = 0
    while True:
        jobs: list[tuple[Features, NDArray[np.int64]]] = []
        for source, weight in zip(sources, weights, strict=True):
            segments = source.segments(fit.segment, held_out=False)
            segments = segments[generator.permutation(len(segments))[: int(len(segments) * weight)]]
            per = max(1, fit.positions // fit.segment)
            jobs += [(source, segments[i : i + per]) for i in range(0, len(segments), per)]
        for n, k in enumerate(generator.permutation(len(jobs))):
            yield epoch + n / len(jobs), *jobs[k]
        epoch += 1


@dataclass
class FitResult:
    """The best averaged parameters, and what was seen on the way."""

    params: dict[str, Tensor]
    score: float
    history: list[dict[str, Any]]
    updates: int
    positions: int
    skipped: int
    seconds: float


def fit(
    config: RecurrentConfig,
    embeddings: Tensor,
    head: Tensor,
    draft_vocabulary: NDArray[np.int32],
    sources: Sequence[Features],
    held_out: Sequence[Recording],
    settings: FitConfig,
    weights: Sequence[float] | None = None,
    start: Mapping[str, Tensor] | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
    save: Callable[[dict[str, Tensor], dict[str, Any]], None] | None = None,
    shapes: Sequence[BeamShape] = (BeamShape(4, 4),),
    head_bias: Tensor | None = None,
) -> FitResult:
    """Train the drafter's own parameters on recorded features.

    embeddings: (V, E) and head: (V', D), the target's frozen tables, the head cut to the draft
    vocabulary. held_out: generations to replay; the averaged parameters that give the most
    tokens per step for the first of `shapes` are kept, and `save` is called with them at once.
    """
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    ops = DropoutOps(device, settings.loss.dropout)
    rng = np.random.default_rng(settings.seed)
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    masters = {k: v.to(device, torch.float32).clone() for k, v in (start or initial(config, settings.seed)).items()}
    scales = {k: v.to(device) for k, v in column_scales(config, sources).items()}
    if start is None:
        for k, v in scales.items():
            masters[k] *= v
    optimizer = Optimizer(masters, settings.optimizer, settings.rate, settings.weight_decay, scales=scales)
    averaged = {k: v.clone() for k, v in masters.items()}
    table, rows = embeddings.to(device, dtype), head.to(device, dtype)
    frozen = {"head.weight": rows} | ({} if head_bias is None else {"head.bias": head_bias.to(device, dtype)})
    to_draft = np.full(embeddings.shape[0], -1, np.int64)
    to_draft[draft_vocabulary] = np.arange(len(draft_vocabulary))

    best, best_score = {k: v.clone() for k, v in averaged.items()}, -1.0
    history: list[dict[str, Any]] = []
    updates = positions = skipped = 0
    window, began, evaluated, reported = Tally(), time.monotonic(), time.monotonic(), time.monotonic()

    def evaluate() -> None:
        nonlocal best, best_score
        p = {k: v.to(dtype) for k, v in averaged.items()} | frozen
        native = torch.from_numpy(draft_vocabulary).to(device)
        results = replay(TorchOps(device), config, p, table, held_out, shapes, native, dtype=settings.dtype)
        entry = {
            "minutes": round((time.monotonic() - began) / 60, 2),
            "updates": updates,
            "positions": positions,
            "tokens_per_step": {f"{r.shape.width}x{r.shape.length}": round(r.tokens_per_step, 4) for r in results},
        }
        history.append(entry)
        if report:
            report(entry)
        score = results[0].tokens_per_step
        if score > best_score:
            best, best_score = {k: v.clone() for k, v in averaged.items()}, score
            if save:
                save(best, entry)

    for epoch, source, segments in batches(sources, weights or [1.0] * len(sources), settings, rng):
        minutes = (time.monotonic() - began) / 60
        progress = epoch / settings.epochs
        if settings.minutes is not None:
            progress = max(progress, minutes / settings.minutes)
        if progress >= 1.0:
            break
        live = {k: v.to(dtype).requires_grad_() for k, v in masters.items()}
        block = source.block(segments, settings.loss.steps, rows, to_draft, frozen.get("head.bias"), dtype)
        tally = distil(ops, live | frozen, config, table, block, settings.loss, generator)
        grads = {k: v.grad.float() if v.grad is not None else torch.zeros_like(masters[k]) for k, v in live.items()}
        norm = float(torch.stack([g.norm() for g in grads.values()]).norm())
        if not math.isfinite(norm):
            skipped += 1
            continue
        if norm > settings.clip:
            grads = {k: g * (settings.clip / norm) for k, g in grads.items()}
        optimizer.step(grads, schedule(progress))
        updates += 1
        positions += len(block.tokens)
        window.add(tally)
        keep = min(settings.average, updates / (updates + 10))
        for k, v in averaged.items():
            v.lerp_(masters[k], 1 - keep)
        now = time.monotonic()
        if report and now - reported > settings.report_seconds:
            reported = now
            report(
                {
                    "minutes": minutes, "progress": progress, "epoch": epoch, "updates": updates,
                    "loss": window.mean_loss(), "top1": window.top1(),
                    "rows": [n / window.rows[0] for n in window.rows],
                    "norm": norm, "positions_per_s": positions / (now - began), "skipped": skipped,
                }
            )  # fmt: skip
            window = Tally()
        if held_out and now - evaluated > settings.evaluate_minutes * 60:
            evaluate()
            evaluated = time.monotonic()
    if held_out:
        evaluate()
    else:
        best = averaged
    return FitResult(best, best_score, history, updates, positions, skipped, time.monotonic() - began)
