"""Devices that are not here: a cost curve in place of a machine, from a file, from published timings, or guessed.

A curve file is JSON:

    {"name": "…", "origin": "…", "batch": 1, "context": 200, "dtype": "float16",
     "check": {"slots": [1, 2, 8, …], "ms": [48.4, 60.0, …]},
     "draft": {"base_ms": 1.0, "per_length_ms": 2.5, "per_node_ms": 0.1}}

or, for a guess from what a data sheet says, in place of check and draft:

    {"name": "…", "roofline": {"bandwidth_gb_per_s": 400, "tflop_per_s": 10, "model_gb": 13.5,
     "cache_mb_per_token": 0.5, "drafter_gb": 0.4, "launch_ms": 1.0}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from portadraft.core.types import BeamShape
from portadraft.errors import InvalidArgument, ModelNotFound
from portadraft.tuner.acceptance import AcceptanceTable
from portadraft.tuner.costs import Costs, Curve
from portadraft.tuner.machine import Chunk

_MOST_BYTES = 4 << 20
_SLOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
_LEAST_MS, _MOST_MS = 1e-3, 1e8
"""Of a pass; below that it is a mistake of units rather than a device."""
_MOST_DRAFT_MS = 1e5
MOST_ROUNDS = 400
"""Of a search on a device that is not here: its time costs nothing, but ours goes on."""
_FIELDS = {
    "": ("name", "origin", "dtype", "batch", "context", "check", "draft", "roofline"),
    "check": ("slots", "ms"),
    "draft": ("base_ms", "per_length_ms", "per_node_ms"),
    "roofline": (
        "bandwidth_gb_per_s", "tflop_per_s", "model_gb", "cache_mb_per_token", "context", "drafter_gb", "launch_ms",
        "bytes_per_weight",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class DeviceCurve:
    """A device as costs. costs: at the batch sizes that it tells of; another one is scaled by rows."""

    name: str
    origin: str
    dtype: str
    costs: Mapping[int, Costs]

    def at(self, batch: int) -> Costs:
        """Costs at a batch size: the device's own, or those of its nearest smaller batch size, where N slots of B rows
        cost what B·N slots of one row do.
        """
        if batch in self.costs:
            return self.costs[batch]
        base = self.costs[max((b for b in self.costs if b < batch), default=min(self.costs))]
        times = batch / base.batch
        slots = sorted({*base.check.at, *_SLOTS})
        check = Curve(tuple(slots), tuple(base.check(n * times) if n * times >= 1 else base.check(1) for n in slots))
        draft = {w: Curve(c.at, tuple(x * max(1.0, times) ** 0.5 for x in c.ms)) for w, c in base.draft.items()}
        return Costs(batch, base.context, check, draft, base.depth_ms, base.check_depth)


def read_curve(path: Path) -> DeviceCurve:
    """Read a curve file, or one shipped with the package by its name (see `shipped`).

    Raises: ModelNotFound; InvalidArgument, naming the field that is wrong.
    """
    if not path.exists() and str(path) in shipped():
        return _shipped()[str(path)]
    if not path.is_file():
        what = "not a file" if path.exists() else "no such file"
        raise ModelNotFound(
            f"device_curve={str(path)!r}: {what}; expected JSON as docs/tuning.md describes it, or one of "
            f"{', '.join(shipped())}"
        )
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidArgument(f"device_curve={str(path)!r}: {path.stat().st_size} bytes; expected a few kilobytes")
        document = json.loads(path.read_text("utf-8"))
    except InvalidArgument:
        raise
    except OSError as error:
        raise InvalidArgument(f"device_curve={str(path)!r}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"device_curve={str(path)!r}: not JSON ({str(error)[:80]})") from None
    return parse_curve(document, str(path))


def parse_curve(document: Any, where: str = "device curve") -> DeviceCurve:
    """From the parsed JSON. Raises: InvalidArgument, naming the field."""
    if not isinstance(document, dict):
        raise InvalidArgument(f"{where}: {type(document).__name__}; expected an object (name; check or roofline)")
    _known(document, "", where)
    name, origin = _text(document, "name", where), _text(document, "origin", where, "a file")
    dtype = _text(document, "dtype", where, "")
    if "roofline" in document:
        if beside := sorted({"check", "draft", "batch", "context"} & document.keys()):
            raise InvalidArgument(
                f"{where}: roofline beside {', '.join(beside)}; expected check and draft (what was measured), or "
                "roofline (a guess): remove one"
            )
        return roofline(name, _numbers(document["roofline"], "roofline", where), dtype, where)
    batch = int(_number(document.get("batch", 1), f"{where}: batch", 1, 65536))
    context = int(_number(document.get("context", 0), f"{where}: context", 0, 1e9))
    check, draft = document.get("check"), document.get("draft", {})
    if not isinstance(check, dict) or not isinstance(check.get("slots"), list) or not isinstance(check.get("ms"), list):
        raise InvalidArgument(f'{where}: check={check!r:.60}; expected {{"slots": [1, …], "ms": […]}}')
    _known(check, "check", where)
    slots = [int(_number(x, f"{where}: check.slots", 1, 65536)) for x in check["slots"][:4096]]
    ms = [_number(x, f"{where}: check.ms", _LEAST_MS, _MOST_MS) for x in check["ms"][:4096]]
    if len(slots) != len(ms) or slots != sorted(set(slots)) or not slots or slots[0] != 1:
        raise InvalidArgument(f"{where}: check: expected rising slots from 1 on, each with its milliseconds")
    parts = _numbers(draft, "draft", where, _MOST_DRAFT_MS)
    curve = _draft(parts.get("base_ms", 0.0), parts.get("per_length_ms", 0.0), parts.get("per_node_ms", 0.0))
    costs = Costs(batch, context, Curve(tuple(slots), tuple(ms)), curve)
    return DeviceCurve(name, origin, dtype, {batch: costs})


def _draft(base: float, per_length: float, per_node: float) -> dict[int, Curve]:
    return {w: Curve(_LENGTHS, tuple(base + per_length * n + per_node * w * n for n in _LENGTHS)) for w in _WIDTHS}


def roofline(name: str, numbers: Mapping[str, float], dtype: str = "", where: str = "device curve") -> DeviceCurve:
    """A guess from a data sheet: a pass takes the longer of reading the weights and computing the slots.

    numbers: bandwidth_gb_per_s, tflop_per_s (that the model really gets), model_gb (weights), and, 0 where left out,
    cache_mb_per_token, context, drafter_gb, launch_ms (of a pass beside both), bytes_per_weight (2).
    """
    for key in ("bandwidth_gb_per_s", "tflop_per_s", "model_gb"):
        if not numbers.get(key, 0) > 0:
            raise InvalidArgument(f"{where}: roofline: {key}={numbers.get(key)!r}; expected a number above 0")
    bandwidth, flops = numbers["bandwidth_gb_per_s"], numbers["tflop_per_s"] * 1e12
    model, drafter = numbers["model_gb"], numbers.get("drafter_gb", 0.0)
    weight = numbers.get("bytes_per_weight", 2.0) or 2.0
    context, launch = numbers.get("context", 200.0), numbers.get("launch_ms", 0.0)

    def ms(gigabytes: float, reads_gb: float, rows: float) -> float:
        read = (gigabytes + reads_gb) / bandwidth
        compute = 2 * gigabytes * 1e9 / weight * rows / flops
        return 1000 * max(read, compute) + launch

    if not _LEAST_MS <= (plain := ms(model, 0, 1)) <= _MOST_MS:
        raise InvalidArgument(
            f"{where}: roofline: a plain step would take {plain:.3g} ms; expected {_LEAST_MS:g} to {_MOST_MS:g}: check "
            "the units"
        )
    if drafter > model:
        raise InvalidArgument(f"{where}: roofline: drafter_gb={drafter:g}; expected less than model_gb={model:g}")
    costs = {}
    for batch in (1, 2, 4, 8, 16, 32, 64, 128):
        cache = batch * context * numbers.get("cache_mb_per_token", 0.0) / 1000
        check = Curve(_SLOTS, tuple(ms(model, cache, batch * n) for n in _SLOTS))
        draft = {w: Curve(_LENGTHS, tuple(n * ms(drafter, 0, batch * w) for n in _LENGTHS)) for w in _WIDTHS}
        costs[batch] = Costs(batch, int(context), check, draft if drafter else {})
    return DeviceCurve(name, "roofline guess", dtype, costs)


def shipped() -> list[str]:
    """The names of the curves that come with the package."""
    return sorted(_shipped())


def _shipped() -> dict[str, DeviceCurve]:
    text = resources.files("portadraft.tuner").joinpath("curves.json").read_text("utf-8")
    return {row["name"]: parse_curve(row, row["name"]) for row in json.loads(text)["curves"]}


def _number(value: Any, where: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise InvalidArgument(f"{where}: {value!r:.40}; expected a number")
    if not low <= value <= high:  # infinities, and integers that no float holds, included
        raise InvalidArgument(f"{where}: {value!r:.40}; expected {low:g} to {high:g}")
    return float(value)


def _numbers(value: Any, section: str, where: str, most: float = 1e9) -> dict[str, float]:
    if not isinstance(value, dict):
        raise InvalidArgument(f"{where}: {section}: {value!r:.40}; expected an object of numbers")
    _known(value, section, where)
    return {name: _number(number, f"{where}: {section}.{name}", 0, most) for name, number in value.items()}


def _known(found: Mapping[str, Any], section: str, where: str) -> None:
    """A mistyped name would be 0, or not there, without a word."""
    if unknown := [name for name in found if name not in _FIELDS[section]]:
        name = f"{section}.{unknown[0]}" if section else unknown[0]
        raise InvalidArgument(f"{where}: {name:.60}: there is no such field; expected {', '.join(_FIELDS[section])}")


def _text(document: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = document.get(key, default)
    if not isinstance(value, str) or len(value) > 300 or not value.isprintable():
        raise InvalidArgument(f"{where}: {key}={value!r:.40}; expected a short text")
    return value


@dataclass
class SimulatedMachine:
    """A `Machine` whose time is computed. `clock` is its own: it moves by what a step would have taken.

    table: gives how often an optional part is found, and the tokens. noise: relative, of every step. memory_slots:
    passes over more slots than that run out of memory.
    """

    costs: Costs
    table: AcceptanceTable
    noise: float = 0.02
    seed: int = 0
    memory_slots: int | None = None
    now: float = 0.0
    batch: int = field(init=False)
    context: int = field(init=False)

    def __post_init__(self) -> None:
        self.batch, self.context = self.costs.batch, self.costs.context
        self._random = np.random.default_rng(self.seed)

    def clock(self) -> float:
        """Seconds that have passed on the device."""
        return self.now

    def _take(self, ms: float) -> float:
        ms = max(ms, 1e-6) * float(np.exp(self._random.normal(0.0, self.noise)))
        self.now += ms / 1000
        return ms

    def _fit(self, slots: int) -> None:
        if self.memory_slots is not None and slots > self.memory_slots:
            raise MemoryError(f"{slots} slots; the simulated device holds {self.memory_slots}")

    def draft_ms(self, width: int, length: int) -> float:
        return self._take(self.costs.draft_ms(width, length))

    def check_ms(self, slots: int, depth: int) -> float:
        self._fit(slots)
        return self._take(self.costs.check_ms(slots, depth))

    def steps(self, shape: BeamShape | None, count: int) -> Chunk:
        if shape is None:
            return Chunk(tuple(self._take(self.costs.plain_ms) for _ in range(count)), (1,) * count, count * self.batch)
        kind, index = self.table.kind, self.table.grid.index(shape)
        share = 1 - (1 - float(self.table.found_share()[index])) ** self.batch
        slots: Sequence[int] = [kind.slots(shape, bool(self._random.random() < share)) for _ in range(count)]
        self._fit(max(slots))
        ms = tuple(self._take(self.costs.seen_ms(kind, shape, n)) for n in slots)
        tokens = self.table.tokens_per_step()[index] * count * self.batch
        return Chunk(ms, tuple(slots), round(tokens))
