"""A whole run of the tuner, killed by SIGKILL: real processes on a tiny model; see `killed.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the torch extra is not installed")
pytest.importorskip("skopt", reason="the tune extra is not installed")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork, to spare the imports")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("killed.py")), str(tmp_path_factory.mktemp("killed"))],
        capture_output=True, text=True, timeout=500, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("moment", ["recording", "measuring", "writing", "renaming", "at any time"])
def test_no_broken_file_is_ever_read(report: dict[str, Any], moment: str) -> None:
    assert report["kills"][moment] >= 1, "it was never killed at that moment"
    assert report["broken"][moment] == []


def test_it_was_killed_in_the_middle_of_files(report: dict[str, Any]) -> None:
    assert report["scratch"]["writing"]
    assert report["planted"] >= 2, "the check would not have seen a broken file"


def test_the_next_run_is_whole(report: dict[str, Any]) -> None:
    """No lock is left behind either."""
    assert report["afterwards"] == {"new": 1, "broken": []}
