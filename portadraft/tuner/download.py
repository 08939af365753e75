"""What loading a model of the hub would bring over the network, said before it does."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from portadraft.backends.sources import DOWNLOADED, NOT_DOWNLOADED, first_line
from portadraft.models import ModelSource

_SECONDS = 10.0
_MOST_REQUESTS = 20


def announce(source: ModelSource) -> str | None:
    """A line about the download; None for a model that is on this machine already, for which no network is used."""
    if source.kind != "hub" or _whole(source):
        return None
    try:
        files = _files(source)
    except Exception as error:  # no network, offline mode, no such repository: loading says what is wrong
        return (
            f"{source.location} is not (all) on this machine, and the Hugging Face hub could not be asked for its size "
            f"({first_line(error)})"
        )
    if not _has_weights(files):
        return f"{source.location} has no safetensors weights on the hub; {_elsewhere(source)}"
    missing = {name: size for name, size in files.items() if _cached(source, name) is None}
    if not missing:
        return None
    part = "" if len(missing) == len(files) else f" (of {len(files)})"
    return (
        f"{source.location} is not {'all ' if part else ''}on this machine: loading it downloads {len(missing)}{part} "
        f"files, {_size(sum(missing.values()))}, from the Hugging Face hub into its cache; press Ctrl-C now to stop"
    )


def _has_weights(names: Iterable[str]) -> bool:
    return any(name.endswith(".safetensors") for name in names)


def _elsewhere(source: ModelSource) -> str:
    """Where such weights may be had: pull requests often bring them, and are anybody's."""
    try:
        found = _pull_request(source)
    except Exception:  # the hub that told of the files may still refuse this
        found = None
    if found is None:
        return (
            "portadraft reads no pickled ones. Convert them with transformers (from_pretrained, then save_pretrained) "
            "and pass the folder"
        )
    reference, size = found
    return (
        f"a pull request there has: pass '{source.location}@{reference}' ({_size(size)}). Anybody may open one: see on "
        "the hub whose it is"
    )


def _pull_request(source: ModelSource) -> tuple[str, int] | None:
    """The oldest pull request whose files hold safetensors weights, and the bytes that loading it fetches."""
    from huggingface_hub import HfApi

    requests = HfApi().list_repo_refs(source.location, include_pull_requests=True).pull_requests or []
    numbers = sorted(int(r.ref.rsplit("/", 1)[-1]) for r in requests if r.ref.rsplit("/", 1)[-1].isdigit())
    for number in numbers[:_MOST_REQUESTS]:
        reference = f"refs/pr/{number}"
        files = _files(replace(source, revision=reference))
        if _has_weights(files):
            return reference, sum(files.values())
    return None


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _cached(source: ModelSource, name: str) -> Path | None:
    """A file of the model in the hub's cache."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(source.location, name, revision=source.revision or "main")
    return Path(found) if isinstance(found, str) else None


def _whole(source: ModelSource) -> bool:
    """Whether configuration and all weights are in the cache: a download may have been broken off."""
    if _cached(source, "config.json") is None:
        return False
    if _cached(source, "model.safetensors") is not None:
        return True
    index = _cached(source, "model.safetensors.index.json")
    if index is None:
        return False
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(names) and all(isinstance(name, str) and _cached(source, name) is not None for name in names)


def _files(source: ModelSource) -> dict[str, int]:
    """Bytes by name of the files that loading fetches. Raises: what the hub's client does."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects

    info = HfApi().model_info(source.location, revision=source.revision, files_metadata=True, timeout=_SECONDS)
    sizes = {s.rfilename: s.size or 0 for s in info.siblings or ()}
    wanted = filter_repo_objects(sizes, allow_patterns=DOWNLOADED, ignore_patterns=NOT_DOWNLOADED)
    return {name: sizes[name] for name in wanted}
