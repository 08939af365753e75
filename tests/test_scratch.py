"""What killed processes left is removed by the next one that writes beside it, once it is old."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from portadraft.drafters.checkpoint_files import write_folder
from portadraft.models.records import write_record
from portadraft.profiles.folder import Folder
from portadraft.profiles.home import submitter
from portadraft.scratch import STALE_S, sweep
from tests.tuner import synthetic


def aged(path: Path, seconds: float) -> Path:
    os.utime(path, (time.time() - seconds,) * 2)
    return path


WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "acceptance table": (".a.safetensors.x1.tmp", lambda p: synthetic.table().save(p / "a.safetensors")),
    "store": (".77-abc.tmp", lambda p: Folder(p).put(b"{}")),
    "record": ("x1.tmp", lambda p: write_record(p / "a.json", "")),
    "drafter": (".a[1].x1.part", lambda p: write_folder(p / "a[1]", {}, b"", overwrite=True)),
    "submitter": (".submitter-x1.tmp", lambda p: submitter()),
}


@pytest.mark.parametrize("name", WRITERS)
def test_old_rests_go_and_young_ones_stay(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platformdirs, "user_data_path", lambda app: tmp_path)
    rest, write = WRITERS[name]
    old, young = tmp_path / rest, tmp_path / rest.replace("x1", "x2").replace("77", "78")
    for path in (old, young):
        path.mkdir() if path.suffix == ".part" else path.touch()
    kept = tmp_path / "kept.json"
    kept.touch()
    aged(old, STALE_S + 60)
    aged(kept, STALE_S + 60)
    write(tmp_path)
    assert not old.exists()
    assert young.exists() and kept.exists()
    assert len(list(tmp_path.glob(".*.tmp"))) + len(list(tmp_path.glob("*.tmp"))) <= 2  # it leaves none of its own


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").touch()
    link = tmp_path / ".x.part"
    link.symlink_to(target)
    os.utime(link, (0, 0), follow_symlinks=False)
    sweep(tmp_path, ".*.part")
    assert not link.is_symlink() and (target / "file").exists()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    sweep(tmp_path / "none", "*")
