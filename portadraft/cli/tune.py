"""`portadraft tune`: progress to standard error, the result to standard output."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from portadraft.cli.generate import drafter_name
from portadraft.cli.guard import complain
from portadraft.cli.writing import writing, writing_own
from portadraft.errors import InvalidArgument

_COLUMNS = ("drafter", "batch", "shape", "tokens/s", "±", "plain", "speedup", "tokens/step", "predicted", "time")
_WIDE = 110
"""Columns of a terminal from which on the table fits."""
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(text: str, name: str = "budget") -> float:
    """ "60s", "5m", "1.5h" or a plain number of seconds. name: of the option. Raises: InvalidArgument."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h)?\s*", text)
    if found is None or float(found[1]) <= 0:
        raise InvalidArgument(f"{name}={text!r}: expected a time such as 60s, 5m or 1h")
    return float(found[1]) * _UNITS[found[2] or ""]


def numbers(text: str, name: str = "batch_sizes") -> tuple[int, ...]:
    """ "1,2,4". name: of the option. Raises: InvalidArgument."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("0*[1-9][0-9]{0,8}", part) for part in parts):
        raise InvalidArgument(f"{name}={text!r:.80}: expected numbers of at least 1 with commas, such as 1,2,4,8")
    return tuple(dict.fromkeys(map(int, parts)))


def main(
    model: str,
    *,
    budget: str,
    batch_sizes: str,
    drafters: Sequence[str],
    device_curve: str | None,
    acceptance: Path | None,
    plot: Path | None,
    force: bool,
    as_json: bool,
    backend: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    **options: Any,
) -> None:
    """Run the command. options: of `TuneConfig`."""
    from portadraft.tuner.config import TuneConfig
    from portadraft.tuner.devices import read_curve

    config = TuneConfig(budget_s=seconds(budget), batch_sizes=numbers(batch_sizes), **options)
    if device_curve is not None:
        if not device_curve:
            raise InvalidArgument("device_curve='': expected a JSON file, or the name of a curve that comes with us")
        config = replace(config, device_curve=read_curve(Path(device_curve)))
    if plot is not None:
        can_draw(plot)
    if config.prompts is not None:
        from portadraft.tuner.recordings import read_prompts

        read_prompts(config.prompts)  # a mistake in them is found before a model is loaded or downloaded
    drafters = [drafter_name(name) for name in drafters]
    console = Console(stderr=True)
    if acceptance is not None:
        if config.device_curve is None:
            raise InvalidArgument("acceptance: a table alone is tuned for a device curve; name one with --device-curve")
        outcome = _planned(acceptance, config)
        document = _finish(None, outcome, force=False, plot=plot, as_json=as_json)
    else:
        if config.device_curve is None:
            _expect_to_store()
        loaded = _load(model, drafters, backend, device, dtype, console)
        with _Progress(console, quiet=as_json) as say:
            outcome, document = _tuned(loaded, replace(config, drafters=tuple(drafters)), say, force, plot, as_json)
    failed, interrupted = document.pop("failed"), outcome.interrupted
    if as_json:
        print(json.dumps(document))
    else:
        _show(outcome, document, console)
    if failed:
        raise OSError("; ".join(failed))
    if interrupted:
        raise KeyboardInterrupt


def can_draw(plot: Path) -> None:
    """Before minutes of measuring. Raises: MissingDependency; InvalidArgument, OSError for a place that is none."""
    from portadraft.tuner.plot import load_matplotlib, place

    load_matplotlib()
    with writing(f"plot={str(plot)!r}", "a folder that can be written to"):
        place(plot)


def _expect_to_store() -> None:
    """Say before a minute of measuring that what it finds will not be kept."""
    from portadraft.profiles.home import check_writable

    try:
        with writing_own():
            check_writable()
    except (OSError, InvalidArgument) as error:
        complain(f"warning: what is found will be shown and not stored: {error}")


def _load(model: str, drafters: Sequence[str], backend: str, device: str, dtype: str, console: Console) -> Any:
    from portadraft import models
    from portadraft.api import load
    from portadraft.tuner.download import announce

    source = models.resolve(model)
    if (text := announce(source)) is not None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    return load(
        model, drafter=drafters[0] if len(drafters) == 1 else "auto", backend=backend, device=device, dtype=dtype
    )


def _tuned(loaded: Any, config: Any, say: Any, force: bool, plot: Path | None, as_json: bool) -> tuple[Any, Any]:
    from portadraft import profiles
    from portadraft.tuner.run import Tuner

    ops, tuner = loaded.target.ops, Tuner(loaded, config, say)
    # Recording answers would disturb another one's measurements, too.
    with profiles.tuning_lock(profiles.this_machine(ops.name, ops.device)):
        done = "not all answers were recorded yet"
        try:
            outcome = tuner.prepare()
            done = "no batch size was measured yet; what was recorded of the answers is kept for the next run"
            tuner.measure(outcome)
        except KeyboardInterrupt:
            complain(f"interrupted: nothing is stored, since {done}")
            raise
    return outcome, _finish(loaded, outcome, force=force, plot=plot, as_json=as_json)


def _planned(acceptance: Path, config: Any) -> Any:
    """A run on a simulated device with a table from a file: no model is loaded."""
    from portadraft.tuner.plan import plan

    return plan(acceptance, config)


def _finish(loaded: Any, outcome: Any, *, force: bool, plot: Path | None, as_json: bool) -> dict[str, Any]:
    """Store profiles and plots; the document for JSON."""
    from portadraft import profiles
    from portadraft.tuner.report import as_dict, to_profile

    document = as_dict(outcome)
    document["profiles"], document["failed"] = [], []
    simulated = outcome.config.device_curve is not None
    if simulated:
        document["stored"] = "nothing: the device is simulated"
    elif outcome.disturbed and not force:
        document["stored"] = (
            "nothing: the machine was busy while it was measured; run again on a quiet machine, or store it "
            "with --force, marked as disturbed"
        )
    else:
        try:
            with writing_own():
                for one in outcome.drafters:
                    document["profiles"].append(profiles.save(to_profile(loaded, outcome, one)))
            document["stored"] = f"{len(document['profiles'])} profile(s) in the user's folder"
        except (OSError, InvalidArgument) as error:  # what took minutes to measure is shown all the same
            document["stored"] = f"nothing: {error}"
            document["failed"].append(f"no profile was stored: {error}")
    if plot is not None:
        from portadraft.tuner.plot import draw

        document["plots"] = []
        try:
            with writing(f"plot={str(plot)!r}", "a folder that can be written to"):
                document["plots"] = [str(p) for p in draw(outcome, plot)]
        except (OSError, InvalidArgument) as error:
            document["failed"].append(f"nothing was drawn: {error}")
    return document


def _rows(document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The cells of `_COLUMNS` for each drafter and batch size."""
    for one in document["drafters"]:
        for b in one["batches"]:
            shape = b["shape"]
            text = "plain" if shape is None else f"{shape['width']}x{shape['length']}"
            if shape is not None and shape["nodes"]:
                text += f", {shape['nodes']} slots"
            spread = "-" if b["spread"] is None else f"{100 * b['spread']:.1f} %"
            yield (
                one["drafter"], str(b["batch_size"]), text, f"{b['tokens_per_s']:.1f}", spread,
                f"{b['plain_tokens_per_s']:.1f}", f"{b['speedup']:.2f}", f"{b['tokens_per_step']:.2f}",
                f"{b['predicted']} {b['predicted_tokens_per_s']:.1f}", f"{b['seconds']:.0f} s",
            )  # fmt: skip


