"""Outcomes of self-checks: one small JSON file each in the user's cache folder.

A record is a convenience: what cannot be read is a miss, what cannot be written costs a check
next time, and only the newest few hundred are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

from portadraft.models.cache import cache_root
from portadraft.scratch import sweep

MOST = 512
"""Records that are kept; the oldest go first."""


def record_path(name: str) -> Path:
    """Where the record of that name stands. It need not exist."""
    return cache_root() / "selfcheck" / f"{name}.json"


def read_record(path: Path) -> str | None:
    """The recorded reason ("" for passed); None where there is no usable record."""
    try:
        reason = json.loads(path.read_text(encoding="utf-8"))["reason"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return reason if isinstance(reason, str) else None


def write_record(path: Path, reason: str) -> None:
    """Record an outcome in one move, and let go of the oldest records where there are too many."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent, "*.tmp")
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"reason": reason}, file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        _prune(path.parent)


def _prune(folder: Path) -> None:
    records = list(folder.glob("*.json"))
    if len(records) <= MOST:
        return
    for record in sorted(records, key=_age)[: len(records) - MOST]:
        with contextlib.suppress(OSError):
            record.unlink()


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process was faster
        return 0.0
