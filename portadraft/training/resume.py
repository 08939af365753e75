"""A run's state on disk: one safetensors file, whose metadata is JSON. No pickle, and never half written.

The tensors are parameters, their average, the best so far and the optimiser's; the JSON holds the
counters, the plan and the history. No generator is stored: every random number of update n comes from
(seed, n, process), so that the counter is all that has to be known (see `portadraft.training.order`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save
from torch import Tensor

from portadraft.errors import CorruptFile

FORMAT = "portadraft-training-state-1"


def save_state(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a state, all or nothing: a kill or a full disk leaves the one that was there.

    facts: plain JSON without NaN; Python's floats come back exactly.

    Raises: OSError naming the file.
    """
    # Cloned where two names share memory, which the format refuses.
    seen: set[int] = set()
    given = {}
    for name, value in tensors.items():
        host = value.detach().to("cpu").contiguous()
        given[name] = host.clone() if host.data_ptr() in seen else host
        seen.add(host.data_ptr())
    text = json.dumps(dict(facts), allow_nan=False)
    write_whole(path, save(given, metadata={"format": FORMAT, "facts": text}))


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_state` wrote.

    Raises: FileNotFoundError; CorruptFile where the file is damaged or of another version.
    """
    again = (
        "start the run again with --overwrite (overwrite=True); a state is written whole, so the disk may be at fault"
    )
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise CorruptFile(
                f"{path}: not a training state that this version reads ({metadata.get('format')!r}); {again}"
            )
        return load_file(str(path)), json.loads(metadata["facts"])
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise CorruptFile(f"{path}: {error}; {again}") from None


def write_whole(path: Path, data: bytes) -> None:
    """Put bytes in the place of a file in one move, on disk before it is done.

    Raises: OSError naming the file; what was there stays, and nothing beside it.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}; what was there before is unharmed", str(path)) from error
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
