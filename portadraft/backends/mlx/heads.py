"""What a model's LM head reads, caught on the way, and how many rows it computes.

mlx-lm's models keep their heads in places of their own, but each ends in a call of a linear layer or
in `as_linear` of the embedding. For the length of a pass that module's class is replaced by a
subclass which notes what comes in, and lets through only the rows that are wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from portadraft.errors import UnsupportedModel

Array = Any

TABLES = (nn.Embedding, nn.QuantizedEmbedding)
LINEARS = (nn.Linear, nn.QuantizedLinear)
_local = threading.local()


@dataclass
class Watch:
    """What was seen in one pass. last_only: let only the last slot of each row through to the head."""

    last_only: bool = False
    looked_up: list[Any] = field(default_factory=list)
    read: list[tuple[Any, Array]] = field(default_factory=list)


def candidates(model: nn.Module) -> list[nn.Module]:
    """Modules that may be the embedding or the head: tables, and linear layers outside of the repeated ones."""
    found = []
    for name, module in model.named_modules():
        inner = any(part.isdigit() for part in name.split("."))
        if isinstance(module, TABLES) or (isinstance(module, LINEARS) and not inner):
            found.append(module)
    return found


@contextmanager
def watching(modules: Sequence[nn.Module], watch: Watch) -> Iterator[None]:
    """Note this thread's calls of the modules. Nothing may run them in another `watching` meanwhile."""
    kinds: list[tuple[Any, Any]] = [(module, type(module)) for module in modules]
    for module, kind in kinds:
        module.__class__ = _watched(kind)
    _local.watch = watch
    try:
        yield
    finally:
        _local.watch = None
        for module, kind in kinds:
            module.__class__ = kind


@cache
def _watched(kind: type) -> type:
    class Watched(kind):  # type: ignore[misc]
        def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Array:
            watch = getattr(_local, "watch", None)
            if watch is not None:
                if issubclass(kind, TABLES):
                    watch.looked_up.append(self)
                else:
                    x = _note(watch, self, x)
            return super().__call__(x, *args, **kwargs)

    if issubclass(kind, TABLES):

        def as_linear(self: Any, x: Array) -> Array:
            watch = getattr(_local, "watch", None)
            if watch is not None:
                x = _note(watch, self, x)
            base: Any = kind
            return base.as_linear(self, x)

        vars_of: Any = Watched
        vars_of.as_linear = as_linear
    Watched.__name__ = Watched.__qualname__ = kind.__name__
    return Watched


def _note(watch: Watch, module: Any, x: Array) -> Array:
    if watch.last_only and x.ndim == 3:
        x = x[:, -1:]
    watch.read.append((module, x))
    return x


@dataclass(frozen=True)
class Ends:
    """The two ends of a model: the table that token ids are looked up in, and the module that makes logits."""

    table: Any
    head: Any


def find_ends(watch: Watch, vocabulary: int) -> Ends:
    """From a pass in which all `candidates` were watched.

    Raises: UnsupportedModel where the head cannot be told.
    """
    if not watch.looked_up:
        raise UnsupportedModel("it looks tokens up in no embedding module")
    heads = [module for module, _ in watch.read if rows(module)[0] == vocabulary]
    if not heads:
        raise UnsupportedModel("its logits come from no module that could be its LM head")
    return Ends(watch.looked_up[0], heads[-1])


def rows(module: Any) -> tuple[int, int]:
    """The logical shape (rows, size) of a table or linear layer, quantised or not."""
    weight = module.weight
    if "scales" in module:
        return weight.shape[0], weight.shape[1] * 32 // module.bits
    return weight.shape[0], weight.shape[1]


def dense(module: Any, index: Array | None = None) -> Array:
    """Its weight, unpacked where it is quantised; only the rows `index` where it is given."""
    parts = [module[name] for name in ("weight", "scales", "biases") if module.get(name) is not None]
    if index is not None:
        parts = [part[index] for part in parts]
    if "scales" not in module:
        return parts[0]
    return mx.dequantize(
        parts[0], parts[1], parts[2] if len(parts) > 2 else None,
        group_size=module.group_size, bits=module.bits, mode=getattr(module, "mode", "affine"),
    )  # fmt: skip
