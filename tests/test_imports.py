"""Who may import whom, shown in fresh interpreters; and what the package's surface is."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import portadraft

PACKAGE = Path(portadraft.__file__).parent
HEAVY = ("torch", "transformers", "mlx", "mlx_lm", "skopt", "tokenizers", "accelerate")
CORE = sorted(
    ".".join(("portadraft", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in (PACKAGE / "core").rglob("*.py")
)


def _run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _loaded_after(statement: str) -> set[str]:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    return set(json.loads(_run(code).splitlines()[-1]))


@pytest.mark.parametrize("statement", ["import portadraft", "import portadraft.cli", "import portadraft.drafters"])
def test_no_array_library_is_loaded(statement: str) -> None:
    assert not _loaded_after(statement) & set(HEAVY)


def test_the_check_can_fail() -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra torch)")
    assert "torch" in _loaded_after("import portadraft.backends.torch.ops, torch")


def test_core_modules_import_with_everything_blocked() -> None:
    """Every core module imports in an interpreter in which array libraries and backends cannot be imported."""
    code = """
        import importlib, importlib.abc, sys
        blocked = ("torch", "transformers", "mlx", "mlx_lm", "skopt", "portadraft.backends", "portadraft.api")
        class Block(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if any(name == b or name.startswith(b + ".") for b in blocked):
                    raise ImportError(f"{name} is blocked here")
        sys.meta_path.insert(0, Block())
        try:
            importlib.import_module(sys.argv[1].replace("core", "backends", 1))
        except ImportError:
            pass
        else:
            raise SystemExit("the block does not work")
        for name in sys.argv[1:]:
            importlib.import_module(name)
    """
    assert "portadraft.core.tree" in CORE
    _run(code, *CORE)


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").rglob("*.py")), ids=lambda path: path.name)
def test_core_names_no_backend(path: Path) -> None:
    """Imports inside functions count too, and only numpy may be foreign."""
    allowed = {"portadraft.core", "portadraft.errors", "numpy"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            names = [node.module or ""]
        else:
            continue
        for name in names:
            top = name.split(".")[0]
            fine = top in sys.stdlib_module_names or any(name == a or name.startswith(a + ".") for a in allowed)
            assert fine, f"{path.name}:{node.lineno} imports {name}"


def _best_seconds(*arguments: str, runs: int = 7) -> float:
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        best = min(best, time.perf_counter() - start)
    return best


def test_import_is_quick() -> None:
    """Best of several runs, an empty interpreter's start taken off; tried again, since others may use the machine."""
    for _ in range(3):
        seconds = _best_seconds("-c", "import portadraft") - _best_seconds("-c", "pass")
        if seconds < 0.3:
            return
    pytest.fail(f"import portadraft takes {seconds:.2f} s; expected under 0.3 s")


def _cpu_seconds(*arguments: str, runs: int = 5) -> float:
    """Processor time, so that a busy machine does not count against us."""
    resource = pytest.importorskip("resource", reason="no resource module on this system")

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return float(usage.ru_utime + usage.ru_stime)

    best = float("inf")
    for _ in range(runs):
        start = used()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        best = min(best, used() - start)
    return best


def test_help_is_quick() -> None:
    seconds = _cpu_seconds("-m", "portadraft.cli", "--help")
    assert seconds < 0.5


def test_public_names() -> None:
    assert portadraft.__all__ == [
        "BeamShape",
        "BrokenLogits",
        "Chat",
        "CorruptFile",
        "Delta",
        "Generation",
        "IncompatibleDrafter",
        "InvalidArgument",
        "MissingDependency",
        "Model",
        "ModelNotFound",
        "OutOfMemory",
        "PortadraftError",
        "PrefixCache",
        "UnknownOption",
        "UnsupportedModel",
        "WeightsMismatch",
        "__version__",
        "generate",
        "load",
        "stream",
    ]
    for name in portadraft.__all__:
        assert getattr(portadraft, name) is not None
        assert name in dir(portadraft)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        portadraft.nothing  # type: ignore[attr-defined]


def test_errors_are_portadraft_errors() -> None:
    for name in portadraft.__all__:
        value = getattr(portadraft, name)
        if isinstance(value, type) and issubclass(value, Exception) and not issubclass(value, Warning):
            assert issubclass(value, portadraft.PortadraftError)
    assert issubclass(portadraft.InvalidArgument, ValueError)
    assert issubclass(portadraft.ModelNotFound, LookupError)
    assert issubclass(portadraft.MissingDependency, ImportError)
    assert issubclass(portadraft.WeightsMismatch, UserWarning)
