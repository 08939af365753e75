"""From untrusted bytes to a `Profile`, or a clear error: bounded in size and depth before anything is parsed."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from portadraft.errors import CorruptFile
from portadraft.profiles.schema import SCHEMA_VERSION, Profile

MOST_BYTES = 4 * 2**20
MOST_DEPTH = 16
# A string that never ends is taken to the end of the text, so that the scan stays linear.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


class NewerSchema(CorruptFile):
    """The profile was written by a newer portadraft."""


class _Header(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    schema_version: int = Field(ge=0)


def parse(data: bytes, name: str = "profile") -> Profile:
    """Read a profile from its bytes. name: for messages.

    Raises: CorruptFile where it is too large, too deep, no JSON, or outside the schema; NewerSchema for a schema
    version above ours.
    """
    label = _label(name)
    if len(data) <= MOST_BYTES and not data.lstrip().startswith(b"{"):
        what = "not a JSON object" if data.strip() else "it is empty"
        raise CorruptFile(f"{label}: {what}; expected a whole profile")
    check_bounds(data, name)
    try:
        version = _Header.model_validate_json(data).schema_version
        if version > SCHEMA_VERSION:
            raise NewerSchema(
                f"{label}: schema version {version}; this portadraft reads up to {SCHEMA_VERSION}; upgrade portadraft"
            )
        return Profile.model_validate_json(data)
    except ValidationError as error:
        raise CorruptFile(f"{label}: not a profile: {_first(error)}; make it anew with `portadraft tune`") from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise CorruptFile(f"{label}: not a profile: {error!s:.200}; make it anew with `portadraft tune`") from None


def read(path: Path) -> Profile:
    """Read a profile from a file.

    Raises: CorruptFile as `parse`; OSError where it cannot be read.
    """
    return parse(read_bounded(path), str(path))


def read_bounded(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file, one more than `most` at the highest, so that a huge one is never loaded.

    Raises: OSError; CorruptFile where it is no ordinary file (a pipe would wait for ever).
    """
    # Looked at once it is open: between a look at the name and the opening another process may have put it there.
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise FileNotFoundError(f"{_label(str(path))}: no such file") from None
    except OSError as error:  # a loop of links, a name too long, no permission, …
        raise type(error)(f"{_label(str(path))}: cannot be read ({error.strerror or error})") from None
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise CorruptFile(f"{_label(str(path))}: not an ordinary file")
        with os.fdopen(number, "rb", closefd=False) as file:
            return file.read(most + 1)
    finally:
        os.close(number)


def check_bounds(data: bytes, name: str, most: int = MOST_BYTES) -> None:
    """Raises: CorruptFile where data is larger than `most` bytes or nests deeper than MOST_DEPTH."""
    if len(data) > most:
        raise CorruptFile(f"{_label(name)}: larger than {most} bytes; expected a profile of at most that size")
    left = _STRING.sub(b"", data).translate(None, _NOT_BRACKETS)
    for _ in range(MOST_DEPTH):  # the innermost pairs go, layer by layer, all at the speed of `replace`
        if not left:
            return
        left = left.replace(b"[]", b"").replace(b"{}", b"")
    if left:
        raise CorruptFile(
            f"{_label(name)}: nested deeper than {MOST_DEPTH} levels, or cut short; expected a whole profile"
        )


def _first(error: ValidationError) -> str:
    """The first complaint, as one line of bounded length."""
    found: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part)[:40] for part in found["loc"][:8])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    text = f"{place}: {found['msg']}" if place else found["msg"]
    return _label(text[:300]) + more


def _label(text: str) -> str:
    """Safe for a terminal."""
    return "".join(c if c.isprintable() else "�" for c in text[-300:])
