"""Where profiles are looked for, in order: the user's folder, the fleet store's copy, what the package brings."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path

from portadraft.errors import CorruptFile, InvalidArgument, PortadraftError
from portadraft.profiles.folder import Folder
from portadraft.profiles.home import store_url, user_folder
from portadraft.profiles.indexing import summaries
from portadraft.profiles.mirror import UNCOPIED, UNREACHABLE, Mirror
from portadraft.profiles.nearness import Summary
from portadraft.profiles.reading import parse, read
from portadraft.profiles.schema import Profile
from portadraft.profiles.stores import open_store

_EXPECTED = "expected a profile's file, a store's folder or URL, 'auto' or 'none'"
IN_PLACE = "read in place"
"""How the note on a store begins that is read without a copy."""


@dataclass
class Place:
    """One place: what it is called, what of it was found, and what there is to say about it.

    asked_for: a single profile that the caller named, which is used however far it is. broken: the note says what is
    wrong with this place.
    """

    label: str
    entries: dict[str, Summary] = field(default_factory=dict)
    note: str = ""
    folder: Folder | None = None
    known: dict[str, Profile] = field(default_factory=dict)
    asked_for: bool = False
    broken: bool = False

    def load(self, identity: str) -> Profile | None:
        """A profile that was named, read anew and verified; None, with a warning, where that fails."""
        if identity in self.known:
            return self.known[identity]
        assert self.folder is not None
        try:
            return parse(self.folder.get(identity), f"{self.folder.url}/{identity}.json")
        except (OSError, PortadraftError) as error:
            warnings.warn(f"a profile is passed over: {error}", stacklevel=2)
            return None


def places(profiles: str | Path | Profile = "auto", *, refresh: bool = True) -> list[Place]:
    """Where to look.

    profiles: "auto"; "none" for nowhere; a profile, or the path of its file, for that one alone; a store's URL or
    folder instead of the configured fleet store. refresh: bring an old copy of the fleet store up to date.

    Raises: CorruptFile and OSError for a file that was named and cannot be read; InvalidArgument for "". Everything
    else is a note or a warning: a look-up never stops a model from loading.
    """
    if isinstance(profiles, Profile):
        return [_named("the profile that was passed", profiles)]
    text = _named_place(profiles)
    if text == "none":
        return []
    if is_file(text):
        try:
            return [_named(f"the file {text}", read(Path(text).expanduser()))]
        except FileNotFoundError:
            raise FileNotFoundError(f"profiles={text!r}: no such file; {_EXPECTED}") from None
    return [_own(), *_fleet(None if text == "auto" else text, refresh), shipped()]


def check_named(profiles: str | Path | Profile) -> bool:
    """Whether it is a profile or its file, which can be read at once.

    Raises: InvalidArgument for what is neither that nor a store: another type, a folder that is not there and of which
    there is no copy; MissingDependency for a store whose client is not installed.
    """
    if isinstance(profiles, Profile):
        return True
    text = _named_place(profiles)
    if is_file(text):
        return True
    if text not in ("auto", "none", "off"):
        store = open_store(text)
        if isinstance(store, Folder) and not store.path.is_dir() and Mirror(text).age_s() is None:
            raise InvalidArgument(f"profiles={text!r:.200}: no such file or folder; {_EXPECTED}")
    return False


def _named_place(profiles: object) -> str:
    """Raises: InvalidArgument for what names no place."""
    if not isinstance(profiles, (str, os.PathLike)):
        raise InvalidArgument(f"profiles={profiles!r:.200}: {_EXPECTED}")
    text = os.fspath(profiles)
    if isinstance(text, bytes):
        raise InvalidArgument(f"profiles={profiles!r:.200}: {_EXPECTED}")
    return text.lower() if text.lower() in ("auto", "none", "off") else text


def is_file(text: str) -> bool:
    """Whether `profiles` names a profile's file rather than a store: by its ending, or since there is such a file.

    Raises: InvalidArgument for "".
    """
    if not text:
        raise InvalidArgument(f"profiles='': {_EXPECTED}")
    if "://" in text or text in ("auto", "none"):
        return False
    with contextlib.suppress(OSError, ValueError):
        return text.lower().endswith(".json") or Path(text).expanduser().is_file()
    return False


def _named(label: str, profile: Profile) -> Place:
    return Place(label, {profile.id: Summary.of(profile)}, known={profile.id: profile}, asked_for=True)


def _own() -> Place:
    folder = user_folder()
    place = Place(f"your folder {folder.path}", folder=folder)
    try:
        place.entries = summaries(folder, keep=True)
    except OSError as error:
        place.note, place.broken = str(error), True
    return place


def _fleet(flag: str | None, refresh: bool) -> Iterator[Place]:
    try:
        configured = store_url(flag)
    except PortadraftError as error:
        yield Place("the fleet store", note=str(error), broken=True)
        return
    if configured is None:
        return
    url, origin = configured
    mirror = Mirror(url)
    place = Place(f"the fleet store {url} ({origin})", folder=mirror.folder)
    try:
        # A folder is as near as its copy would be.
        fresh_s = 0.0 if "://" not in url or url.lower().startswith("file://") else None
        if refresh:
            place.note = mirror.refresh() if fresh_s is None else mirror.refresh(fresh_s)
            place.broken = place.note.startswith((UNREACHABLE, UNCOPIED))
        folder = mirror.folder
        if place.note.startswith(UNCOPIED) and isinstance(store := open_store(url), Folder):
            folder = place.folder = store  # it needs no copy
            place.note, place.broken = f"{IN_PLACE}; {place.note}", False
        place.entries = summaries(folder, keep=folder is mirror.folder)
    except (OSError, PortadraftError) as error:
        place.note = place.note if place.broken else str(error)  # that the copy cannot be read follows from it
        place.broken = True
    yield place


def shipped() -> Place:
    """What the package brings: optima that others published, lowest in rank."""
    known = {profile.id: profile for profile in _shipped()}
    return Place(
        "shipped with portadraft",
        {identity: Summary.of(profile) for identity, profile in known.items()},
        known=known,
    )


@lru_cache(maxsize=1)
def _shipped() -> tuple[Profile, ...]:
    folder = Path(str(resources.files("portadraft.profiles").joinpath("shipped")))
    out = []
    for path in sorted(folder.glob("*.json")):
        try:
            out.append(read(path))
        except (CorruptFile, OSError) as error:
            warnings.warn(f"a profile is passed over: {error}", stacklevel=2)
    return tuple(out)
