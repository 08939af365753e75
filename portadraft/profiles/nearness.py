"""How near a profile is to this machine, model and call: the order of preference, each step with its differences.

    asked-for         a profile that the caller named, however far it is
    exact             same device and memory, libraries of the same release, model, drafter, temperature and context
    other-versions    the same, measured with other releases of the libraries or of portadraft
    predicted         acceptance of this model and drafter × a cost curve of this device (`prediction`)
    other-conditions  same device and architecture; other memory, temperature, context, weights or drafter's weights
    similar-device    as above, on a device of the same generation
    published         what a paper or recording states for this device and model by name
    none              no profile: the default shape

Every step after `exact` is a guess that the call tests while it runs, and no step changes a token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import AwareDatetime, Field

from portadraft.identity import same_weights
from portadraft.profiles.device import family
from portadraft.profiles.ids import same_drafter
from portadraft.profiles.pooling import release
from portadraft.profiles.schema import (
    Conditions,
    DrafterIdentity,
    Machine,
    ModelIdentity,
    Origin,
    Profile,
    Software,
    _Part,
)

Step = Literal[
    "asked-for", "exact", "other-versions", "predicted", "other-conditions", "similar-device", "published", "none"
]
STEPS: tuple[Step, ...] = (
    "asked-for",
    "exact",
    "other-versions",
    "predicted",
    "other-conditions",
    "similar-device",
    "published",
    "none",
)
SHORT_CONTEXT = 512
CONTEXT_FACTOR = 4.0
TEMPERATURE_STEP = 0.36
THREADS_FACTOR = 1.5


class Summary(_Part):
    """What of a profile says whether it is of use; kept in indexes."""

    origin: Origin
    created: AwareDatetime
    machine: Machine
    software: Software
    model: ModelIdentity
    drafter: DrafterIdentity
    conditions: Conditions
    disturbed: bool = False
    costs: bool = False
    acceptance: tuple[float, ...] = Field(default=(), max_length=64)

    @staticmethod
    def of(profile: Profile) -> Summary:
        return Summary(
            origin=profile.origin,
            created=profile.created,
            machine=profile.machine,
            software=profile.software,
            model=profile.model,
            drafter=profile.drafter,
            conditions=profile.conditions,
            disturbed=profile.disturbed,
            costs=bool(profile.costs.verify),
            acceptance=tuple(sorted({a.temperature for a in profile.acceptance})[:64]),
        )


@dataclass(frozen=True)
class Query:
    """What is looked for: this machine, software, model and drafter, and the call's temperature and context."""

    machine: Machine
    software: Software
    model: ModelIdentity
    drafter: DrafterIdentity
    dtype: str
    temperature: float = 0.0
    context: int = 0


@dataclass(frozen=True)
class Nearness:
    """A step, and what differs, in words. penalty orders profiles within a step."""

    step: Step
    penalty: float
    differences: tuple[str, ...]

    def order(self) -> tuple[int, float]:
        return STEPS.index(self.step), self.penalty


def compare(query: Query, found: Summary) -> Nearness | None:
    """How near a profile is, or None where it is of no use."""
    if found.software.backend != query.software.backend and found.origin != "published":
        return None
    if found.origin == "published":
        return _published(query, found)
    if not _same_costs(query, found):
        return None
    notes = _Notes()
    where = _device(query.machine, found.machine, notes)
    if where is None:
        return None
    _versions(query.software, found.software, notes)
    if not _same_kind_of_drafter(query, found, notes):
        return None
    if not same_temperature(query.temperature, found.conditions.temperature):
        notes.add("other-conditions", 2.0, f"temperature {found.conditions.temperature:g}, here {query.temperature:g}")
    if not same_context(query.context, found.conditions.context):
        notes.add("other-conditions", 1.0, f"context {found.conditions.context}, here {query.context}")
    if found.disturbed:
        notes.add("other-conditions", 8.0, "measured on a busy machine")
    if found.origin == "predicted":
        notes.add("predicted", 0.0, "predicted, not measured")
    return notes.result(where)


def same_temperature(a: float, b: float) -> bool:
    """Both greedy, or both sampled and near."""
    return a == b or (a > 0 and b > 0 and abs(a - b) <= TEMPERATURE_STEP)


def same_context(a: int, b: int) -> bool:
    """Both short, or within a factor."""
    low, high = sorted((max(a, SHORT_CONTEXT), max(b, SHORT_CONTEXT)))
    return high <= CONTEXT_FACTOR * low


def temperature_class(temperature: float) -> float:
    """Calls of one class are served by one look-up."""
    return 0.0 if temperature == 0 else max(0.1, round(temperature, 1))


def context_class(context: int) -> int:
    """Powers of two above SHORT_CONTEXT; calls of one class are served by one look-up."""
    return max(context, SHORT_CONTEXT).bit_length()


def same_device(a: Machine, b: Machine) -> bool:
    """The same canonical device; of CPUs, as many cores and threads of it. Memory is not compared."""
    if (a.name, a.kind) != (b.name, b.kind):
        return False
    return a.kind == "gpu" or (a.cores == b.cores and (a.threads == b.threads or None in (a.threads, b.threads)))


