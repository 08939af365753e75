"""This machine and this software, as profiles name them. Imports a backend only when it is asked about one."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import portadraft
from portadraft import backends
from portadraft.profiles.device import canonical_name, nominal_memory_gb
from portadraft.profiles.schema import Machine, Software

_ARM_PARTS = {
    0xD08: "Arm Cortex-A72",
    0xD0B: "Arm Cortex-A76",
    0xD0C: "Arm Neoverse-N1",
    0xD40: "Arm Neoverse-V1",
    0xD49: "Arm Neoverse-N2",
    0xD4F: "Arm Neoverse-V2",
}
_NAMELESS = ("AMD EPYC", "Intel Xeon", "Intel Core", "QEMU Virtual", "Common KVM", "unknown")


def this_machine(backend: str, device: str) -> Machine:
    """The machine as a backend sees it. backend: a name of the registry; device: as its `Ops.device` names it."""
    report = _report(backend, device)
    gpu = report["kind"] == "gpu"
    reported = report["name"] or _processor()
    memory = report["memory_bytes"] or system_memory_bytes()
    name = canonical_name(reported)
    return Machine(
        name=name if gpu else _with_family(name),
        kind="gpu" if gpu else "cpu",
        memory_gb=nominal_memory_gb(memory) if memory else None,
        cores=None if gpu else usable_cores(),
        threads=report["threads"],
        driver=_driver() if gpu else "",
        reported=_tidy(reported),
    )


def this_software(backend: str) -> Software:
    """Our version, and those of the libraries that the backend's timings depend on."""
    module = _module(backend)
    names = getattr(module, "DISTRIBUTIONS", ("numpy",))
    versions = {name: version for name in names if (version := _version(name))}
    return Software(portadraft=portadraft.__version__, backend=backend, versions=versions)


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def system_memory_bytes() -> int | None:
    """The computer's memory, None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _module(backend: str) -> Any:
    try:
        return importlib.import_module(f"{backends.get(backend).module}.machine")
    except ImportError:  # a backend need not have one; then the operating system tells
        return None


def _report(backend: str, device: str) -> dict[str, Any]:
    module = _module(backend)
    if module is None:
        kind = "cpu" if device == "cpu" else "gpu"
        return {"kind": kind, "name": None, "memory_bytes": None, "threads": None}
    report: dict[str, Any] = module.describe(device)
    return report


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)[:200]
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines in Linux's description."""
    out: dict[str, str] = {}
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return out
    for line in text.splitlines():
        key, _, value = line.partition(":")
        out.setdefault(key.strip(), value.strip())
    return out


def _processor() -> str:
    if platform.system() == "Darwin":
        return _run("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or "unknown"
    info = _cpuinfo()
    if name := info.get("model name") or info.get("Model"):
        return name
    try:
        part = int(info.get("CPU part", ""), 16)
    except ValueError:
        return platform.processor() or platform.machine() or "unknown"
    return _ARM_PARTS.get(part, f"Arm part {part:#x}")


def _with_family(name: str) -> str:
    """Clouds hide the model of a processor ("AMD EPYC"); its family and model numbers still tell what it is."""
    info = _cpuinfo()
    numbers = info.get("cpu family"), info.get("model")
    if name.split(" (")[0] not in _NAMELESS or None in numbers:
        return name
    return f"{name} (family {numbers[0]} model {numbers[1]})"


def _driver() -> str:
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else ""


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _tidy(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:200]
