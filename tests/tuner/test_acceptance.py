"""Replay equals the decode loop: the same accepted counts, step by step, for every shape that is asked."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from portadraft.backends.numpy import NumpyTarget
from portadraft.core.beam import beam_search, beam_search_lengths
from portadraft.core.requests import Request
from portadraft.core.tree import pack_beam, rank_nodes
from portadraft.core.types import Beam, BeamShape
from portadraft.core.uniforms import row_seed
from portadraft.drafters import PromptLookup, Together
from portadraft.drafters.select import LOOKUP_LENGTH
from portadraft.errors import CorruptFile, InvalidArgument
from portadraft.testing import decode, random_redrafter
from portadraft.tuner.acceptance import AcceptanceTable, Origin, make_table
from portadraft.tuner.grid import Grid
from portadraft.tuner.positions import follow, positions
from portadraft.tuner.recordings import record

V = 48
GRID = Grid((1, 2, 4, 6), (1, 2, 3, 4, 5), (4, 8, 0))
PHRASE = (5, 9, 2, 44, 17, 30)
PROMPTS = [(7,), PHRASE * 3, (1, 2, 3, 4, 5), (*PHRASE, 8, *PHRASE[:4])]
TOKENS = 50


@pytest.fixture(scope="module")
def target():
    return NumpyTarget.random(1, vocabulary_size=V)


def make(name, target):
    # A small vocabulary and a random drafter: some guesses are right by chance, wide beams often.
    trained = random_redrafter(target, 5)
    if name == "redrafter":
        return trained
    if name == "lookup":
        return PromptLookup(target.ops, longest=3, shortest=1)
    return Together(target.ops, [trained, PromptLookup(target.ops, longest=3, shortest=1, length=LOOKUP_LENGTH)])


@pytest.fixture(scope="module")
def recordings(target):
    return {t: record(target, PROMPTS, max_tokens=TOKENS, temperature=t, seed=3, batch=3) for t in (0.0, 0.7)}


def requests(tokens=TOKENS):
    return [Request(prompt, tokens, row_seed(3, i)) for i, prompt in enumerate(PROMPTS)]


def loop(target, drafter, shape, temperature):
    """Accepted counts of every row's whole steps in the real loop."""
    _, reported = decode(target, drafter, requests(), shape, temperature=temperature)
    return [[p.accepted for p in reported if p.key == i and p.accepted is not None] for i in range(len(PROMPTS))]


SHAPES = [
    (1, 1, 0), (1, 3, 4), (1, 5, 0), (2, 1, 0), (2, 2, 4), (2, 4, 8), (2, 5, 0), (4, 2, 0), (4, 3, 8), (4, 4, 4),
    (4, 5, 8), (6, 1, 4), (6, 3, 8), (6, 5, 0), (6, 5, 8),
]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["redrafter", "redrafter+lookup", "lookup"])
def test_replay_equals_the_loop(target, recordings, name, temperature):
    """Fifteen shapes from one replay against fifteen decodings. A last step that ends at the limit is left out."""
    drafter = make(name, target)
    chains = [follow(one, GRID) for one in positions(target.ops, drafter, recordings[temperature], GRID, rows=3)]
    accepted = 0
    for width, length, nodes in SHAPES:
        shape = BeamShape(width, length, nodes or None)
        index = GRID.index(shape)
        wanted = loop(target, drafter, shape, temperature)
        for chain, whole in zip(chains, wanted, strict=True):
            got = chain.sequence[:, *index]
            got = got[got >= 0].tolist()
            assert got == whole[: len(got)]
            assert len(whole) - len(got) <= 1
            assert chain.steps[index] == len(got)
            assert chain.accepted[index] == sum(got)
            accepted += sum(got)
    assert accepted > 20


def test_replay_with_the_wrong_features_does_not(target, recordings):
    """The negative control: features shifted by one position."""
    shifted = [dataclasses.replace(r, hidden=np.roll(r.hidden, 1, axis=0)) for r in recordings[0.0]]
    drafter = make("redrafter", target)
    right = [follow(p, GRID) for p in positions(target.ops, drafter, recordings[0.0], GRID)]
    wrong = [follow(p, GRID) for p in positions(target.ops, drafter, shifted, GRID)]
    assert any((a.accepted != b.accepted).any() for a, b in zip(right, wrong, strict=True))


def test_recordings_are_what_the_loop_generates(target, recordings):
    for temperature, made in recordings.items():
        answers, _ = decode(target, None, requests(), temperature=temperature)
        for prompt, ids, one in zip(PROMPTS, answers, made, strict=True):
            assert one.tokens.tolist() == ids
            assert one.hidden.shape == (len(ids) - 1, target.facts.hidden_size)
            assert one.prompt == prompt
    assert any((a.tokens != b.tokens).any() for a, b in zip(recordings[0.0], recordings[0.7], strict=True))


def test_a_drafter_that_wants_all_features_is_refused(target, recordings):
    drafter = make("redrafter", target)
    drafter.wants = "all"
    with pytest.raises(InvalidArgument, match="every position"):
        positions(target.ops, drafter, recordings[0.0], GRID)


