"""Which backend is used, by argument, variable and what is installed; and what the errors say."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from portadraft import backends
from portadraft.backends import Backend, choice
from portadraft.backends.choice import ChosenBackend, available, choose_backend, install_line, servers
from portadraft.errors import InvalidArgument, MissingDependency

Install = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Say which of numpy, torch, mlx and a newcomer are installed."""

    def install(*names: str) -> None:
        def backend(name: str, **more: Any) -> Backend:
            package = "numpy" if name in names else f"no_such_{name}"
            return Backend(name, f"portadraft.backends.{name}", (package,), name, **more)

        listed = [backend("numpy", models=False), backend("newcomer"), backend("mlx"), backend("torch")]
        monkeypatch.setattr(backends, "REGISTRY", {b.name: b for b in listed})

    return install


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    def be(system: str, processor: str) -> None:
        monkeypatch.setattr(platform, "system", lambda: system)
        monkeypatch.setattr(platform, "machine", lambda: processor)

    return be


def test_order(installed: Install) -> None:
    installed("numpy", "newcomer", "mlx", "torch")
    assert servers() == ["torch", "mlx", "newcomer"]
    assert available() == ["torch", "mlx", "newcomer"]
    installed("numpy", "mlx")
    assert available() == ["mlx"]


@pytest.mark.parametrize(
    ("present", "name"),
    [(("torch", "mlx"), "torch"), (("torch",), "torch"), (("mlx",), "mlx"), (("newcomer",), "newcomer")],
)
def test_auto_takes_what_is_installed(installed: Install, present: tuple[str, ...], name: str) -> None:
    installed("numpy", *present)
    chosen = choose_backend("auto", {})
    assert chosen.name == name
    expected = "preferred to mlx" if len(present) > 1 else "the only backend for language models that is installed"
    assert chosen.reason.startswith(expected)


def test_auto_on_apple_silicon_says_what_it_prefers_and_why(installed: Install, machine: Any) -> None:
    machine("Darwin", "arm64")
    installed("numpy", "torch", "mlx")
    name, reason = choose_backend("auto", {})
    assert name == "torch"
    assert "loads every model and trains drafters" in reason
    assert "Neither has been timed on an Apple GPU" in reason
    assert "backend='mlx'" in reason


def test_what_is_asked_for_counts_before_the_variable(installed: Install) -> None:
    installed("numpy", "torch", "mlx")
    assert choose_backend("mlx", {"PORTADRAFT_BACKEND": "torch"}) == ChosenBackend("mlx", "asked for")
    assert choose_backend("auto", {"PORTADRAFT_BACKEND": " mlx "}).name == "mlx"
    assert "PORTADRAFT_BACKEND" in choose_backend("auto", {"PORTADRAFT_BACKEND": "mlx"}).reason
    for nothing in ({}, {"PORTADRAFT_BACKEND": ""}, {"PORTADRAFT_BACKEND": "auto"}):
        assert choose_backend("auto", nothing).name == "torch"


def test_the_processes_own_environment_is_read(installed: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("numpy", "torch", "mlx")
    monkeypatch.setenv("PORTADRAFT_BACKEND", "mlx")
    assert choose_backend().name == "mlx"


def test_wrong_names_say_what_there_is(installed: Install) -> None:
    installed("numpy", "torch")
    with pytest.raises(InvalidArgument, match=r"backend='tourch': expected 'auto' or one of torch, mlx, newcomer; "):
        choose_backend("tourch", {})
    with pytest.raises(InvalidArgument, match=r"PORTADRAFT_BACKEND='x': expected .*; installed here: torch$"):
        choose_backend("auto", {"PORTADRAFT_BACKEND": "x"})
    with pytest.raises(InvalidArgument, match=r"backend='numpy': serves arrays and tests, not language models; expect"):
        choose_backend("numpy", {})
    installed("numpy")
    with pytest.raises(InvalidArgument, match="installed here: none of them"):
        choose_backend("x", {})


@pytest.mark.parametrize(
    ("system", "processor", "torch", "mlx"),
    [
        ("Linux", "x86_64", "CPU build of torch first", "mlx[cuda]"),
        ("Darwin", "arm64", "", ""),
        ("Darwin", "x86_64", "", "there is no mlx for Darwin x86_64"),
    ],
)
def test_missing_packages_name_this_platforms_line(
    installed: Install, machine: Any, system: str, processor: str, torch: str, mlx: str
) -> None:
    machine(system, processor)
    installed("numpy")
    for name, more in (("torch", torch), ("mlx", mlx)):
        line = f"pip install 'portadraft[{name}]'"
        assert install_line(name).startswith(line)
        assert more in install_line(name)
        assert more or install_line(name) == line
        with pytest.raises(MissingDependency) as error:
            choose_backend(name, {})
        assert str(error.value).startswith(f"backend {name!r} needs no_such_{name}")
        assert str(error.value).endswith(install_line(name))
    with pytest.raises(MissingDependency, match=r"no backend for language models is installed; .*portadraft\[torch\]"):
        choose_backend("auto", {})


def test_the_real_registry() -> None:
    assert set(servers()) == set(backends.REGISTRY) - {"numpy"}
    assert servers()[0] == "torch"
    assert set(choice.UNTESTED) <= {*backends.REGISTRY, *choice.PREFERENCE}


def test_choosing_imports_no_backend() -> None:
    code = (
        "import sys, portadraft.backends.choice as c; c.available(); c.install_line('mlx');"
        "assert not {'torch', 'transformers', 'mlx', 'mlx_lm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """`load` asks here, before anything is loaded."""
    import portadraft

    monkeypatch.setenv("PORTADRAFT_BACKEND", "nothing")
    with pytest.raises(InvalidArgument, match="PORTADRAFT_BACKEND='nothing'"):
        portadraft.load("HuggingFaceTB/SmolLM2-135M-Instruct")
