"""Where a fleet keeps its profiles: a folder, a bucket, a hub repository, or a web server that serves an index.

    a folder            /net/profiles, file:///net/profiles
    anything of fsspec  s3://bucket/profiles, gs://…, hf://…        one object per submission, never rewritten
    a web server        https://host/profiles/                      read-only; `index.json` says what there is

A submission is one whole object named by the sha256 of its bytes and verified when it is read, so it needs no rename
(object stores have no atomic one), no lock, and no trust in whoever serves it.
"""

from __future__ import annotations

import importlib
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Protocol

from portadraft.errors import CorruptFile, InvalidArgument, MissingDependency, StoreUnreachable
from portadraft.profiles.folder import INDEX, MOST_INDEX_BYTES, Folder, check_id, digest, id_of, verify
from portadraft.profiles.reading import MOST_BYTES

TIMEOUT_S = 10.0
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "hf": "hub"}


class Store(Protocol):
    """What every store can do. Methods raise StoreUnreachable or OSError where it does not answer."""

    url: str
    writable: bool

    def ids(self) -> list[str]:
        """Of every submission, sorted."""

    def get(self, identity: str) -> bytes:
        """The bytes of a submission. Raises: CorruptFile where they are not those that the id names."""

    def put(self, data: bytes) -> str:
        """Add a submission; returns its id."""

    def read_index(self) -> bytes | None:
        """The bytes of `index.json`, or None where there is none."""

    def write_index(self, data: bytes) -> None:
        """Replace `index.json`."""


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store at a URL or path. Nothing is read yet.

    Raises: InvalidArgument for an address of an unknown kind; MissingDependency where its client is not installed.
    """
    text = os.fspath(url)
    if not text or not text.isprintable():
        raise InvalidArgument(f"store={text!r:.80}: expected a folder, or a URL such as s3://bucket/profiles")
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", text)
    if scheme is None and (slip := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+", text)):
        raise InvalidArgument(f"store={text!r:.80}: expected a folder, or a URL with two slashes: {slip[1]}://…")
    if scheme is not None and not text[scheme.end() :].strip("/"):
        raise InvalidArgument(f"store={text!r:.80}: expected a folder or bucket behind {scheme[0]}")
    if scheme is None or scheme[1].lower() in ("file", "local"):
        return Folder(Path(text[scheme.end() :] if scheme else text).expanduser())
    if scheme[1].lower() in ("http", "https"):
        return WebIndex(text)
    return Bucket(text, scheme[1].lower())


class Bucket:
    """A store in anything that fsspec reaches."""

    writable = True

    def __init__(self, url: str, scheme: str) -> None:
        fsspec = importlib.import_module("fsspec")
        self.url = url.rstrip("/")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            extra = _EXTRAS.get(scheme)
            hint = f"pip install 'portadraft[{extra}]'" if extra else f"install the fsspec client for {scheme}://"
            raise MissingDependency(f"store={url!r}: {error}; {hint}") from None
        except ValueError as error:
            raise InvalidArgument(f"store={url!r}: {error}; expected a folder or a URL that fsspec knows") from None

    def ids(self) -> list[str]:
        def names() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return [str(name) for name in self._fs.ls(self._root, detail=False)]
            except FileNotFoundError:
                return []

        found = (id_of(name.rstrip("/").rsplit("/", 1)[-1]) for name in self._ask("list", names))
        return sorted(identity for identity in found if identity)

    def get(self, identity: str) -> bytes:
        return verify(identity, self._read(f"{check_id(identity)}.json", MOST_BYTES), self.url)

    def put(self, data: bytes) -> str:
        identity = digest(data)
        try:
            self.get(identity)
        except (OSError, CorruptFile):
            self._ask("write", lambda: self._fs.pipe_file(self._path(f"{identity}.json"), data))
        return identity

    def read_index(self) -> bytes | None:
        try:
            return self._read(INDEX, MOST_INDEX_BYTES)
        except FileNotFoundError:
            return None

    def write_index(self, data: bytes) -> None:
        self._ask("write", lambda: self._fs.pipe_file(self._path(INDEX), data))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _read(self, name: str, most: int) -> bytes:
        """At most `most` bytes: the size is asked for first, so that a huge object is never fetched."""

        def read() -> bytes:
            self._fs.invalidate_cache()
            path = self._path(name)
            size = self._fs.info(path).get("size")
            if size is not None and size > most:
                raise CorruptFile(f"{self.url}/{name}: {size} bytes; expected at most {most}")
            return bytes(self._fs.cat_file(path))

        data: bytes = self._ask("read", read)
        return data

    def _ask(self, what: str, call: Any) -> Any:
        """Clients raise all sorts of errors; say which store and what was being done."""
        try:
            return call()
        except (FileNotFoundError, CorruptFile):
            raise
        except Exception as error:
            raise StoreUnreachable(
                f"store={self.url!r}: cannot {what} ({type(error).__name__}: {error!s:.200}); check the address, the "
                "network and the credentials"
            ) from error


class WebIndex:
    """A store behind a web server: read-only, listed by its index."""

    writable = False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def ids(self) -> list[str]:
        from portadraft.profiles.indexing import parse_index

        data = self.read_index()
        if data is None:
            raise StoreUnreachable(
                f"store={self.url!r}: it serves no {INDEX}; upload the one that `portadraft profiles push` writes"
            )
        return sorted(parse_index(data, f"{self.url}/{INDEX}"))

    def get(self, identity: str) -> bytes:
        return verify(identity, self._read(f"{check_id(identity)}.json", MOST_BYTES), self.url)

    def put(self, data: bytes) -> str:
        raise StoreUnreachable(f"store={self.url!r}: web servers are read-only; push to the folder or bucket behind it")

    def read_index(self) -> bytes | None:
        try:
            return self._read(INDEX, MOST_INDEX_BYTES)
        except FileNotFoundError:
            return None

    def write_index(self, data: bytes) -> None:
        self.put(data)

    def _read(self, name: str, most: int) -> bytes:
        address = f"{self.url}/{name}"
        try:
            with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
                data: bytes = answer.read(most + 1)
        except urllib.error.HTTPError as error:
            if error.code in (404, 410):
                raise FileNotFoundError(f"{address}: not found") from None
            raise StoreUnreachable(f"store={self.url!r}: {name}: the server answers {error.code}") from None
        except (OSError, ValueError) as error:
            raise StoreUnreachable(f"store={self.url!r}: {error!s:.200}; check the address and the network") from None
        if len(data) > most:
            raise CorruptFile(f"{address}: larger than {most} bytes")
        return data
