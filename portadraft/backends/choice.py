"""Which backend a language model gets, and why; what is untested; how a missing one is installed. Imports no backend.

What was asked for counts; else the environment variable; else what is installed, torch first.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import NamedTuple

from portadraft import backends
from portadraft.errors import InvalidArgument, MissingDependency

VARIABLE = "PORTADRAFT_BACKEND"
PREFERENCE = ("torch", "mlx")
"""The order in which "auto" takes what is installed; backends that are not named here come after."""

UNTESTED = {
    "torch": {
        "cuda": "not run on an NVIDIA GPU yet; scripts/device_check.sh does, and its graphs are checked on a CPU",
        "cuda on ROCm": "AMD's GPUs go by the name cuda; the conformance suite runs there if one is present",
        "mps": "never run on an Apple GPU: its operators and data types are checked against torch's own table",
        "xpu": "Intel's GPUs are used only if named; the conformance suite runs there if one is present",
    },
    "mlx": {
        "Metal": "never run on an Apple GPU: what is tested is MLX on a CPU",
        "CUDA": "never run with mlx's CUDA packages",
    },
}
"""Where each backend should work and has not been run, with what is known."""


class ChosenBackend(NamedTuple):
    """A registered backend's name and why it was chosen."""

    name: str
    reason: str


def choose_backend(backend: str = "auto", environment: Mapping[str, str] | None = None) -> ChosenBackend:
    """The backend for a language model; nothing is imported.

    backend: "auto" or a name of the registry; environment: defaults to the process's own.

    Raises: InvalidArgument for a name that is unknown or serves no language models;
    MissingDependency, with the line that installs it here, where its packages are absent.
    """
    said = (os.environ if environment is None else environment).get(VARIABLE, "").strip()
    if backend != "auto":
        return ChosenBackend(_checked(backend, "backend"), "asked for")
    if said and said != "auto":
        return ChosenBackend(_checked(said, VARIABLE), f"the variable {VARIABLE} says so")
    present = available()
    if not present:
        raise MissingDependency(
            "backend='auto': no backend for language models is installed; "
            f"install one with: {install_line(PREFERENCE[0])}"
        )
    return ChosenBackend(present[0], _reason(present))


def servers() -> list[str]:
    """The registered backends that serve language models, the preferred ones first."""
    names = [name for name, backend in backends.REGISTRY.items() if backend.models]
    return sorted(names, key=lambda name: PREFERENCE.index(name) if name in PREFERENCE else len(PREFERENCE))


def available() -> list[str]:
    """Those of `servers` whose packages are installed."""
    return [name for name in servers() if not backends.REGISTRY[name].missing()]


def install_line(extra: str | None) -> str:
    """The command that brings an extra on this platform, with what else has to be known there."""
    if extra is None:
        return "pip install portadraft"
    system, machine = platform.system(), platform.machine()
    line = f"pip install 'portadraft[{extra}]'"
    if extra == "mlx":
        if (system, machine) == ("Darwin", "arm64"):
            return line
        if system == "Linux":
            return f"{line} (brings mlx for CPUs; for an NVIDIA GPU add its own extra: pip install 'mlx[cuda]')"
        return f"{line} (there is no mlx for {system} {machine}: it needs Apple silicon or Linux)"
    if extra == "torch" and system == "Linux":
        return f"{line} (on a machine without a GPU install a CPU build of torch first, or it brings gigabytes)"
    return line


def _checked(name: str, source: str) -> str:
    """The name, if it is a backend for language models whose packages are here."""
    if name not in servers():
        why = " serves arrays and tests, not language models;" if name in backends.REGISTRY else ""
        raise InvalidArgument(
            f"{source}={name!r}:{why} expected 'auto' or one of {', '.join(servers())}; "
            f"installed here: {', '.join(available()) or 'none of them'}"
        )
    backends.REGISTRY[name].require()
    return name


def _reason(present: list[str]) -> str:
    name = present[0]
    rest = [other for other in present[1:] if other in PREFERENCE]
    if not rest:
        return "the only backend for language models that is installed"
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        return (
            f"preferred to {', '.join(rest)}, which is installed too: {name} loads every model and trains drafters. "
            f"Neither has been timed on an Apple GPU; try backend={rest[0]!r}"
        )
    return f"preferred to {', '.join(rest)}, which is installed too but verifies trees slowly off Apple's GPUs"
