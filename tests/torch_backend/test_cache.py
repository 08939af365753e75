"""Capacity, growth, errors, and what a step allocates."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from portadraft.backends.torch.cache import BUCKET, LayerShape, RowCache, Store
from portadraft.backends.torch.target import TorchTarget
from portadraft.core.types import Verdict
from portadraft.errors import InvalidArgument

from .families import FAMILIES, _make, distance, plain_logits, random_tree

CPU = torch.device("cpu")


def filled(*widths: tuple[int, int]) -> RowCache:
    cache = RowCache([LayerShape(2, k, v, torch.float32, CPU) for k, v in widths])
    cache.reserve(2, 20, exact=True)
    for i, store in enumerate(cache.stores):
        for buffer in store.buffers:
            buffer.copy_(torch.arange(buffer.numel(), dtype=torch.float32).view(buffer.shape) + i)
    cache.lengths = [12, 7]
    return cache


@pytest.mark.parametrize("widths", [[(4, 4)] * 3, [(4, 6)] * 2, [(4, 4), (6, 4), (4, 4)]])
def test_growth_keeps_the_content(widths: list[tuple[int, int]]) -> None:
    cache = filled(*widths)
    before = [buffer.clone() for store in cache.stores for buffer in store.buffers]
    cache.reserve(3, BUCKET + 1)
    assert cache.capacity == (3, 2 * BUCKET)
    after = [buffer for store in cache.stores for buffer in store.buffers]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[:, :2, :, :BUCKET], old)


def test_failed_growth_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled((4, 4), (6, 6))
    before = [buffer.clone() for store in cache.stores for buffer in store.buffers]

    def refuse(self: Store, rows: int, tokens: int) -> list[torch.Tensor]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Store, "_allocate", refuse)
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.reserve(2, 500)
    assert cache.capacity == (2, BUCKET)
    for old, new in zip(before, (b for s in cache.stores for b in s.buffers), strict=True):
        assert torch.equal(old, new)


def test_growth_takes_less_where_more_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RowCache([LayerShape(2, 4, 4, torch.float32, CPU)])
    cache.reserve(1, 10 * BUCKET, exact=True)
    stock = Store._allocate

    def small_only(self: Store, rows: int, tokens: int) -> list[torch.Tensor]:
        if tokens > 12 * BUCKET:
            raise RuntimeError("out of memory")
        return stock(self, rows, tokens)

    monkeypatch.setattr(Store, "_allocate", small_only)
    cache.reserve(1, 10 * BUCKET + 1)
    assert cache.capacity == (1, 11 * BUCKET)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("slots", [[0, 1, 2], [0, 2, 3], [0, 3], [0]])
def test_commit_moves_the_accepted_slots(
    rows: int, one_by_one: bool, slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowCache, "one_by_one", one_by_one)
    cache = filled((4, 4), (6, 4))
    cache.lengths = cache.lengths[:rows]
    base = max(cache.lengths)
    cache.begin(slice(0, rows), base, 5)
    before = [buffer.clone() for store in cache.stores for buffer in store.buffers]
    lengths = list(cache.lengths)
    chosen = [slots, [0, 1]][:rows]
    index = torch.zeros((rows, 6), dtype=torch.int32)
    for b, row in enumerate(chosen):
        index[b, : len(row)] = torch.tensor(row)
    cache.move([base] * rows, [len(row) for row in chosen], index.tolist(), index, 5)
    for old, new in zip(before, (b for s in cache.stores for b in s.buffers), strict=True):
        for b, row in enumerate(chosen):
            assert torch.equal(new[:, b, :, : lengths[b]], old[:, b, :, : lengths[b]])
            for j, slot in enumerate(row):
                assert torch.equal(new[:, b, :, lengths[b] + j], old[:, b, :, base + slot])
    assert cache.lengths == [n + len(row) for n, row in zip(lengths, chosen, strict=True)]


def test_a_ragged_commit_on_a_cpu_costs_what_it_moves() -> None:
    """Sixteen rows of SmolLM2's size took over a second by a scatter, and take a millisecond row by row."""
    cache = RowCache([LayerShape(3, 64, 64, torch.bfloat16, CPU)] * 30)
    cache.reserve(16, 500)
    cache.lengths = list(range(200, 216))
    index = torch.zeros((16, 1), dtype=torch.int32)
    seconds = []
    for _ in range(5):
        cache.begin(slice(0, 16), 400, 1)
        start = time.perf_counter()
        cache.move([400] * 16, [1] * 16, index.tolist(), index, 1)
        seconds.append(time.perf_counter() - start)
    copied = time.perf_counter()
    [buffer.clone() for store in cache.stores for buffer in store.buffers]
    copied = time.perf_counter() - copied
    assert min(seconds) < copied, f"{min(seconds):.4f} s, a copy of the whole cache {copied:.4f} s"


