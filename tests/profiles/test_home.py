"""Who a user is to the fleet, and that two tuners do not measure each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import platformdirs
import pytest

from portadraft.errors import InvalidArgument
from portadraft.profiles import home, submitter, tuning_lock

from .examples import MACHINE

pytestmark = pytest.mark.usefixtures("new_home")
ROOT = Path(__file__).resolve().parents[2]


def test_a_submitter_is_made_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        names = set(pool.map(lambda _: submitter(), range(32)))
    assert len(names) == 1
    (name,) = names
    assert name == submitter() and len(name) == 16 and name.isalnum()
    folder = platformdirs.user_data_path("portadraft")
    assert [path.name for path in folder.iterdir()] == ["submitter"]


@pytest.mark.parametrize("broken", [b"", b"\xff\xfe", b"../../etc", b"x" * 1000])
def test_a_broken_submitter_is_replaced(broken: bytes) -> None:
    path = platformdirs.user_data_path("portadraft") / "submitter"
    path.parent.mkdir(parents=True)
    path.write_bytes(broken)
    assert submitter() == submitter()
    assert len(submitter()) == 16


def test_a_full_disk_leaves_no_half_submitter(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        submitter()
    assert list(platformdirs.user_data_path("portadraft").iterdir()) == []


def test_whether_a_profile_could_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    home.check_writable()
    folder = home.user_folder().path
    assert list(folder.iterdir()) == []
    real = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        real(self, data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        home.check_writable()
    assert list(folder.iterdir()) == []


_HOLD = """
import sys, time
from portadraft.profiles import tuning_lock
from portadraft.profiles.schema import Machine
with tuning_lock(Machine(name="x", kind="gpu")):
    print("held", flush=True)
    time.sleep(300)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 on this system")
def test_two_tuners_do_not_measure_each_other() -> None:
    """The second is told so; one that was killed is not waited for."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen([sys.executable, "-c", _HOLD], stdout=subprocess.PIPE, env=environment)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(InvalidArgument, match="another process is tuning"), tuning_lock(MACHINE):
            pass
        with tuning_lock(MACHINE.model_copy(update={"kind": "cpu"})):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with tuning_lock(MACHINE, wait_s=5):
        pass
    with tuning_lock(MACHINE):  # and again
        pass
