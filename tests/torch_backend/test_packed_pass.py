"""The packed pass, slot by slot: each slot's logits are those of its root-to-slot path alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from portadraft.backends.torch.cache import RowCache
from portadraft.backends.torch.target import TorchTarget
from portadraft.core.types import PackedBeam, Verdict, Verified
from portadraft.errors import InvalidArgument

from .families import FAMILIES, VOCABULARY, WINDOW, _make, distance, path, plain_logits, random_tree

TOLERANCE = 1e-3
WRONG = 2e-2
"""A negative control must be off by at least this many standard deviations."""


@cache
def model_of(family: str) -> Any:
    return FAMILIES[family]()


def prompts(rng: np.random.Generator, *lengths: int) -> list[list[int]]:
    return [rng.integers(3, VOCABULARY, n).tolist() for n in lengths]


def worst(model: Any, texts: list[list[int]], packed: PackedBeam, verified: Verified) -> float:
    """The greatest distance of any live slot from its path alone."""
    out = 0.0
    for b, text in enumerate(texts):
        for slot in range(int(packed.sizes[b])):
            tokens = [int(packed.tokens[b, s]) for s in path(packed, b, slot)]
            out = max(out, distance(verified.logits[b, slot], plain_logits(model, text + tokens)[-1]))
    return out


def step(target: TorchTarget, texts: list[list[int]], packed: PackedBeam, ends: list[int]) -> Verified:
    """Verify, commit the path to slot ends[b] in each row, and note the tokens in `texts`."""
    verified = target.verify(packed)
    paths = [path(packed, b, end) for b, end in enumerate(ends)]
    longest = max(len(p) for p in paths)
    slots = torch.tensor([p + [0] * (longest - len(p)) for p in paths], dtype=torch.int32)
    counts = [len(p) for p in paths]
    verdict = Verdict(torch.zeros_like(slots), torch.tensor(counts, dtype=torch.int32), slots)
    target.commit(verdict, counts, slots.tolist())
    for text, row, p in zip(texts, packed.tokens, paths, strict=True):
        text.extend(int(row[s]) for s in p)
    return verified


@pytest.mark.parametrize("family", FAMILIES)
def test_every_slot_equals_its_path_alone(family: str) -> None:
    model = model_of(family)
    rng = np.random.default_rng(5)
    target = TorchTarget(model, strict=True)
    texts = prompts(rng, 13, 9)
    first = target.admit(texts)
    for b, text in enumerate(texts):
        assert distance(first.logits[b, 0], plain_logits(model, text)[-1]) < TOLERANCE
    shapes = [(7, [7, 4]), (1, None), (6, None), (9, [3, 9]), (5, None), (1, None), (4, None)]
    for slots, alive in shapes:
        if family == "phi3-longrope":
            slots, alive = 1, None  # this text crosses the switch; trees there have a test of their own
        packed = random_tree(rng, 2, slots, alive)
        ends = [int(rng.integers(0, int(n))) for n in packed.sizes]
        before = [list(t) for t in texts]
        verified = step(target, texts, packed, ends)
        assert worst(model, before, packed, verified) < TOLERANCE
        assert target.lengths == tuple(len(t) for t in texts)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_commits_of_every_length_and_order(family: str) -> None:
    model = model_of(family)
    rng = np.random.default_rng(6)
    # Slots 0-2-4-5 are one path, so its commits are not contiguous; 0-1-3 is another.
    parents = torch.tensor([[0, 0, 0, 1, 2, 4], [0, 0, 1, 2, 3, 4]], dtype=torch.int32)
    for end in range(6):
        target = TorchTarget(model)
        texts = prompts(rng, 11, 7)
        target.admit(texts)
        packed = tree_of(rng, parents)
        step(target, texts, packed, [end, 5 - end])
        packed = random_tree(rng, 2, 5)
        assert worst(model, texts, packed, target.verify(packed)) < TOLERANCE


def tree_of(rng: np.random.Generator, parents: torch.Tensor) -> PackedBeam:
    packed = random_tree(rng, *parents.shape)
    depths, mask = torch.zeros_like(parents), torch.eye(parents.shape[1], dtype=torch.bool).repeat(len(parents), 1, 1)
    for b in range(len(parents)):
        for i in range(1, parents.shape[1]):
            depths[b, i] = depths[b, parents[b, i]] + 1
            mask[b, i] |= mask[b, parents[b, i]]
    return replace(packed, parents=parents, depths=depths, mask=mask, length=int(depths.max()))


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma2"])
def test_rows_come_and_go(family: str) -> None:
    model = model_of(family)
    rng = np.random.default_rng(7)
    target = TorchTarget(model)
    texts = prompts(rng, 12, 5, 17)
    target.admit(texts[:2])
    step(target, texts[:2], random_tree(rng, 2, 5), [3, 4])
    target.admit(texts[2:], reserve=40)
    target.release(0)
    texts = [texts[2], texts[1]]
    assert target.lengths == tuple(len(t) for t in texts)
    packed = random_tree(rng, 2, 6)
    assert worst(model, texts, packed, step(target, [list(t) for t in texts], packed, [5, 2])) < TOLERANCE
    target.truncate(0, 9)
    target.truncate(1, 3)
    texts = [texts[0][:9], texts[1][:3]]
    packed = random_tree(rng, 2, 6)
    assert worst(model, texts, packed, target.verify(packed)) < TOLERANCE
    target.release(1)
    packed = random_tree(rng, 1, 80)
    assert worst(model, texts[:1], packed, target.verify(packed)) < TOLERANCE


def test_prefill_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portadraft.backends.torch.target.PREFILL_CHUNK", 5)
    for family in ("llama", "mistral-sliding", "gpt-oss", "phi3-longrope"):
        model = model_of(family)
        rng = np.random.default_rng(8)
        texts = prompts(rng, 17, 5, 31)
        target = TorchTarget(model)
        first = target.admit(texts)
        for b, text in enumerate(texts):
            assert distance(first.logits[b, 0], plain_logits(model, text)[-1]) < TOLERANCE, family
        packed = random_tree(rng, 3, 1)
        assert worst(model, texts, packed, target.verify(packed)) < TOLERANCE, family


def test_longrope_switch_is_crossed_like_the_stock_model() -> None:
    model = model_of("phi3-longrope")
    rng = np.random.default_rng(9)
    target = TorchTarget(model)
    texts = prompts(rng, 20, 22)
    target.admit(texts)
    assert (target.room(0), target.room(1)) == (3, 1)
    chain = tree_of(rng, torch.tensor([[0, 0], [0, 0]], dtype=torch.int32))
    verified = target.verify(chain)
    assert worst(model, texts, chain, verified) < TOLERANCE
    with pytest.raises(InvalidArgument, match="room"):
        target.verify(tree_of(rng, torch.tensor([[0, 0, 1], [0, 0, 1]], dtype=torch.int32)))
    for _ in range(6):  # row 1 crosses first: for a while the rows are on different sides
        packed = random_tree(rng, 2, 1)
        before = [list(t) for t in texts]
        assert worst(model, before, packed, step(target, texts, packed, [0, 0])) < TOLERANCE
    assert target.lengths == (26, 28)
    packed = random_tree(rng, 2, 6)
    assert worst(model, texts, packed, target.verify(packed)) < TOLERANCE
    target.truncate(0, 10)
    texts[0] = texts[0][:10]
    packed = random_tree(rng, 2, 3)
    assert worst(model, texts, packed, target.verify(packed)) < TOLERANCE


def test_dynamic_ntk_is_like_plain_decoding() -> None:
    from .families import _make

    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    make = _make("Llama", max_position_embeddings=16, rope_parameters=parameters)
    rng = np.random.default_rng(10)
    text = prompts(rng, 14)[0]
    target = TorchTarget(make())
    target.admit([text])
    assert target.room(0) == 1
    fresh = make()
    with torch.no_grad():
        out = fresh(input_ids=torch.tensor([text]), use_cache=True)
    for _ in range(6):
        packed = random_tree(rng, 1, 1)
        verified = step(target, [text], packed, [0])
        with torch.no_grad():
            out = fresh(input_ids=packed.tokens.long(), use_cache=True, past_key_values=out.past_key_values)
        assert distance(verified.logits[0, 0], out.logits[0, 0]) < TOLERANCE
    # A short row after a long one gets its own frequencies.
    target.release(0)
    short = prompts(rng, 17)
    assert distance(target.admit(short).logits[0, 0], plain_logits(make(), short[0])[-1]) < TOLERANCE


# negative controls: each of these must be seen


@pytest.fixture
def ragged() -> tuple[Any, TorchTarget, list[list[int]], PackedBeam]:
    model = model_of("mistral-sliding")
    rng = np.random.default_rng(11)
    target = TorchTarget(model)
    texts = prompts(rng, 13, 9)
    target.admit(texts)
    return model, target, texts, tree_of(rng, torch.tensor([[0, 0, 0, 1, 2, 4]] * 2, dtype=torch.int32))


def test_control_wrong_positions(ragged: Any) -> None:
    model, target, texts, packed = ragged
    wrong = replace(packed, depths=torch.arange(6, dtype=torch.int32).expand(2, -1))
    assert worst(model, texts, packed, target.verify(wrong)) > WRONG


def test_control_wrong_mask(ragged: Any) -> None:
    model, target, texts, packed = ragged
    wrong = replace(packed, mask=torch.ones(6, 6, dtype=torch.bool).tril().expand(2, -1, -1))
    assert worst(model, texts, packed, target.verify(wrong)) > WRONG


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
def test_control_window_off_by_one(ragged: Any, window: int) -> None:
    model, target, texts, packed = ragged
    target._forward.own.config.sliding_window = window
    try:
        verified = target.verify(packed)
    finally:
        target._forward.own.config.sliding_window = WINDOW
    assert worst(model, texts, packed, verified) > WRONG


def test_control_gap_not_masked(ragged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, target, texts, packed = ragged
    step(target, texts, packed, [5, 0])  # leaves junk behind the shorter row
    monkeypatch.setattr("portadraft.backends.torch.attention.Pass.mask", _without_gap)
    assert worst(model, texts, packed, target.verify(packed)) > WRONG


def _without_gap(self: Any, function: Any, plain: bool) -> torch.Tensor:
    rows, slots = self.positions.shape
    visible = torch.ones((rows, 1, slots, self.past + slots), dtype=torch.bool)
    visible[..., self.past :] = self.tree[:, None]
    return visible


def test_control_keys_not_moved(ragged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, target, texts, packed = ragged

    def count_only(self: RowCache, bases: Any, counts: list[int], *rest: Any) -> None:
        self.lengths[:] = [n + c for n, c in zip(self.lengths, counts, strict=True)]

    monkeypatch.setattr(RowCache, "move", count_only)
    step(target, texts, packed, [5, 4])
    assert worst(model, texts, packed, target.verify(packed)) > WRONG


def test_the_callers_model_is_left_alone() -> None:
    model = FAMILIES["gemma2"]()
    text = list(range(3, 20))
    before, setting = plain_logits(model, text), model.config._attn_implementation
    target = TorchTarget(model)
    target.admit([text])
    target.verify(random_tree(np.random.default_rng(0), 1, 5))
    assert model.config._attn_implementation == setting
    assert not model.get_output_embeddings()._forward_pre_hooks
    assert torch.equal(plain_logits(model, text), before)


def test_features_are_what_the_head_reads() -> None:
    model = model_of("gemma2")
    target = TorchTarget(model)
    text = list(range(3, 20))
    verified = target.admit([text])
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state[0, -1]
    assert distance(verified.hidden[0, 0], hidden) < TOLERANCE
    assert target.facts.hidden_size == hidden.shape[-1]
    assert target.facts.vocabulary_size == VOCABULARY


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize(("kept", "total"), [(9, 15), (9, 40), (30, 40), (30, 34), (14, 15)])
def test_restored_rows_on_both_sides_of_a_rotary_switch(kind: str, kept: int, total: int) -> None:
    """A state is used only where a fresh prefill would have its keys; the answer is the prefill's in any case."""
    if kind == "longrope":
        model = model_of("phi3-longrope")
    else:
        scheme = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        model = _make("Llama", rope_parameters=scheme, max_position_embeddings=24)()
    ids = prompts(np.random.default_rng(12), total)[0]
    target = TorchTarget(model)
    target.admit([ids[:kept]])
    state = target.export(0, ids[:kept])
    target.release(0)
    restored = target.admit([ids], known=[(state, kept)])
    fresh = TorchTarget(model).admit([ids])
    assert distance(restored.logits[0, 0], fresh.logits[0, 0]) < TOLERANCE
    assert target._switched is not None
    wrong = target._switched
    wrong.usable = lambda beyond, total: True  # type: ignore[method-assign]
    blind = target.admit([ids], known=[(state, kept)])
    same_side = (kept > 24) == (total > 24) and not (kind == "dynamic" and total > 24)
    assert (distance(blind.logits[0, 0], fresh.logits[0, 0]) < TOLERANCE) == same_side
