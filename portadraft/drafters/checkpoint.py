"""A drafter on disk: a folder with `config.json` and `model.safetensors`. Needs numpy and safetensors only.

`config.json` says how the drafter is built, which target it belongs to and how it was trained;
`model.safetensors` holds its own parameters (a tied head's rows are the target's) and, where
it predicts only some tokens, their ids as `draft_vocabulary`. Writing is all or nothing.

Apple's published layout (see `apple`) is read by the same function, and written by `write_apple`
for drafters that it can express.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from portadraft.core.recurrent import RecurrentConfig
from portadraft.drafters.apple import APPLE_TYPE, document_for, obstacles, read_layout, swap_halves
from portadraft.drafters.checkpoint_files import (
    CONFIG,
    WEIGHTS,
    NumpyParameters,
    check_shapes,
    integer,
    read_json,
    read_tensors,
    write_folder,
)
from portadraft.errors import CorruptFile, IncompatibleDrafter, InvalidArgument

FORMAT_VERSION = 1
VOCABULARY = "draft_vocabulary"


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
    document = read_json(folder)
    if document.get("model_type") == APPLE_TYPE:
        return Identity(
            vocabulary_size=integer(folder, document, "vocab_size"),
            hidden_size=integer(folder, document, "hidden_size"),
        )
    return _parse(folder, document)[1]


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Load a drafter's folder, of our layout or of Apple's.

    Raises: ModelNotFound if a file is missing; CorruptFile if one is damaged, has tensors missing,
    too many or of the wrong shape; IncompatibleDrafter for a newer format or one that cannot be run.
    """
    folder = Path(folder)
    document = read_json(folder)
    if document.get("model_type") == APPLE_TYPE:
        config, params = read_layout(folder, document)
        return Checkpoint(config, params, Identity(config.vocabulary_size, config.hidden_size))
    config, identity, training = _parse(folder, document)
    tensors = read_tensors(folder, document.get("weights_sha256"))
    vocabulary = tensors.pop(VOCABULARY, None)
    path = folder / WEIGHTS
    check_shapes(path, config, tensors)
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
    check_shapes(folder / WEIGHTS, checkpoint.config, checkpoint.params)
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
    return write_folder(folder, document, weights, overwrite)


def write_apple(folder: str | Path, checkpoint: Checkpoint, overwrite: bool = False) -> Path:
    """Write Apple's published layout, which TensorRT-LLM's ReDrafter converter takes.

    Raises: InvalidArgument where that layout cannot express the drafter.
    """
    config = checkpoint.config
    reasons = obstacles(config, checkpoint.identity.vocabulary_size, checkpoint.draft_vocabulary is not None)
    if reasons:
        raise InvalidArgument(f"checkpoint: Apple's layout cannot express this drafter: {'; '.join(reasons)}")
    path = Path(folder)
    check_shapes(path / WEIGHTS, config, checkpoint.params)
    tensors = {k: np.ascontiguousarray(v) for k, v in swap_halves(config, checkpoint.params).items()}
    weights = safetensors.numpy.save(tensors, metadata={"format": "pt"})
    return write_folder(path, document_for(config), weights, overwrite)


# our layout


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


def _as_type(name: str, value: NDArray[Any], dtype: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        return np.asarray(value).astype(dtype)
