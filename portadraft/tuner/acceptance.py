"""Acceptance tables: tokens per step of every shape, by replay. They belong to weights, drafter and text, to no device.

A table keeps the counts of every recording, so that means, their uncertainty, and figures for a
part of the prompts all come from the same numbers. Stored beside the drafter, so that each is
made once and not on every machine.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from portadraft.core.drafter import Drafter
from portadraft.core.ops import Ops
from portadraft.core.types import BeamShape
from portadraft.errors import CorruptFile, InvalidArgument
from portadraft.scratch import sweep
from portadraft.tuner.grid import Grid, Kind
from portadraft.tuner.positions import follow, positions
from portadraft.tuner.recordings import Recording

FORMAT_VERSION = 1
_CONFIDENT = 1.96
_MOST_BYTES = 64 << 20
_COUNTS = ("steps", "accepted", "found", "nodes")


@dataclass(frozen=True)
class Origin:
    """What a table was made from; a table is used only where all of it agrees.

    drafter: its name. drafter_id: a hash of its weights, "" where it has none. weights_id, tokenizer: of the target.
    prompts: `recordings.prompts_id`. temperature, seed: of the generations.
    """

    drafter: str
    drafter_id: str = ""
    weights_id: str = ""
    tokenizer: str = ""
    prompts: str = ""
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Rate:
    """Tokens per step with its standard error over recordings, and the 95 % interval."""

    tokens_per_step: float
    error: float

    @property
    def low(self) -> float:
        return max(1.0, self.tokens_per_step - _CONFIDENT * self.error)

    @property
    def high(self) -> float:
        return self.tokens_per_step + _CONFIDENT * self.error


@dataclass(frozen=True)
class AcceptanceTable:
    """Counts by recording and shape, each (R, W, L, N) int32.

    steps; accepted: drafted tokens accepted; found: steps in which the drafter's optional part was there; nodes:
    verified nodes, root included. categories: the kind of text of each recording.
    """

    grid: Grid
    origin: Origin
    categories: tuple[str, ...]
    steps: NDArray[np.int32]
    accepted: NDArray[np.int32]
    found: NDArray[np.int32]
    nodes: NDArray[np.int32]

    @property
    def kind(self) -> Kind:
        return Kind.of(self.origin.drafter)

    def rows(self, category: str | None = None) -> NDArray[np.int64]:
        """The recordings of a category; None for all."""
        return np.array([i for i, c in enumerate(self.categories) if category is None or c == category], np.int64)

    def tokens_per_step(self, rows: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """(W, L, N): total tokens ÷ total steps over some recordings (None: all)."""
        at = self.rows() if rows is None else rows
        steps = self.steps[at].sum(axis=0)
        mean: NDArray[np.float64] = 1.0 + self.accepted[at].sum(axis=0) / np.maximum(steps, 1)
        return mean

    def errors(self, rows: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """(W, L, N): standard errors of the above, by the delta method for a ratio of sums over recordings."""
        at = self.rows() if rows is None else rows
        n = len(at)
        if n < 2:
            return np.full(self.grid.size, np.inf)
        steps, tokens = self.steps[at].astype(float), (self.steps[at] + self.accepted[at]).astype(float)
        ratio = self.tokens_per_step(at)
        rest = tokens - ratio * steps
        error: NDArray[np.float64] = np.sqrt((rest**2).sum(axis=0) * n / (n - 1)) / np.maximum(steps.sum(axis=0), 1)
        return error

    def rate(self, shape: BeamShape, category: str | None = None) -> Rate:
        """Tokens per step of one shape. Raises: InvalidArgument for a shape outside the grid."""
        index, rows = self.grid.index(shape), self.rows(category)
        return Rate(float(self.tokens_per_step(rows)[index]), float(self.errors(rows)[index]))

    def found_share(self, rows: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """(W, L, N): the share of steps in which a row's optional part was there."""
        at = self.rows() if rows is None else rows
        share: NDArray[np.float64] = self.found[at].sum(axis=0) / np.maximum(self.steps[at].sum(axis=0), 1)
        return share

    def mean_nodes(self) -> NDArray[np.float64]:
        """(W, L, N): verified nodes per step, root included."""
        mean: NDArray[np.float64] = self.nodes.sum(axis=0) / np.maximum(self.steps.sum(axis=0), 1)
        return mean

    # files

    def save(self, path: Path) -> None:
        """Write a safetensors file, all or nothing. Raises: OSError."""
        head = {
            "format_version": FORMAT_VERSION,
            "grid": [self.grid.widths, self.grid.lengths, self.grid.budgets],
            "origin": self.origin.__dict__,
            "categories": self.categories,
        }
        tensors = {name: np.ascontiguousarray(getattr(self, name), dtype="<i4") for name in _COUNTS}
        tensors = {name: v.astype("<u2") if v.size and v.max() < 65536 else v for name, v in tensors.items()}
        data = safetensors.numpy.save(tensors, {"portadraft": json.dumps(head)})
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent, ".*.safetensors.*.tmp")
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @staticmethod
    def load(path: Path) -> AcceptanceTable:
        """Read what `save` wrote. Raises: CorruptFile."""
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ValueError(f"{path.stat().st_size} bytes, expected at most {_MOST_BYTES}")
            with safetensors.safe_open(path, framework="numpy") as file:
                head = json.loads((file.metadata() or {})["portadraft"])
                counts = {name: file.get_tensor(name).astype(np.int32) for name in _COUNTS}
            return AcceptanceTable._parse(head, counts)
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError, InvalidArgument) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)[:200]
            raise CorruptFile(
                f"{path}: not an acceptance table ({why}); expected one that `portadraft tune` stored, which makes it "
                "again if it is not there"
            ) from None

    @staticmethod
    def _parse(head: dict[str, Any], counts: dict[str, NDArray[np.int32]]) -> AcceptanceTable:
        if head["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {head['format_version']!r}, expected {FORMAT_VERSION}")
        grid = Grid(*(tuple(int(x) for x in axis) for axis in head["grid"]))
        raw = head["origin"]
        numbers = ("temperature", "seed")
        names = [f for f in Origin.__dataclass_fields__ if f not in numbers]
        if any(not isinstance(raw[f], str) for f in names) or not math.isfinite(raw["temperature"]):
            raise ValueError("origin: expected texts and finite numbers")
        origin = Origin(**{f: raw[f] for f in names}, temperature=float(raw["temperature"]), seed=int(raw["seed"]))
        categories = tuple(str(c) for c in head["categories"])
        for name, array in counts.items():
            if array.shape != (len(categories), *grid.size) or (array.size and array.min() < 0):
                raise ValueError(
                    f"{name}: shape {array.shape}, expected {(len(categories), *grid.size)}, none negative"
                )
        if any(len(text) > 300 or not text.isprintable() for text in (*categories, *(raw[f] for f in names))):
            raise ValueError("categories, origin: expected short printable texts")
        table = AcceptanceTable(grid, origin, categories, **counts)
        if not table.steps.any():
            raise ValueError("it has no steps")
        if table._contradicts_itself():
            raise ValueError("counts that contradict each other")
        return table

    def _contradicts_itself(self) -> bool:
        """Whether steps have more accepted or verified nodes than their shape has depth or slots."""
        depth, slots = np.zeros(self.grid.size, np.int64), np.zeros(self.grid.size, np.int64)
        for index, shape in self.grid.cells():
            depth[index], slots[index] = self.kind.depth(shape, True), self.kind.slots(shape, True)
        steps = self.steps.astype(np.int64)
        return bool(
            (self.accepted > steps * depth).any() or (self.nodes > steps * slots).any() or (self.found > steps).any()
        )


def make_table(
    ops: Ops,
    drafter: Drafter,
    recordings: Sequence[Recording],
    origin: Origin,
    grid: Grid | None = None,
    *,
    dtype: str = "float32",
    report: Callable[[int], None] | None = None,
) -> AcceptanceTable:
    """Replay recordings for every shape of the grid (the default grid where None).

    Raises: InvalidArgument where no recording has a step, or for a drafter that replay cannot drive.
    """
    grid = Kind.of(drafter.name).shapes(grid or Grid())
    if not any(len(r.tokens) > 1 for r in recordings):
        raise InvalidArgument("recordings: none of them has two tokens, so there is no step to replay")
    chains = [follow(one, grid) for one in positions(ops, drafter, recordings, grid, dtype=dtype, report=report)]
    counts = {name: np.stack([getattr(c, name) for c in chains]).astype(np.int32) for name in _COUNTS}
    return AcceptanceTable(grid, origin, tuple(r.category for r in recordings), **counts)
