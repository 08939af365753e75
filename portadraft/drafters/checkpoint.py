"""A drafter on disk: a folder with `config.json` and `model.safetensors`. Needs numpy and safetensors only.

`config.json` says how the drafter is built, which target it belongs to and how it was trained;
`model.safetensors` holds its own parameters (a tied head's rows are the target's) and, where
it predicts only some tokens, their ids as `draft_vocabulary`. Writing is all or nothing.

Apple's published layout (config.json with model_type "recurrent_drafting_drafter") is read by
the same function, and written by `write_apple` for drafters that it can express. There the
state stands behind the hidden state, [h, s], and here before it, [s, h]: reading and writing
swap the two halves wherever a matrix touches them, which loses nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from portadraft.core.recurrent import RecurrentConfig
from portadraft.errors import CorruptFile, IncompatibleDrafter, InvalidArgument, ModelNotFound

FORMAT_VERSION = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
VOCABULARY = "draft_vocabulary"
APPLE_TYPE = "recurrent_drafting_drafter"

NumpyParameters = Mapping[str, NDArray[Any]]

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}


@dataclass(frozen=True)
class Identity:
    """Which target a drafter belongs to.

    name: for people. tokenizer: `portadraft.identity.tokenizer_fingerprint`. weights_id:
    `TargetFacts.weights_id`. Empty strings where unknown. vocabulary_size, hidden_size: the target's.
    """

    vocabulary_size: int
    hidden_size: int
    name: str = ""
    tokenizer: str = ""
    weights_id: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A drafter as numbers.

    params: by the names of `RecurrentConfig.shapes`, in the type they are stored in (bfloat16 is
    read as float32). draft_vocabulary: (V',) int32, the target's id of each drafter id, ascending;
    None where they are equal. training: how it was trained; plain JSON.
    """

    config: RecurrentConfig
    params: NumpyParameters
    identity: Identity
    draft_vocabulary: NDArray[np.int32] | None = None
    training: Mapping[str, Any] = field(default_factory=dict)


