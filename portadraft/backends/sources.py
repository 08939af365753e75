"""What every backend that loads language models shares: where their files come from, and what loading gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from portadraft.backends.quiet import quiet_transformers
from portadraft.errors import ModelNotFound, UnsupportedModel
from portadraft.models import ModelSource

DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.tiktoken"]
NOT_DOWNLOADED = ["*/*", "consolidated*.safetensors"]


class Chosen(NamedTuple):
    """A value and why it was chosen."""

    value: str
    reason: str


class LoadedTarget(NamedTuple):
    """A target, its text side, and where and in which type it runs, with reasons."""

    target: Any
    tokenizer: Any
    generation_config: Any
    device: Chosen
    dtype: Chosen


def fetch(source: ModelSource) -> Path:
    """The local folder of a source of kind `folder` or `hub`; the latter is downloaded unless it is cached.

    Raises: ModelNotFound where the hub or the model cannot be reached; UnsupportedModel where a model of
    the hub has no safetensors weights.
    """
    if source.kind == "folder":
        return Path(source.location)
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {
        "revision": source.revision,
        "allow_patterns": DOWNLOADED,
        "ignore_patterns": NOT_DOWNLOADED,
    }
    try:
        with quiet_transformers():
            folder = Path(snapshot_download(source.location, **options))
    except Exception as error:  # the hub's client raises errors of many kinds, its HTTP library's included
        hint = f" {source.hint[0].upper()}{source.hint[1:]}." if source.hint else ""
        raise ModelNotFound(
            f"model={source.label!r}: {source.location} is neither in the local Hugging Face cache nor reachable "
            f"({first_line(error)}); check the id, the network and, for a gated model, `hf auth login`.{hint}"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedModel(
            f"model={source.label!r}: {source.location} has no safetensors weights (at revision "
            f"{source.revision or 'main'}); portadraft does not read pickled ones, which can run code. Where a pull "
            f"request there adds a safetensors variant, use '{source.location}@refs/pr/<number>'; else convert the "
            "weights with transformers (from_pretrained, then save_pretrained) and pass the folder"
        )
    return folder


def first_line(error: BaseException) -> str:
    """What an error says, short enough for a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
