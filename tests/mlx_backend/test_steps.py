"""What a step may cost with mlx: one read, nothing else that waits, no copy of the cache."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed", exc_type=ImportError)
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from portadraft.backends.mlx.target import MlxTarget
from portadraft.core.decode import Decoder
from portadraft.core.drafter import Drafter
from portadraft.core.requests import Request
from portadraft.core.types import BeamShape
from portadraft.drafters import OracleDrafter, PromptLookup, Together
from portadraft.testing import Tree, pack_tree, random_redrafter, verdict_for
from tests.mlx_backend import packed, tiny

pytestmark = pytest.mark.mlx

TREE = Tree((5, 6, 7, 8, 9, 10), (0, 0, 0, 1, 2, 4))
PROMPTS = [(5, 9, 2, 44, 17, 30) * 2, (1, 2, 3)]


@pytest.fixture(scope="module", autouse=True)
def _uncompiled() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def target() -> MlxTarget:
    return MlxTarget(tiny.build("gemma3_text"))  # a window, and full attention


class Waited(Exception):
    """Something waited for the device outside of the decoder's read."""


@contextmanager
def no_waiting(monkeypatch: pytest.MonkeyPatch, target: MlxTarget) -> Iterator[Counter[str]]:
    """Counts reads; whatever else would wait for the device raises."""
    counts: Counter[str] = Counter()
    inside: list[bool] = []
    read = target.ops.to_numpy

    def counted(x: Any) -> Any:
        counts["to_numpy"] += 1
        inside.append(True)
        try:
            return read(x)
        finally:
            inside.pop()

    def guard(owner: Any, name: str, concerns: Callable[..., bool] = lambda *_: True) -> None:
        original = getattr(owner, name)

        def guarded(*args: Any, **options: Any) -> Any:
            if not inside and concerns(*args):
                raise Waited(name)
            return original(*args, **options)

        patch.setattr(owner, name, guarded)

    with monkeypatch.context() as patch:
        patch.setattr(target.ops, "to_numpy", counted)
        for name in ("eval", "synchronize"):
            guard(mx, name)
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
            guard(mx.array, name)
        for name in ("array", "asarray", "ascontiguousarray"):  # through the buffer protocol, which cannot be guarded
            guard(np, name, lambda *args: isinstance(args[0], mx.array))
        yield counts


def drafter_for(target: MlxTarget, name: str) -> Drafter | None:
    if name == "oracle":
        answers = {prompt: list(range(1, 60)) for prompt in PROMPTS}
        return OracleDrafter(target.ops, answers, tiny.VOCABULARY, 0.7, seed=1)
    if name == "redrafter+lookup":
        return Together(
            target.ops, [random_redrafter(target, 3, draft_vocabulary=list(range(40))), PromptLookup(target.ops)]
        )
    return None


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["none", "oracle", "redrafter+lookup"])
def test_one_read_a_step(target: MlxTarget, monkeypatch: pytest.MonkeyPatch, name: str, temperature: float) -> None:
    decoder = Decoder(target, drafter_for(target, name), BeamShape(2, 3, 6), temperature=temperature)
    decoder.admit([Request(prompt, 20, seed=i) for i, prompt in enumerate(PROMPTS)])
    try:
        with no_waiting(monkeypatch, target) as counts:
            for steps in range(1, 6):
                assert decoder.step()
                assert counts == {"to_numpy": steps}
    finally:
        decoder.close()


def test_control_the_guard_notices(target: MlxTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    x = mx.array([1])
    reads: list[Callable[[Any], Any]] = [
        lambda x: mx.eval(x),
        lambda x: np.asarray(x),
        lambda x: [0, 1][x[0]],
        lambda x: x.item(),
        lambda x: x.tolist(),
        bool,
        int,
        float,
    ]
    with no_waiting(monkeypatch, target) as counts:
        for read in reads:
            with pytest.raises(Waited):
                read(x)
        assert target.ops.to_numpy(x).tolist() == [1]
        assert counts == {"to_numpy": 1}


def test_the_device_starts_before_the_pass_is_built(target: MlxTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts, packs while the host builds the pass; runs the pass while the host goes on; commits likewise."""
    events: list[str] = []
    begin: Any = mx.async_eval

    def started(*arrays: Any) -> None:
        events.append("device")
        begin(*arrays)

    monkeypatch.setattr(mx, "async_eval", started)
    for name in ("verify", "commit", "_run"):
        original = getattr(target, name)
        monkeypatch.setattr(
            target, name, lambda *a, name=name, original=original: (events.append(name), original(*a))[1]
        )
    target.admit([list(PROMPTS[0])])
    events.clear()
    beam = pack_tree(target.ops, [TREE])
    target.verify(beam)
    target.commit(*verdict_for(target.ops, beam, [TREE.path(5)]))
    assert events == ["verify", "device", "_run", "device", "commit", "device"]
    target.release(0)


def test_the_device_runs_layers_while_others_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each layer here; the passes are right, and nothing begins while a target is only probed."""
    monkeypatch.setattr("portadraft.backends.mlx.cache.LAYERS_AHEAD", 1)
    begun: list[int] = []
    begin: Any = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (begun.append(len(arrays)), begin(*arrays))[1])
    model = tiny.build("gemma3_text")
    target = MlxTarget(model)
    texts = [list(PROMPTS[0]), list(PROMPTS[1])]
    target.admit(texts)
    assert not begun
    beam = pack_tree(target.ops, [TREE, TREE])
    target.verify(beam)
    assert begun == [3, *[1] * (len(target.cache.layers) - 1), 2]
    target.commit(*verdict_for(target.ops, beam, [TREE.path(5), TREE.path(3)]))
    texts = [t + [TREE.tokens[s] for s in TREE.path(n)] for t, n in zip(texts, (5, 3), strict=True)]
    assert packed.worst(model, target, beam, [TREE, TREE], texts) < 1e-4


def _commit_costs(context: int) -> tuple[float, int, int]:
    """At a context of that many tokens: the least seconds of a commit, the most bytes it takes, bytes of the cache."""
    target = MlxTarget(tiny.build("llama", max_position_embeddings=8192, num_hidden_layers=2, head_dim=128))
    target.admit([[1]], reserve=context + 200)
    target.cache.lengths[0] = context  # what the keys are does not matter here, and the prefill takes long
    beam = pack_tree(target.ops, [TREE])
    seconds, extra = [], []
    for _ in range(6):
        step = verdict_for(target.ops, beam, [TREE.path(5)])
        mx.eval(target.verify(beam).logits)
        mx.synchronize()
        mx.reset_peak_memory()
        before, start = mx.get_active_memory(), time.perf_counter()
        target.commit(*step)
        mx.eval(target.cache.buffers())
        seconds.append(time.perf_counter() - start)
        extra.append(mx.get_peak_memory() - before)
    return min(seconds), max(extra), sum(x.nbytes for x in target.cache.buffers())


def test_a_commit_copies_no_cache() -> None:
    short, _, _ = _commit_costs(200)
    long, extra, size = _commit_costs(4000)
    assert size > 16_000_000
    assert extra < size // 50, extra
    assert long < 2 * short + 1e-3, (short, long)  # a copy of the cache takes several milliseconds
