"""Compiled packing and acceptance say what the plain ones say, at every input of the same shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from portadraft.backends import make_ops
from portadraft.core import compiled, draw
from portadraft.core.accept import accept
from portadraft.core.choice import Chooser, Situation
from portadraft.core.compiled import accept_compiled, pack_compiled
from portadraft.core.sampling import Sampling
from portadraft.core.tree import pack_beam
from portadraft.core.types import Beam

VOCABULARY = 11


def beam_of(ops: Any, seed: int, nodes: int | None = None) -> tuple[Any, Beam]:
    """Two rows of four candidates of three tokens, few enough tokens that prefixes are shared."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 3, (2, 4, 3)).astype(np.int32)
    scores = -np.cumsum(rng.random((2, 4, 3)), axis=2).astype(np.float32)
    lengths = rng.integers(1, 4, (2, 4)).astype(np.int32)
    roots = ops.asarray(rng.integers(0, VOCABULARY, 2).astype(np.int32))
    return roots, Beam(ops.asarray(tokens), ops.asarray(lengths), ops.asarray(scores, "float32"), nodes)


@pytest.fixture(params=["numpy", "torch", "torch on a tape"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "numpy":
        return make_ops("numpy")
    pytest.importorskip("torch", reason="torch is not installed")
    ops: Any = make_ops("torch")
    if request.param == "torch on a tape":
        from portadraft.backends.torch.graphs import Graphs
        from tests.torch_backend.tape import Tape

        ops.graphs = Graphs(Tape())
        monkeypatch.setattr(type(ops), "host", False)  # on a GPU nothing is computed in numpy
    return ops


@pytest.mark.parametrize("nodes", [None, 6])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.9), Sampling(1.0, top_k=5, min_p=0.01)])
def test_the_same_as_plain(ops: Any, nodes: int | None, sampling: Sampling) -> None:
    different = set()
    for seed in range(5):
        chooser = Chooser(ops, sampling, VOCABULARY)
        roots, beam = beam_of(ops, seed, 9)
        packed, expected = pack_compiled(ops, roots, beam, nodes), pack_beam(ops, roots, beam, nodes)
        assert packed.length == expected.length
        for name in ("tokens", "parents", "depths", "mask", "sizes"):
            np.testing.assert_array_equal(
                ops.to_numpy(getattr(packed, name)), ops.to_numpy(getattr(expected, name)), err_msg=name
            )
        rng = np.random.default_rng(100 + seed)
        logits = rng.standard_normal((2, packed.tokens.shape[1], VOCABULARY)).astype(np.float32)
        logits[..., :3] += 3  # so that drafted tokens are accepted
        numbers = None if sampling.greedy else draw.numbers(ops, rng.random((2, 4)))
        given = (packed, ops.asarray(logits, "float32"), chooser, Situation(numbers))
        (verdict, _), (plain, _) = accept_compiled(ops, *given), accept(ops, *given)
        for name in ("tokens", "counts", "slots"):
            np.testing.assert_array_equal(ops.to_numpy(getattr(verdict, name)), ops.to_numpy(getattr(plain, name)))
        different.add(ops.to_numpy(verdict.tokens).tobytes())
    assert len(different) > 1
    if getattr(ops, "graphs", None) is not None:
        assert not ops.graphs.failures
        assert ops.graphs.replays == 8  # two functions, each captured at its second use of five


def test_control_a_choice_made_on_the_host_is_baked_in() -> None:
    """The way that top-p takes where arrays lie in the host's memory would be wrong in a capture; the tape shows it."""
    pytest.importorskip("torch", reason="torch is not installed")
    from portadraft.backends.torch.graphs import Graphs
    from tests.torch_backend.tape import Tape

    ops: Any = make_ops("torch")
    assert ops.host
    ops.graphs = Graphs(Tape())
    rng = np.random.default_rng(0)
    run = ops.compile(lambda x: ops.mass_threshold(x, 0.5))
    wrong = 0
    for _ in range(5):
        x = ops.asarray(rng.random((2, VOCABULARY)).astype(np.float32), "float32")
        wrong += not np.array_equal(ops.to_numpy(run(x)), ops.to_numpy(ops.mass_threshold(x, 0.5)))
    assert wrong >= 2


def test_decoders_of_one_target_share_them() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from portadraft.backends.torch.graphs import Graphs
    from tests.torch_backend.tape import Tape

    ops: Any = make_ops("torch")
    tape = Tape()
    ops.graphs = Graphs(tape)
    for seed in range(4):
        roots, beam = beam_of(ops, seed)
        pack_compiled(ops, roots, beam, 5)
    assert tape.captures == 1
    plain: Any = make_ops("numpy")
    pack_compiled(plain, *beam_of(plain, 1), 5)
    assert not vars(plain)[compiled._KEPT], "what is not compiled is not kept"


def test_penalties_go_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = make_ops("numpy")
    chooser = Chooser(ops, Sampling(banned=[4]), VOCABULARY)
    roots, beam = beam_of(ops, 1)
    packed = pack_beam(ops, roots, beam)
    seen = []
    monkeypatch.setattr(compiled, "accept", lambda *given: seen.append(given) or ("verdict", None))
    logits = ops.asarray(np.zeros((2, packed.tokens.shape[1], VOCABULARY), np.float32), "float32")
    assert accept_compiled(ops, packed, logits, chooser, Situation()) == ("verdict", None)
    assert seen[0][3] is chooser
