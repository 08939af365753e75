"""What the person at the terminal sees: bars with rate and time left, and the figures that matter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import rich.progress
from rich.console import Console


class Progress:
    """Bars on standard error; plain lines of figures where it is no terminal; silent if not `enabled`."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.console = Console(file=sys.stderr, quiet=not enabled)

    @contextmanager
    def task(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """A bar; the function it gives takes how many are done."""
        with self._bars(unit) as bars:
            task = bars.add_task(name, total=total, rate=0.0)
            yield lambda done: self._update(bars, task, done)
        if not self.console.is_terminal:
            self.console.print(f"{name}: {total} {unit}")

    @contextmanager
    def training(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """A bar over the budget, and a line for each evaluation."""
        with self._bars("%") as bars:
            task = bars.add_task("training", total=100, rate=0.0)

            def report(entry: dict[str, Any]) -> None:
                self._update(bars, task, 100 * float(entry.get("progress", 0.0)))
                if "tokens_per_step" in entry:
                    figures = ", ".join(f"{k}: {v:.2f}" for k, v in entry["tokens_per_step"].items())
                    done = f"{entry['minutes']:.1f} min, {entry['updates']} updates"
                    self.console.print(f"{done}: tokens per step {figures}")
                elif "loss" in entry:
                    top1 = " ".join(f"{x:.2f}" for x in entry["top1"])
                    line = f"loss {entry['loss']:.3f}, top-1 {top1}, {entry['positions_per_s']:.0f} positions/s"
                    bars.update(task, description=line)
                    if not self.console.is_terminal:
                        self.console.print(f"{entry['minutes']:.1f} min, {line}")

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
            rich.progress.TextColumn("" if unit == "%" else "{task.fields[rate]:.0f} " + unit + "/s"),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=self.console,
            disable=not (self.enabled and self.console.is_terminal),
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None: ...
