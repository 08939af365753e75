"""What loading a remote model would bring over the network, said before it does."""

from __future__ import annotations

import fnmatch

from portadraft.models import ModelSource

_NEEDED = ("*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja")


def announce(source: ModelSource) -> str | None:
    """A line about the download; None for a model that is on this machine already."""
    if source.kind != "hub" or _cached(source):
        return None
    size = _size(source)
    if size is None:
        return (
            f"{source.location} is not on this machine, and its size could not be asked for; "
            "loading it downloads it from the Hugging Face hub"
        )
    files, bytes_ = size
    return (
        f"{source.location} is not on this machine: loading it downloads {files} files, {bytes_ / 1e9:.2f} GB, "
        "from the Hugging Face hub into its cache; press Ctrl-C now to stop"
    )


def _cached(source: ModelSource) -> bool:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    found = try_to_load_from_cache(source.location, "config.json", revision=source.revision or "main")
    return isinstance(found, str)


def _size(source: ModelSource) -> tuple[int, int] | None:
    """Number and bytes of the files that loading would fetch; None where the hub does not answer."""
    try:
        from huggingface_hub import HfApi

        info = HfApi().model_info(source.location, revision=source.revision, files_metadata=True, timeout=10)
    except Exception:  # no network, offline mode, no such repository: loading says what is wrong
        return None
    files = {s.rfilename: s.size or 0 for s in info.siblings or ()}
    wanted = [n for n in files if any(fnmatch.fnmatch(n, p) for p in _NEEDED)]
    if not any(n.endswith(".safetensors") for n in wanted):
        wanted += [n for n in files if n.endswith(".bin")]
    return len(wanted), sum(files[n] for n in wanted)
