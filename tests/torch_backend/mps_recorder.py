"""What a program asks of its device, recorded operator by operator, and held against what MPS serves.

It runs on a CPU. Where torch goes another way on MPS than here (it has kernels of its own for
`linear`, scaled dot-product attention and others that a CPU takes apart), both ways are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TABLE: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parent.parent / "data" / "mps_operators.json").read_text(encoding="utf-8")
)
"""Made by scripts/mps_operators.py."""

ALTERNATIVES = ("_scaled_dot_product_attention_math_for_mps", "linear", "linear_backward")
"""Kernels that torch's own code asks for on MPS alone, so that no run on a CPU can record them."""

MOVES = frozenset(
    """
    _reshape_alias _to_copy _unsafe_view alias as_strided cat clone copy_ detach detach_ empty.memory_format empty_like
    empty_strided expand fill_.Scalar fill_.Tensor full full_like index_select lift_fresh new_empty new_ones new_zeros
    nonzero permute repeat select.int slice.Tensor squeeze.dim squeeze.dims stack t transpose.int unbind.int unsqueeze
    view view.dtype zero_ zeros zeros_like _local_scalar_dense
    """.split()
)
"""Operators that carry values from place to place or from type to type."""

INT64 = MOVES | frozenset(
    """
    _index_put_impl_ add.Tensor arange arange.start arange.start_out argmax embedding eq.Scalar eq.Tensor ge.Scalar
    gather gt.Tensor index.Tensor index_put index_put_ le.Tensor lt.Tensor scatter.src scatter_add_
    sort sort.stable sub.Tensor sum sum.dim_IntList topk
    """.split()
)
"""Where int64 is harmless on MPS: as an index, as an index that comes out, in sums and compares (from macOS 13.3 on),
and where nothing is computed. Elsewhere it is not taken on trust: some kernels refuse it or compute in int32."""

Use = tuple[str, tuple[str, ...]]
"""An operator's name ("add.Tensor") and the data types of its tensors, results and dtype arguments, sorted."""

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Recorder(TorchDispatchMode):
    """Records every operator that reaches the device, those that composite operators call included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Use, int] = {}
        self._composite = frozenset(TABLE["composite"])
        self._kernels = frozenset(TABLE["kernels"])
        self._open: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::")
        if name in self._open or name in self._kernels:
            out = func(*args, **kwargs)
        elif name in self._composite:
            # Its own code runs with the recorder on: what it calls is asked of the device as well.
            with self._opened(name):
                out = func.redispatch(_CPU, *args, **kwargs)
        elif func._can_decompose():  # called by a composite one, and taken apart on every backend
            with self._opened(name):
                return func.decompose(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        kinds = set()
        for leaf in tree_leaves((args, kwargs, out)):
            kind = leaf.dtype if isinstance(leaf, torch.Tensor) else leaf
            if isinstance(kind, torch.dtype):
                kinds.add(str(kind).removeprefix("torch."))
        use = (name, tuple(sorted(kinds)))
        self.seen[use] = self.seen.get(use, 0) + 1
        return out

    @contextmanager
    def _opened(self, name: str) -> Iterator[None]:
        self._open.add(name)
        try:
            with torch._C._AutoDispatchBelowAutograd(), self:
                yield
        finally:
            self._open.discard(name)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.seen}


@contextmanager
def recording() -> Iterator[Recorder]:
    """Records what runs inside. Attention is computed from its parts, which the CPU's fused kernel would hide."""
    with sdpa_kernel(SDPBackend.MATH), Recorder() as recorder:
        yield recorder


def complaints(seen: Collection[Use], kernels: Collection[str], composite: Collection[str]) -> list[str]:
    """Why MPS could not run what was recorded; empty where it could."""
    out = []
    for name, kinds in sorted(seen):
        if name not in kernels and name not in composite:
            out.append(f"{name}: not among the operators that MPS serves")
        for kind in kinds:
            if kind in ("float16", "float32", "int32", "bool"):
                continue
            if kind in ("bfloat16", "int16") and name in MOVES:  # features are kept in 16 bits, on the host
                continue
            if kind == "int64" and name in INT64:
                continue
            out.append(f"{name}: {kind}")
    return out
