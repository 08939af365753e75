"""Which device and data type a model gets, each with its reason."""

from __future__ import annotations

import platform
import subprocess
from functools import lru_cache
from pathlib import Path

import torch

from portadraft.backends.sources import Chosen
from portadraft.backends.torch.ops import DTYPES
from portadraft.errors import InvalidArgument

DTYPE_NAMES = ("float32", "bfloat16", "float16")
_X86_BF16 = {"avx512_bf16", "amx_bf16", "avx_ne_convert"}


@lru_cache(maxsize=1)
def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16, AMX, or Arm's bf16)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            flags = set(value.split())
            return bool(flags & _X86_BF16) or "bf16" in flags
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        answer = subprocess.run(
            ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"], capture_output=True, text=True, check=False
        )
        return answer.stdout.strip() == "1"
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(probe()) if probe is not None else False


def choose_device(device: str = "auto") -> Chosen:
    """`auto`: CUDA, else Apple's GPU, else the CPU.

    Raises: InvalidArgument for an unknown device or one that this machine lacks.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return Chosen("cuda", f"torch sees {torch.cuda.get_device_name(0)}")
        if torch.backends.mps.is_available():
            return Chosen("mps", "torch sees an Apple GPU")
        return Chosen("cpu", "torch sees no GPU")
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        parsed = None
    counts = _counts()
    here = ", ".join(["'auto'", *(repr(kind) for kind, count in counts.items() if count)])
    if parsed is None or parsed.type not in counts:
        raise InvalidArgument(
            f"device={device!r}: expected 'auto', 'cpu', 'cuda', 'cuda:<number>', 'mps' or 'xpu'; found here: {here}"
        )
    count = counts[parsed.type]
    if (parsed.index or 0) >= count:
        found = "; this machine has no such device" if count == 0 else f"; this machine has {count}, counted from 0"
        raise InvalidArgument(
            f"device={device!r}{found}: found here: {here}; if a device is missing, check torch's installation"
        )
    return Chosen(str(parsed), "asked for")


def _counts() -> dict[str, int]:
    """How many devices of each kind torch sees. AMD's GPUs are "cuda" to torch."""
    return {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
        "xpu": torch.xpu.device_count(),
    }


def choose_dtype(dtype: str = "auto", device: str = "cpu") -> Chosen:
    """`auto`: the fastest type that the device computes in.

    Raises: InvalidArgument for an unknown type.
    """
    if dtype != "auto":
        if dtype not in DTYPE_NAMES:
            raise InvalidArgument(f"dtype={dtype!r}: expected 'auto', {', '.join(map(repr, DTYPE_NAMES))}")
        return Chosen(dtype, "asked for")
    kind = device.partition(":")[0]
    if kind == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Chosen("bfloat16", "the GPU computes in bfloat16")
        return Chosen("float16", "the GPU does not compute in bfloat16")
    if kind == "xpu":
        return Chosen("bfloat16", "Intel GPUs compute in bfloat16")
    if kind == "mps":
        return Chosen("float16", "fastest type on Apple GPUs")
    if cpu_has_bf16():
        return Chosen("bfloat16", "the CPU has bfloat16 instructions")
    return Chosen("float32", "the CPU has no bfloat16 instructions")


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a name in DTYPE_NAMES."""
    return DTYPES[name]
