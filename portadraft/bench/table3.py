"""`portadraft bench table3`: the form of the paper's table 3: how the best width falls as the batch grows."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from portadraft.api import load
from portadraft.core.target import Target
from portadraft.core.types import BeamShape
from portadraft.errors import InvalidArgument
from portadraft.tuner.config import TuneConfig
from portadraft.tuner.machine import LiveMachine, is_out_of_memory
from portadraft.tuner.memory import free_bytes, need_bytes
from portadraft.tuner.run import Tuner

_Cells = dict[BeamShape | None, "list[float] | str"]
_FAR_TOO_SLOW = 6.0
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
BATCHES = (1, 2, 4, 8, 10, 20)


def table3(
    model: str = "smollm2-135m",
    *,
    drafter: str = "auto",
    dtype: str = "auto",
    widths: Sequence[int] = WIDTHS,
    batches: Sequence[int] = BATCHES,
    length: int = 4,
    nodes: int | None = None,
    steps: int = 3,
    rounds: int = 2,
    seconds: float = 3600.0,
    config: TuneConfig | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Tokens per second of every width and batch size, per request and in all; out of memory is a cell.

    As it is decoded: steps of all widths and of plain decoding take turns on the same rows. nodes: the budget of every
    shape (None: all nodes are verified, as in the paper). seconds: after which no further cell is begun. config: of the
    prompts and so on.
    """
    if not widths or not batches or min(*widths, *batches, steps, rounds) < 1:
        raise InvalidArgument("widths, batches, steps, rounds: expected numbers of at least 1")
    loaded = load(model, dtype=dtype, drafter=drafter)
    tune = Tuner(loaded, config or TuneConfig(), say)
    selected = loaded.drafter_for(drafter)
    if selected.drafter is None:
        raise InvalidArgument(f"drafter={drafter!r}: plain decoding has no width")
    end = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    for batch in batches:
        shapes: list[BeamShape | None] = [None, *(BeamShape(w, length, nodes) for w in widths)]
        cells: _Cells = {s: [] for s in shapes}
        with tune.machine(selected.drafter, batch) as machine:
            for turn in range(rounds):
                for shape in shapes if turn % 2 == 0 else reversed(shapes):
                    late = shape is not None and time.monotonic() > end
                    _cell(loaded.target, machine, cells, shape, max(steps, -(-24 // batch)), late, first=turn == 0)
        rows += [_line(batch, shape, cells) for shape in shapes if shape is not None]
        say(f"batch {batch}: " + ", ".join(f"{r['width']}: {r['speedup']}" for r in rows if r["batch"] == batch))
    best = {}
    for batch in batches:
        done = [r for r in rows if r["batch"] == batch and r["speedup"] is not None]
        if done:
            best[str(batch)] = max(done, key=lambda r: float(r["speedup"]))["width"]
    return {
        "bench": "table3",
        "model": loaded.name,
        "dtype": loaded.target.facts.dtype,
        "drafter": selected.name,
        "length": length,
        "nodes": nodes,
        "best_width_by_batch": best,
        "cells": rows,
    }


def _line(batch: int, shape: BeamShape, cells: _Cells) -> dict[str, Any]:
    got, plain = cells[shape], cells[None]
    line: dict[str, Any] = {"batch": batch, "width": shape.width, "per_request": None, "total": None, "speedup": None}
    if isinstance(got, str):
        return line | {"note": got}
    if not got or isinstance(plain, str) or not plain:
        return line | {"note": "not run"}
    total = statistics.median(got)
    speedup = round(total / statistics.median(plain), 3)
    return line | {"per_request": round(total / batch, 2), "total": round(total, 2), "speedup": speedup, "note": ""}


def _cell(
    target: Target, machine: LiveMachine, cells: _Cells, shape: BeamShape | None, steps: int, late: bool, first: bool
) -> None:
    """Some steps of one cell; what does not fit is marked so, and what is far too slow is timed once."""
    got, plain = cells[shape], cells[None]
    if isinstance(got, str) or late:
        return
    slots = 1 if shape is None else shape.slots()
    free = free_bytes(target.ops)
    if free is not None and need_bytes(target.facts, machine.batch, slots, machine.context) > free:
        cells[shape] = "out of memory (predicted)"
        return
    try:
        if first:
            chunk = machine.steps(shape, 1)
            base = machine.batch * 1000 / plain[0] if not isinstance(plain, str) and plain else math.inf
            if chunk.ms[0] > _FAR_TOO_SLOW * base:
                got.append(chunk.tokens * 1000 / sum(chunk.ms))
                return
        elif got and isinstance(plain, list) and got[0] < plain[0] / 3:
            return
        chunk = machine.steps(shape, steps)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        cells[shape] = "out of memory"
        machine.close()
        return
    got.append(chunk.tokens * 1000 / sum(chunk.ms))
