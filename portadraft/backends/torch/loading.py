"""Load a Hugging Face causal language model from the hub, a folder or a GGUF file.

Only safetensors and GGUF are read, and no code that comes with a model is run.

Unpacking a GGUF file takes long (see `gguf_once`), so the unpacked weights are kept in
the cache in float32, from which any type is rounded as the file's own loader rounds it.
"""

from __future__ import annotations

import importlib.util
import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError

from portadraft.backends.gguf_once import read_gguf_once
from portadraft.backends.quiet import quiet_transformers
from portadraft.backends.sources import fetch, first_line
from portadraft.backends.tokenizers import load_gguf_tokenizer, load_tokenizer
from portadraft.backends.torch.devices import choose_device, choose_dtype, cpu_has_bf16, torch_dtype
from portadraft.errors import (
    CorruptFile,
    MissingDependency,
    ModelNotFound,
    OutOfMemory,
    PortadraftError,
    UnsupportedModel,
)
from portadraft.models import ModelSource, cache, gguf_path, resolve
from portadraft.models.files import check_folder, read_config

__all__ = ["Loaded", "choose_device", "choose_dtype", "cpu_has_bf16", "fetch", "load_model"]

_KIND = "weights"
_LARGEST_CACHED = 6 << 30  # bytes of unpacked float32 weights
_UNPACKED_TO_PACKED = 8  # of 4-bit weights


_log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A model ready to decode, its tokenizer, and its generation config."""

    model: Any
    tokenizer: Any
    generation_config: Any


def load_model(source: ModelSource | str, dtype: str = "auto", device: str = "auto") -> Loaded:
    """Load a model, in evaluation mode and without gradients.

    dtype, device: names, or "auto" (see `choose_dtype`, `choose_device`, which give the reasons).

    Raises: ModelNotFound (unreachable, or parts missing), CorruptFile (damaged or incomplete),
    UnsupportedModel (pickled weights only, unknown architecture, needs its own code),
    MissingDependency, OutOfMemory, InvalidArgument.
    """
    source = resolve(source)
    where = choose_device(device).value
    wanted = torch_dtype(choose_dtype(dtype, where).value)
    if source.kind == "gguf":
        path = gguf_path(source)
        with _clear_errors(source.label), nullcontext() if gguf_cached(path) else read_gguf_once():
            model = _load_gguf(path, wanted, where)
            tokenizer = load_gguf_tokenizer(path)
        return Loaded(model, tokenizer, model.generation_config)
    folder = fetch(source)
    _check_architecture(read_config(folder), source.label)
    check_folder(folder)
    with _clear_errors(source.label):
        model = _load_folder(folder, wanted, where)
    return Loaded(model, load_tokenizer(folder), model.generation_config)


def gguf_cached(path: Path) -> bool:
    """Whether a GGUF file's weights are in the cache, so that loading it is fast."""
    return cache.lookup(_KIND, _key(path)) is not None


def _key(path: Path) -> str:
    return f"{cache.file_identity(path)}-{transformers.__version__}"


