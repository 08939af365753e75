"""What all tests share: skips with reasons, hypothesis' profile, and an environment without a network."""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

# Before anything imports an array library or a hub client.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PORTADRAFT_CACHE", str(Path(__file__).resolve().parent.parent / ".pytest_cache" / "portadraft"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What a developer tuned, trained or configured must not decide how tests go.
_HOME = tempfile.mkdtemp(prefix="portadraft-tests-")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ["XDG_DATA_HOME"] = os.environ["XDG_CONFIG_HOME"] = _HOME
os.environ.pop("PORTADRAFT_PROFILES", None)
if (os.cpu_count() or 1) > 4:
    # Tiny models on many cores spend their time waiting for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "4")

import pytest
from hypothesis import HealthCheck, settings

# Deadlines fail on a busy machine; a fixed order of examples fails the same way for everyone.
settings.register_profile(
    "portadraft", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("portadraft")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, rather than leave out, so that the closing summary says what did not run and why."""
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: takes minutes; run `make test-slow`"))
        for name, missing in _HARDWARE.items():
            if item.get_closest_marker(name) and (reason := missing()):
                item.add_marker(pytest.mark.skip(reason=reason))


@cache
def _no_cuda() -> str | None:
    torch = _import("torch")
    return None if torch is not None and torch.cuda.is_available() else "cuda: no NVIDIA GPU that torch can use"


@cache
def _no_mps() -> str | None:
    torch = _import("torch")
    return None if torch is not None and torch.backends.mps.is_available() else "mps: no Apple GPU that torch can use"


@cache
def _no_mlx() -> str | None:
    return None if _import("mlx.core") and _import("mlx_lm") else "mlx: mlx and mlx-lm are not installed"


def _import(name: str):  # type: ignore[no-untyped-def]
    try:
        return importlib.import_module(name)
    except Exception:  # a broken install counts as absent
        return None


_HARDWARE: dict[str, Callable[[], str | None]] = {"cuda": _no_cuda, "mps": _no_mps, "mlx": _no_mlx}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """A tiny random model, loaded by `portadraft.load`: float32, on the CPU."""
    import portadraft
    from tests.test_api import save_model

    path = tmp_path_factory.mktemp("models") / "tiny"
    save_model(path)
    return portadraft.load(path, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory, model) -> Path:  # type: ignore[no-untyped-def]
    """The folder of a random drafter for `model`."""
    from tests.test_api import save_drafter

    return save_drafter(tmp_path_factory.mktemp("drafters") / "random", model)
