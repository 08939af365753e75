"""Tune a tiny model in processes that are killed by SIGKILL at many moments; what they leave is read after each.

Run as a script with a folder to work in; prints one JSON document. Processes are forked after the imports, which take
longer than the runs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
PLACE = Path(sys.argv[1])
for name in ("DATA", "CONFIG", "CACHE"):
    os.environ[f"XDG_{name}_HOME"] = str(PLACE / "home" / name.lower())
os.environ["PORTADRAFT_CACHE"] = str(PLACE / "cache")
os.environ["HOME"] = str(PLACE / "home")

import skopt  # noqa: F401  # imported before the forks

import portadraft
from portadraft import profiles
from portadraft.cli import tune
from portadraft.core.decode import Decoder
from portadraft.profiles.catalog import places
from portadraft.profiles.home import user_folder
from portadraft.tuner import config as tuner_config
from portadraft.tuner.acceptance import AcceptanceTable
from portadraft.tuner.grid import Grid
from portadraft.tuner.machine import LiveMachine
from tests.killing import forked
from tests.test_api import save_drafter, save_model

PROMPTS = ("abc abc abc", "one two three one two", "0123456789 0123456")
TABLES = PLACE / "drafter" / "acceptance"


def prepare() -> None:
    save_model(PLACE / "model", max_position_embeddings=2048)
    save_drafter(PLACE / "drafter", portadraft.load(PLACE / "model", dtype="float32", device="cpu"))
    (PLACE / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS), "utf-8")


def run() -> None:
    """A whole `portadraft tune`, of few shapes."""
    whole = tuner_config.TuneConfig
    tuner_config.TuneConfig = functools.partial(whole, grid=Grid((1, 2), (1, 2), (4, 0)))  # type: ignore[misc,assignment]
    with contextlib.redirect_stdout(io.StringIO()):
        tune.main(
            str(PLACE / "model"), budget="0.4s", batch_sizes="1", drafters=[str(PLACE / "drafter")], device_curve=None,
            acceptance=None, plot=None, force=True, as_json=True, backend="torch", device="cpu", dtype="float32",
            prompts=PLACE / "prompts.jsonl", max_tokens=16, context=20,
        )  # fmt: skip


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def torn(descriptor: int) -> None:
    """Killed while half of a file has reached the disk."""
    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
    die()


def killed_in(place: Any, name: str, nth: int, how: Callable[..., Any]) -> None:
    """Have this process killed at the nth call of a function."""
    real, left = getattr(place, name), nth

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        return how(*arguments) if left == 0 else real(*arguments, **options)

    setattr(place, name, call)


def killed_after(seconds: float) -> None:
    threading.Timer(seconds, die).start()


MOMENTS: dict[str, tuple[Callable[[], None], ...]] = {
    "recording": tuple(lambda n=n: killed_in(Decoder, "step", n, die) for n in (9,)),  # type: ignore[misc]
    "measuring": tuple(lambda n=n: killed_in(LiveMachine, "steps", n, die) for n in (12,)),  # type: ignore[misc]
    "writing": tuple(lambda n=n: killed_in(os, "fsync", n, torn) for n in (1, 2)),  # type: ignore[misc]
    "renaming": tuple(lambda n=n: killed_in(os, "replace", n, die) for n in (1, 2)),  # type: ignore[misc]
    "at any time": tuple(lambda s=s: killed_after(s) for s in (0.5,)),  # type: ignore[misc]
}


def broken() -> list[str]:
    """What is wrong with the files that programs read: through the readers that they use."""
    wrong: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for path in TABLES.glob("*.safetensors"):
            try:
                AcceptanceTable.load(path)
            except portadraft.PortadraftError as error:
                wrong.append(str(error))
        for identity in user_folder().ids():
            try:
                profiles.parse(user_folder().get(identity))
            except portadraft.PortadraftError as error:
                wrong.append(str(error))
        places()
    return wrong + [str(one.message) for one in said]


def main() -> None:
    report: dict[str, Any] = {"kills": {}, "broken": {}, "scratch": {}}
    assert forked(prepare) == 0
    for moment, ways in MOMENTS.items():
        kills, wrong = 0, []
        for way in ways:
            shutil.rmtree(TABLES, ignore_errors=True)
            kills += forked(lambda way=way: (way(), run())) == signal.SIGKILL
            wrong += broken()
        folders = [p for p in (TABLES, user_folder().path) if p.is_dir()]
        report["scratch"][moment] = [p.name for f in folders for p in f.iterdir() if p.name.startswith(".")]
        report["kills"][moment], report["broken"][moment] = kills, wrong
    before = len(user_folder().ids())
    assert forked(run) == 0
    report["afterwards"] = {"new": len(user_folder().ids()) - before, "broken": broken()}
    # The check itself can fail: a table and a profile that are cut short at their places.
    for path in (next(TABLES.glob("*.safetensors")), user_folder().path / f"{user_folder().ids()[0]}.json"):
        path.write_bytes(path.read_bytes()[:-9])
    report["planted"] = len(broken())
    print(json.dumps(report))


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)