def _check_architecture(config: Any, label: str) -> None:
    """Refuse what transformers has no code for, before it reads anything large."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        own = "it brings code of its own, which portadraft does not run, and " if "auto_map" in config else ""
        raise UnsupportedModel(
            f"model={label!r}: {own}transformers {transformers.__version__} knows no model type {kind!r}; use a model "
            "of a built-in architecture, or update transformers if it came out recently"
        )
    if kind not in CAUSAL or config.get("is_encoder_decoder"):
        raise UnsupportedModel(
            f"model={label!r}: model type {kind!r} is not a decoder-only language model; expected one that "
            "transformers' AutoModelForCausalLM loads"
        )


def _options(dtype: torch.dtype, device: str) -> dict[str, Any]:
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False}
    if device != "cpu" and _has_accelerate():
        options["device_map"] = {"": device}  # weights go straight to the device
    return options


def _has_accelerate() -> bool:
    return importlib.util.find_spec("accelerate") is not None


def _load_folder(folder: Path, dtype: torch.dtype, device: str) -> Any:
    with quiet_transformers():
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), use_safetensors=True, output_loading_info=True, **_options(dtype, device)
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise CorruptFile(
            f"model={str(folder)!r}: {len(missing)} tensors are missing from its weights ({missing[0]}, …); "
            "download them again, or see that config.json belongs to them"
        )
    return _ready(model, device)


def _load_gguf(path: Path, dtype: torch.dtype, device: str) -> Any:
    key = _key(path)
    entry = cache.lookup(_KIND, key)
    if entry is not None:
        try:
            check_folder(entry)
            return _load_folder(entry, dtype, device)
        except (CorruptFile, ModelNotFound, SafetensorError):
            cache.drop(_KIND, key)
    importlib.import_module("transformers.modeling_gguf_pytorch_utils")  # so that its bar can be silenced
    size = path.stat().st_size * _UNPACKED_TO_PACKED
    if size <= _LARGEST_CACHED and size < cache.free_bytes() // 2:
        _log.info("unpacking %s once, which takes a while; later loads are fast", path.name)
        model = _unpack_gguf(path, torch.float32)
        with quiet_transformers():
            entry = cache.store(_KIND, key, lambda folder: model.save_pretrained(str(folder)))
        if entry is not None:
            del model
            return _load_folder(entry, dtype, device)
    return _ready(_unpack_gguf(path, dtype), device)


def _unpack_gguf(path: Path, dtype: torch.dtype) -> Any:
    """A GGUF file as an ordinary model."""
    for package in ("gguf", "accelerate"):  # transformers unpacks with both
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(
                f"reading {path.name} needs the package {package!r}, which is not installed; "
                "install it with: pip install 'portadraft[torch,gguf]'"
            )
    options: dict[str, Any] = {}
    config_class = getattr(transformers, "GgufConfig", None)
    if config_class is not None:  # never kernels that compute on packed blocks and round in ways of their own
        options["quantization_config"] = config_class(dequantize=True)
    try:
        with quiet_transformers():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=dtype, trust_remote_code=False, **options
            )
    except (ValueError, LookupError, EOFError, OverflowError, struct.error) as error:
        text = first_line(error)
        if "not supported" in text or "architecture" in text.lower():
            raise UnsupportedModel(
                f"model file {path}: transformers cannot read GGUF files of this model ({text}); "
                "use the model's Hugging Face folder"
            ) from error
        raise CorruptFile(f"model file {path}: not a whole GGUF file ({text}); download it again") from error
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _ready(model: Any, device: str) -> Any:
    model = model.eval().requires_grad_(False)
    here, there = model.device, torch.device(device)
    return model if here.type == there.type and there.index in (None, here.index) else model.to(there)


@contextmanager
def _clear_errors(label: str) -> Iterator[None]:
    """Say what went wrong in the user's terms."""
    try:
        yield
    except PortadraftError:
        raise
    except SafetensorError as error:
        raise CorruptFile(
            f"model={label!r}: its weights are damaged ({first_line(error)}); download them again"
        ) from error
    except ImportError as error:
        raise MissingDependency(
            f"model={label!r} needs a package that is not installed ({first_line(error)}); for a GGUF file: "
            "pip install 'portadraft[torch,gguf]'"
        ) from error
    except (MemoryError, RuntimeError) as error:
        text = str(error).lower()
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "out of memory" in text or "allocate" in text:
            raise OutOfMemory(
                f"model={label!r} does not fit into memory ({first_line(error)}); use a smaller model, "
                "dtype='bfloat16' or 'float16', or a device with more memory"
            ) from error
        if "size mismatch" in text or "ignore_mismatched_sizes" in text:
            raise CorruptFile(
                f"model={label!r}: its weights do not have the shapes that config.json describes "
                f"({first_line(error)}); download both from the same origin"
            ) from error
        raise
