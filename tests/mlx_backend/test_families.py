"""The packed pass on every architecture of the installed mlx-lm: each slot equals its path alone, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed", exc_type=ImportError)
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from portadraft.backends.mlx.selfcheck import check, require_supported
from portadraft.errors import UnsupportedModel
from tests.mlx_backend import packed, tiny
from tests.mlx_backend.refused import REFUSED, UNBUILT

pytestmark = pytest.mark.mlx

TOLERANCE = 1e-4
NAMES = tiny.names()
SERVED = [name for name in NAMES if name not in REFUSED and name not in UNBUILT]
QUICK = {"llama", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3", "afm7", "gpt_neox"}


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """mlx compiles small functions with the system's compiler, seconds for each on a CPU."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def _slow_unless_quick(names: list[str], quick: set[str]) -> list[object]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _slow_unless_quick(SERVED, QUICK))
def test_each_slot_is_its_path(name: str) -> None:
    assert packed.greatest_error(tiny.build(name)) < TOLERANCE


@pytest.mark.parametrize("name", _slow_unless_quick(sorted(REFUSED), {"mamba", "gpt2", "qwen3_next"}))
def test_refused_with_the_reason(name: str) -> None:
    model = tiny.build(name)
    with pytest.raises(UnsupportedModel, match=REFUSED[name]) as caught:
        require_supported(model)
    assert "cannot verify trees" in str(caught.value)


def test_a_model_that_has_no_clone_is_refused_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("llama")
    kind = type(model)

    def broken(self: Any, args: Any) -> None:
        raise ValueError("no such size")

    monkeypatch.setattr(kind, "__init__", broken)
    reason = check(model)
    assert "cut 0 raises ValueError: no such size" in reason
    assert "portadraft.load(…, check=False)" in reason


@pytest.mark.parametrize("name", sorted(UNBUILT))
def test_not_built(name: str) -> None:
    """These stand in the list because nothing could be said about them; else they belong elsewhere."""
    with pytest.raises((ImportError, ValueError)):
        tiny.build(name)


def test_enough_are_served() -> None:
    try:
        known = version("mlx-lm").startswith("0.32")
    except PackageNotFoundError:  # pragma: no cover
        known = False
    assert set(REFUSED) | set(UNBUILT) <= set(NAMES) or not known
    assert len(SERVED) >= 60