def test_update_copies_nothing_but_the_new_slots() -> None:
    cache = filled((4, 4))
    cache.begin(slice(0, 2), 12, 3)
    new = torch.randn(2, 2, 3, 4)
    keys, values = cache.update(new, -new, 0)
    buffer = cache.stores[0].buffers[0]
    assert keys.data_ptr() == buffer[0].data_ptr() and values.data_ptr() == buffer[1].data_ptr()
    assert keys.shape == (2, 2, 15, 4)
    assert torch.equal(keys[:, :, 12:], new) and torch.equal(values[:, :, 12:], -new)


# the target's own care


def target_with(*lengths: int) -> tuple[TorchTarget, Any]:
    model = FAMILIES["llama"]()
    target = TorchTarget(model)
    rng = np.random.default_rng(1)
    target.admit([rng.integers(3, 90, n).tolist() for n in lengths])
    return target, model


def test_a_failed_prefill_adds_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    target, model = target_with(9)
    stock, calls = target._prefill, []

    def second_fails(row: int, ids: torch.Tensor, **more: Any) -> Any:
        calls.append(row)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return stock(row, ids, **more)

    monkeypatch.setattr(target, "_prefill", second_fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        target.admit([[5, 6, 7], [8, 9]])
    assert target.lengths == (9,)
    monkeypatch.undo()
    first = target.admit([[5, 6, 7]])
    assert distance(first.logits[0, 0], plain_logits(model, [5, 6, 7])[-1]) < 1e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.admit([]), "at least one prompt"),
        (lambda t: t.admit([[4], []]), r"prompts\[1\] is empty"),
        (lambda t: t.admit([[4, 97]]), "0…96"),
        (lambda t: t.truncate(0, 10), "expected 1…9"),
        (lambda t: t.truncate(0, 0), "expected 1…9"),
        (lambda t: t.release(1), "row=1"),
        (lambda t: t.verify(random_tree(np.random.default_rng(0), 2, 3)), "2 rows"),
        (lambda t: t.commit(None, [1], [[0]]), "verify first"),
    ],
)
def test_bad_calls_are_named(call: Any, message: str) -> None:
    target, _ = target_with(9)
    with pytest.raises(InvalidArgument, match=message):
        call(target)
    assert target.lengths == (9,)


def test_room_ends_with_the_context() -> None:
    target, _ = target_with(9, 250)
    assert (target.room(0), target.room(1)) == (246, 5)


def test_training_mode_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="eval"):
        TorchTarget(FAMILIES["llama"]().train())


class Allocations(TorchDispatchMode):
    """The largest tensor, in bytes, that any operation below torch's surface made anew."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("slots", [1, 17])
def test_no_allocation_in_a_step_as_large_as_one_layers_keys(rows: int, slots: int) -> None:
    rng = np.random.default_rng(2)
    # The heads of SmolLM2-135M.
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 2}
    target = TorchTarget(_make("Mistral", sliding_window=100, max_position_embeddings=8192, **sizes)())
    target.admit([rng.integers(3, 90, 1500 - 7 * b).tolist() for b in range(rows)], reserve=64)
    packed = random_tree(rng, rows, slots)
    index = torch.tensor([[0, slots - 1]] * rows, dtype=torch.int32)
    counts = [min(slots, 2)] * rows
    with Allocations() as seen:
        target.verify(packed)
        target.commit(Verdict(index, torch.tensor(counts), index), counts, index.tolist())
    assert 0 < seen.largest < 1500 * 3 * 64 * 4 * rows


def test_the_callers_model_is_untouched_at_any_moment() -> None:
    """Before, between and during our passes: another thread may be anywhere in its forward when ours begins."""
    model = FAMILIES["gemma2"]()
    text = list(range(3, 20))
    before = plain_logits(model, text)
    settings = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    target = TorchTarget(model)
    target.admit([text])
    tree = random_tree(np.random.default_rng(0), 1, 5)
    results: list[torch.Tensor] = []

    # In the middle of the caller's forward, masks made and attention to come: a whole pass of ours.
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: target.verify(tree) and None)
    during = plain_logits(model, text)
    hook.remove()
    assert torch.equal(during, before)
    # In the middle of our forward: a whole one of the caller's, in another thread.
    hook = target._forward.own.model.layers[1].register_forward_pre_hook(
        lambda *_: _in_thread(lambda: results.append(plain_logits(model, text)))
    )
    target.verify(tree)
    hook.remove()
    assert torch.equal(results[0], before)
    assert [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")] == settings
    shared = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in target._forward.own.parameters()} == shared, "the weights must not be copied"


def _in_thread(run: Any) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
