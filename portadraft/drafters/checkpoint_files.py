"""A drafter's two files, whatever its layout: read with clear errors, written all or nothing."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from portadraft.core.recurrent import RecurrentConfig
from portadraft.errors import CorruptFile, InvalidArgument, ModelNotFound
from portadraft.scratch import sweep

CONFIG, WEIGHTS = "config.json", "model.safetensors"

NumpyParameters = Mapping[str, NDArray[Any]]

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}


def read_json(folder: Path) -> dict[str, Any]:
    """config.json as an object. Raises: ModelNotFound, CorruptFile."""
    path = folder / CONFIG
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: no such file; expected a drafter's folder with {CONFIG} and {WEIGHTS}") from None
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{path}: not UTF-8 text ({error}); fetch or train the drafter again") from None
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CorruptFile(f"{path}: not JSON ({error}); fetch or train the drafter again") from None
    if not isinstance(document, dict):
        raise CorruptFile(f"{path}: expected a JSON object; fetch or train the drafter again")
    return document


def integer(folder: Path, document: dict[str, Any], name: str) -> int:
    """A whole number of the document. Raises: CorruptFile."""
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CorruptFile(f"{folder / CONFIG}: {name}={value!r:.60}: expected a whole number")
    return value


def read_tensors(folder: Path, sha256: Any = None) -> dict[str, NDArray[Any]]:
    """All tensors of model.safetensors, bfloat16 as float32. Raises: ModelNotFound, CorruptFile."""
    path = folder / WEIGHTS
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: no such file; expected a drafter's folder with {CONFIG} and {WEIGHTS}") from None
    again = "the file is damaged or cut short; fetch or train the drafter again"
    try:
        entries = safetensors.deserialize(raw)  # type: ignore[no-untyped-call]
    except Exception as error:  # safetensors raises its own kind, and others for some damage
        raise CorruptFile(f"{path}: {error}; {again}") from None
    if sha256 is not None and hashlib.sha256(raw).hexdigest() != sha256:
        raise CorruptFile(f"{path}: its SHA-256 is not the one in {CONFIG}; {again}")
    out = {}
    for name, entry in entries:
        dtype, shape, data = entry["dtype"], tuple(entry["shape"]), entry["data"]
        if dtype not in _BYTES:
            raise CorruptFile(f"{path}: tensor {name!r} has type {dtype}; expected one of {', '.join(_BYTES)}")
        if len(data) != int(np.prod(shape, dtype=np.int64)) * _BYTES[dtype]:
            raise CorruptFile(f"{path}: tensor {name!r} has {len(data)} bytes for shape {shape}; {again}")
        if dtype == "BF16":
            out[name] = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        else:
            out[name] = np.frombuffer(data, _DTYPES[dtype]).reshape(shape)
    return out


def check_shapes(path: Path, config: RecurrentConfig, tensors: NumpyParameters) -> None:
    """Raises: CorruptFile where tensors are missing, too many, or of another shape or kind than expected."""
    wanted = config.shapes()
    problems = [f"{name!r} is missing" for name in wanted if name not in tensors]
    problems += [f"{name!r} is not expected" for name in tensors if name not in wanted]
    problems += [
        f"{name!r} has shape {tuple(tensors[name].shape)}, expected {shape}"
        for name, shape in wanted.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems += [
        f"{name!r} has type {tensors[name].dtype}, expected a floating-point one"
        for name in wanted
        if name in tensors and tensors[name].dtype.kind != "f"
    ]
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise CorruptFile(
            f"{path}: tensors do not fit the architecture in {CONFIG}: {'; '.join(problems[:4])}{more}; "
            "fetch or train the drafter again"
        )


def write_folder(folder: Path, document: dict[str, Any], weights: bytes, overwrite: bool) -> Path:
    """Write both files; a failure leaves what was there, and no rests. Raises: InvalidArgument, OSError."""
    if folder.exists() and not overwrite:
        raise InvalidArgument(f"folder={str(folder)!r}: exists already; choose another, or pass overwrite=True")
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        sweep(folder.parent, f".{glob.escape(folder.name)}.*.part")
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
        _write_file(temporary / WEIGHTS, weights)
        _write_file(temporary / CONFIG, text.encode())
        temporary.chmod(0o755)
        _sync(temporary)
        _exchange(temporary, folder)
        _sync(folder.parent)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the drafter could not be written ({os.strerror(error.errno) if error.errno else error}); "
            "nothing was changed; free some space or choose another folder",
            str(folder),
        ) from error
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _exchange(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`; if that fails, the old one stands again."""
    if not folder.exists():
        new.rename(folder)
        return
    old = new.with_name(new.name + ".old")
    folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Have the directory's entries on disk; systems that cannot open directories go without."""
    with contextlib.suppress(PermissionError, IsADirectoryError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
