"""`portadraft profiles …`, in process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from portadraft.cli.app import app
from portadraft.profiles import home, save
from portadraft.profiles.folder import Folder

from .conftest import move_home
from .examples import make, sample, shape

pytestmark = pytest.mark.usefixtures("new_home")
ONE = make(samples=(sample("ann", 20.0, shape()), sample("ann", 10.0, None)))
TWO = make(samples=(sample("bob", 30.0, shape()), sample("bob", 10.0, None)))


def run(*arguments: str, status: int = 0) -> Any:
    """The JSON that a command prints."""
    result = CliRunner().invoke(app, ["profiles", *arguments, "--json"])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout) if status == 0 else result.stderr


def people(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["profiles", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_from_home_to_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = str(tmp_path / "store")
    ids = sorted([save(ONE), save(TWO)])
    assert sorted(run("push", "--store", store)["pushed"]) == ids
    move_home(monkeypatch, tmp_path / "other")
    monkeypatch.setenv("PORTADRAFT_PROFILES", store)
    assert sorted(run("pull")["fetched"]) == ids
    assert run("pull")["fetched"] == []
    rows = [row for row in run("list")["profiles"] if row["origin"] == "measured"]
    assert sorted(row["id"] for row in rows) == ids
    assert run("show", ids[0][:8])["machine"]["name"] == "NVIDIA L40S"
    (merged,) = run("merge")["merged"]
    assert len(run("show", merged)["samples"]) == 4


def test_for_people(tmp_path: Path) -> None:
    identity = save(ONE)
    assert identity[:8] in people("list") and "vicuna-33b" in people("list")
    text = people("show", identity)
    assert "batch 1: 4x4, 8 slots, 37.0 tokens/s (plain 22.0), 1.70x" in text
    assert "2 samples of 1 submitter" in text
    assert people("push", "--store", str(tmp_path)) == f"1 profile in {tmp_path}\n"
    assert people("pull", "--store", str(tmp_path)).startswith(f"1 profile in {tmp_path}: 1 new here")


def test_files(tmp_path: Path) -> None:
    identity = save(ONE)
    (written,) = run("export", "--out", str(tmp_path))["exported"]
    path = tmp_path / f"{written}.json"
    home.user_folder().remove(identity)
    assert run("import", str(path))["imported"] == [identity]
    assert run("validate", str(path))["files"][0]["valid"] is True
    bad = tmp_path / "bad.json"
    bad.write_text("{", encoding="utf-8")
    assert "not all of these files are profiles" in run("validate", str(path), str(bad), status=2)
    home.user_folder().remove(identity)
    assert "bad.json: " in run("import", str(path), str(bad), status=2)
    assert home.user_folder().ids() == []  # all or none
    assert "no such file" in run("import", str(tmp_path / "none.json"), status=1)


def test_merge_files(tmp_path: Path) -> None:
    paths = []
    for i, profile in enumerate((ONE, TWO, ONE)):
        path = tmp_path / f"{i}.json"
        path.write_bytes(profile.to_bytes())
        paths.append(str(path))
    out = tmp_path / "out"
    report = run("merge", *paths, "--out", str(out))
    assert report["read"] == 3 and report["merged"] == Folder(out).ids()
    assert run("show", str(out / f"{report['merged'][0]}.json"))["batches"][0]["speedup"] == pytest.approx(2.5)


def test_mistakes(tmp_path: Path) -> None:
    assert "none is configured; pass --store" in run("push", status=2)
    assert "none is configured" in run("pull", status=2)
    assert "it holds no profiles" in run("push", "--store", str(tmp_path), status=2)
    assert "it holds no profiles" in run("export", "--out", str(tmp_path / "out"), status=2)
    assert "no such profile" in run("show", "abcd1234", status=2)
    save(ONE)
    assert "no such profile" in run("push", "ffff0000", "--store", str(tmp_path), status=2)
    assert "store='nonsense://x'" in run("push", "--store", "nonsense://x", status=2)
    for slip in ("s3:/x/y", "file:/x"):
        assert "a URL with two slashes" in run("push", "--store", slip, status=2)
    for nowhere in ("file://", "s3://", "https:///"):
        assert "expected a folder or bucket behind" in run("push", "--store", nowhere, status=2)
    assert "check the address" in run("pull", "--store", "http://127.0.0.1:9/x", status=2)


def test_a_store_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `push` makes one; `list` goes on without the one that is configured, and says so."""
    missing = str(tmp_path / "nothere")
    for command in ("pull", "list", "merge"):
        assert f"store='{missing}': no such folder; expected" in run(command, "--store", missing, status=2)
        assert "it ends with this process" in run(command, "--store", "Memory://x", status=2)
    file = tmp_path / "file"
    file.touch()
    assert "not a folder" in run("pull", "--store", str(file), status=2)
    for address, reason in ((missing, "no such folder"), ("http://127.0.0.1:9/p", "check the address")):
        monkeypatch.setenv("PORTADRAFT_PROFILES", address)
        result = CliRunner().invoke(app, ["profiles", "list", "--json"])
        assert result.exit_code == 0
        (warning,) = json.loads(result.stdout)["warnings"]
        assert f"the fleet store {address} ($PORTADRAFT_PROFILES): not reachable" in warning and reason in warning
        assert "warning: the fleet store" in result.stderr
        assert "not reachable" in people("list")
    save(ONE)
    assert "it ends with this process" in run("push", "--store", "memory://x", status=2)
    run("push", "--store", missing)
    monkeypatch.setenv("PORTADRAFT_PROFILES", missing)
    assert run("pull")["total"] == 1
    assert run("list")["warnings"] == []


