"""One run: the parameters, where it stands, and what an update does with them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.types import BeamShape
from portadraft.errors import InvalidArgument
from portadraft.training.bill import peak_bytes
from portadraft.training.config import FitConfig
from portadraft.training.counters import Counters, FitResult, Params, Report
from portadraft.training.distributed import Processes
from portadraft.training.evaluation import Figures, replayed
from portadraft.training.features import Features
from portadraft.training.initial import column_scales, initial
from portadraft.training.loss import DropoutOps, Tally, distil
from portadraft.training.optim import Optimizer, schedule
from portadraft.training.order import Batch, Jobs, Order, seed_for
from portadraft.training.plan import Plan, planned
from portadraft.training.resume import load_state, save_state
from portadraft.training.steps import Guard, averaged_gradients
from portadraft.tuner.replay import Recording

TRAINED = 0.75
"""With about what probability a position goes on to its next step once the drafter has learned. At first that is far
less, and an update takes half as long: the speed is measured as it will be."""


class Trainer:
    """One run: the parameters, where it stands, and what an update does with them."""

    report: Report | None = None
    save: Callable[[Params, dict[str, Any]], None] | None = None

    def __init__(
        self,
        config: RecurrentConfig,
        embeddings: Tensor,
        head: Tensor,
        head_bias: Tensor | None,
        draft_vocabulary: NDArray[np.int32],
        sources: Sequence[Features],
        held_out: Sequence[Recording],
        settings: FitConfig,
        jobs: Jobs,
        start: Mapping[str, Tensor] | None,
        shapes: Sequence[BeamShape],
        processes: Processes,
    ) -> None:
        self.config, self.settings, self.shapes, self.processes = config, settings, shapes, processes
        self.sources, self.vocabulary = sources, draft_vocabulary
        self.held_out = list(held_out)[processes.rank :: processes.world]
        self.evaluates = len(held_out) > 0
        self.device, self.dtype = torch.device(settings.device), getattr(torch, settings.dtype)
        self.order = Order(jobs, settings.positions, settings.segment, settings.seed, processes.world)
        if self.order.per_epoch == 0:
            raise InvalidArgument("data: no position is left to train on; give more or longer texts")
        self.ops = DropoutOps(self.device, settings.loss.dropout)
        self.generator = torch.Generator()
        begin = start or initial(config, settings.seed)
        self.masters = {k: v.to(self.device, torch.float32).clone() for k, v in begin.items()}
        scales = {k: v.to(self.device) for k, v in column_scales(config, sources).items()}
        if start is None:
            for k, v in scales.items():
                self.masters[k] *= v
        self.optimizer = Optimizer(
            self.masters, settings.optimizer, settings.rate, settings.weight_decay, scales=scales
        )
        self.averaged = {k: v.clone() for k, v in self.masters.items()}
        self.best = {k: v.clone() for k, v in self.masters.items()}
        self.table = embeddings.to(self.device, self.dtype)
        self.rows = head.to(self.device, self.dtype)
        self.frozen = {"head.weight": self.rows}
        if head_bias is not None:
            self.frozen["head.bias"] = head_bias.to(self.device, self.dtype)
        self.to_draft = np.full(embeddings.shape[0], -1, np.int64)
        self.to_draft[draft_vocabulary] = np.arange(len(draft_vocabulary))
        self.at = Counters()
        self.guard = Guard(settings.explode, self.at.norms)
        self.window, self.clock, self.reported = Tally(), time.monotonic(), time.monotonic()

    # one batch

    def gradients(self, batch: Batch, floor: float = 0.0) -> tuple[Params, Tally, int]:
        """Of the mean loss over this process's share of a batch, with the number of positions in it.

        floor: the least probability with which a position goes on to its next step.
        """
        settings = self.settings
        loss = replace(settings.loss, floor=max(settings.loss.floor, floor))
        seed = seed_for(settings.seed, batch.number, self.processes.rank)
        torch.manual_seed(seed)
        self.generator.manual_seed(seed)
        # Detached: in float32 `to` gives the same tensor, which would keep the gradients of earlier updates.
        live = {k: v.detach().to(self.dtype).requires_grad_() for k, v in self.masters.items()}
        tally, positions = Tally(), 0
        if self.processes.rank < len(batch.jobs):
            source, segments = batch.jobs[self.processes.rank]
            positions = int((segments[:, 1] - segments[:, 0]).sum())
            block = source.block(
                segments,
                settings.loss.steps,
                self.rows,
                self.to_draft,
                self.frozen.get("head.bias"),
                self.dtype,
                settings.loss.temperature,
            )
            tally = distil(self.ops, live | self.frozen, self.config, self.table, block, loss, self.generator)
        grads = {k: torch.zeros_like(v) if v.grad is None else v.grad.float() for k, v in live.items()}
        return {k: g.reshape(self.masters[k].shape) for k, g in grads.items()}, tally, positions

    def advance(self) -> bool:
        """One update; True if it ended with an evaluation."""
        at, plan = self.at, Plan(**self.at.plan or {})
        batch = self.order[at.number]
        at.number += 1
        grads, tally, positions = self.gradients(batch)
        weight = sum(self.settings.loss.weight(t) * n for t, n in enumerate(tally.rows, 1))
        mean = averaged_gradients(self.processes, grads, sum(tally.rows), positions, weight)
        reason = self.guard.objection(mean.norm)
        if reason:
            self.skip(batch, reason, mean.norm, mean.broken)
        elif mean.rows:
            if mean.norm > self.settings.clip:
                mean.grads = {k: g * (self.settings.clip / mean.norm) for k, g in mean.grads.items()}
            self.optimizer.step(mean.grads, schedule((at.number - 1) / plan.updates))
            at.updates += 1
            at.positions += mean.positions
            at.rows += mean.rows
            self.window.add(tally)
            keep = min(self.settings.average, at.updates / (at.updates + 10))
            for k, v in self.averaged.items():
                v.lerp_(self.masters[k], 1 - keep)
        self.tell(batch, mean.norm, plan)
        last = at.number >= plan.updates
        evaluated = self.evaluates and (last or at.number % plan.evaluate_every == 0)
        if evaluated:
            self.evaluate()
        if last:
            at.ended = f"all {plan.updates} planned updates done"
        elif evaluated and self.settings.patience is not None and at.stale >= self.settings.patience:
            at.ended = f"no better in {at.stale} evaluations"
        if at.ended and not self.evaluates:
            self.best = {k: v.clone() for k, v in self.averaged.items()}
        return evaluated

    def skip(self, batch: Batch, reason: str, norm: float, broken: Sequence[int]) -> None:
        """Count an update that was left out, and name where it was."""
        self.at.skipped_updates += 1
        guilty = [batch.jobs[rank] for rank in broken if rank < len(batch.jobs)] or batch.jobs
        entry = {
            "update": batch.number,
            "reason": reason,
            "norm": norm if math.isfinite(norm) else str(norm),
            "where": [self.where(source, segments) for source, segments in guilty],
        }
        if len(self.at.skipped) < 100:
            self.at.skipped.append(entry)
        if self.report:
            self.report({"skipped": entry})

    def where(self, source: Features, segments: NDArray[np.int64]) -> dict[str, Any]:
        """Which documents of which source some segments belong to, and the files and lines that these are from."""
        numbers = np.searchsorted(source.offsets, segments[:, 0], side="right") - 1
        documents = sorted({int(d) for d in numbers})
        index = next((i for i, one in enumerate(self.sources) if one is source), None)
        places = list(dict.fromkeys(source.named[d] for d in documents)) if source.named else []
        return {"source": index, "documents": documents, "places": places}

    def tell(self, batch: Batch, norm: float, plan: Plan) -> None:
        now, at = time.monotonic(), self.at
        if not self.report or now - self.reported <= self.settings.report_seconds or not self.window.rows:
            return
        self.reported = now
        spent = now - self.clock
        self.report(
            {
                "minutes": spent / 60, "minutes_left": spent / 60 * (plan.updates / at.number - 1),
                "progress": at.number / plan.updates, "epoch": batch.epoch, "updates": at.updates,
                "loss": self.window.mean_loss(), "top1": self.window.top1(),
                "rows": [n / self.window.rows[0] for n in self.window.rows], "norm": norm,
                "positions_per_s": at.positions / max(spent, 1e-9), "skipped_updates": at.skipped_updates,
            }
        )  # fmt: skip
        self.window = Tally()

    # the plan

    def make_plan(self) -> Plan:
        """How many updates, decided once; under a time budget the speed is measured on copies first."""
        settings, order = self.settings, self.order
        seconds = None if settings.minutes is None else settings.minutes * 60
        per_update = per_evaluation = 0.0
        if seconds is not None:
            began = time.monotonic()
            per_update, per_evaluation = self.pilot(seconds)
            seconds -= time.monotonic() - began
        plan = planned(
            order.per_epoch, settings.epochs, order.positions_per_epoch, settings.tokens,
            seconds, per_update, per_evaluation, settings.evaluations,
        )  # fmt: skip
        return Plan(**self.processes.agree(asdict(plan)))

    def pilot(self, seconds: float) -> tuple[float, float]:
        """Seconds of an update and of an evaluation, from at most about 3 % of the budget; nothing changes by it."""
        times: list[float] = []
        number, wanted = 0, 3
        while number < wanted:
            began = time.monotonic()
            grads, tally, positions = self.gradients(self.order[number], TRAINED)
            mean = averaged_gradients(self.processes, grads, sum(tally.rows), positions)
            trial = Optimizer({k: v.clone() for k, v in self.masters.items()}, self.settings.optimizer, 0.0, 0.0)
            trial.step(mean.grads, 1.0)
            times.append(time.monotonic() - began)
            number += 1
            if number == 2:
                wanted = self.processes.agree(2 + max(1, min(30, int(0.02 * seconds / times[-1]))))
        began = time.monotonic()
        if self.evaluates:
            self.measure()
        return sum(times[2:]) / len(times[2:]), time.monotonic() - began

    # evaluation and state

    def measure(self) -> Figures:
        """Of the averaged parameters, over all processes."""
        params = {k: v.to(self.dtype) for k, v in self.averaged.items()} | self.frozen
        return replayed(
            self.processes, self.config, params, self.table, self.held_out, self.shapes, self.vocabulary,
            self.settings.dtype,
        )  # fmt: skip

    def evaluate(self) -> None:
        """Replay the averaged parameters, and keep them if they are the best."""
        at = self.at
        figures = self.measure()
        entry = {
            "minutes": round((time.monotonic() - self.clock) / 60, 2), "updates": at.updates,
            "positions": at.positions, "tokens_per_step": figures.tokens_per_step, "nodes": figures.nodes,
            "loss": round(self.window.mean_loss(), 4) if self.window.rows else None,
        }  # fmt: skip
        at.history.append(entry)
        if self.report:
            self.report(entry | {"evaluation": True})
        at.stale += 1
        if figures.score > at.score:
            self.best = {k: v.clone() for k, v in self.averaged.items()}
            at.score, at.stale = figures.score, 0
            if self.save:
                self.save(self.best, entry)

    def write(self, path: Path) -> None:
        self.at.seconds = time.monotonic() - self.clock
        self.at.peak_bytes = max(self.at.peak_bytes, peak_bytes(self.device))
        parts = {"masters": self.masters, "averaged": self.averaged, "best": self.best}
        tensors = {f"{part}.{k}": v for part, params in parts.items() for k, v in params.items()}
        facts = asdict(self.at) | {"optimizer_steps": self.optimizer.count}
        save_state(path, tensors | {f"optimizer.{k}": v for k, v in self.optimizer.state().items()}, facts)

    def restore(self, path: Path) -> None:
        tensors, facts = load_state(path)
        for part, params in (("masters", self.masters), ("averaged", self.averaged), ("best", self.best)):
            for name, value in params.items():
                value.copy_(tensors[f"{part}.{name}"])
        moments = {k.removeprefix("optimizer."): v for k, v in tensors.items() if k.startswith("optimizer.")}
        self.optimizer.restore(moments, facts.pop("optimizer_steps"))
        self.at = Counters(**facts)
        self.guard = Guard(self.settings.explode, self.at.norms)

    def result(self) -> FitResult:
        at = self.at
        at.seconds = time.monotonic() - self.clock
        at.peak_bytes = max(at.peak_bytes, peak_bytes(self.device))
        return FitResult(
            self.best, at.score, at.history, at.updates, at.positions, at.rows, at.skipped_updates, at.skipped,
            Plan(**at.plan or {}).updates, at.seconds, at.peak_bytes, at.ended,
        )  # fmt: skip