def test_one_search_serves_all_lengths(target):
    drafter = random_redrafter(target, 5)
    ops = target.ops
    generator = np.random.default_rng(0)
    roots = ops.asarray(generator.integers(0, V, 5))
    hidden = ops.asarray(generator.standard_normal((5, target.facts.hidden_size)), "float32")
    cut = False
    for width in (1, 3, 8):
        arguments = (ops, drafter.config, drafter._params, drafter._embeddings, roots, hidden, width)
        every = beam_search_lengths(*arguments, 6)
        for length, beam in enumerate(every, start=1):
            alone = beam_search(*arguments, length)
            assert np.array_equal(beam.tokens, alone.tokens)
            assert np.array_equal(beam.scores, alone.scores)
            assert np.array_equal(beam.lengths, alone.lengths)
            cut = cut or not np.array_equal(every[-1].tokens[:, :, :length], alone.tokens)
    assert cut  # cutting the longest is something else


@pytest.mark.parametrize("nodes", [2, 3, 5, 9, None])
def test_ranks_say_what_a_budget_keeps(target, nodes):
    ops, generator = target.ops, np.random.default_rng(1)
    tokens = generator.integers(0, 3, (4, 5, 4)).astype(np.int32)
    scores = np.cumsum(-generator.integers(0, 2, tokens.shape).astype(np.float32), axis=2)  # many ties
    beam = Beam(tokens, generator.integers(0, 5, (4, 5)).astype(np.int32), scores)
    packed = pack_beam(ops, ops.full((4,), 0, "int32"), beam, nodes)
    rank = rank_nodes(ops, beam)
    kept = rank < (20 if nodes is None else min(20, nodes - 1))
    for row in range(4):
        paths = {tuple(tokens[row, i, : d + 1]) for i, d in zip(*np.nonzero(kept[row]), strict=True)}
        seen = set()
        for slot in range(1, packed.sizes[row]):
            path, at = [], slot
            while at:
                path.append(packed.tokens[row, at])
                at = packed.parents[row, at]
            seen.add(tuple(path[::-1]))
        assert paths == seen


# tables


@pytest.fixture(scope="module")
def table(target, recordings):
    made = [dataclasses.replace(r, category=c) for r, c in zip(recordings[0.0], "aabb", strict=True)]
    return make_table(target.ops, make("redrafter+lookup", target), made, Origin("redrafter+lookup", "x"), GRID)


def test_a_table_says_means_and_their_error(table):
    rate = table.rate(BeamShape(6, 5))
    index = GRID.index(BeamShape(6, 5))
    assert rate.tokens_per_step == pytest.approx(1 + table.accepted[:, *index].sum() / table.steps[:, *index].sum())
    assert 1.0 <= rate.low < rate.tokens_per_step < rate.high
    # The delta method against a bootstrap.
    generator = np.random.default_rng(0)
    drawn = [table.tokens_per_step(generator.integers(0, 4, 4))[index] for _ in range(4000)]
    assert rate.error == pytest.approx(np.std(drawn) * np.sqrt(4 / 3), rel=0.25)
    by_kind = [table.rate(BeamShape(6, 5), c).tokens_per_step for c in "ab"]
    assert min(by_kind) < rate.tokens_per_step < max(by_kind)
    with pytest.raises(InvalidArgument, match="not in the grid"):
        table.rate(BeamShape(5, 5))


def test_more_nodes_never_hurt_at_a_position_so_means_grow_with_the_budget(table):
    means = table.tokens_per_step()
    assert means[..., -1].mean() > means[..., 0].mean()
    assert (table.mean_nodes()[..., 0] <= 4).all()
    assert (table.mean_nodes()[..., 1] <= 8).all()


def test_a_table_comes_back_from_its_file(table, tmp_path):
    path = tmp_path / "deep" / "t.safetensors"
    table.save(path)
    again = AcceptanceTable.load(path)
    assert (again.grid, again.origin, again.categories) == (table.grid, table.origin, table.categories)
    for name in ("steps", "accepted", "found", "nodes"):
        assert np.array_equal(getattr(again, name), getattr(table, name))
    assert [p.name for p in path.parent.iterdir()] == ["t.safetensors"]


def test_a_damaged_table_is_named(table, tmp_path):
    path = tmp_path / "t.safetensors"
    table.save(path)
    whole = path.read_bytes()
    for broken in (
        b"",
        whole[: len(whole) // 2],
        b"\xff" * 100,
        whole.replace(b'format_version\\": 1', b'format_version\\": 9'),
    ):
        path.write_bytes(broken)
        with pytest.raises(CorruptFile, match="not an acceptance table"):
            AcceptanceTable.load(path)
    escape = tuple("\x1b[31mred" for _ in table.categories)
    for changes, message in (
        ({"found": table.steps + 1}, "contradict"),
        ({"accepted": table.steps * 100}, "contradict"),  # a beam is at most so deep
        ({"nodes": table.steps * 1000}, "contradict"),
        ({name: np.zeros_like(table.steps) for name in ("steps", "accepted", "found", "nodes")}, "no steps"),
        ({"categories": escape}, "printable"),
        ({"origin": dataclasses.replace(table.origin, drafter="redrafter\x07")}, "printable"),
    ):
        dataclasses.replace(table, **changes).save(path)
        with pytest.raises(CorruptFile, match=message):
            AcceptanceTable.load(path)


def test_a_table_without_a_step_is_refused(target, recordings):
    short = [dataclasses.replace(r, tokens=r.tokens[:1]) for r in recordings[0.0]]
    with pytest.raises(InvalidArgument, match="no step"):
        make_table(target.ops, make("lookup", target), short, Origin("lookup"))