def similar_device(a: Machine, b: Machine) -> bool:
    """Of one generation; of CPUs, with about as many threads."""
    if a.kind != b.kind or family(a.name) is None or family(a.name) != family(b.name):
        return False
    if a.kind == "gpu":
        return True
    here, there = (m.threads or m.cores or 0 for m in (a, b))
    return 0 < max(here, there) <= THREADS_FACTOR * min(here, there)


def same_costs(query: Query, found: Summary) -> bool:
    """Whether the costs that a profile states are those of this model here, but for the device."""
    return found.software.backend == query.software.backend and _same_costs(query, found)


def _same_costs(query: Query, found: Summary) -> bool:
    model = found.model
    return model.architecture_id == query.model.architecture_id != "" and found.conditions.dtype == query.dtype


def cost_differences(query: Query, found: Profile) -> tuple[str, ...]:
    """What differs between this machine and the one that costs were measured on, beside its name; in words."""
    notes = _Notes()
    _memory(query.machine, found.machine, notes)
    _versions(query.software, found.software, notes)
    return tuple(notes.differences)


def of_no_use(query: Query, found: Summary) -> str:
    """For a profile that `compare` passes over: what it is for instead, in words."""
    if found.origin == "published":
        return "published figures of another model or device"
    if found.software.backend != query.software.backend:
        return f"for the backend {found.software.backend}"
    if found.model.architecture_id != query.model.architecture_id or not query.model.architecture_id:
        return f"for {found.model.name or 'another model'}, of another architecture"
    if found.conditions.dtype != query.dtype:
        return f"for {found.conditions.dtype}"
    if _device(query.machine, found.machine, _Notes()) is None:
        return f"of {named(found.machine)}"
    return f"for the drafter {found.drafter.name}"


class _Notes:
    def __init__(self) -> None:
        self.step, self.penalty = 0, 0.0
        self.differences: list[str] = []

    def add(self, step: Step, penalty: float, text: str) -> None:
        self.step = max(self.step, STEPS.index(step))
        self.penalty += penalty
        self.differences.append(text)

    def result(self, least: Step) -> Nearness:
        return Nearness(STEPS[max(self.step, STEPS.index(least))], self.penalty, tuple(self.differences))


def _device(here: Machine, there: Machine, notes: _Notes) -> Step | None:
    if same_device(here, there):
        _memory(here, there, notes)
        return "exact"
    if not similar_device(here, there):
        return None
    notes.add("similar-device", 0.0 if here.name == there.name else 1.0, f"measured on {named(there)}")
    return "similar-device"


def named(machine: Machine) -> str:
    """A device for people: of CPUs, with their threads."""
    count = machine.threads or machine.cores if machine.kind == "cpu" else None
    return machine.name + (f" with {count} thread{'s' if count > 1 else ''}" if count else "")


def _memory(here: Machine, there: Machine, notes: _Notes) -> None:
    if here.memory_gb != there.memory_gb and None not in (here.memory_gb, there.memory_gb):
        notes.add("other-conditions", 1.0, f"{there.memory_gb} GB of memory, here {here.memory_gb}")


def _versions(here: Software, there: Software, notes: _Notes) -> None:
    pairs: list[tuple[str, str, str]] = [("portadraft", there.portadraft, here.portadraft)]
    pairs += [(name, there.versions.get(name, "unknown"), version) for name, version in here.versions.items()]
    for name, old, new in pairs:
        if release(old) != release(new):
            notes.add("other-versions", 0.5 + min(_distance(old, new), 100) / 200, f"{name} {old}, here {new}")


def _distance(old: str, new: str) -> float:
    """How many releases lie between two versions, about."""
    try:
        (a, b), (c, d) = (tuple(map(int, release(v).split("."))) for v in (old, new))
    except ValueError:
        return 100.0
    return 20.0 * abs(a - c) + abs(b - d)


def _same_kind_of_drafter(query: Query, found: Summary, notes: _Notes) -> bool:
    if not same_weights(query.model.weights_id, found.model.weights_id):
        notes.add("other-conditions", 4.0, f"other weights of the same architecture ({found.model.name or 'unnamed'})")
    if found.drafter.name != query.drafter.name:
        return False
    if not same_drafter(query.drafter, found.drafter):
        notes.add("other-conditions", 4.0, "another drafter of the same kind")
    return True


# published figures, which know names only


def _published(query: Query, found: Summary) -> Nearness | None:
    if found.machine.kind != query.machine.kind or not _named(found.machine.name, query.machine.name):
        return None
    if model_key(found.model.name) != model_key(query.model.name):
        return None
    if "redrafter" not in query.drafter.name:
        return None
    texts = ["published figures, not measured here", f"{found.conditions.dtype}, here {query.dtype}"]
    if found.conditions.dtype == query.dtype:
        texts.pop()
    return Nearness("published", float(len(texts)), tuple(texts))


def _named(published: str, here: str) -> bool:
    """A published name may leave out the form factor ("NVIDIA H100"), never add to it."""
    if here == published:
        return True
    return here.startswith("NVIDIA ") and here in {f"{published} {form}" for form in ("SXM", "PCIe", "NVL")}


def model_key(name: str) -> str:
    """ "lmsys/vicuna-7b-v1.3", "vicuna-7b" and a folder of that name are one model to published figures."""
    last = re.split(r"[/\\]", name.strip().rstrip("/\\"))[-1].lower()
    return re.sub(r"(-v\d+(\.\d+)*|-hf|\.gguf)+$", "", last)
