"""The folder of an unfinished run, and what in it lets another process go on.

    <out>.partial/
        run.json            what was asked for; a run goes on only with the same
        clock.json          time spent so far
        corpus/             prompts, answers and features (`portadraft.training.corpus`)
        vocabulary.npy      the draft vocabulary, once it is chosen
        state.safetensors   the state of training (`portadraft.training.resume`)
        best/               the best drafter so far, usable as it is

It is removed when the drafter stands in its own folder.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from portadraft.errors import CorruptFile, InvalidArgument
from portadraft.training.resume import write_whole

REQUEST, CLOCK, CORPUS, VOCABULARY, STATE, BEST = (
    "run.json", "clock.json", "corpus", "vocabulary.npy", "state.safetensors", "best",
)  # fmt: skip


def work_folder(out: Path, work: Path | None) -> Path:
    """Where a run that writes `out` keeps what is unfinished: beside it, or under `work`."""
    name = out.resolve().name + ".partial"
    return out.resolve().parent / name if work is None else Path(work) / name


def read_request(folder: Path) -> dict[str, Any] | None:
    """What the unfinished run in a folder was asked for; None where there is none.

    Raises: CorruptFile.
    """
    path = folder / REQUEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CorruptFile(f"{path}: {error}; start the run again with --overwrite (overwrite=True)") from None
    if not isinstance(document, dict):
        raise CorruptFile(f"{path}: expected a JSON object; start the run again with --overwrite (overwrite=True)")
    return document


def check_folders(out: Path, folder: Path, resume: bool, overwrite: bool) -> None:
    """Whether a run may begin or go on there, before anything is loaded.

    Raises: InvalidArgument where it would replace something unasked, or there is nothing left to do.
    """
    if resume and overwrite:
        raise InvalidArgument("resume=True, overwrite=True: one goes on, the other starts again; expected one of them")
    if out.exists() and not out.is_dir():
        raise InvalidArgument(f"out={str(out)!r}: is a file; expected a folder that does not exist yet")
    unfinished = (folder / REQUEST).exists()
    if not unfinished and folder.exists() and any(p.name != REQUEST + ".part" for p in folder.iterdir()):
        raise InvalidArgument(
            f"out={str(out)!r}: {folder}, where the unfinished run would be kept, holds something else; move it away, "
            "or choose another folder with --work (work=)"
        )
    if resume and out.exists() and not unfinished:
        raise InvalidArgument(f"out={str(out)!r}: its training is finished; there is nothing to go on with")
    if resume or overwrite:
        return
    if out.exists():
        raise InvalidArgument(
            f"out={str(out)!r}: exists already; choose another folder, or replace it with --overwrite (overwrite=True)"
        )
    if unfinished:
        raise InvalidArgument(
            f"out={str(out)!r}: an unfinished run is in {folder}; go on with --resume (resume=True), or start again "
            "with --overwrite (overwrite=True)"
        )


def begin(folder: Path, request: Mapping[str, Any]) -> None:
    """Make the folder of a new run; one of an older run is removed."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_whole(folder / REQUEST, json.dumps(dict(request), indent=1).encode())


def check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Whether a run may go on with this request.

    Raises: InvalidArgument naming what differs, as it was and as it is.
    """
    was, is_now = _flat(before), _flat(json.loads(json.dumps(dict(now))))
    differing = [k for k in sorted(was.keys() | is_now.keys()) if was.get(k) != is_now.get(k)]
    if differing:
        listed = "; ".join(f"{k} was {was.get(k)!r}, now {is_now.get(k)!r}" for k in differing[:5])
        raise InvalidArgument(
            f"resume: the run in {folder} was asked for something else: {listed}. Go on with the same options, or "
            "start again with --overwrite (overwrite=True)"
        )


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        out: dict[str, Any] = {}
        for key, item in value.items():
            out |= _flat(item, f"{name}.{key}" if name else str(key))
        return out
    return {name: value}


def discard(folder: Path) -> None:
    """Remove a run's folder."""
    shutil.rmtree(folder, ignore_errors=True)


class Clock:
    """Time spent on a run in all its sessions, to within a few seconds of a kill.

    writes: only the main process does.
    """

    EVERY = 10.0

    def __init__(self, folder: Path, writes: bool = True) -> None:
        self._path, self._writes = folder / CLOCK, writes
        self._before = 0.0
        if self._path.exists():
            try:
                self._before = float(json.loads(self._path.read_text())["seconds"])
            except (ValueError, KeyError, TypeError):
                raise CorruptFile(
                    f"{self._path}: not a number of seconds; start the run again with --overwrite (overwrite=True)"
                ) from None
        self._began = self._written = time.monotonic()

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    def tick(self) -> None:
        """Called often; writes now and then."""
        now = time.monotonic()
        if self._writes and now - self._written > self.EVERY:
            self._written = now
            write_whole(self._path, json.dumps({"seconds": round(self.seconds, 1)}).encode())
