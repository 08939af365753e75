"""Temporary files and folders that killed processes left beside what they were to become."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

STALE_S = 3600.0
"""Nothing is written for as long as that: what is older belongs to no living process."""


def sweep(folder: Path, pattern: str) -> None:
    """Remove what is older than `STALE_S` and matches a glob pattern; what cannot be removed is left."""
    with contextlib.suppress(OSError):
        for scratch in folder.glob(pattern):
            with contextlib.suppress(OSError):
                if time.time() - scratch.lstat().st_mtime <= STALE_S:
                    continue
                if scratch.is_dir() and not scratch.is_symlink():
                    shutil.rmtree(scratch, ignore_errors=True)
                else:
                    scratch.unlink()
