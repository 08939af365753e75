"""A folder of things that were slow to make, on this machine: converted tokenizers and weights.

An entry is a folder `<root>/<kind>/<key>`. It is written beside its place and renamed, so that a
reader sees a whole entry or none. The cache is an optimisation: a full or read-only disk gives a
warning and no entry, never an error. Each kind is bounded: what was used longest ago goes when a new
entry makes it larger than `limit_bytes`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT = "PORTADRAFT_CACHE"
LIMIT = "PORTADRAFT_CACHE_GIB"
_DEFAULT_LIMIT = 20 << 30
_IN_USE = 3600.0  # seconds: an entry that was used so lately may still be being read
_FORGOTTEN = 86400.0  # seconds after which a half-made entry is nobody's any more
_EDGE = 1 << 16


def limit_bytes() -> int:
    """The most bytes of one kind: $PORTADRAFT_CACHE_GIB, else 20 GiB; nonsense there is the default, with a warning."""
    text = os.environ.get(LIMIT)
    if not text:
        return _DEFAULT_LIMIT
    try:
        value = float(text)
        if not value >= 0:
            raise ValueError
        return int(value * 2**30)
    except (ValueError, OverflowError):
        warnings.warn(f"${LIMIT}={text!r}: expected a number of GiB of at least 0; using 20", stacklevel=2)
        return _DEFAULT_LIMIT


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
    if not entry.is_dir():
        return None
    with contextlib.suppress(OSError):
        os.utime(entry)  # the time of its last use, by which `prune` goes
    return entry


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
        prune(kind, keep=key)
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


def prune(kind: str, *, keep: str = "") -> None:
    """Drop entries, the longest unused first, until the kind is within `limit_bytes`.

    keep: a key that stays in any case. Entries used within the last hour stay too.
    """
    now, entries = time.time(), []
    for folder in (cache_root() / kind).glob("*"):
        try:
            used = folder.stat().st_mtime
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        except OSError:  # another process is making or dropping it
            continue
        if folder.name.startswith("."):
            if now - used > _FORGOTTEN:
                shutil.rmtree(folder, ignore_errors=True)
        else:
            entries.append((used, size, folder))
    total, most = sum(size for _, size, _ in entries), limit_bytes()
    for used, size, folder in sorted(entries):
        if total <= most:
            return
        if folder.name != keep and now - used > _IN_USE:
            shutil.rmtree(folder, ignore_errors=True)
            total -= size


def free_bytes() -> int:
    """Free space where the cache is (or would be)."""
    folder = cache_root()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
