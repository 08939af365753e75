"""Checks of model files before anything large is read: formats, headers, sizes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from portadraft.errors import CorruptFile, InvalidArgument, ModelNotFound, UnsupportedModel

GGUF_MAGIC = b"GGUF"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_HEADER = 100_000_000
_TO_SAFETENSORS = (
    "Convert it once, on a machine where you trust its origin, with transformers: "
    "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
)


def check_gguf(path: Path) -> None:
    """See that a file is GGUF of a version that is in use.

    Raises: CorruptFile, naming what was found.
    """
    with path.open("rb") as file:
        head = file.read(8)
    if head[:4] != GGUF_MAGIC:
        raise CorruptFile(
            f"model file {path}: expected a GGUF file, which starts with {GGUF_MAGIC!r}, but it starts with "
            f"{head[:4]!r}; check the path, or download the file again"
        )
    version = struct.unpack("<I", head[4:8])[0] if len(head) == 8 else None
    if version not in (2, 3):
        raise CorruptFile(
            f"model file {path}: GGUF version {version}, expected 2 or 3; download the file again, or convert it anew"
        )


def check_safetensors(path: Path) -> None:
    """See that a safetensors file's header is sound and that its data is complete.

    Raises: CorruptFile, naming the file and what is wrong.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _MAX_HEADER):
                raise ValueError(f"its header claims {length} bytes, the file has {size}")
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        needed = 8 + length + max(ends, default=0)
        if needed != size:
            raise ValueError(f"its header describes {needed} bytes, the file has {size}")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CorruptFile(
            f"weights file {path}: not a whole safetensors file ({error}); download or write it again"
        ) from None


def read_config(folder: Path) -> Mapping[str, Any]:
    """A model folder's `config.json`.

    Raises: ModelNotFound without one; CorruptFile if it is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(
            f"model={str(folder)!r}: the folder has no config.json; expected a Hugging Face model folder "
            "(config.json, *.safetensors, tokenizer files) or the path of a .gguf file"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CorruptFile(f"{path}: expected JSON ({error}); download or write it again") from None
    if not isinstance(config, dict):
        raise CorruptFile(f"{path}: expected a JSON object, found {type(config).__name__}; download or write it again")
    return config


def check_folder(folder: Path) -> None:
    """See that a model folder holds weights that portadraft reads, and that they are whole.

    Raises: ModelNotFound without weights; UnsupportedModel where the only weights are pickles, which
    can run code when they are read; CorruptFile for a damaged file.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights:
        pickles = [name for name in names if name.endswith(_PICKLES)]
        if pickles:
            raise UnsupportedModel(
                f"model={str(folder)!r}: its only weights are {', '.join(pickles[:3])}, in a format that can run code "
                f"when it is read; portadraft reads safetensors and GGUF. {_TO_SAFETENSORS}"
            )
        ggufs = [name for name in names if name.endswith(".gguf")]
        if ggufs:
            raise InvalidArgument(f"model={str(folder)!r}: the folder holds {ggufs[0]}; pass that file's path instead")
        raise ModelNotFound(
            f"model={str(folder)!r}: the folder has no *.safetensors file; expected the model's weights beside "
            "config.json"
        )
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    for name in indexes:
        try:
            shards = set(json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptFile(
                f"{folder / name}: expected an index of weight files ({error!r}); download it again"
            ) from None
        missing = sorted(shards - set(names))
        if missing:
            raise CorruptFile(
                f"model={str(folder)!r}: {name} names {missing[0]}, which is not there ({len(missing)} missing); "
                "download the missing files"
            )
    for name in weights:
        check_safetensors(folder / name)
