"""The compacted index of a store: what each submission is about, so that a look-up reads one object.

An index is a convenience and never believed: what it names is read, verified and compared itself before it is used.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from portadraft.errors import CorruptFile, PortadraftError
from portadraft.profiles.folder import INDEX, MOST_INDEX_BYTES, Folder
from portadraft.profiles.nearness import Summary
from portadraft.profiles.reading import check_bounds, parse
from portadraft.profiles.stores import Store

_ATTEMPTS = 5


class Index(BaseModel):
    """entries: by id."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    index_version: Literal[1] = 1
    entries: dict[Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")], Summary] = Field(max_length=100_000)


def parse_index(data: bytes, name: str) -> dict[str, Summary]:
    """The entries of an index.

    Raises: CorruptFile.
    """
    check_bounds(data, name, MOST_INDEX_BYTES)
    try:
        return Index.model_validate_json(data).entries
    except (ValidationError, ValueError, RecursionError) as error:
        raise CorruptFile(f"{name}: not an index of profiles ({str(error).splitlines()[0]:.200})") from None


def index_bytes(entries: dict[str, Summary]) -> bytes:
    """Equal entries give equal bytes."""
    document = {
        "index_version": 1,
        "entries": {identity: entries[identity].model_dump(mode="json") for identity in sorted(entries)},
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def summaries(store: Store, *, keep: bool = False, warn: Callable[[str], None] = warnings.warn) -> dict[str, Summary]:
    """What each submission of a store is about: from its index, and from the submissions that it lacks.

    keep: write an index that was incomplete, where the store allows it. warn: told of submissions that cannot be
    read, which are left out.

    Raises: OSError where the store cannot be listed.
    """
    known, ids = _known(store), store.ids()
    entries = {identity: known[identity] for identity in ids if identity in known}
    for identity in ids:
        if identity not in known and (summary := _summary(store, identity, warn)) is not None:
            entries[identity] = summary
    if keep and entries.keys() != known.keys():
        with contextlib.suppress(OSError):
            store.write_index(index_bytes(entries))
    return entries


def rebuild(store: Store) -> int:
    """Bring a store's index up to date; returns how many submissions it names.

    Where no lock is to be had (object stores), whoever writes last looks again, so nothing pushed before is missing.

    Raises: OSError, StoreUnreachable.
    """
    with store.lock() if isinstance(store, Folder) else contextlib.nullcontext():
        entries: dict[str, Summary] = {}
        for _ in range(_ATTEMPTS):
            entries = summaries(store)
            if entries == _known(store):
                break
            store.write_index(index_bytes(entries))
        return len(entries)


def push(store: Store, documents: Sequence[bytes], note: Callable[[str], None] = lambda text: None) -> list[str]:
    """Add submissions, each validated first, and bring the index up to date; returns their ids.

    Raises: CorruptFile for what is no profile (nothing is pushed then); OSError, StoreUnreachable.
    """
    for document in documents:
        parse(document)
    ids = [store.put(document) for document in documents]
    try:
        rebuild(store)
    except (OSError, PortadraftError) as error:
        note(f"the profiles are stored, but not their {INDEX}: {error}")
    return ids


def _known(store: Store) -> dict[str, Summary]:
    try:
        data = store.read_index()
        return {} if data is None else parse_index(data, f"{store.url}/{INDEX}")
    except CorruptFile:
        return {}  # it is made anew from the submissions


def _summary(store: Store, identity: str, warn: Callable[[str], None]) -> Summary | None:
    try:
        return Summary.of(parse(store.get(identity), f"{store.url}/{identity}.json"))
    except FileNotFoundError:  # removed since it was listed
        return None
    except (OSError, PortadraftError) as error:
        warn(f"a profile is passed over: {error}")
        return None
