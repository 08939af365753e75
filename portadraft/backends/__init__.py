"""The registry of backends. A backend is imported when it is first used.

Adding one is a folder here and a line in `REGISTRY`; the conformance suites take their
parameters from it.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from portadraft.core.ops import Ops
from portadraft.errors import InvalidArgument, MissingDependency


@dataclass(frozen=True)
class Backend:
    """One registry line.

    requires: top-level packages that must be importable.
    extra: the extra of portadraft that brings them.
    models: whether it loads language models (numpy's target is for tests).
    """

    name: str
    module: str
    requires: tuple[str, ...]
    extra: str | None
    models: bool = True

    def missing(self) -> list[str]:
        """The required packages that are not installed (nothing is imported)."""
        return [name for name in self.requires if importlib.util.find_spec(name) is None]

    def load(self) -> ModuleType:
        """Import the backend.

        Raises: MissingDependency with the install line.
        """
        self.require()
        return importlib.import_module(self.module)

    def require(self) -> None:
        """Raises: MissingDependency with this platform's install line where a package is absent."""
        from portadraft.backends.choice import install_line

        missing = self.missing()
        if missing:
            raise MissingDependency(
                f"backend {self.name!r} needs {', '.join(missing)}, which is not installed; "
                f"install it with: {install_line(self.extra)}"
            )


REGISTRY: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("numpy", "portadraft.backends.numpy", ("numpy",), None, models=False),
        Backend("torch", "portadraft.backends.torch", ("torch", "transformers"), "torch"),
        Backend("mlx", "portadraft.backends.mlx", ("mlx", "mlx_lm"), "mlx"),
    )
}


def get(name: str) -> Backend:
    """The backend of that name.

    Raises: InvalidArgument for an unknown one.
    """
    try:
        return REGISTRY[name]
    except KeyError:
        raise InvalidArgument(f"backend={name!r}: expected one of {', '.join(sorted(REGISTRY))}") from None


def make_ops(name: str, **options: Any) -> Ops:
    """The `Ops` of a backend; torch takes `device`."""
    ops: Ops = get(name).load().make_ops(**options)
    return ops
