"""Which profile serves this machine, model and call, from where, and why: found once, before the first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from portadraft.identity import same_weights
from portadraft.profiles.catalog import IN_PLACE, Place, places
from portadraft.profiles.ids import same_drafter
from portadraft.profiles.mirror import UNREACHABLE
from portadraft.profiles.nearness import (
    Nearness,
    Query,
    Step,
    Summary,
    compare,
    cost_differences,
    of_no_use,
    same_costs,
    same_device,
    same_temperature,
    similar_device,
)
from portadraft.profiles.pooling import pool, pooling_key
from portadraft.profiles.prediction import predict
from portadraft.profiles.schema import Acceptance, Conditions, Profile, now

MOST_POOLED = 256
_UNUSUAL = (UNREACHABLE, IN_PLACE)
"""Notes on a store that are said with a profile that came from it, too."""
Table: TypeAlias = Callable[[Query], Sequence[Acceptance]]


@dataclass(frozen=True)
class Looked:
    """One place that was looked at: how many profiles it has, the best step among them, and a note. why: where none is
    of use, what they are for instead, the commonest first.
    """

    place: str
    profiles: int
    best: Step
    note: str
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """The outcome of a look-up.

    step: how near (`portadraft.profiles.nearness`); profile: None for the step "none". place: where it was found.
    differences: from what was looked for, in words. pooled: how many profiles of equal machines it is made of.
    looked: every place that was looked at.
    """

    step: Step
    profile: Profile | None
    place: str = ""
    differences: tuple[str, ...] = ()
    pooled: int = 1
    looked: tuple[Looked, ...] = ()

    @property
    def trusted(self) -> bool:
        """Whether it was measured under just these circumstances."""
        return self.step == "exact" and self.profile is not None and self.profile.origin == "measured"

    @property
    def reason(self) -> str:
        """One line for stats."""
        differences = f"; {', '.join(self.differences)}" if self.differences else ""
        if self.profile is None:
            looked = ", ".join(one.place + (f": {one.note}" if one.note else "") for one in self.looked)
            return f"no profile for this machine and model ({looked or 'none was asked for'}{differences})"
        pooled = f", {self.pooled} pooled" if self.pooled > 1 else ""
        old = [one.note for one in self.looked if one.place in self.place and one.note.startswith(_UNUSUAL)]
        note = f" ({old[0]})" if old else ""
        return f"profile, {self.step}: {self.place}{note}{pooled}{differences}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "step": self.step,
            "place": self.place,
            "differences": list(self.differences),
            "pooled": self.pooled,
            "profile": None if self.profile is None else self.profile.id,
            "looked": [vars(one) for one in self.looked],
        }


@dataclass(frozen=True)
class _Candidate:
    nearness: Nearness
    rank: int  # of the place
    place: Place
    identity: str
    summary: Summary

    def order(self) -> tuple[Any, ...]:
        return (*self.nearness.order(), self.rank, -self.summary.created.timestamp(), self.identity)


def find(
    query: Query,
    profiles: str | Path | Profile = "auto",
    *,
    acceptance: Table = lambda query: (),
    refresh: bool = True,
) -> Found:
    """The nearest profile.

    profiles: as `catalog.places` takes it. acceptance: asked for a table of this model and drafter where a prediction
    needs one (`tables.stored_acceptance`); profiles bring others. refresh: whether the network may be used.

    Raises: CorruptFile, OSError where `profiles` names a file that cannot be read.
    """
    return find_in(query, places(profiles, refresh=refresh), acceptance)


def find_in(query: Query, where: Sequence[Place], acceptance: Table = lambda query: ()) -> Found:
    """The nearest profile of places that were read before."""
    candidates = sorted(_candidates(query, where), key=_Candidate.order)
    looked = tuple(_looked(query, place, rank, candidates) for rank, place in enumerate(where))
    found = (
        _asked_for(query, where)
        or _first(query, candidates, "exact", "other-versions")
        or _predicted(query, where, acceptance, same_device, "predicted")
        or _first(query, candidates, "predicted", "other-conditions", "similar-device")
        or _predicted(query, where, acceptance, similar_device, "similar-device")
        or _first(query, candidates, "published")
        or Found("none", None)
    )
    return replace(found, looked=looked)


def _asked_for(query: Query, where: Sequence[Place]) -> Found | None:
    for place in where:
        if place.asked_for:
            (profile,) = place.known.values()
            nearness = compare(query, Summary.of(profile))
            model = profile.model.name or "another model"
            far = f"made for {model} with {profile.drafter.name} on {profile.machine.name}"
            return Found("asked-for", profile, place.label, (far,) if nearness is None else nearness.differences)
    return None


def _first(query: Query, candidates: Sequence[_Candidate], *steps: Step) -> Found | None:
    """The first of the candidates (in order) that can be read."""
    for candidate in candidates:
        if candidate.nearness.step in steps and (found := _load(query, candidate, candidates)):
            return found
    return None


def _candidates(query: Query, where: Sequence[Place]) -> Iterator[_Candidate]:
    for rank, place in enumerate(where):
        for identity, summary in place.entries.items():
            if (nearness := compare(query, summary)) is not None:
                yield _Candidate(nearness, rank, place, identity, summary)


def _looked(query: Query, place: Place, rank: int, candidates: Sequence[_Candidate]) -> Looked:
    best: Step = next((c.nearness.step for c in candidates if c.rank == rank), "none")
    reasons = Counter(of_no_use(query, summary) for summary in place.entries.values()) if best == "none" else Counter()
    return Looked(place.label, len(place.entries), best, place.note, tuple(r for r, _ in reasons.most_common(3)))


def _load(query: Query, best: _Candidate, candidates: Sequence[_Candidate]) -> Found | None:
    """The profile, pooled with those of equal machines that are as near. An index that lied about it is a miss."""
    profile = _honest(query, best)
    if profile is None:
        return None
    key, parts, labels = pooling_key(profile), {profile.id: profile}, [best.place.label]
    for other in candidates:
        if len(parts) >= MOST_POOLED:
            break
        if other.identity in parts or other.nearness.order() != best.nearness.order():
            continue
        if (equal := _honest(query, other)) is not None and pooling_key(equal) == key:
            parts[equal.id] = equal
            labels += [other.place.label] if other.place.label not in labels else []
    pooled = pool(list(parts.values()))
    return Found(best.nearness.step, pooled, " and ".join(labels), best.nearness.differences, len(parts))


def _honest(query: Query, candidate: _Candidate) -> Profile | None:
    profile = candidate.place.load(candidate.identity)
    if profile is None or compare(query, Summary.of(profile)) != candidate.nearness:
        return None
    return profile


# prediction


def _predicted(query: Query, where: Sequence[Place], acceptance: Table, device: Any, step: Step) -> Found | None:
    """A shape from this drafter's acceptance and a cost curve of this (or a similar) device."""
    costs = _with_costs(query, where, device)
    if costs is None:
        return None
    source, label = costs
    lines, origin = _acceptance(query, where, acceptance(query))
    batches = predict(
        lines, source.costs, drafter=query.drafter.name, temperature=query.temperature, context=query.context
    )
    if not batches:
        return None
    texts = [f"costs measured on {source.machine.name}", *cost_differences(query, source), f"acceptance from {origin}"]
    profile = Profile(
        origin="predicted",
        created=now(),
        machine=query.machine,
        software=query.software,
        model=query.model,
        drafter=query.drafter,
        conditions=Conditions(dtype=query.dtype, temperature=query.temperature, context=query.context),
        batches=batches,
    )
    return Found(step, profile, label, tuple(texts))


