"""`portadraft train`: progress to standard error, the result to standard output."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from portadraft import backends
from portadraft.cli.guard import complain
from portadraft.errors import InvalidArgument, MissingDependency, PortadraftError


def main(
    model: str,
    *,
    data: Sequence[str],
    text: Sequence[str],
    out: Path | None,
    mode: str | None,
    mix: str | None,
    cache_limit: str | None,
    choices: dict[str, Any],
    schedule: dict[str, Any],
    as_json: bool,
    **options: Any,
) -> None:
    """Run the command.

    choices: fields of `TrainConfig`; schedule: of its `FitConfig`; None keeps the default, or, with --resume, what
    the unfinished run was asked for.
    """
    if missing := backends.get("torch").missing():
        raise MissingDependency(
            f"training needs {', '.join(missing)}, which is not installed: pip install 'portadraft[train]'"
        )
    from portadraft.training import train
    from portadraft.training.run import TrainConfig, stored_config

    out = _default_out(model) if out is None else out
    try:
        before = stored_config(out, options.get("work")) if options.get("resume") else None
        config = _config(before or TrainConfig(), mode, mix, cache_limit, choices, schedule)
        given = None if config == before else config
        result = train(model, data or None, out=out, text=text or None, config=given, **options)
    except PortadraftError as error:
        raise type(error)(as_typed(str(error))) from error
    except (KeyboardInterrupt, OSError) as error:
        if _speaks():
            line = shlex.join(["portadraft", "train", model, "--out", str(out), "--resume"])
            if options.get("work"):
                line += f" --work {shlex.quote(str(options['work']))}"
            why = "stopped" if isinstance(error, KeyboardInterrupt) else f"stopped ({error.strerror or error})"
            complain(f"{why}; go on with: {line}")
        raise
    if _speaks():
        _print(model, result, as_json)


def _print(model: str, result: Any, as_json: bool) -> None:
    if not as_json:
        figures = ", ".join(f"{shape}: {value:.2f}" for shape, value in result.tokens_per_step.items())
        print(f"wrote {result.folder}; tokens per step on held-out answers: {figures or 'none held out'}")
        print(f'use it: portadraft generate --model {shlex.quote(model)} --drafter {result.folder} "…"')
        return
    document = {"folder": str(result.folder), "tokens_per_step": result.tokens_per_step, "training": result.training}
    print(json.dumps(document, default=str))


def _config(
    base: Any,
    mode: str | None,
    mix: str | None,
    cache_limit: str | None,
    choices: dict[str, Any],
    schedule: dict[str, Any],
) -> Any:
    from portadraft.training.config import parse_bytes
    from portadraft.training.modes import MODES, parse_mix

    given = _given(choices)
    if mode is not None and mix is not None:
        raise InvalidArgument("mode=, mix=: both say what to imitate; expected one of them")
    if mode is not None:
        if mode not in MODES:
            raise InvalidArgument(f"mode={mode!r}: expected one of {', '.join(MODES)}")
        given["mix"] = {mode: 1.0}
    if mix is not None:
        given["mix"] = parse_mix(mix)
    if cache_limit is not None:
        given["cache_bytes"] = parse_bytes(cache_limit)
    given_fit = _given(schedule)
    fit = dataclasses.replace(base.fit, loss=_loss(base.fit.loss, given_fit), **given_fit)
    return dataclasses.replace(base, **given, fit=fit)


def _loss(base: Any, given: dict[str, Any]) -> Any:
    """What concerns the loss, taken out of the given options."""
    changes: dict[str, Any] = {name: given.pop(name) for name in ("hard", "steps") if name in given}
    if "loss_temperature" in given:
        changes["temperature"] = given.pop("loss_temperature")
    if "step_weights" in given:
        changes["step_weights"] = _numbers(given.pop("step_weights"))
    try:
        return dataclasses.replace(base, **changes)
    except InvalidArgument as error:
        raise InvalidArgument(re.sub(r"^temperature=", "loss_temperature=", str(error))) from None


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgument(
            f"step_weights={text!r}: expected a number for each drafting step, such as 1,0.8,0.6,0.5,0.4"
        ) from None


_OPTIONS = {"tied_head": "--untied-head", "cache_bytes": "--cache-limit", "own_prompts": "--prompts"} | {
    name: "--" + name.replace("_", "-")
    for name in (
        "out data text mode mix budget resume overwrite init draft_vocabulary ship_vocabulary blocks inner_size "
        "temperature seed dtype device cache_limit epochs rate max_answer max_length text_tokens batch steps hard work "
        "rows patience loss_temperature step_weights"
    ).split()
}


def as_typed(message: str) -> str:
    """A message about Python's arguments, with the options as they are typed: `out='x'` becomes `--out 'x'`."""
    message = re.sub(r" \((?:resume|overwrite)=True\)| \(work=\)", "", message)
    names = "|".join(_OPTIONS)
    message = re.sub(rf"(?<![\w'\"/.-])({names})=(True\b|None\b)?(?=(.?))", _option, message)
    return re.sub(rf"^({names}): ", lambda m: f"{_OPTIONS[m[1]]}: ", message)


def _option(match: re.Match[str]) -> str:
    no_value = match[2] or match[3] in (" ", ",", ":", ";", "")
    return _OPTIONS[match[1]] + ("" if no_value else " ")


def _default_out(model: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name or model).strip("-.") or "model"
    return Path(f"{name}-drafter")


def _speaks() -> bool:
    """Whether this is the process that speaks, where a launcher started several."""
    return os.environ.get("RANK", "0") == "0"


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
