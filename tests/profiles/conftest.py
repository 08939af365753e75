"""An empty home folder for tests that store profiles."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest


def move_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Everything that is the user's lies under `folder` from now on."""
    for name in ("user_data_path", "user_config_path", "user_cache_path"):
        monkeypatch.setattr(platformdirs, name, lambda app, kind=name: folder / kind)
    monkeypatch.setenv("PORTADRAFT_CACHE", str(folder / "cache"))
    monkeypatch.delenv("PORTADRAFT_PROFILES", raising=False)
    return folder


@pytest.fixture
def new_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return move_home(monkeypatch, tmp_path_factory.mktemp("home"))