def _with_costs(query: Query, where: Sequence[Place], device: Any) -> tuple[Profile, str] | None:
    fitting = [
        (place, identity, summary)
        for place in where
        for identity, summary in place.entries.items()
        if summary.costs
        and not summary.disturbed
        and same_costs(query, summary)
        and device(query.machine, summary.machine)
    ]
    exact_versions = query.software.versions
    fitting.sort(key=lambda one: (one[2].software.versions != exact_versions, -one[2].created.timestamp(), one[1]))
    for place, identity, summary in fitting:
        profile = place.load(identity)
        if profile is not None and Summary.of(profile) == summary:
            return profile, place.label
    return None


def _acceptance(query: Query, where: Sequence[Place], table: Sequence[Acceptance]) -> tuple[Sequence[Acceptance], str]:
    if any(same_temperature(line.temperature, query.temperature) for line in table):
        return table, "the drafter's own table"
    for place in where:
        for identity, summary in sorted(place.entries.items(), key=lambda item: -item[1].created.timestamp()):
            fits = (
                any(same_temperature(t, query.temperature) for t in summary.acceptance)
                and same_weights(summary.model.weights_id, query.model.weights_id)
                and same_drafter(summary.drafter, query.drafter)
            )
            if fits and (profile := place.load(identity)) is not None and Summary.of(profile) == summary:
                return profile.acceptance, f"a profile of {summary.machine.name}"
    return (), ""
