"""What a GPU would run compiled gives what runs plainly here. Compiling is slow on a CPU, so the sizes are small."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed", exc_type=ImportError)
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from portadraft.backends.mlx import MlxOps
from portadraft.backends.mlx.target import MlxTarget
from portadraft.core.types import Beam, BeamShape
from portadraft.drafters import ReDrafter
from portadraft.testing import random_redrafter
from tests.mlx_backend import tiny

pytestmark = pytest.mark.mlx

SHAPE = BeamShape(2, 2)


@pytest.fixture(scope="module")
def drafters() -> tuple[ReDrafter, ReDrafter]:
    """One that runs plainly, and one that runs as on a GPU."""
    mx.enable_compile()
    target = MlxTarget(tiny.build("llama"))
    plain = random_redrafter(target, 1, draft_vocabulary=list(range(3, 60)))
    target.ops = MlxOps()
    target.ops.device = "gpu"
    return plain, random_redrafter(target, 1, draft_vocabulary=list(range(3, 60)))


def inputs(rows: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    roots = mx.array(rng.integers(0, tiny.VOCABULARY, rows).astype(np.int32))
    features = mx.array(rng.standard_normal((rows, 64)).astype(np.float32))
    mx.eval(roots, features)
    return roots, features


def same(a: Beam, b: Beam) -> bool:
    return all(
        np.allclose(np.array(getattr(a, name)), np.array(getattr(b, name)), rtol=1e-5, atol=1e-5)
        for name in ("tokens", "lengths", "scores")
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_a_compiled_draft_is_the_plain_one(drafters: tuple[ReDrafter, ReDrafter], rows: int) -> None:
    plain, compiled = drafters
    for seed in (1, 2):
        given = inputs(rows, seed)
        assert same(compiled.draft(*given, SHAPE), plain.draft(*given, SHAPE))
    assert not same(compiled.draft(*inputs(rows, 3), SHAPE), plain.draft(*inputs(rows, 4), SHAPE))


def test_compiled_drafts_in_other_threads(drafters: tuple[ReDrafter, ReDrafter]) -> None:
    plain, compiled = drafters
    given, out = inputs(1, 5), []

    def run() -> None:
        beam = compiled.draft(*given, SHAPE)
        mx.eval(beam.tokens, beam.lengths, beam.scores)
        out.append(beam)

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(out) == 2 and all(same(beam, plain.draft(*given, SHAPE)) for beam in out)


def test_only_a_gpu_compiles() -> None:
    def function(x: Any) -> Any:
        return x + 1

    ops = MlxOps()
    ops.device = "cpu"
    assert ops.compile(function) is function
    ops.device = "gpu"
    assert ops.compile(function) is not function
