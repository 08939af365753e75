"""A store in a folder: one whole file `<sha256>.json` per submission. The user's own profiles lie in one, too.

A file is written beside its place and renamed into it, so a reader sees a whole file or none; it is verified by its
name when it is read, so whatever a crash or another program left there is never taken for a profile.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from portadraft.errors import CorruptFile, InvalidArgument
from portadraft.profiles.reading import read_bounded
from portadraft.scratch import sweep

INDEX = "index.json"
MOST_INDEX_BYTES = 64 * 2**20
_NAME = re.compile(r"[0-9a-f]{64}\.json")


def digest(data: bytes) -> str:
    """The id of a submission: sha256 of its bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def id_of(name: str) -> str | None:
    """The id that a file name stands for, or None where it is no submission's."""
    return name.removesuffix(".json") if _NAME.fullmatch(name) else None


def verify(identity: str, data: bytes, where: str) -> bytes:
    """Raises: CorruptFile where the bytes are not those that the id names."""
    if digest(data) != identity:
        raise CorruptFile(f"{where}/{identity}.json: its content is not what its name says; delete it and push it anew")
    return data


def check_id(identity: str) -> str:
    """Raises: InvalidArgument where it is no id, so that no id can lead out of a store."""
    if id_of(f"{identity}.json") is None:
        raise InvalidArgument(f"id={identity!r:.80}: expected 64 hexadecimal digits, see `portadraft profiles list`")
    return identity


class Folder:
    """A folder of submissions. It need not exist before the first `put`."""

    writable = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = str(path)

    def ids(self) -> list[str]:
        """Of every submission, sorted.

        Raises: OSError where the folder cannot be listed; a folder that is not there holds nothing.
        """
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise type(error)(f"{self.path}: cannot be read ({error.strerror or error})") from None
        return sorted(identity for name in names if (identity := id_of(name)))

    def get(self, identity: str) -> bytes:
        """The bytes of a submission.

        Raises: OSError; CorruptFile where they are not what the name says.
        """
        return verify(identity, read_bounded(self.path / f"{check_id(identity)}.json"), self.url)

    def put(self, data: bytes) -> str:
        """Add a submission; returns its id. One that is there and whole is left alone."""
        identity = digest(data)
        with contextlib.suppress(OSError, CorruptFile):
            self.get(identity)
            return identity
        self._write(f"{identity}.json", data)
        return identity

    def remove(self, identity: str) -> None:
        """Remove a submission, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / f"{check_id(identity)}.json").unlink()

    def read_index(self) -> bytes | None:
        """The bytes of the compacted index, or None."""
        try:
            return read_bounded(self.path / INDEX, MOST_INDEX_BYTES)
        except FileNotFoundError:
            return None

    def write_index(self, data: bytes) -> None:
        """Replace the compacted index."""
        self._write(INDEX, data)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Held by one process at a time: for what is read, changed and written (the index)."""
        self.path.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path / ".lock", timeout=60):
            yield

    def _write(self, name: str, data: bytes) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        sweep(self.path, ".*.tmp")
        scratch = self.path / f".{os.getpid()}-{secrets.token_hex(6)}.tmp"
        try:
            with scratch.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(self.path / name)
        finally:
            scratch.unlink(missing_ok=True)