def _show(outcome: Any, document: dict[str, Any], console: Console) -> None:
    title, rows = f"{outcome.model}: tokens per second, all rows", list(_rows(document))
    out = Console()
    if out.width >= _WIDE:
        table = Table(title=escape(title))
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in ("drafter", "shape", "predicted") else "right")
        for row in rows:
            table.add_row(*map(escape, row))
        out.print(table)
    else:  # a table would cut figures in two
        print(title)
        for row in rows:
            print("; ".join(f"{name} {value}" for name, value in zip(_COLUMNS, row, strict=True)))
    if len(outcome.drafters) > 1:
        print(f"fastest drafter: {outcome.best.name}")
    for one in document["drafters"]:
        kinds = ", ".join(f"{k} {v['tokens_per_step']:.2f}" for k, v in one["acceptance_by_category"].items())
        if kinds:
            print(f"tokens per step of {one['drafter']} by kind of text: {kinds}")
    if outcome.recommended_batch_size is not None:
        print(f"most tokens in all: batch size {outcome.recommended_batch_size}")
    for note in outcome.notes:
        print(note)
    print(f"stored: {document['stored']}")
    if document.get("plots"):
        print(f"plots: {', '.join(document['plots'])}")


def progress() -> _Progress:
    """For commands beside this one: use as a context manager, then call with a line of text."""
    return _Progress(Console(stderr=True), quiet=False)


class _Progress:
    """One changing line on a terminal, else a line every few seconds."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self._console, self._quiet = console, quiet
        self._status: Status | None = None
        self._best, self._last, self._printed = "", "", 0.0

    def __enter__(self) -> _Progress:
        if not self._quiet and self._console.is_terminal:
            self._status = self._console.status("tuning …")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, text: str) -> None:
        if self._quiet:
            return
        if text.startswith("best so far"):
            self._best = text
        line = text if text == self._best or not self._best else f"{text}; {self._best}"
        if self._status is not None:
            self._status.update(escape(line))
        elif time.monotonic() - self._printed > 5:
            self._printed = time.monotonic()
            print(line, file=sys.stderr, flush=True)
