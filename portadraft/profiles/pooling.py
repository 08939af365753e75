"""Profiles of equal machines become one, from their raw samples.

Pooling is a union of samples and a choice made anew from them, so it is idempotent, commutative and associative, and a
sample that comes twice counts once. Each submitter counts once, with the median of its own samples, so that a machine
that was measured a hundred times does not outvote the others.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TypeVar

from pydantic import BaseModel

from portadraft.errors import InvalidArgument
from portadraft.profiles.schema import (
    MOST_RATE,
    MOST_SAMPLES,
    MOST_SPEEDUP,
    BatchChoice,
    Profile,
    Sample,
    Shape,
    spread_of,
)

NOISE = 0.02
"""Relative noise of one submitter's median: a shape's advantage is lowered by NOISE / sqrt(submitters), so that one
lucky measurement does not beat what many measured, and plain decoding wins a draw."""

T = TypeVar("T", bound=BaseModel)


def release(version: str) -> str:
    """Major and minor number of a version: what separates libraries that differ in speed ("2.13.0+cu126" → "2.13")."""
    found = re.match(r"\s*v?(\d{1,9})(?:\.(\d{1,9}))?", version)
    return version if found is None else f"{int(found[1])}.{int(found[2] or 0)}"


def pooling_key(profile: Profile) -> tuple[object, ...]:
    """What must be equal for two profiles to be pooled."""
    machine, software, model = profile.machine, profile.software, profile.model
    return (
        profile.origin,
        (machine.name, machine.kind, machine.memory_gb, machine.cores, machine.threads),
        (software.backend, release(software.portadraft)),
        tuple(sorted((name, release(version)) for name, version in software.versions.items())),
        (model.architecture_id, model.weights_id, model.tokenizer, "" if model.architecture_id else model.name),
        (profile.drafter.name, profile.drafter.id),
        tuple(sorted(profile.conditions.model_dump().items(), key=lambda item: item[0])),
    )


def merge(profiles: Iterable[Profile]) -> list[Profile]:
    """One profile per kind of machine and conditions, in the order of their ids."""
    groups: dict[tuple[object, ...], list[Profile]] = defaultdict(list)
    for profile in profiles:
        groups[pooling_key(profile)].append(profile)
    return sorted((pool(group) for group in groups.values()), key=lambda profile: profile.id)


def pool(profiles: Sequence[Profile]) -> Profile:
    """One profile of several that agree in `pooling_key`. A single one comes back as it is.

    Raises: InvalidArgument for none, or for profiles that must not be pooled.
    """
    known = {profile.id: profile for profile in profiles}
    if len({pooling_key(profile) for profile in known.values()}) != 1:
        raise InvalidArgument(
            f"profiles: {len(known)} that differ in machine, software, model or conditions; expected equal ones, which "
            "`merge` sorts out"
        )
    parts = [known[identity] for identity in sorted(known)]
    if len(parts) == 1:
        return parts[0]
    samples = _union(parts)
    first = parts[0]
    batches = _choices(parts, samples)
    best = max(batches, key=lambda choice: (choice.tokens_per_s or 0.0, -choice.batch_size))
    return first.model_copy(
        update={
            "created": max(profile.created for profile in parts),
            "machine": _largest(profile.machine for profile in parts),
            "software": _largest(profile.software for profile in parts),
            "model": _largest(profile.model for profile in parts),
            "costs": max((p.costs for p in parts), key=lambda c: (len(c.verify) + len(c.draft), _text(c))),
            "acceptance": max((p.acceptance for p in parts), key=lambda a: (len(a), [_text(x) for x in a])),
            "batches": batches,
            "recommended_batch_size": best.batch_size if first.conditions.objective == "throughput" else None,
            "samples": samples,
            "disturbed": all(s.disturbed for s in samples) if samples else all(p.disturbed for p in parts),
            "source": max(profile.source for profile in parts),
        }
    )


def _text(part: BaseModel) -> str:
    return part.model_dump_json()


def _largest(parts: Iterable[T]) -> T:
    """Any rule that does not depend on the order would do."""
    return max(parts, key=_text)


def _union(profiles: Sequence[Profile]) -> tuple[Sample, ...]:
    """Every sample once. Of too many, those with the least hashes: a choice that does not depend on the order."""
    known: dict[str, Sample] = {}
    for profile in profiles:
        for sample in profile.samples:
            key = _text(sample.model_copy(update={"disturbed": False}))
            busy = sample.disturbed or profile.disturbed or (key in known and known[key].disturbed)
            known[key] = sample.model_copy(update={"disturbed": busy})
    kept = sorted(known, key=lambda key: hashlib.sha256(key.encode()).digest())[:MOST_SAMPLES]
    return tuple(known[key] for key in sorted(kept))


def _choices(profiles: Sequence[Profile], samples: Sequence[Sample]) -> tuple[BatchChoice, ...]:
    measured: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        measured[sample.batch_size].append(sample)
    stated: dict[int, list[BatchChoice]] = defaultdict(list)
    for profile in profiles:
        for choice in profile.batches:
            stated[choice.batch_size].append(choice)
    return tuple(
        choose(size, measured[size]) if size in measured else _largest(stated[size])
        for size in sorted(measured.keys() | stated.keys())[:256]
    )


def choose(batch_size: int, samples: Sequence[Sample]) -> BatchChoice:
    """The best shape at one batch size, from raw samples of it (at least one).

    Samples from a busy machine count only where there are no others.
    """
    calm = [sample for sample in samples if not sample.disturbed] or list(samples)
    speeds = _by_shape(calm)
    plain = speeds.get(None, {})
    usual = median(plain.values()) if plain else None
    best, best_bound = None, 1.0 if plain else -math.inf
    for shape in sorted((s for s in speeds if s is not None), key=str):
        ratios = [_ratio(value, plain.get(who, usual)) for who, value in speeds[shape].items()]
        bound = median(ratios) * (1 - NOISE / math.sqrt(len(ratios)))
        if bound > best_bound:
            best, best_bound = shape, bound
    chosen = speeds[best]
    ratios = [_ratio(value, plain.get(who, usual)) for who, value in chosen.items()] if plain else []
    values = [s.tokens_per_s for s in calm if s.shape == best] if len(chosen) == 1 else list(chosen.values())
    rate = median(chosen.values())
    gain = median(ratios) if ratios else None
    # Ratios are taken within a submitter, so the plain rate that belongs to the usual rate follows from the gain.
    if gain is not None and not (0 < gain <= MOST_SPEEDUP and 0 < rate / gain <= MOST_RATE):
        gain = None  # no machine measured that
    return BatchChoice(
        batch_size=batch_size,
        shape=best,
        tokens_per_s=rate,
        spread=spread_of(values),
        plain_tokens_per_s=None if gain is None else rate / gain,
        speedup=gain,
    )


def _by_shape(samples: Sequence[Sample]) -> dict[Shape | None, dict[str, float]]:
    """Per shape and submitter the median; of scoring rounds alone where there are some, since these chose nothing."""
    raw: dict[tuple[Shape | None, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        raw[sample.shape, sample.submitter][sample.phase].append(sample.tokens_per_s)
    out: dict[Shape | None, dict[str, float]] = defaultdict(dict)
    for (shape, submitter), phases in raw.items():
        out[shape][submitter] = median(phases.get("score") or phases["search"])
    return dict(out)


def _ratio(value: float, plain: float | None) -> float:
    return value if plain is None else value / plain
