"""Stores of a fleet: nothing is lost, nothing broken is read, and an outage changes nothing."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from portadraft.errors import CorruptFile, InvalidArgument, MissingDependency, StoreUnreachable
from portadraft.profiles import mirror as mirror_module
from portadraft.profiles.folder import Folder, digest
from portadraft.profiles.indexing import parse_index, push, rebuild, summaries
from portadraft.profiles.lookup import find
from portadraft.profiles.mirror import CopyFailed, Mirror
from portadraft.profiles.reading import MOST_BYTES, parse
from portadraft.profiles.schema import Profile
from portadraft.profiles.stores import Bucket, Store, WebIndex, open_store

from .examples import make, query

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("new_home")


def _profiles(count: int, start: int = 0) -> list[Profile]:
    return [make(source=f"number {i}") for i in range(start, start + count)]


def _documents(count: int, start: int = 0) -> list[bytes]:
    return [profile.to_bytes() for profile in _profiles(count, start)]


# every kind of store


def _s3_or_skip() -> None:
    for package in ("moto", "s3fs", "flask", "flask_cors"):
        pytest.importorskip(package, reason=f"{package} is not installed (extra dev)", exc_type=ImportError)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """A real S3 server in a process of its own, spoken to over HTTP."""
    _s3_or_skip()
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert server.poll() is None, "the S3 server did not start"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The address of an empty bucket's folder."""
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"b{abs(hash(str(tmp_path))) % 10**12}"
    s3fs.S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}/profiles"


