"""What there is on this machine, and what would be used: looked up, not printed (see `doctor`).

Nothing is downloaded and no model is loaded: this looks where `portadraft.load` would look.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import portadraft

_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")


def collect() -> dict[str, Any]:
    """The report as plain data (what `portadraft doctor --json` prints)."""
    backends, drafters = [_backend(name) for name in _registry()], _trained_drafters()
    return {
        "portadraft": portadraft.__version__,
        "python": platform.python_version(),
        "machine": _machine(),
        "backends": backends,
        "packages": {name: _version(name) for name in ("numpy", "torch", "transformers", "mlx", "mlx-lm", "gguf")},
        "models": [*_packaged_models(), *_cached_models()],
        "short_names": _short_names(),
        "drafters": drafters,
        "choice": _choice(backends, drafters),
        "untested": _untested(backends),
        "warnings": _warnings(),
    }


# the machine


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "bf16_instructions": _bf16_instructions(),
    }


def _cpuinfo(*keys: str) -> str:
    """The first value of one of the keys in Linux's description of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    except OSError:
        pass
    return ""


def _sysctl(key: str) -> str:
    if platform.system() != "Darwin":
        return ""
    try:
        done = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _processor() -> str:
    return _cpuinfo("model name", "Model") or _sysctl("machdep.cpu.brand_string") or platform.processor() or "unknown"


def _bf16_instructions() -> list[str]:
    flags = _cpuinfo("flags", "Features").split()
    found = [flag for flag in _BF16_FLAGS if flag in flags]
    if _sysctl("hw.optional.arm.FEAT_BF16") == "1":
        found.append("bf16")
    return found


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None


# backends


def _registry() -> list[str]:
    from portadraft.backends import REGISTRY

    return list(REGISTRY)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backend(name: str) -> dict[str, Any]:
    from portadraft.backends import get

    backend = get(name)
    out: dict[str, Any] = {
        "name": name,
        "works": False,
        "version": _version(backend.requires[0]),
        "devices": [],
        "problem": None,
    }
    try:
        backend.load()
        out["devices"] = _devices(name)
        out["works"] = True
    except Exception as error:  # a broken install may fail in any way, and that is what is asked for here
        out["problem"] = f"{error}" or type(error).__name__
    return out


def _devices(name: str) -> list[str]:
    if name != "torch":
        return ["cpu"]
    import torch

    found = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    if torch.version.hip is not None:
        found = [f"{device}, ROCm: untested" for device in found]
    if torch.backends.mps.is_available():
        found.append("mps (untested)")
    found += [f"xpu:{i} ({torch.xpu.get_device_name(i)}, untested)" for i in range(torch.xpu.device_count())]
    return [*found, f"cpu ({torch.get_num_threads()} threads)"]


# models and drafters


def _megabytes(paths: list[Path]) -> float:
    total = 0
    for path in paths:
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return round(total / 1e6, 1)


def _packaged_models() -> list[dict[str, Any]]:
    """Short names whose model stands in an installed package."""
    from portadraft.models import SHORT_NAMES, resolve

    out = []
    for name in SHORT_NAMES:
        source = resolve(name)
        if source.kind == "gguf":
            path = Path(source.location)
            size = _megabytes([path]) if path.exists() else None  # several parts, joined at first use
            out.append({"name": name, "source": "installed package", "path": str(path), "megabytes": size})
    return out


def _short_names() -> list[str]:
    from portadraft.models import SHORT_NAMES

    return list(SHORT_NAMES)


def _cache_folder() -> Path:
    """Where Hugging Face's client keeps models, by its own rules."""
    if explicit := os.environ.get("HF_HUB_CACHE"):
        return Path(explicit)
    home = os.environ.get("HF_HOME")
    base = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return base / "hub"


def _cached_models() -> list[dict[str, Any]]:
    out = []
    for folder in sorted(_cache_folder().glob("models--*")):
        weights = [*folder.glob("snapshots/*/*.safetensors"), *folder.glob("snapshots/*/*.gguf")]
        if weights:
            name = folder.name.removeprefix("models--").replace("--", "/")
            out.append(
                {
                    "name": name,
                    "source": "Hugging Face cache",
                    "path": str(folder),
                    "megabytes": _megabytes(sorted({path.resolve() for path in weights})),
                }
            )
    return out


def _trained_drafters() -> list[dict[str, Any]]:
    """Trained drafters, where `drafter="auto"` looks for them."""
    from portadraft.drafters.checkpoint import read_identity
    from portadraft.drafters.select import folders

    package, out = Path(portadraft.__file__).parent, []
    for folder in folders():
        try:
            made_for = read_identity(folder).name or "unnamed model"
        except (portadraft.PortadraftError, OSError) as error:
            made_for = f"unreadable: {error}"
        out.append(
            {
                "name": folder.name,
                "target": made_for,
                "source": "shipped" if folder.is_relative_to(package) else "your own",
                "path": str(folder),
                "megabytes": _megabytes([path for path in folder.iterdir() if path.is_file()]),
            }
        )
    return out


# what would be used


def _choice(backends: list[dict[str, Any]], drafters: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What `portadraft.load` and `generate` would choose where they are left to choose."""
    from portadraft.backends.choice import choose_backend
    from portadraft.profiles.shape import default_shape

    try:
        chosen = choose_backend()
    except portadraft.PortadraftError as error:
        return {"backend": {"value": None, "reason": str(error)}}
    backend = {"value": chosen.name, "reason": chosen.reason}
    broken = [b["problem"] for b in backends if b["name"] == chosen.name and not b["works"]]
    if broken:
        return {"backend": {"value": None, "reason": f"{chosen.name} ({chosen.reason}) is not usable: {broken[0]}"}}
    if chosen.name != "torch":
        return {"backend": backend}
    from portadraft.backends.torch.devices import choose_device, choose_dtype

    device = choose_device()
    dtype = choose_dtype(device=device.value)
    name = "redrafter+lookup" if drafters else "lookup"
    why = "where one was trained for the model's weights; else lookup" if drafters else "no trained drafter"
    shape, shape_reason = default_shape(name, device.value.partition(":")[0])
    size = f"{shape.width}x{shape.length}" + (f", {shape.nodes} slots" if shape.nodes else "")
    return {
        "backend": backend,
        "device": {"value": device.value, "reason": device.reason},
        "dtype": {"value": dtype.value, "reason": dtype.reason},
        "drafter": {"value": name, "reason": why},
        "shape": {"value": size, "reason": shape_reason},
    }


def _untested(backends: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Where the registered backends should work and have not been run."""
    from portadraft.backends.choice import UNTESTED

    names = [b["name"] for b in backends]
    return [
        {"backend": name, "where": where, "known": known}
        for name, places in UNTESTED.items()
        if name in names
        for where, known in places.items()
    ]


def _warnings() -> list[str]:
    """Settings of the environment that would mislead."""
    out = []
    if os.environ.get("PYTORCH_ENABLE_MPS_FALLBACK", "0") not in ("", "0"):
        out.append(
            "PYTORCH_ENABLE_MPS_FALLBACK is set: what the Apple GPU lacks is computed on the CPU without a word, "
            "so that times mislead; portadraft needs no fallback, unset it"
        )
    return out
