"""What a run was asked for, as plain JSON: what decides its result, and what it may be resumed with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from portadraft.errors import InvalidArgument
from portadraft.training import data as files
from portadraft.training.config import TrainConfig

Paths = Sequence[str | Path] | str | Path | None


def request_for(
    model: str | Path,
    data: Paths,
    text: Paths,
    config: TrainConfig | None,
    init: str | Path | None,
    dtype: str,
    before: dict[str, Any] | None,
) -> dict[str, Any]:
    """All that decides the result, as plain JSON; what was left out comes from the run before."""
    was = before or {}
    listed: dict[str, list[str]] = {}
    digests = {}
    for name, given in (("data", data), ("text", text)):
        paths = was.get(name, []) if given is None else [given] if isinstance(given, (str, Path)) else list(given)
        listed[name] = []
        for path in paths:
            if files.names_dataset(path):
                listed[name].append(str(path))
                continue
            rows = files.read_rows(path)  # a mistake in a file is found before the model is loaded
            if name == "text" and not any(row.text for row in rows):
                raise InvalidArgument("text: no row has a `text` or a `reference`; pass files of prompts as data=")
            whole = str(Path(path).resolve())
            listed[name].append(whole)
            with Path(path).open("rb") as file:
                digests[whole] = hashlib.file_digest(file, "sha256").hexdigest()
    settings = json.loads(json.dumps(asdict(config or TrainConfig()))) if config or not was else was["config"]
    start = was.get("init") if init is None else str(Path(init).resolve())
    request = {
        "model": str(Path(model).resolve()) if Path(model).exists() else str(model),
        "dtype": was.get("dtype", "auto") if dtype == "auto" else dtype,
        **listed,
        "sha256": digests,
        "init": start,
        "config": settings,
    }
    if "own_prompts" in was:
        request["own_prompts"] = was["own_prompts"]
    return request


def check_init(config: TrainConfig) -> None:
    names = ("draft_vocabulary", "blocks", "inner_size", "tied_head")
    for name in names:
        if (value := getattr(config, name)) is not None:
            raise InvalidArgument(f"{name}={value!r}: with init= the drafter's own is kept; leave one of them out")