@pytest.fixture(params=["folder", "file url", "memory", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("s3"))
    name = tmp_path.name
    return {"folder": str(tmp_path / "s"), "file url": f"file://{tmp_path}/s", "memory": f"memory://{name}/s"}[
        request.param
    ]


def test_store(address: str) -> None:
    store = open_store(address)
    assert store.ids() == [] and store.read_index() is None
    documents = _documents(3)
    ids = push(store, documents)
    assert ids == [digest(document) for document in documents]
    assert store.ids() == sorted(ids)
    assert [store.get(identity) for identity in ids] == documents
    assert push(store, documents[:1]) == ids[:1]  # once more changes nothing
    again = open_store(address)
    assert again.ids() == sorted(ids)
    index = again.read_index()
    assert index is not None and sorted(parse_index(index, "index")) == sorted(ids)
    with pytest.raises(FileNotFoundError):
        store.get("0" * 64)


@pytest.mark.parametrize("identity", ["../../etc/passwd", "", "a" * 63, "A" * 64, "a" * 64 + "/x", "index"])
def test_ids_cannot_lead_out_of_a_store(tmp_path: Path, identity: str) -> None:
    for address in (str(tmp_path), "memory://x", "https://example.invalid/"):
        with pytest.raises(InvalidArgument, match="expected 64 hexadecimal digits"):
            open_store(address).get(identity)


def _overwrite(store: Store, name: str, data: bytes) -> None:
    if isinstance(store, Folder):
        (store.path / name).write_bytes(data)
    else:
        assert isinstance(store, Bucket)
        store._fs.pipe_file(store._path(name), data)


def test_what_is_not_what_its_name_says_is_refused(address: str) -> None:
    store = open_store(address)
    first, second = push(store, _documents(2))
    _overwrite(store, f"{first}.json", _documents(1)[0][:-40])
    with pytest.raises(CorruptFile, match="not what its name says"):
        store.get(first)
    assert store.get(second)
    assert push(store, _documents(1)) == [first]  # pushing it anew mends it
    assert store.get(first) == _documents(1)[0]


def test_huge_objects_are_not_read(address: str) -> None:
    store = open_store(address)
    push(store, _documents(1))
    _overwrite(store, f"{'0' * 64}.json", b" " * (MOST_BYTES + 1))
    with pytest.raises(CorruptFile):
        store.get("0" * 64)


def test_foreign_files_are_left_alone(address: str) -> None:
    store = open_store(address)
    push(store, _documents(1))
    for name in ("README.md", "x.json", "0" * 64, f"{'z' * 64}.json"):
        _overwrite(store, name, b"{}")
    assert len(store.ids()) == 1


def test_pushing_no_profile_changes_nothing(address: str) -> None:
    store = open_store(address)
    with pytest.raises(CorruptFile):
        push(store, [*_documents(1), b"{}"])
    assert store.ids() == []


def test_from_one_home_to_another(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    push(open_store(address), [make().to_bytes()])
    monkeypatch.setenv("PORTADRAFT_PROFILES", address)
    found = find(query())
    assert (found.step, found.profile) == ("exact", make())
    assert f"the fleet store {address}" in found.reason


# a web server


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    handler = functools.partial(Quiet, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/", tmp_path
    server.shutdown()
    server.server_close()


def test_web_server(web: tuple[str, Path]) -> None:
    url, folder = web
    store = open_store(url)
    assert isinstance(store, WebIndex) and not store.writable
    with pytest.raises(StoreUnreachable, match=r"serves no index\.json"):
        store.ids()
    ids = push(Folder(folder), _documents(2))
    assert store.ids() == sorted(ids)
    assert parse(store.get(ids[0])) == _profiles(1)[0]
    with pytest.raises(StoreUnreachable, match="read-only"):
        store.put(b"x")
    with pytest.raises(FileNotFoundError):
        store.get("0" * 64)
    assert Mirror(url).sync().total == 2
    assert find(query(), url).step == "exact"


def test_web_server_that_sends_something_else(web: tuple[str, Path]) -> None:
    url, folder = web
    identity = push(Folder(folder), _documents(1))[0]
    (folder / f"{identity}.json").write_bytes(b"<html>please log in</html>")
    with pytest.warns(UserWarning, match="passed over: .*not what its name says"):
        assert list(Mirror(url).sync().refused) == [identity]
    (folder / "index.json").write_bytes(b"<html>please log in</html>")
    with pytest.raises(CorruptFile, match="not an index"):
        Mirror(url).sync()


def test_unreachable_stores() -> None:
    with pytest.raises(StoreUnreachable, match="check the address"):
        open_store(f"http://127.0.0.1:{_free_port()}/").ids()


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    importlib.import_module("fsspec")
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(MissingDependency, match=r"pip install 'portadraft\[s3\]'"):
        open_store("s3://bucket/x")


def test_a_bucket_that_does_not_exist(s3: str) -> None:
    with pytest.raises((StoreUnreachable, FileNotFoundError)):
        push(open_store("s3://no-such-bucket-here/x"), _documents(1))


# the mirror


def test_mirror_follows(tmp_path: Path) -> None:
    store, mirror = Folder(tmp_path / "s"), Mirror(str(tmp_path / "s"))
    assert mirror.age_s() is None
    ids = push(store, _documents(3))
    assert sorted(mirror.sync().fetched) == sorted(ids)
    assert mirror.sync().fetched == []
    store.remove(ids[0])
    (new,) = push(store, _documents(1, start=9))
    synced = mirror.sync()
    assert (synced.fetched, synced.removed) == ([new], [ids[0]])
    assert mirror.folder.ids() == sorted([*ids[1:], new])
    age = mirror.age_s()
    assert age is not None and age < 60


def test_an_emptied_store_keeps_the_copy(tmp_path: Path) -> None:
    """Whoever moves a folder by mistake does not make a fleet forget."""
    folder = tmp_path / "s"
    push(Folder(folder), _documents(2))
    Mirror(str(folder)).sync()
    folder.rename(tmp_path / "moved")
    with pytest.raises(StoreUnreachable, match="no such folder"):
        Mirror(str(folder)).sync()
    assert len(Mirror(str(folder)).folder.ids()) == 2
    folder.mkdir()
    assert Mirror(str(folder)).sync().removed == []
    assert len(Mirror(str(folder)).folder.ids()) == 2


def test_refused_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store's broken profile is fetched and complained of once, not at every start."""
    store = Folder(tmp_path)
    push(store, _documents(1))
    bad = store.put(b'{"schema_version": 99}')
    mirror = Mirror(str(tmp_path))
    with pytest.warns(UserWarning, match="schema version 99"):
        assert list(mirror.sync().refused) == [bad]
    monkeypatch.setattr(mirror, "_fetch", None)
    assert list(mirror.sync().refused) == [bad]
    assert bad not in mirror.folder.ids()


def test_offline_the_last_copy_serves(web: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    url, folder = web
    push(Folder(folder), [make().to_bytes()])
    monkeypatch.setenv("PORTADRAFT_PROFILES", url)
    assert find(query()).step == "exact"

    def gone(address: str) -> Store:
        raise StoreUnreachable("the cable was cut")

    monkeypatch.setattr(mirror_module, "open_store", gone)
    mirror = Mirror(url)
    note = mirror.refresh(fresh_s=0.0)
    assert note.startswith("not reachable (the cable was cut); the copy of ") and note.endswith(" ago is used")
    os.utime(mirror.folder.path / "mirror.state", (0, 0))
    found = find(query())
    assert found.step == "exact" and f"{url} ($PORTADRAFT_PROFILES) (not reachable" in found.reason
    with pytest.raises(StoreUnreachable):
        mirror.sync()


@pytest.mark.parametrize("address", ["folder", "web"])
def test_a_copy_that_cannot_be_written(
    address: str, web: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full or read-only cache is not called the store's fault; a folder is then read where it is."""
    url = web[0] if address == "web" else str(tmp_path / "store")
    push(Folder(web[1] if address == "web" else Path(url)), [make().to_bytes()])
    monkeypatch.setenv("PORTADRAFT_PROFILES", url)
    (tmp_path / "cache").touch()  # a file where the cache should be
    monkeypatch.setenv("PORTADRAFT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CopyFailed, match=r"cache.*: the store's copy cannot be written .*PORTADRAFT_CACHE"):
        Mirror(url).sync()
    found = find(query())
    note = found.looked[1].note
    assert "not copied" in note and "not reachable" not in note
    if address == "folder":
        assert found.step == "exact" and note.startswith("read in place; ") and "(read in place" in found.reason
    else:
        assert found.step == "none" and note.startswith("not copied (")
    monkeypatch.setenv("PORTADRAFT_CACHE", str(tmp_path / "another"))
    assert find(query()).step == "exact" and "read in place" not in find(query()).reason


def test_a_slow_store_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    monkeypatch.setattr(mirror_module, "open_store", lambda url: stop.wait(30) and None)
    start = time.monotonic()
    note = Mirror(str(tmp_path)).refresh(wait_s=0.1)
    stop.set()
    assert time.monotonic() - start < 5
    assert "did not answer within 0.1 s" in note


def test_a_store_that_failed_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def gone(address: str) -> Store:
        asked.append(address)
        raise StoreUnreachable("no")

    monkeypatch.setattr(mirror_module, "open_store", gone)
    mirror = Mirror("https://example.invalid/")
    assert "not reachable (no)" in mirror.refresh()
    assert "there is no copy of it yet" in mirror.refresh()
    assert len(asked) == 1


# many at once, and sudden ends


def _python(code: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


_FIFTY = """
    import os, sys, traceback
    from pathlib import Path
    from portadraft.profiles.folder import Folder
    from portadraft.profiles.indexing import push
    source, store = (Folder(Path(argument)) for argument in sys.argv[1:])
    documents = [source.get(identity) for identity in source.ids()]
    gate, opener = os.pipe()
    children = []
    for document in documents:
        child = os.fork()
        if child == 0:
            os.close(opener)
            os.read(gate, 1)  # returns in all of them when the last opener is closed
            try:
                push(Folder(store.path), [document])
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    os.close(opener)
    codes = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(f"{sum(map(bool, codes))} failed" if any(codes) else 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fifty_processes_push_at_once(tmp_path: Path) -> None:
    """Each its own profile into one folder: all are there, whole, and in the index."""
    source, store = Folder(tmp_path / "source"), Folder(tmp_path / "store")
    ids = [source.put(document) for document in _documents(50)]
    process = _python(_FIFTY, str(source.path), str(store.path))
    _, problems = process.communicate(timeout=300)
    assert (process.returncode, problems) == (0, b"")
    assert store.ids() == sorted(ids)
    assert all(parse(store.get(identity)) for identity in ids)
    assert sorted(parse_index(store.read_index() or b"", "index")) == sorted(ids)
    assert not list(store.path.glob("*.tmp"))


def test_two_at_once_in_a_bucket(s3: str) -> None:
    """There is no lock: whoever writes the index last looks again, so it names everything."""
    threads = [threading.Thread(target=push, args=(open_store(s3), _documents(2, start=10 * i))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = open_store(s3)
    assert len(store.ids()) == 8
    assert sorted(parse_index(store.read_index() or b"", "index")) == store.ids()


_ENDLESS = """
    import itertools, sys
    from pathlib import Path
    from portadraft.profiles.folder import Folder
    from portadraft.profiles.indexing import push, rebuild
    from portadraft.profiles.pooling import merge
    from portadraft.profiles.reading import read
    what, place, example = sys.argv[1], Folder(Path(sys.argv[2])), read(Path(sys.argv[3]))
    print("ready", flush=True)
    for i in itertools.count():
        one = example.model_copy(update={"source": f"{what} {i} " + "x" * 1500})
        if what == "push":
            push(place, [one.to_bytes()])
        else:
            both = merge([one, example.model_copy(update={"source": f"other {i}"})])
            place.put(both[0].to_bytes())
            rebuild(place)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 on this system")
@pytest.mark.parametrize("what", ["push", "merge"])
def test_killed_at_any_moment(tmp_path: Path, what: str) -> None:
    """No reader ever sees a broken profile or index, during or after; and the next writer goes on."""
    example = tmp_path / "example.json"
    example.write_bytes(make().to_bytes())
    store = Folder(tmp_path / "store")
    processes = [_python(_ENDLESS, what, str(store.path), str(example)) for _ in range(3)]
    try:
        for i, process in enumerate(processes):
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            end = time.monotonic() + 0.1 + 0.13 * i
            while time.monotonic() < end or not store.ids():
                for identity in store.ids()[:20]:
                    parse(store.get(identity))  # raises where it is broken
                index = store.read_index()
                assert index is None or parse_index(index, "index") is not None
            process.send_signal(signal.SIGKILL)
            process.communicate()
    finally:  # a failure must not leave writers that never end
        for process in processes:
            process.kill()
            process.communicate()
    for identity in store.ids():
        parse(store.get(identity))
    push(store, _documents(1))  # no lock is left behind
    assert len(summaries(store)) == len(store.ids())


def test_left_overs_are_never_read_and_go_in_time(tmp_path: Path) -> None:
    store = Folder(tmp_path)
    push(store, _documents(1))
    old, new = tmp_path / ".1-a.tmp", tmp_path / ".2-b.tmp"
    for path in (old, new):
        path.write_bytes(b"half a pro")
    os.utime(old, (0, 0))
    push(store, _documents(1, start=5))
    assert (old.exists(), new.exists()) == (False, True)
    assert len(store.ids()) == 2


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Folder(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.put(_documents(1)[0])
    assert list(tmp_path.iterdir()) == []


def test_rebuild_names_what_was_pushed_without_it(tmp_path: Path) -> None:
    store = Folder(tmp_path)
    ids = [store.put(document) for document in _documents(3)]
    assert rebuild(store) == 3
    assert sorted(json.loads(store.read_index() or b"")["entries"]) == sorted(ids)
