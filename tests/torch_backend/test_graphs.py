"""Passes with static shapes: captured at one state of the rows, they are right at every other one.

The tape stands in for a CUDA graph (see `tape`), so that what a capture would bake in is baked
in here as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from portadraft.backends.torch import attention
from portadraft.backends.torch import graphs as graphs_module
from portadraft.backends.torch.graphs import Graphs, context_bucket
from portadraft.backends.torch.ops import TorchOps
from portadraft.backends.torch.target import TorchTarget
from portadraft.core.decode import Request
from portadraft.core.types import BeamShape, PackedBeam, Verdict, Verified
from portadraft.testing.helpers import decode, random_redrafter

from .families import FAMILIES, distance, path, random_tree
from .tape import Tape
from .test_packed_pass import model_of, prompts, step

TOLERANCE = 1e-4
CAPTURED = sorted(set(FAMILIES) - {"phi3-longrope"})


def compared(plain: TorchTarget, static: TorchTarget, packed: PackedBeam) -> tuple[float, Verified]:
    """The greatest distance of any living slot's logits and features between the two targets."""
    expected, got = plain.verify(packed), static.verify(packed)
    worst = 0.0
    for b, size in enumerate(packed.sizes.tolist()):
        worst = max(worst, distance(got.logits[b, :size], expected.logits[b, :size]))
        worst = max(worst, distance(got.hidden[b, :size], expected.hidden[b, :size]))
    return worst, got


@pytest.mark.parametrize("family", CAPTURED)
def test_a_captured_pass_is_right_at_other_states(family: str) -> None:
    """Five trees at five states of two rows, captured at the second, replayed at the rest."""
    model, rng = model_of(family), np.random.default_rng(3)
    tape = Tape()
    plain, static = TorchTarget(model), TorchTarget(model, graphs=Graphs(tape))
    texts = prompts(rng, 13, 9)
    for target in (plain, static):
        target.admit(texts)
    for alive in ([7, 4], [7, 7], [2, 6], [5, 1], [7, 3]):
        packed = random_tree(rng, 2, 7, alive)
        worst, _ = compared(plain, static, packed)
        assert worst < TOLERANCE
        ends = [int(rng.integers(0, n)) for n in alive]
        for target, copy in ((plain, [list(t) for t in texts]), (static, texts)):
            step(target, copy, packed, ends)
        assert plain.lengths == static.lengths == tuple(len(t) for t in texts)
    assert static._graphs is not None
    assert static.notes == ()
    assert tape.captures == 1
    assert static._graphs.replays == 9, "two passes at each of five states, all but the very first"


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma2", "gpt-oss"])
def test_a_graph_of_cuda_is_right_at_other_states(family: str) -> None:
    """The same on the device, with its own graphs."""
    model, rng = FAMILIES[family]().to("cuda"), np.random.default_rng(3)
    plain, static = TorchTarget(model, graphs=None), TorchTarget(model)
    texts = prompts(rng, 13, 9)
    for target in (plain, static):
        target.admit(texts)
    for alive in ([7, 4], [7, 7], [2, 6], [5, 1], [7, 3]):
        packed = random_tree(rng, 2, 7, alive)
        there = PackedBeam(*(x.cuda() for x in (packed.tokens, packed.parents, packed.depths, packed.mask)),
                           packed.sizes.cuda(), packed.length)  # fmt: skip
        worst, _ = compared(plain, static, there)
        assert worst < 10 * TOLERANCE
        ends = [int(rng.integers(0, n)) for n in alive]
        paths = [path(packed, b, end) for b, end in enumerate(ends)]
        slots = torch.tensor([p + [0] * (7 - len(p)) for p in paths], dtype=torch.int32)
        counts = [len(p) for p in paths]
        for target in (plain, static):
            target.verify(there)
            target.commit(Verdict(slots.cuda(), torch.tensor(counts).cuda(), slots.cuda()), counts, slots.tolist())
    assert static.notes == ()
    assert static._graphs is not None
    assert static._graphs.replays == 9


