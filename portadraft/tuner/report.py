"""What a run found, as a profile for the machine and as JSON for programs."""

from __future__ import annotations

import math
from typing import Any

from portadraft import profiles
from portadraft.api import Model
from portadraft.profiles.schema import (
    Acceptance,
    BatchChoice,
    Conditions,
    Costs,
    DraftCost,
    Profile,
    Sample,
    Shape,
    VerifyCost,
    now,
    spread_of,
)
from portadraft.tuner.config import TuneConfig
from portadraft.tuner.outcome import DrafterResult, Outcome, shape_name
from portadraft.tuner.search import Result

_KEPT_SHAPES = 120
"""Shapes whose acceptance a profile carries: the fastest ones at any batch size, for other machines' predictions."""


def to_profile(model: Model, outcome: Outcome, one: DrafterResult) -> Profile:
    """The profile of one drafter's results."""
    config, facts, ops = outcome.config, model.target.facts, model.target.ops
    who = profiles.submitter()
    return Profile(
        # On a device so slow that the budget holds no round, the prediction stands as it is.
        origin="measured" if all(r.measured for r in one.results) else "predicted",
        created=now(),
        machine=profiles.this_machine(ops.name, ops.device),
        software=profiles.this_software(ops.name),
        model=profiles.model_identity(model.target, model.name, one_fingerprint(model)),
        drafter=profiles.drafter_identity(one.drafter, one.name),
        conditions=Conditions(
            dtype=facts.dtype,
            temperature=config.temperature,
            context=measured_context(one, config),
            objective=config.objective,
        ),
        batches=tuple(_choice(r) for r in one.results),
        recommended_batch_size=outcome.recommended_batch_size if one is outcome.best else None,
        costs=_costs(one),
        acceptance=_acceptance(one),
        samples=tuple(_samples(one, who, outcome.run)),
        disturbed=any(r.disturbed for r in one.results),
    )


def one_fingerprint(model: Model) -> str:
    """The tokenizer's fingerprint of a loaded model."""
    return str(getattr(model, "fingerprint", getattr(model, "_fingerprint", "")))


def _choice(r: Result) -> BatchChoice:
    return BatchChoice(
        batch_size=r.batch,
        shape=Shape.of(r.shape),
        tokens_per_s=r.tokens_per_s,
        spread=r.spread if r.measured else None,  # of a prediction there is none
        plain_tokens_per_s=r.plain_tokens_per_s,
        speedup=r.speedup,
    )


def _costs(one: DrafterResult) -> Costs:
    verify, draft = [], []
    for costs, timings in one.costs:
        for slots, ms in sorted(timings.check.items()):
            cost = costs.check(slots)
            verify.append(
                VerifyCost(
                    batch_size=costs.batch, context=costs.context, slots=slots, ms=cost, spread=spread_of(list(ms))
                )
            )
        for (width, length), ms in sorted(timings.draft.items()):
            cost = costs.draft_ms(width, length)
            draft.append(
                DraftCost(batch_size=costs.batch, width=width, length=length, ms=cost, spread=spread_of(list(ms)))
            )
    return Costs(verify=tuple(verify), draft=tuple(draft))


def _acceptance(one: DrafterResult) -> tuple[Acceptance, ...]:
    shapes = {s for r in one.results for s in r.prediction.distinct()[:_KEPT_SHAPES]}
    nodes, table = one.table.mean_nodes(), one.table
    out = []
    for shape in sorted(shapes, key=lambda s: (s.width, s.length, s.nodes or 0)):
        rate = table.rate(shape)
        known = math.isfinite(rate.error)
        out.append(
            Acceptance(
                shape=Shape(width=shape.width, length=shape.length, nodes=shape.nodes),
                temperature=table.origin.temperature,
                tokens_per_step=rate.tokens_per_step,
                low=rate.low if known else None,
                high=min(rate.high, 65.0) if known else None,
                slots=max(1.0, float(nodes[table.grid.index(shape)])),
            )
        )
    return tuple(out)


def _samples(one: DrafterResult, who: str, run: str) -> list[Sample]:
    """Every turn as tokens per second of the replayed acceptance at the measured cost; see `search.Measured`."""
    out = []
    for r in one.results:
        for m in r.measured:
            plain = r.batch * 1000 / m.plain_ms
            gain = 1.0 if m.shape is None else r.prediction.of(m.shape) / r.prediction.plain_tokens_per_s
            out.append(
                Sample(
                    submitter=who,
                    run=run,
                    round=m.round,
                    phase=m.phase,
                    batch_size=r.batch,
                    shape=Shape.of(m.shape),
                    tokens_per_s=plain * gain * math.exp(-m.ratio if m.shape is not None else 0.0),
                    disturbed=m.disturbed,
                )
            )
    return out[:20_000]


def measured_context(one: DrafterResult, config: TuneConfig) -> int:
    """Tokens before the steps that were measured: fewer than asked for where the model's limit left no room."""
    if config.device_curve is not None or not one.costs:
        return config.context
    return min(costs.context for costs, _ in one.costs)


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """For JSON."""
    return {
        "model": outcome.model,
        "objective": outcome.config.objective,
        "temperature": outcome.config.temperature,
        "context": measured_context(outcome.best, outcome.config),
        "best_drafter": outcome.best.name,
        "recommended_batch_size": outcome.recommended_batch_size,
        "disturbed": outcome.disturbed,
        "interrupted": outcome.interrupted,
        "notes": outcome.notes,
        "drafters": [
            {
                "drafter": one.name,
                "acceptance_by_category": _by_category(one),
                "batches": [_batch(r) for r in one.results],
            }
            for one in outcome.drafters
        ],
    }


def _batch(r: Result) -> dict[str, Any]:
    index = None if r.shape is None else r.prediction.table.grid.index(r.shape)
    return {
        "batch_size": r.batch,
        "shape": None
        if r.shape is None
        else {"width": r.shape.width, "length": r.shape.length, "nodes": r.shape.nodes},
        "tokens_per_s": round(r.tokens_per_s, 2),
        "spread": round(r.spread, 4) if r.measured else None,
        "plain_tokens_per_s": round(r.plain_tokens_per_s, 2),
        "speedup": round(r.speedup, 3),
        "tokens_per_step": round(r.tokens_per_step, 3),
        "tokens_per_step_error": None if index is None else round(float(r.prediction.table.errors()[index]), 4),
        "predicted": shape_name(r.prediction.best()),
        "predicted_tokens_per_s": round(r.prediction.of(r.prediction.best()), 2),
        "shapes_measured": len({m.shape for m in r.measured if m.shape is not None}),
        "turns": len(r.measured),
        "out_of_memory_at_slots": r.too_large,
        "disturbed": r.disturbed,
        "seconds": round(r.seconds, 1),
    }


def _by_category(one: DrafterResult) -> dict[str, dict[str, float]]:
    """Tokens per step of the chosen shape of the first batch size, by kind of text."""
    shape = next((r.shape for r in one.results if r.shape is not None), None)
    if shape is None:
        return {}
    out = {}
    for category in sorted(set(one.table.categories)):
        rate = one.table.rate(shape, category)
        out[category or "all"] = {
            "tokens_per_step": round(rate.tokens_per_step, 3),
            "error": round(rate.error, 3) if math.isfinite(rate.error) else -1.0,
        }
    return out