def read_identity(folder: str | Path) -> Identity:
    """Which target the drafter in a folder belongs to; reads config.json alone."""
    folder = Path(folder)
    document = _read_json(folder)
    if document.get("model_type") == APPLE_TYPE:
        return Identity(
            vocabulary_size=_integer(folder, document, "vocab_size"),
            hidden_size=_integer(folder, document, "hidden_size"),
        )
    return _parse(folder, document)[1]


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Load a drafter's folder, of our layout or of Apple's.

    Raises: ModelNotFound if a file is missing; CorruptFile if one is damaged, has tensors missing,
    too many or of the wrong shape; IncompatibleDrafter for a newer format or one that cannot be run.
    """
    folder = Path(folder)
    document = _read_json(folder)
    if document.get("model_type") == APPLE_TYPE:
        return _read_apple(folder, document)
    config, identity, training = _parse(folder, document)
    tensors = _read_tensors(folder, document.get("weights_sha256"))
    vocabulary = tensors.pop(VOCABULARY, None)
    path = folder / WEIGHTS
    _check_shapes(path, config, tensors)
    if vocabulary is not None:
        vocabulary = _check_vocabulary(path, vocabulary, config.vocabulary_size, identity.vocabulary_size)
    elif config.vocabulary_size != identity.vocabulary_size:
        raise CorruptFile(
            f"{path}: no tensor {VOCABULARY!r}, which a drafter for {config.vocabulary_size} of "
            f"{identity.vocabulary_size} tokens needs; fetch or train the drafter again"
        )
    return Checkpoint(config, tensors, identity, vocabulary, training)


def write_checkpoint(
    folder: str | Path, checkpoint: Checkpoint, dtype: str | None = "float16", overwrite: bool = False
) -> Path:
    """Write a drafter's folder, all or nothing: a failure leaves what was there, and no rests.

    dtype: "float16", "float32", or None to keep each tensor's own.

    Raises: InvalidArgument if the folder exists and overwrite is False, or if values do not fit the
    type; OSError naming the folder if the disk is full or not writable.
    """
    if dtype not in ("float16", "float32", None):
        raise InvalidArgument(f"dtype={dtype!r}: expected 'float16', 'float32' or None")
    folder = Path(folder)
    _check_shapes(folder / WEIGHTS, checkpoint.config, checkpoint.params)
    tensors = {}
    for name, value in checkpoint.params.items():
        array = np.ascontiguousarray(value if dtype is None else _as_type(name, value, dtype))
        if not np.isfinite(array).all():
            raise InvalidArgument(f"params[{name!r}]: not finite as {array.dtype}; write it as dtype='float32'")
        tensors[name] = array
    if checkpoint.draft_vocabulary is not None:
        tensors[VOCABULARY] = _check_vocabulary(
            folder / WEIGHTS,
            checkpoint.draft_vocabulary,
            checkpoint.config.vocabulary_size,
            checkpoint.identity.vocabulary_size,
        )
    weights = safetensors.numpy.save(tensors, metadata={"format": "portadraft"})
    document = {
        "format": "portadraft-drafter",
        "format_version": FORMAT_VERSION,
        "architecture": dataclasses.asdict(checkpoint.config),
        "target": dataclasses.asdict(checkpoint.identity),
        "training": dict(checkpoint.training),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    return _write_folder(folder, document, weights, overwrite)


def write_apple(folder: str | Path, checkpoint: Checkpoint, overwrite: bool = False) -> Path:
    """Write Apple's published layout, which TensorRT-LLM's ReDrafter converter takes.

    Raises: InvalidArgument where that layout cannot express the drafter.
    """
    config = checkpoint.config
    reasons = []
    if config.tied_head:
        reasons.append("its head is the target's own, and the layout wants one of the drafter's")
    if checkpoint.draft_vocabulary is not None or config.vocabulary_size != checkpoint.identity.vocabulary_size:
        reasons.append(
            f"it predicts {config.vocabulary_size} of {checkpoint.identity.vocabulary_size} tokens, "
            "and the layout has no map between ids"
        )
    if config.first_state != "recurrence":
        reasons.append(f"first_state={config.first_state!r}, and the layout computes the first state by the recurrence")
    if config.embedding_size != config.hidden_size:
        reasons.append(f"embedding_size={config.embedding_size} differs from hidden_size={config.hidden_size}")
    if reasons:
        raise InvalidArgument(f"checkpoint: Apple's layout cannot express this drafter: {'; '.join(reasons)}")
    path = Path(folder)
    _check_shapes(path / WEIGHTS, config, checkpoint.params)
    tensors = {k: np.ascontiguousarray(v) for k, v in _swap_halves(config, checkpoint.params).items()}
    document = {
        "model_type": APPLE_TYPE,
        "architectures": ["Drafter"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocabulary_size,
        "exit_dim": config.inner_size,
        "num_draft_layers": config.blocks,
        "rnn": True,
    }
    return _write_folder(path, document, safetensors.numpy.save(tensors, metadata={"format": "pt"}), overwrite)


# reading


def _read_json(folder: Path) -> dict[str, Any]:
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


def _parse(folder: Path, document: dict[str, Any]) -> tuple[RecurrentConfig, Identity, dict[str, Any]]:
    path = folder / CONFIG
    if document.get("format") != "portadraft-drafter":
        raise CorruptFile(f'{path}: not a drafter\'s configuration (no "format": "portadraft-drafter")')
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise IncompatibleDrafter(
            f"{path}: format_version={version!r}; this portadraft reads version {FORMAT_VERSION}. "
            "Update portadraft, or train the drafter again"
        )
    config = _dataclass(path, "architecture", document.get("architecture"), RecurrentConfig)
    identity = _dataclass(path, "target", document.get("target"), Identity)
    if config.first_state not in ("recurrence", "embedding"):
        raise CorruptFile(f"{path}: architecture.first_state={config.first_state!r}: expected recurrence or embedding")
    for name in ("hidden_size", "embedding_size", "inner_size", "vocabulary_size"):
        if getattr(config, name) < 1:
            raise CorruptFile(f"{path}: architecture.{name}={getattr(config, name)}: expected at least 1")
    if config.blocks < 0:
        raise CorruptFile(f"{path}: architecture.blocks={config.blocks}: expected at least 0")
    training = document.get("training", {})
    if not isinstance(training, dict):
        raise CorruptFile(f"{path}: training: expected an object")
    return config, identity, training


def _dataclass(path: Path, key: str, value: Any, kind: type[Any]) -> Any:
    """An object of a flat dataclass from JSON, with the types of its fields checked."""
    if not isinstance(value, dict):
        raise CorruptFile(f"{path}: {key}: expected an object")
    kinds: dict[str, type] = {"int": int, "str": str, "bool": bool}
    known = {f.name: f for f in dataclasses.fields(kind)}
    given = {}
    for name, item in known.items():
        if name not in value:
            if item.default is dataclasses.MISSING:
                raise CorruptFile(f"{path}: {key}.{name} is missing")
            continue
        wanted = kinds.get(str(item.type), str)
        got = value[name]
        if not isinstance(got, wanted) or (wanted is int and isinstance(got, bool)):
            raise CorruptFile(f"{path}: {key}.{name}={got!r:.60}: expected {wanted.__name__}")
        given[name] = got
    return kind(**given)


def _integer(folder: Path, document: dict[str, Any], name: str) -> int:
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CorruptFile(f"{folder / CONFIG}: {name}={value!r:.60}: expected a whole number")
    return value


def _read_tensors(folder: Path, sha256: Any = None) -> dict[str, NDArray[Any]]:
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


def _check_shapes(path: Path, config: RecurrentConfig, tensors: NumpyParameters) -> None:
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


def _check_vocabulary(path: Path, ids: NDArray[Any], size: int, target: int) -> NDArray[np.int32]:
    ids = np.asarray(ids)
    fine = (
        ids.shape == (size,)
        and ids.dtype.kind in "iu"
        and (size == 0 or (int(ids.min()) >= 0 and int(ids.max()) < target))
        and bool((np.diff(ids.astype(np.int64)) > 0).all())
    )
    if not fine:
        raise CorruptFile(
            f"{path}: {VOCABULARY}: expected {size} ascending token ids below {target}, "
            f"got {ids.dtype} of shape {ids.shape}"
        )
    return np.ascontiguousarray(ids, np.int32)


# Apple's layout


def _read_apple(folder: Path, document: dict[str, Any]) -> Checkpoint:
    if not document.get("rnn", False):
        raise IncompatibleDrafter(
            f"{folder / CONFIG}: rnn=false: its state is a sum of embeddings, which portadraft cannot run; "
            "expected a drafter with rnn=true"
        )
    hidden = _integer(folder, document, "hidden_size")
    vocabulary = _integer(folder, document, "vocab_size")
    config = RecurrentConfig(
        hidden_size=hidden,
        embedding_size=hidden,
        inner_size=_integer(folder, document, "exit_dim"),
        blocks=_integer(folder, document, "num_draft_layers"),
        vocabulary_size=vocabulary,
        tied_head=False,
    )
    # Older checkpoints spell some names in the plural.
    renamed = {"lm_heads.": "lm_head.", "input_projs.": "input_proj."}
    tensors = {}
    for name, value in _read_tensors(folder).items():
        for old, new in renamed.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        tensors[name] = value
    _check_shapes(folder / WEIGHTS, config, tensors)
    return Checkpoint(config, _swap_halves(config, tensors), Identity(vocabulary, hidden))


def _swap_halves(config: RecurrentConfig, params: NumpyParameters) -> dict[str, NDArray[Any]]:
    """The same drafter with [s, h] and [h, s] exchanged; its own inverse."""
    d, out = config.hidden_size, dict(params)

    def columns(x: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([x[:, d:], x[:, :d]], axis=1)

    def rows(x: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([x[d:], x[:d]], axis=0)

    if config.inner_size != 2 * d:
        out["input_proj.weight"] = columns(out["input_proj.weight"])
        return out
    # Without a projection the residual blocks work on the pair itself, and so does what follows them.
    for i in range(config.blocks):
        name = f"lm_head.{i}.linear"
        out[f"{name}.weight"] = rows(columns(out[f"{name}.weight"]))
        out[f"{name}.bias"] = rows(out[f"{name}.bias"])
    last = "project.weight" if config.tied_head else f"lm_head.{config.blocks}.weight"
    out[last] = columns(out[last])
    return out


# writing


def _as_type(name: str, value: NDArray[Any], dtype: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        return np.asarray(value).astype(dtype)


def _write_folder(folder: Path, document: dict[str, Any], weights: bytes, overwrite: bool) -> Path:
    if folder.exists() and not overwrite:
        raise InvalidArgument(f"folder={str(folder)!r}: exists already; choose another, or pass overwrite=True")
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
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
