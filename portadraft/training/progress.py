"""What the person at the terminal sees: bars with rate and time left, and the figures that matter."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import rich.progress
from rich.console import Console

EVERY = 60.0
"""Seconds between lines where there is no terminal to show a bar."""


class Progress:
    """Bars on standard error; plain lines of figures where it is no terminal; silent if not `enabled`.

    tick: called whenever there is news, shown or not.
    """

    def __init__(self, enabled: bool = True, tick: Callable[[], None] = lambda: None) -> None:
        self.enabled, self.tick = enabled, tick
        self.console = Console(file=sys.stderr, quiet=not enabled)

    def say(self, line: str) -> None:
        """A line of its own, above a bar if there is one."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """A bar; the function it gives takes how many are done."""
        with self._bars(unit) as bars:
            task = bars.add_task(name, total=total, rate=0.0)

            said = time.monotonic()

            def advance(done: int) -> None:
                nonlocal said
                self._update(bars, task, done)
                self.tick()
                if not self.console.is_terminal and time.monotonic() - said > EVERY:
                    said = time.monotonic()
                    self.say(f"{name}: {done} of {total} {unit}")

            yield advance
        if not self.console.is_terminal:
            self.say(f"{name}: {total} {unit}")

    @contextmanager
    def training(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """A bar over the plan, a line for each evaluation, and one for each update that was left out."""
        with self._bars("tokens") as bars:
            task = bars.add_task("training", total=1.0, rate=0.0)

            def report(entry: dict[str, Any]) -> None:
                self.tick()
                if "skipped" in entry:
                    self.say(f"left out {skipped_line(entry['skipped'])}")
                elif "tokens_per_step" in entry:
                    self.say(evaluation_line(entry))
                elif "loss" in entry:
                    top1 = " ".join(f"{x:.2f}" for x in entry["top1"])
                    line = f"loss {entry['loss']:.3f}, top-1 {top1}"
                    rate = entry["positions_per_s"]
                    bars.update(task, completed=entry["progress"], description=line, rate=rate)
                    if not self.console.is_terminal:
                        left = f", {entry['minutes_left']:.1f} min left" if "minutes_left" in entry else ""
                        self.say(f"{entry['minutes']:.1f} min, {line}, {rate:.0f} tokens/s{left}")

            yield report

    @staticmethod
    def _update(bars: rich.progress.Progress, task: rich.progress.TaskID, done: float) -> None:
        bars.update(task, completed=done)
        speed = bars.tasks[task].finished_speed or bars.tasks[task].speed or 0.0
        bars.update(task, rate=speed)

    def _bars(self, unit: str) -> rich.progress.Progress:
        return rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn("{task.fields[rate]:.0f} " + unit + "/s"),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=self.console,
            disable=not (self.enabled and self.console.is_terminal),
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None: ...


def evaluation_line(entry: dict[str, Any]) -> str:
    """One evaluation: time, updates, loss, tokens per step by W x L/N."""
    figures = ", ".join(f"{k}: {v:.2f}" for k, v in entry["tokens_per_step"].items())
    loss = "" if entry.get("loss") is None else f", loss {entry['loss']:.3f}"
    return f"{entry['minutes']:.1f} min, {entry['updates']} updates{loss}: tokens per step {figures}"


def skipped_line(skipped: dict[str, Any]) -> str:
    """An update that was left out: which, why, and the documents that it was to learn from, by file and line."""
    places = []
    for place in skipped["where"]:
        documents, named = place["documents"], [name for name in place.get("places", ()) if name]
        if named:
            places.append("; ".join(named[:4]) + (" …" if len(named) > 4 else ""))
            continue
        more = " …" if len(documents) > 4 else ""
        places.append(f"documents {', '.join(map(str, documents[:4]))}{more} of source {place['source']}")
    return f"update {skipped['update']}: {skipped['reason']} ({'; '.join(places)})"
