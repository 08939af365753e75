"""The last good copy of a fleet store, so that a look-up needs no network and an outage changes nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from portadraft.errors import CorruptFile, PortadraftError, StoreUnreachable
from portadraft.models.cache import ENVIRONMENT, cache_root
from portadraft.profiles.folder import Folder
from portadraft.profiles.indexing import summaries
from portadraft.profiles.reading import parse
from portadraft.profiles.stores import Store, open_store

FRESH_S = 24 * 3600.0
"""Seconds after which a copy is brought up to date by itself."""
WAIT_S = 5.0
"""The most seconds that loading a model waits for that; a slower store serves the next one."""
RETRY_S = 600.0
"""Seconds for which a store that did not answer is not asked again by itself."""
MOST_PROFILES = 10_000
UNREACHABLE = "not reachable"
"""How `Mirror.refresh` begins where the store did not answer."""
UNCOPIED = "not copied"
"""How it begins where the store may well be there, but its copy cannot be written."""
_STATE = "mirror.state"


class CopyFailed(OSError):
    """The store's copy in the cache cannot be written."""


@dataclass
class Synced:
    """What a `sync` did: ids fetched, ids removed since the store dropped them, and reasons for those refused."""

    total: int = 0
    fetched: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


class Mirror:
    """The copy of one store in the cache folder."""

    def __init__(self, url: str) -> None:
        self.url = url
        key = hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        self.folder = Folder(cache_root() / "profiles" / key)

    def age_s(self) -> float | None:
        """Seconds since the last complete `sync`, None where there was none."""
        return _age_s(self._state_path())

    def sync(self, warn: Callable[[str], None] = warnings.warn) -> Synced:
        """Copy what is new, and drop what the store dropped. Other processes wait, or are waited for.

        warn: told of each profile that is passed over.

        Raises: StoreUnreachable, OSError, MissingDependency, InvalidArgument; the copy then stays as it was. CopyFailed
        (an OSError) where it is the copy that cannot be written.
        """
        store = open_store(self.url)
        if isinstance(store, Folder) and not store.path.is_dir():
            what = "not a folder" if store.path.exists() else "no such folder"
            raise StoreUnreachable(
                f"store={self.url!r}: {what}; expected one that `portadraft profiles push` has written to: "
                "check its name, and whether it is mounted"
            )
        lock = FileLock(self.folder.path / ".lock", timeout=120)
        try:
            with self._writing():
                self.folder.path.mkdir(parents=True, exist_ok=True)
                lock.acquire()
            try:
                return self._sync(store, warn)
            finally:
                lock.release()
        except Timeout:
            raise StoreUnreachable(f"store={self.url!r}: another process has been copying it for two minutes") from None

    def _sync(self, store: Store, warn: Callable[[str], None]) -> Synced:
        ids = store.ids()[:MOST_PROFILES]
        here, out = set(self.folder.ids()), Synced(total=len(ids), refused=dict(self._refused()))
        out.refused = {identity: why for identity, why in out.refused.items() if identity in ids}
        new = [identity for identity in ids if identity not in here and identity not in out.refused]
        for identity, problem in _side_by_side(lambda one: self._fetch(store, one), new).items():
            if problem is None:
                out.fetched.append(identity)
            elif problem:
                out.refused[identity] = problem
                warn(f"a profile of {self.url} is passed over: {problem}")
        if ids:  # a store that is suddenly empty was more likely moved than cleared
            out.removed = sorted(here - set(ids))
            for identity in out.removed:
                self.folder.remove(identity)
        summaries(self.folder, keep=True, warn=warn)
        with self._writing():
            self._state_path().write_text(json.dumps({"refused": out.refused}), encoding="utf-8")
        return out

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises: CopyFailed for what goes wrong with the copy, which is not the store's fault."""
        try:
            yield
        except Timeout:
            raise
        except OSError as error:
            raise CopyFailed(
                f"{self.folder.path}: the store's copy cannot be written ({error.strerror or error}); free some space "
                f"there, or name another place with {ENVIRONMENT}"
            ) from error

    def _fetch(self, store: Store, identity: str) -> str | None:
        """Copy one; why it is refused for good, or "" where it has gone. Errors of the network pass through."""
        try:
            data = store.get(identity)
            parse(data, f"{identity}.json")
        except CorruptFile as error:
            return str(error)[:300]
        except FileNotFoundError:
            return ""
        with self._writing():
            self.folder.put(data)
        return None

    def refresh(self, fresh_s: float = FRESH_S, wait_s: float = WAIT_S) -> str:
        """Bring an old copy up to date, without waiting long for a slow store; says in words what the copy is."""
        age, failed = self.age_s(), _age_s(self._failure_path())
        if age is not None and age < fresh_s:
            return f"copied {_ago(age)} ago"
        if failed is not None and failed < min(fresh_s, RETRY_S):
            return f"{UNREACHABLE} {_ago(failed)} ago; {self._copy(age)}"
        problem: list[Exception] = []
        thread = threading.Thread(target=self._quietly, args=(problem.append,), daemon=True, name="portadraft-profiles")
        thread.start()
        thread.join(wait_s)
        if not thread.is_alive() and not problem:
            return "copied now"
        why = _words(problem[0]) if problem else f"it did not answer within {wait_s:g} s"
        with contextlib.suppress(OSError):
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self._failure_path().touch()
        what = UNCOPIED if problem and isinstance(problem[0], CopyFailed) else UNREACHABLE
        return f"{what} ({why}); {self._copy(age)}"

    def _copy(self, age: float | None) -> str:
        return "there is no copy of it yet" if age is None else f"the copy of {_ago(age)} ago is used"

    def _quietly(self, complain: Callable[[Exception], None]) -> None:
        try:
            self.sync(warn=lambda text: None)  # `portadraft profiles pull` says what was passed over
        except Exception as error:  # a client may fail in any way; a look-up must not
            complain(error)

    def _failure_path(self) -> Path:
        return self.folder.path / "mirror.failed"

    def _state_path(self) -> Path:
        return self.folder.path / _STATE

    def _refused(self) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            refused = json.loads(self._state_path().read_text(encoding="utf-8")).get("refused")
            if isinstance(refused, dict):
                return {str(key): str(value) for key, value in refused.items()}
        return {}


def _side_by_side(call: Callable[[str], str | None], ids: Sequence[str], workers: int = 8) -> dict[str, str | None]:
    """call(id) for each, in threads that do not keep the process alive. Raises the first error."""
    todo = deque(ids)
    out: dict[str, str | None] = {}
    errors: list[Exception] = []

    def work() -> None:
        while not errors:
            try:
                identity = todo.popleft()
            except IndexError:
                return
            try:
                out[identity] = call(identity)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(workers, len(ids)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {identity: out[identity] for identity in ids}


def _words(error: Exception) -> str:
    if isinstance(error, (OSError, PortadraftError)):
        return " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {error!s:.200}"


def _age_s(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _ago(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"
