"""Tokens per step on a file of prompts, by the decode loop itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from portadraft.api import load
from portadraft.core.types import BeamShape
from portadraft.errors import InvalidArgument, ModelNotFound


def read_prompts(path: Path) -> list[str]:
    """JSONL with `turns` (the first counts) or `prompt` on each line.

    Raises: ModelNotFound for a missing file; InvalidArgument, naming the line, for anything else.
    """
    if not path.is_file():
        raise ModelNotFound(f"prompts={str(path)!r}: no such file; expected JSONL with `turns` or `prompt` a line")
    try:
        whole = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise InvalidArgument(f"{path}: it is not UTF-8 ({where}); expected JSONL") from None
    found = []
    # Not splitlines: JSON strings may hold the separators of lines that Unicode knows besides.
    for number, line in enumerate(whole.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row["turns"][0] if "turns" in row else row["prompt"]
        except (ValueError, KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str) or not text:
            raise InvalidArgument(f"{path}, line {number}: expected a JSON object with `turns` or `prompt`")
        found.append(text)
    if not found:
        raise InvalidArgument(f"{path}: it holds no prompts")
    return found


def acceptance(
    prompts: Path,
    *,
    model: str = "smollm2-135m",
    drafter: str = "redrafter",
    shapes: Sequence[BeamShape] = (BeamShape(1, 4), BeamShape(4, 4), BeamShape(8, 4), BeamShape(16, 5)),
    max_tokens: int = 128,
    limit: int | None = None,
    batch: int = 1,
    dtype: str = "auto",
    quiet: bool = False,
) -> dict[str, Any]:
    """Mean tokens of a whole step over all answers, per shape.

    limit: only so many prompts, spread over the file. batch: rows decoded together; the text
    and the acceptance do not depend on it in float32, the time does.
    """
    texts = read_prompts(prompts)
    if limit is not None and limit < len(texts):
        texts = [texts[i * len(texts) // limit] for i in range(limit)]
    loaded = load(model, dtype=dtype, drafter=drafter)
    rows = []
    with Progress(console=Console(stderr=True, quiet=quiet), transient=True) as bar:
        task = bar.add_task("decoding", total=len(shapes) * len(texts))
        for shape in shapes:
            steps = tokens = 0
            for start in range(0, len(texts), batch):
                answers = loaded.generate(
                    texts[start : start + batch],
                    max_tokens=max_tokens,
                    batch_size=batch,
                    width=shape.width,
                    length=shape.length,
                    nodes=shape.nodes,
                )
                for answer in answers:
                    steps += sum(answer.stats.accepted.values())
                    tokens += sum((n + 1) * count for n, count in answer.stats.accepted.items())
                bar.advance(task, len(answers))
            rows.append(
                {
                    "width": shape.width,
                    "length": shape.length,
                    "nodes": shape.nodes,
                    "steps": steps,
                    "tokens_per_step": round(tokens / steps, 4) if steps else None,
                }
            )
    return {
        "bench": "acceptance",
        "model": loaded.name,
        "dtype": loaded.target.facts.dtype,
        "drafter": loaded.chosen["drafter"].value,
        "prompts": len(texts),
        "max_tokens": max_tokens,
        "shapes": rows,
    }
