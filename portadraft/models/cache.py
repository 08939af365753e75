"""A folder of things that were slow to make, on this machine: converted tokenizers and weights.

An entry is a folder `<root>/<kind>/<key>`. It is written beside its place and renamed, so that a
reader sees a whole entry or none. The cache is an optimisation: a full or read-only disk gives a
warning and no entry, never an error.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT = "PORTADRAFT_CACHE"
_EDGE = 1 << 16


def cache_root() -> Path:
    """The cache's folder: $PORTADRAFT_CACHE, else the user's cache folder of this system. It need not exist."""
    override = os.environ.get(ENVIRONMENT)
    if override:
        return Path(override).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("portadraft")


def file_identity(path: Path) -> str:
    """A short hash of a file's size, modification time, head and tail: fast for files of any size.

    Raises: OSError if it cannot be read.
    """
    status = path.stat()
    digest = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode())
    with path.open("rb") as file:
        digest.update(file.read(_EDGE))
        file.seek(max(0, status.st_size - _EDGE))
        digest.update(file.read(_EDGE))
    return digest.hexdigest()[:24]


def lookup(kind: str, key: str) -> Path | None:
    """The entry's folder, or None."""
    entry = cache_root() / kind / key
    return entry if entry.is_dir() else None


def store(kind: str, key: str, write: Callable[[Path], None]) -> Path | None:
    """Make an entry with `write(empty folder)`; whoever comes first wins.

    Returns its folder, or None with a warning where the disk does not allow it. Errors of
    `write` other than OSError pass through; nothing is left behind in either case.
    """
    parent = cache_root() / kind
    scratch: str | None = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(prefix=f".{key}.", dir=parent)
        content = Path(scratch) / "content"
        content.mkdir()
        write(content)
        entry = parent / key
        try:
            content.rename(entry)
        except OSError:
            if not entry.is_dir():
                raise
        return entry
    except OSError as error:
        warnings.warn(
            f"could not keep {kind} in the cache {parent} ({error}); the next load is as slow as this one. "
            f"Free some space or point ${ENVIRONMENT} to a writable folder.",
            stacklevel=2,
        )
        return None
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def drop(kind: str, key: str) -> None:
    """Remove an entry, if there is one."""
    shutil.rmtree(cache_root() / kind / key, ignore_errors=True)


def free_bytes() -> int:
    """Free space where the cache is (or would be)."""
    folder = cache_root()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
