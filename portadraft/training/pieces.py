"""Work that is done in pieces, each of them complete or absent, so that a killed run can go on.

Nothing here knows what the pieces mean.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from portadraft.errors import CorruptFile, InvalidArgument


def write_array(path: Path, array: NDArray[Any]) -> None:
    """Write an .npy file that is whole or not there. Raises: OSError for a full disk; nothing stays then."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what killed runs left half written or for a while. Only while nobody else works in the folder."""
    for left in (*folder.glob(".*.npy.*"), *folder.glob("*-stream*.npy")):
        with contextlib.suppress(OSError):
            left.unlink()


class Groups:
    """Results of numbered groups of work, a line of JSON each, in one file per process.

    A line is on disk before `add` returns. A last line that was cut short by a kill is dropped.
    """

    def __init__(self, folder: Path, name: str, shard: tuple[int, int] = (0, 1)) -> None:
        self.folder, self.name, self.shard = folder, name, shard
        self.path = folder / f"{name}.{shard[0]}.jsonl"

    def missing(self, count: int) -> list[int]:
        """This process's groups of 0 … count - 1 that are not done yet."""
        rank, world = self.shard
        if self.path.exists():
            whole = sum(len(line) for line, _ in _lines(self.path))
            if whole < self.path.stat().st_size:
                with self.path.open("r+b") as file:
                    file.truncate(whole)
        done = self._read()
        return [g for g in range(rank, count, world) if g not in done]

    def add(self, group: int, value: Any) -> None:
        """Append a group's result. Raises: OSError for a full disk."""
        line = json.dumps({"group": group, "value": value}, separators=(",", ":")).encode() + b"\n"
        with self.path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def all(self, count: int) -> list[Any]:
        """The results of all groups, of every process. Raises: CorruptFile if one is not there."""
        done = self._read()
        absent = [g for g in range(count) if g not in done]
        if absent:
            raise CorruptFile(
                f"{self.folder}: group {absent[0]} of {self.name!r} is missing; a process did not finish, or the "
                "processes do not share this folder"
            )
        return [done[g] for g in range(count)]

    def _read(self) -> dict[int, Any]:
        out: dict[int, Any] = {}
        for path in sorted(self.folder.glob(f"{self.name}.*.jsonl")):
            for _, value in _lines(path):
                out.setdefault(int(value["group"]), value["value"])
        return out


def _lines(path: Path) -> Iterator[tuple[bytes, Any]]:
    """Whole lines and their values, up to the first that is cut short."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except ValueError:
                return
            if not isinstance(value, dict) or type(value.get("group")) is not int or "value" not in value:
                return
            yield line, value


def claim(folder: Path, settings: dict[str, Any], rank: int = 0) -> None:
    """Make sure that the folder holds work for these settings and no others; rank 0 writes them down.

    Raises: InvalidArgument naming what differs.
    """
    path = folder / "request.json"
    wanted = json.loads(json.dumps(settings))
    try:
        have = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        have = None
    except ValueError:
        raise CorruptFile(f"{path}: not JSON; delete the folder {folder} and start again") from None
    if have is None:
        if rank == 0:
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(wanted, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            temporary.replace(path)
        return
    for key in sorted({*have, *wanted} if isinstance(have, dict) else wanted):
        old, new = (have.get(key) if isinstance(have, dict) else None), wanted.get(key)
        if old != new:
            raise InvalidArgument(
                f"{key}={_short(new)}: the work begun in {folder} was for {_short(old)}; go on with the same settings, "
                "or delete that folder"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
