"""The mlx target: negative controls, rows that come and go, known prefixes, what is left alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed", exc_type=ImportError)
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from portadraft.backends.mlx import rotary
from portadraft.backends.mlx.cache import LayerCache
from portadraft.backends.mlx.target import MlxTarget
from portadraft.core.requests import Request
from portadraft.core.types import BeamShape
from portadraft.errors import InvalidArgument
from portadraft.testing import Tree, pack_tree, verdict_for
from tests.mlx_backend import packed, tiny

pytestmark = pytest.mark.mlx

WRONG = 1e-2
TREE = Tree((5, 6, 7, 8, 9, 10), (0, 0, 0, 1, 2, 4))


@pytest.fixture(scope="module", autouse=True)
def _uncompiled() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("gemma3_text")  # a window, and full attention


def texts(seed: int = 3) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[int(t) for t in rng.integers(0, tiny.VOCABULARY, n)] for n in (13, 9)]


def started(model: Any) -> tuple[MlxTarget, list[list[int]], Any]:
    target = MlxTarget(model)
    prompts = texts()
    target.admit(prompts)
    return target, prompts, pack_tree(target.ops, [TREE, TREE])


def test_right_passes(model: Any) -> None:
    target, prompts, beam = started(model)
    assert packed.worst(model, target, beam, [TREE, TREE], prompts) < 1e-4


def test_control_wrong_positions(model: Any) -> None:
    target, prompts, beam = started(model)
    wrong = replace(beam, depths=mx.broadcast_to(mx.arange(6, dtype=mx.int32), (2, 6)))
    assert packed.worst(model, target, wrong, [TREE, TREE], prompts) > WRONG


def test_control_rotary_left_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts, beam = started(model)
    monkeypatch.setattr(rotary, "_install", lambda: None)
    monkeypatch.setattr(rotary, "_remove", lambda: None)
    assert packed.worst(model, target, beam, [TREE, TREE], prompts) > WRONG


def test_control_wrong_mask(model: Any) -> None:
    target, prompts, beam = started(model)
    wrong = replace(beam, mask=mx.broadcast_to(mx.tri(6, dtype=mx.int32).astype(mx.bool_), (2, 6, 6)))
    assert packed.worst(model, target, wrong, [TREE, TREE], prompts) > WRONG


@pytest.mark.parametrize("by", [-1, 1])
def test_control_window_off_by_one(model: Any, by: int) -> None:
    target, prompts, beam = started(model)
    for layer in target.cache.layers:
        if layer.window:
            layer.window += by
    model.model.window_size = tiny.WINDOW + by
    try:
        logits = target.ops.to_numpy(target.verify(beam).logits)
    finally:
        model.model.window_size = tiny.WINDOW
    error = max(
        packed.distance(logits[b, s], packed.plain(model, text + TREE.path_tokens(s)))
        for b, text in enumerate(prompts)
        for s in range(6)
    )
    assert error > WRONG


def test_control_keys_not_moved(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts, beam = started(model)
    monkeypatch.setattr(LayerCache, "move", lambda *_: None)
    target.verify(beam)
    paths = [TREE.path(5), TREE.path(3)]
    target.commit(*verdict_for(target.ops, beam, paths))
    after = [text + [TREE.tokens[s] for s in path] for text, path in zip(prompts, paths, strict=True)]
    assert packed.worst(model, target, beam, [TREE, TREE], after) > WRONG


def test_prefill_in_chunks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portadraft.backends.mlx.target.PREFILL_CHUNK", 5)
    target = MlxTarget(model)
    prompts = texts()
    first = target.ops.to_numpy(target.admit(prompts).logits)
    for b, text in enumerate(prompts):
        assert packed.distance(first[b, 0], packed.plain(model, text)) < 1e-4
    assert packed.worst(model, target, pack_tree(target.ops, [TREE, TREE]), [TREE, TREE], prompts) < 1e-4


def test_a_known_prefix_is_restored(model: Any) -> None:
    """Longer than the window, into a batch with rows that are computed whole; the state outlives its row."""
    target, (long, short), _ = started(model)
    state = target.export(0, long)
    assert state.nbytes == len(long) * target.facts.cache_bytes_per_token
    target.release(0)
    target.release(0)
    prompts = [short, [*long[:11], 4, 5], long]
    first = target.ops.to_numpy(target.admit(prompts, known=[None, (state, 11), (state, 12)]).logits)
    for b, prompt in enumerate(prompts):
        assert packed.distance(first[b, 0], packed.plain(model, prompt)) < 1e-4
    assert packed.worst(model, target, pack_tree(target.ops, [TREE] * 3), [TREE] * 3, prompts) < 1e-4


def test_control_a_wrong_prefix_is_noticed(model: Any) -> None:
    target, (long, _), _ = started(model)
    state = target.export(0, long)
    other = [(t + 1) % tiny.VOCABULARY for t in long]
    with pytest.raises(InvalidArgument, match="restore no more than the common prefix"):
        target.admit([other], known=[(state, 5)])
    lied = replace(state, ids=tuple(other))
    wrong = target.ops.to_numpy(target.admit([other], known=[(lied, 12)]).logits)[0, 0]
    assert packed.distance(wrong, packed.plain(model, other)) > WRONG
    with pytest.raises(InvalidArgument, match="another target"):
        MlxTarget(model).admit([long], known=[(state, 5)])


def test_the_callers_model_is_left_alone(model: Any) -> None:
    before, rope = packed.plain(model, texts()[0]), mx.fast.rope
    kinds = [type(m) for m in model.modules()]
    target, _, beam = started(model)
    target.verify(beam)
    assert mx.fast.rope is rope
    assert [type(m) for m in model.modules()] == kinds
    np.testing.assert_array_equal(packed.plain(model, texts()[0]), before)


def test_swapped_rope_is_inert_in_other_threads() -> None:
    x = mx.random.normal((2, 2, 3, 8))
    mx.eval(x)  # what is not computed yet belongs to the thread that made it
    expected = np.array(mx.fast.rope(x, 8, traditional=False, base=10000.0, scale=1.0, offset=4))
    seen: list[np.ndarray] = []

    def other() -> None:
        seen.append(np.array(mx.fast.rope(x, 8, traditional=False, base=10000.0, scale=1.0, offset=4)))

    with rotary.positions(mx.array([[0, 1, 1], [5, 6, 6]], dtype=mx.int32)):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        mine = mx.fast.rope(x, 8, traditional=False, base=10000.0, scale=1.0, offset=4)
    np.testing.assert_array_equal(seen[0], expected)
    assert not np.allclose(np.array(mine), expected)


def test_other_threads_may_decode() -> None:
    from portadraft.testing import decode, random_redrafter

    target = MlxTarget(tiny.build("llama", rope_scaling={"rope_type": "llama3", "factor": 8.0}))
    drafter = random_redrafter(target, draft_vocabulary=list(range(1, 60, 2)))
    request = Request(tuple(texts()[0]), 12)
    out: list[list[int]] = []

    def run() -> None:
        out.extend(decode(target, drafter, [request], BeamShape(2, 3))[0])

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    run()
    assert len(out) == 3 and out[0] == out[1] == out[2]


def test_errors(model: Any) -> None:
    target, prompts, beam = started(model)
    with pytest.raises(InvalidArgument, match="call verify first"):
        target.commit(*verdict_for(target.ops, beam, [[0], [0]]))
    with pytest.raises(InvalidArgument, match="empty"):
        target.admit([[]])
    with pytest.raises(InvalidArgument, match="holds the id 97: expected 0…96"):
        target.admit([[tiny.VOCABULARY]])
    with pytest.raises(InvalidArgument, match="expected one for each of the 2"):
        target.verify(pack_tree(target.ops, [TREE]))
    assert target.lengths == (13, 9) == tuple(len(p) for p in prompts)


def test_the_context_ends() -> None:
    target = MlxTarget(tiny.build("llama", max_position_embeddings=12))
    target.admit([[1] * 9])
    assert target.room(0) == 2
    with pytest.raises(InvalidArgument, match="room"):
        target.verify(pack_tree(target.ops, [Tree((1, 2, 3, 4), (0, 0, 1, 2))]))
