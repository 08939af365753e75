"""Load an mlx-lm model from the hub, a folder or a GGUF file. No code that comes with a model is run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from portadraft.backends.mlx.gguf import load_gguf
from portadraft.backends.mlx.ops import mlx_dtype
from portadraft.backends.mlx.renamed import older_names
from portadraft.backends.sources import Chosen, fetch, first_line
from portadraft.backends.tokenizers import load_gguf_tokenizer, load_tokenizer
from portadraft.errors import CorruptFile, InvalidArgument, MissingDependency, UnsupportedModel
from portadraft.models import ModelSource, gguf_path, resolve
from portadraft.models.files import check_folder, read_config

_DTYPES = ("float32", "bfloat16", "float16")


class Loaded(NamedTuple):
    """What was loaded. generation_config: an object with `eos_token_id`. limit: the context's, in tokens, if known."""

    model: Any
    tokenizer: Any
    generation_config: Any
    limit: int | None
    dtype: Chosen


def choose_device(device: str = "auto") -> Chosen:
    """`auto`: what mlx takes by default.

    Raises: InvalidArgument for an unknown device, or one that this build of mlx lacks.
    """
    gpu = mx.default_device() == mx.Device(mx.gpu)
    here = "gpu" if gpu else "cpu"
    kind = "Metal" if sys.platform == "darwin" else "CUDA"
    if device == "auto":
        return Chosen(here, f"mlx computes with {kind}" if gpu else "this build of mlx has no GPU")
    if device not in ("cpu", "gpu"):
        raise InvalidArgument(f"device={device!r}: expected 'auto', 'cpu' or 'gpu' with mlx")
    if device != here:
        raise InvalidArgument(
            f"device={device!r}: mlx's default device here is {here!r}; use device='auto', or set it with "
            f"mlx.core.set_default_device before loading"
        )
    return Chosen(here, "asked for")


def choose_dtype(dtype: str, device: str, quantised: bool) -> Chosen:
    """`auto`: float16 on Apple GPUs, bfloat16 on NVIDIA's, float32 on CPUs; quantised weights stay as they are.

    Raises: InvalidArgument for an unknown type.
    """
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise InvalidArgument(f"dtype={dtype!r}: expected 'auto', {', '.join(map(repr, _DTYPES))}")
        return Chosen(dtype, "asked for")
    if quantised:
        return Chosen("auto", "quantised weights are kept as they are")
    if device == "gpu":
        if sys.platform == "darwin":
            return Chosen("float16", "fastest type on Apple GPUs")
        return Chosen("bfloat16", "the GPU computes in bfloat16")
    return Chosen("float32", "half precision is no faster with mlx on a CPU")


def load_model(source: ModelSource | str, dtype: str = "auto", device: str = "auto") -> Loaded:
    """Load a model.

    dtype: "auto" keeps quantised weights; a name unpacks those of a GGUF file, and sets the type in
    which other models compute.

    Raises: ModelNotFound, CorruptFile, UnsupportedModel, MissingDependency, InvalidArgument.
    """
    source = resolve(source)
    where = choose_device(device).value
    if source.kind == "gguf":
        path = gguf_path(source)
        chosen = choose_dtype(dtype, where, quantised=True)
        model, ends = load_gguf(path, None if chosen.value == "auto" else mlx_dtype(chosen.value))
        tokenizer = load_gguf_tokenizer(path)
        return Loaded(model, tokenizer, ends, int(model.args.max_position_embeddings), chosen)
    folder = fetch(source)
    config = read_config(folder)
    check_folder(folder)
    quantised = bool(config.get("quantization") or config.get("quantization_config"))
    chosen = choose_dtype(dtype, where, quantised)
    model = _load_folder(folder, source.label)
    if chosen.value != "auto":
        _set_dtype(model, mlx_dtype(chosen.value))
    return Loaded(model, load_tokenizer(folder), _generation_config(folder, config), _limit(config), chosen)


def _load_folder(folder: Path, label: str) -> Any:
    from mlx_lm.utils import load_model as load

    changes = older_names(read_config(folder), label)
    try:
        model, _ = load(folder, model_config=changes)
    except ModuleNotFoundError as error:
        raise MissingDependency(f"model={label!r} needs a package that is not installed ({error})") from error
    except ValueError as error:
        text = first_line(error)
        if "not supported" in text or "custom module" in text:
            raise UnsupportedModel(
                f"model={label!r}: mlx-lm has no code for it ({text}); use another model, or backend='torch'"
            ) from error
        raise CorruptFile(f"model={label!r}: its weights do not fit config.json ({text})") from error
    except (TypeError, KeyError, AttributeError) as error:
        raise UnsupportedModel(
            f"model={label!r}: mlx-lm cannot read its config.json ({type(error).__name__}: {first_line(error)}); use "
            "another model, or backend='torch'"
        ) from error
    return model


def _set_dtype(model: Any, dtype: Any) -> None:
    """Unquantised weights in one type. Scales of quantised ones too: the type of their results goes by them."""

    def convert(x: Any) -> Any:
        return x.astype(dtype) if mx.issubdtype(x.dtype, mx.floating) else x

    if all(x.dtype == dtype or not mx.issubdtype(x.dtype, mx.floating) for _, x in tree_flatten(model.parameters())):
        return
    model.update(tree_map(convert, model.parameters()))
    mx.eval(model.parameters())


def _generation_config(folder: Path, config: Any) -> Any:
    """What generation_config.json says, as attributes; `eos_token_id` is that of config.json where it names none."""
    import json

    try:
        stated = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stated = {}
    if not isinstance(stated, dict):
        stated = {}
    return SimpleNamespace(**{"eos_token_id": config.get("eos_token_id"), **stated})


def _limit(config: Any) -> int | None:
    for part in (config, config.get("text_config") or {}):
        value = part.get("max_position_embeddings")
        if isinstance(value, int) and value > 0:
            return value
    return None
