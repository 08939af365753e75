"""`portadraft train`: progress to standard error, the result to standard output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from portadraft import backends
from portadraft.errors import MissingDependency


def main(
    model: str,
    *,
    data: Sequence[Path],
    text: Sequence[Path],
    out: Path,
    architecture: dict[str, Any],
    schedule: dict[str, Any],
    as_json: bool,
    **options: Any,
) -> None:
    """Run the command.

    architecture: fields of `TrainConfig`; schedule: of its `FitConfig`; None keeps the default.
    """
    if missing := backends.get("torch").missing():
        raise MissingDependency(
            f"training needs {', '.join(missing)}, which is not installed: pip install 'portadraft[train]'"
        )
    from portadraft.training import train
    from portadraft.training.loop import FitConfig
    from portadraft.training.run import TrainConfig

    config = TrainConfig(**_given(architecture), fit=FitConfig(**_given(schedule)))
    result = train(model, data or None, out=out, text=text or None, config=config, **options)
    if not as_json:
        figures = ", ".join(f"{shape}: {value:.2f}" for shape, value in result.tokens_per_step.items())
        print(f"wrote {result.folder}; tokens per step on held-out answers: {figures or 'none held out'}")
        print(f'use it: portadraft generate --model {model} --drafter {result.folder} "…"')
    else:
        document = {
            "folder": str(result.folder),
            "tokens_per_step": result.tokens_per_step,
            "training": result.training,
        }
        print(json.dumps(document, default=str))


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
