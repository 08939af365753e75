"""The user's own profiles, who the user is to the fleet, and which fleet store is configured."""

from __future__ import annotations

import contextlib
import os
import secrets
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from portadraft.errors import InvalidArgument
from portadraft.models.cache import cache_root
from portadraft.profiles.folder import Folder
from portadraft.profiles.schema import Machine, Profile
from portadraft.scratch import sweep

VARIABLE = "PORTADRAFT_PROFILES"
"""The fleet store's URL; "none" switches a configured one off."""
_PROFILE_BYTES = 1 << 17
"""As much as a large profile has."""


def user_folder() -> Folder:
    """Where this user's profiles lie."""
    return Folder(platformdirs.user_data_path("portadraft") / "profiles")


def save(profile: Profile) -> str:
    """Store a profile in the user's folder, where `generate` finds it; returns its id.

    Raises: OSError where the folder cannot be written.
    """
    return user_folder().put(profile.to_bytes())


def check_writable() -> None:
    """Raises: OSError where the user's folder of profiles cannot be written to; it is made where it is not there."""
    folder = user_folder().path
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{os.getpid()}-{secrets.token_hex(6)}.tmp"
    try:
        scratch.write_bytes(bytes(_PROFILE_BYTES))
    finally:
        scratch.unlink(missing_ok=True)


def submitter() -> str:
    """A random name for this user on this machine, made once: it says which samples come from one source, not from
    whom.
    """
    path = platformdirs.user_data_path("portadraft") / "submitter"
    path.parent.mkdir(parents=True, exist_ok=True)
    for replace in (False, True, True):
        with contextlib.suppress(OSError):
            found = path.read_text(encoding="ascii", errors="replace")
            if found.isalnum() and len(found) == 16:
                return found
        sweep(path.parent, ".submitter-*.tmp")
        scratch = path.with_name(f".submitter-{secrets.token_hex(6)}.tmp")
        try:
            scratch.write_text(secrets.token_hex(8), encoding="ascii")
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
        try:
            if replace:  # what stands there is no name, or there are no links on this file system
                scratch.replace(path)
            else:
                os.link(scratch, path)  # only the first of several processes succeeds
        except OSError:
            pass
        finally:
            scratch.unlink(missing_ok=True)
    return path.read_text(encoding="ascii")


@contextlib.contextmanager
def tuning_lock(machine: Machine, wait_s: float = 0.0) -> Iterator[None]:
    """Held while this machine is measured: two tuners at once would measure each other.

    Where the cache cannot be written there is no lock, with a warning.

    Raises: InvalidArgument where another process holds it for longer than wait_s.
    """
    folder = cache_root() / "locks"
    lock = FileLock(folder / f"tune-{machine.kind}.lock", timeout=wait_s)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise InvalidArgument(
            "tune: another process is tuning on this machine, and both would measure each other; wait until it is done"
        ) from None
    except OSError as error:
        warnings.warn(f"tuning goes on without a lock against a second tuner: {error}", stacklevel=3)
    try:
        yield
    finally:
        lock.release()


def config_path() -> Path:
    """The configuration file; it need not exist."""
    return platformdirs.user_config_path("portadraft") / "config.toml"


def store_url(flag: str | None = None) -> tuple[str, str] | None:
    """The fleet store's URL and where it was named: a flag, $PORTADRAFT_PROFILES, or config.toml's
    `[profiles] store = "…"`. None where there is none.

    Raises: InvalidArgument for a broken configuration file.
    """
    for value, origin in ((flag, "asked for"), (os.environ.get(VARIABLE), f"${VARIABLE}")):
        if value:
            return None if value.lower() in ("none", "off") else (value, origin)
    path = config_path()
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument(f'{path}: {error}; expected TOML with [profiles] and store = "URL"') from None
    section = settings.get("profiles")
    value = section.get("store") if isinstance(section, dict) else None
    if value is None or value == "none":
        return None
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{path}: [profiles] store is {value!r:.80}; expected a URL or folder in quotes")
    return value, str(path)