def test_a_broken_configuration_is_said(new_home: Path) -> None:
    home.config_path().parent.mkdir(parents=True)
    home.config_path().write_text("[profiles\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["profiles", "list", "--json"])
    assert result.exit_code == 0
    (warning,) = json.loads(result.stdout)["warnings"]
    assert str(home.config_path()) in warning and "expected TOML" in warning
    assert "expected TOML" in result.stderr


def test_places_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are named, with what to do, and not by the system's number or a temporary file."""
    identity, file = save(ONE), tmp_path / "file"
    file.touch()
    (written,) = run("export", "--out", str(tmp_path))["exported"]
    assert f"out='{file}': cannot be written to (it is a file); expected" in run("export", "--out", str(file), status=2)
    assert f"store='{file}': cannot be written to (it is a file)" in run("push", "--store", str(file), status=2)

    store, exported = str(tmp_path / "s"), str(tmp_path / f"{written}.json")
    for problem, status, reason in (
        (PermissionError(13, "Permission denied", ".77-aabb.tmp"), 2, "(Permission denied); expected"),
        (OSError(30, "Read-only file system", ".77-aabb.tmp"), 2, "(Read-only file system); expected"),
        (OSError(28, "No space left on device", ".77-aabb.tmp"), 1, "(No space left on device)"),
    ):
        monkeypatch.setattr(Folder, "_write", Mock(side_effect=problem))
        home.user_folder().remove(identity)
        said = [run("import", exported, status=status)]
        (home.user_folder().path / f"{identity}.json").write_bytes(ONE.to_bytes())
        said += [run("push", "--store", store, status=status), run("export", "--out", store, status=status)]
        names = f"your folder {home.user_folder().path}", f"store='{store}'", f"out='{store}'"
        for text, name in zip(said, names, strict=True):
            assert f"{name}: cannot be written to {reason}" in text
            assert ".tmp" not in text and "Errno" not in text

    monkeypatch.undo()
    monkeypatch.setenv("XDG_DATA_HOME", str(file / "x"))
    move_home(monkeypatch, file / "x")
    for command, option in (("export", "--out"), ("push", "--store")):
        text = run(command, option, str(tmp_path / "anywhere"), status=1)
        assert f"{home.user_folder().path}: cannot be read (Not a directory)" in text and "Errno" not in text
    assert "cannot be read (Not a directory)" in people("list")
    text = run("import", exported, status=2)
    assert f"XDG_DATA_HOME='{file / 'x'}': your folder" in text and "Not a directory" in text and "Errno" not in text


def test_a_profile_given_twice_counts_once(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        path.write_bytes(ONE.to_bytes())
    assert run("import", *map(str, paths))["imported"] == [ONE.id]
    assert people("import", *map(str, paths)).startswith("1 profile taken")
    assert run("export", ONE.id, ONE.id[:8], "--out", str(tmp_path / "out"))["exported"] == [ONE.id]


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    """Each is named with what it is, by every command that reads files, and none by the system's number."""
    made: dict[str, tuple[str, int]] = {
        "folder.json": ("not an ordinary file", 2),
        "weights.json": ("not a JSON object", 2),
        "empty.json": ("it is empty", 2),
        "list.json": ("not a JSON object", 2),
        "index.json": ("schema_version: Field required", 2),
        "newer.json": ("schema version 99; this portadraft reads up to 1", 2),
        "older.json": ("schema_version: Input should be 1", 2),
        "cut.json": ("cut short", 2),
        "link.json": ("no such file", 1),
        "loop.json": ("cannot be read (", 1),
        "n" * 300 + ".json": ("cannot be read (", 1),
    }
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "weights.json").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00" + bytes(range(256)))
    (tmp_path / "empty.json").write_bytes(b" \n")
    (tmp_path / "list.json").write_bytes(b"[]")
    (tmp_path / "index.json").write_bytes(b'{"index_version": 1, "entries": {}}')
    for name, version in (("newer", 99), ("older", 0)):
        document = json.loads(ONE.to_bytes()) | {"schema_version": version}
        (tmp_path / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    (tmp_path / "cut.json").write_bytes(ONE.to_bytes()[:-9])
    (tmp_path / "link.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    for name, (message, status) in made.items():
        path = str(tmp_path / name)
        for command in ("show", "import", "merge"):
            said = run(command, path, status=status)
            assert message in said and name[-99:] in said and "Errno" not in said, (command, name)
    rows = CliRunner().invoke(app, ["profiles", "validate", "--json", *(str(tmp_path / name) for name in made)])
    assert rows.exit_code == 2
    problems = [row["problem"] for row in json.loads(rows.stdout)["files"]]
    assert all(m in p for (m, _), p in zip(made.values(), problems, strict=True))
    assert home.user_folder().ids() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", "nan"), "temperature=nan: expected"),
        (("--temperature", "-1"), "temperature=-1.0: expected"),
        (("--context", "1000000000000"), "context=1000000000000: expected at most"),
    ],
)
def test_what_is_explained_must_make_sense(options: tuple[str, ...], message: str) -> None:
    assert message in run("explain", "--model", "/no/such", *options, status=2)


def test_explain(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the torch extra is not installed")
    from tests.test_api import save_model

    save_model(tmp_path / "tiny")
    options = ["explain", "--model", str(tmp_path / "tiny"), "--dtype", "float32", "--device", "cpu"]
    report = run(*options)
    assert report["step"] == "none"
    assert report["looked_for"]["drafter"]["name"] == "lookup"
    assert [one["place"] for one in report["looked"]][-1] == "shipped with portadraft"
    text = people(*options)
    assert "looked in:  your folder" in text
    assert "no fleet store is configured" in text
    assert "they are published figures of another model or device" in text
    assert "it is decoded plainly, and no profile is needed" in people(*options, "--drafter", "none")
    assert "the default shape is used; `portadraft tune` measures this machine" in text