def test_rows_and_contexts_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come and go, contexts cross a bucket, the cache grows: always the pass of the state that is."""
    monkeypatch.setattr(graphs_module, "context_bucket", lambda n: -(-n // 16) * 16)
    monkeypatch.setattr("portadraft.backends.torch.target.context_bucket", lambda n: -(-n // 16) * 16)
    monkeypatch.setattr("portadraft.backends.torch.target.SLOTS", 4)
    model, rng = model_of("mistral-sliding"), np.random.default_rng(4)
    tape = Tape()
    plain, static = TorchTarget(model), TorchTarget(model, graphs=Graphs(tape))
    texts = prompts(rng, 5, 14)
    for target in (plain, static):
        target.admit(texts)
    seen = set()
    for turn in range(24):
        if turn == 8:
            fresh = prompts(rng, 3)
            texts = texts + fresh
            for target in (plain, static):
                target.admit(fresh)
        if turn == 15:
            for target in (plain, static):
                target.release(0)
                target.truncate(0, 4)
            texts = [texts[2][:4], texts[1]]
        packed = random_tree(rng, len(texts), 6)
        worst, _ = compared(plain, static, packed)
        assert worst < TOLERANCE, turn
        ends = [int(rng.integers(0, 6)) for _ in texts]
        for target, copy in ((plain, [list(t) for t in texts]), (static, texts)):
            step(target, copy, packed, ends)
        seen.add((len(texts), context_bucket(max(static.lengths))))
    assert static._graphs is not None
    assert static._graphs.replays > 24
    assert tape.captures >= 3


def test_whole_decoding_is_the_same() -> None:
    model, rng = model_of("llama"), np.random.default_rng(5)
    requests = [Request(tuple(p), 24) for p in prompts(rng, 6, 11, 3)]
    plain, static = TorchTarget(model), TorchTarget(model, graphs=Graphs(Tape()))
    for shape in (BeamShape(1, 3), BeamShape(3, 4, 7)):
        expected, _ = decode(plain, random_redrafter(plain, 1), requests, shape)
        got, _ = decode(static, random_redrafter(static, 1), requests, shape)
        assert got == expected
    alone, _ = decode(plain, None, requests)
    assert alone == expected == decode(static, None, requests)[0]
    assert static._graphs is not None
    assert static._graphs.replays > 15
    assert static.notes == ()


# negative controls


def test_the_tape_bakes_in_host_numbers() -> None:
    """What a capture must not read from the host comes out as it was at the capture."""
    lengths = [3]

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor(lengths)

    def right(x: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        return x + there

    graphs = Graphs(Tape())
    x = torch.arange(4)
    for value in (3, 4, 5):
        lengths[0] = value
        assert graphs.run("right", 0, right, (x, torch.tensor([value]))).tolist() == [n + value for n in range(4)]
    for value, expected in ((3, 3), (4, 4), (5, 4)):
        lengths[0] = value
        assert graphs.run("wrong", 0, wrong, (x,)).tolist() == [n + expected for n in range(4)]


def test_a_pass_with_lengths_of_the_host_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rng = model_of("llama"), np.random.default_rng(6)
    plain, static = TorchTarget(model), TorchTarget(model, graphs=Graphs(Tape()))
    forward = static._forward
    stock = forward.run

    def baked(rows: Any, tokens: Any, positions: Any, tree: Any, lengths: Any, *rest: Any, **more: Any) -> Any:
        if lengths is not None:
            lengths = torch.tensor(static.lengths)
        return stock(rows, tokens, positions, tree, lengths, *rest, **more)

    monkeypatch.setattr(forward, "run", baked)
    texts = prompts(rng, 8, 12)
    for target in (plain, static):
        target.admit(texts)
    worst = []
    for _ in range(4):
        packed = random_tree(rng, 2, 5)
        worst.append(compared(plain, static, packed)[0])
        for target, copy in ((plain, [list(t) for t in texts]), (static, texts)):
            step(target, copy, packed, [2, 4])
    assert max(worst[:1]) < TOLERANCE
    assert max(worst[2:]) > 100 * TOLERANCE


# what cannot be captured, and how much is kept


def test_a_host_read_leaves_the_function_as_it_is() -> None:
    graphs = Graphs(Tape())

    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * int(x.max())

    for _ in range(4):
        assert graphs.run("reads", 0, reads, (torch.tensor([1, 3]),)).tolist() == [3, 9]
    assert "host read" in graphs.failures["reads"]
    assert len(graphs) == 0


def test_the_longest_unused_graph_goes_first() -> None:
    graphs = Graphs(Tape(), most=2)
    for key in (1, 2, 1, 2, 3, 1, 3, 3):
        assert graphs.run("add", key, lambda x, key=key: x + key, (torch.zeros(2),)).tolist() == [key, key]
        assert len(graphs) <= 2
    assert [whole[1] for whole in graphs._captured] == [1, 3]
    graphs.forget("add")
    assert len(graphs) == 0


def test_too_little_memory_means_fewer_graphs() -> None:
    class Full(Tape):
        def capture(self, function: Any) -> Any:
            if self.captures == 1:
                self.captures += 1
                raise torch.OutOfMemoryError("no")
            return super().capture(function)

    graphs = Graphs(Full(), most=2)
    for key in (1, 1, 2, 2, 2, 2):
        assert graphs.run("add", key, lambda x, key=key: x + key, (torch.zeros(2),)).tolist() == [key, key]
    assert not graphs.failures
    assert graphs._most == 1
    assert len(graphs) == 1


def test_outputs_stay_what_they_were() -> None:
    graphs = Graphs(Tape())
    outs = [graphs.run("twice", 0, lambda x: (x * 2, x), (torch.full((2,), float(i)),)) for i in range(4)]
    assert [(a[0].item(), b[0].item()) for a, b in outs] == [(0, 0), (2, 1), (4, 2), (6, 3)]


def test_compile_goes_through_graphs_where_there_are_any() -> None:
    ops = TorchOps()

    def add(x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        return x if y is None else x + y

    assert ops.compile(add) is add
    ops.graphs = Graphs(Tape())
    compiled = ops.compile(add)
    x = torch.ones(3)
    for i in range(3):
        assert compiled(x, x * i).tolist() == [1 + i] * 3
        assert compiled(x, None).tolist() == [1] * 3
    assert ops.graphs.replays == 4


def test_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TorchTarget(model_of("llama")).notes == ()
    limited = TorchTarget(model_of("phi3-longrope"), graphs=Graphs(Tape()))
    assert "rotary" in limited.notes[0]
    monkeypatch.setenv(graphs_module.ENVIRONMENT, "0")
    assert graphs_module.default_graphs(torch.device("cuda")) is None
    monkeypatch.delenv(graphs_module.ENVIRONMENT)
    assert graphs_module.default_graphs(torch.device("cuda")) is not None
    assert graphs_module.default_graphs(torch.device("cpu")) is None


@pytest.mark.parametrize("length", [1, 255, 256, 257, 1023, 1025, 4097, 100_000])
def test_context_buckets(length: int) -> None:
    bucket = context_bucket(length)
    assert length <= bucket < max(length + 256, length * 1.26)
    assert bucket % 256 == 0
    assert context_bucket(bucket) == bucket


@pytest.mark.parametrize("size", [1, 16, 21])
@pytest.mark.parametrize("groups", [1, 3])
def test_an_aligned_mask_is_the_mask(size: int, groups: int) -> None:
    mask = torch.rand(2, 1, 5, size, generator=torch.Generator().manual_seed(size)) < 0.6
    aligned = attention._aligned(mask, groups, torch.float16)
    assert torch.equal(aligned, attention._additive(mask, groups, torch.float16))
    assert all(stride % 16 == 0 for stride in aligned.stride()[:3]) and aligned.stride(3) == 1
