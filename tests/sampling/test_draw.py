"""The draw against the float64 reference: exact where the device has float64, within `EDGE` where it has not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from portadraft.bench import reference
from portadraft.core.draw import EDGE, draw, numbers
from portadraft.core.filters import weights
from portadraft.core.ops import BITS
from portadraft.core.picking import BLOCK, _share
from portadraft.core.sampling import Sampling

V = 49_152
SAMPLINGS = {
    "1.0": Sampling(1.0),
    "0.7, top-p": Sampling(0.7, top_p=0.9),
    "1.3, top-k": Sampling(1.3, top_k=5000),
    "1.0, min-p": Sampling(1.0, min_p=1e-4),
    "all filters": Sampling(1.0, top_k=20_000, top_p=0.95, min_p=1e-6),
}


def heavy_tail(seed, rows=4, vocabulary=V):
    """Rows in which thousands of unlikely tokens hold much of the probability together, as in a model's logits."""
    generator = np.random.default_rng(seed)
    x = generator.normal(0, np.linspace(0.5, 2.5, rows)[:, None], (rows, vocabulary))
    x[:, generator.integers(0, vocabulary, 40)] += generator.random(40) * 9
    return x.astype(np.float32)


def drawn(ops, logits, sampling, uniforms):
    """The tokens of one row of logits at many uniforms."""
    w = weights(ops, ops.asarray(logits[None], "float32"), sampling)
    w = ops.broadcast_to(w, (50, w.shape[1])) + 0.0
    parts = uniforms.reshape(-1, 50)
    return np.concatenate([ops.to_numpy(draw(ops, w, numbers(ops, part))) for part in parts])


def cdf_of(logits, sampling):
    return np.cumsum(reference.filtered(logits.astype(np.float64), sampling))


def expected(cdf, uniforms):
    kept = np.flatnonzero(np.diff(cdf, prepend=0.0) > 0)
    return kept[np.minimum(np.searchsorted(cdf[kept], uniforms * cdf[-1], side="right"), len(kept) - 1)]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_reference_says_the_same(forms, name):
    sampling, off, total = SAMPLINGS[name], 0, 0
    uniforms = np.random.default_rng(1).random(500)
    for logits in heavy_tail(2):
        cdf = cdf_of(logits, sampling)
        got, right = drawn(forms, logits, sampling, uniforms), expected(cdf, uniforms)
        total += len(got)
        off += (got != right).sum()
        for token, u in zip(got[got != right], uniforms[got != right], strict=True):
            assert forms.wide == "float32", (token, u)
            assert cdf[token] - cdf[token - 1] > 0, "a dropped token"
            low, high = cdf[token - 1] if token else 0.0, cdf[token]
            assert low - EDGE <= u <= high + EDGE
    assert off <= total / 50


def test_control_float32_alone_is_off(forms):
    """Sums in float32 over the whole vocabulary draw other tokens: the equality above would see it."""
    uniforms = np.random.default_rng(1).random(500)
    off = 0
    for logits in heavy_tail(2):
        p = np.exp(logits - logits.max())
        sums = np.cumsum(p, dtype=np.float32)
        got = np.searchsorted(sums, (uniforms * sums[-1]).astype(np.float32), side="right")
        off += (got != expected(cdf_of(logits, Sampling(1.0)), uniforms)).sum()
    assert off > 5


def test_all_bits_of_the_uniform_count(forms):
    """Two uniforms that float32 does not tell apart, on either side of an edge."""
    logits = heavy_tail(3, rows=1)[0]
    cdf = cdf_of(logits, Sampling(1.0))
    edges = cdf[[1000, 20_000, 40_000]] / cdf[-1]
    near = 2.0**-40 if forms.wide == "float64" else EDGE
    either = np.repeat(np.concatenate([edges - near, edges + near]), 25)[:150]
    got = drawn(forms, logits, Sampling(1.0), either)
    assert (got[:75] <= np.repeat([1000, 20_000, 40_000], 25)).all()
    assert (got[75:] > np.repeat([1000, 20_000, 40_000], 25)).all()
    if forms.wide == "float64":
        assert (np.float32(edges - near) == np.float32(edges + near)).all()
        assert (got[75:] == np.repeat([1001, 20_001, 40_001], 25)).all()


@pytest.mark.parametrize("vocabulary", [1, 2, 97, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 3])
def test_every_size_and_the_ends(forms, vocabulary):
    generator = np.random.default_rng(vocabulary)
    logits = generator.normal(0, 2, vocabulary).astype(np.float32)
    logits[generator.random(vocabulary) < 0.3] = -np.inf
    logits[vocabulary // 2] = 0.5
    alive = np.flatnonzero(logits > -np.inf)
    uniforms = np.concatenate([[0.0, 1 - 2.0**-53], generator.random(48)])
    got = drawn(forms, logits, Sampling(1.0), uniforms)
    assert got[0] == alive[0]
    cdf = cdf_of(logits, Sampling(1.0))
    assert np.isin(got, alive).all()
    assert got[1] == alive[-1] or cdf[-1] - cdf[got[1]] < EDGE
    if forms.wide == "float64":
        assert got.tolist() == expected(cdf, uniforms).tolist()


def test_edges_between_blocks_never_give_a_token_without_weight(forms):
    """Uniforms at the very edges of blocks that begin and end with dropped tokens."""
    w = np.random.default_rng(4).random((1, 4 * BLOCK))
    w[:, np.arange(4 * BLOCK) % BLOCK < 20] = 0
    w[:, np.arange(4 * BLOCK) % BLOCK > 200] = 0
    w[:, 2 * BLOCK : 3 * BLOCK] = 0
    native = forms.asarray(w, forms.wide)
    edges = np.cumsum(w[0].reshape(4, BLOCK).sum(axis=1)) / w.sum()
    for edge in edges:
        for shift in range(-20, 21):
            u = np.clip(np.asarray([edge * (1 + shift * 2.0**-53)]), 0, 1 - 2.0**-53)
            (token,) = forms.to_numpy(draw(forms, native, numbers(forms, u)))
            assert w[0, token] > 0


def test_neighbours_and_batch_size_do_not_matter(forms):
    logits = heavy_tail(5, rows=6, vocabulary=5003)
    uniforms = np.random.default_rng(6).random((40, 6))
    sampling = Sampling(0.9, top_p=0.95)
    w = weights(forms, forms.asarray(logits, "float32"), sampling)
    alone = [weights(forms, forms.asarray(row[None], "float32"), sampling) for row in logits]
    different = set()
    for u in uniforms:
        together = forms.to_numpy(draw(forms, w, numbers(forms, u))).tolist()
        one_by_one = [int(forms.to_numpy(draw(forms, x, numbers(forms, u[i : i + 1])))[0]) for i, x in enumerate(alone)]
        assert together == one_by_one
        different.add(tuple(together))
    assert len(different) == 40


def test_rows_without_weights_give_none(forms):
    w = np.zeros((3, 700))
    w[1, 5] = 1.0
    with np.errstate(all="ignore"):
        first = forms.to_numpy(draw(forms, forms.asarray(w, forms.wide), numbers(forms, np.full(3, 0.5))))
        w[2, 3] = np.nan
        second = forms.to_numpy(draw(forms, forms.asarray(w, forms.wide), numbers(forms, np.full(3, 0.5))))
    assert first.tolist() == second.tolist() == [-1, 5, -1]


def test_products_of_whole_numbers_are_exact():
    generator = np.random.default_rng(7)
    total = np.concatenate([generator.integers(1, 2**BITS + 2**10, 2000), [2**BITS + 2**10, 1]])
    uniforms = np.concatenate([generator.integers(0, 2**BITS, 2000), [2**BITS - 1, 2**BITS - 1]])
    got = _share(total.astype(np.int32), uniforms.astype(np.int32))
    assert got.dtype == np.int32
    assert got.tolist() == [int(t) * int(u) >> BITS for t, u in zip(total, uniforms, strict=True)]
    assert (got < total).all()


# what `verify` allows where a device has no float64


def test_without_float64_edges_may_be_off_by_so_much_and_no_more():
    logits = heavy_tail(8)[1]  # one token in twenty is kept
    sampling = Sampling(0.8, top_p=0.9)
    cdf = cdf_of(logits, sampling)
    kept = np.flatnonzero(np.diff(cdf, prepend=0.0) > 0)
    token, after = kept[len(kept) // 2], kept[len(kept) // 2 + 1]
    at = cdf[token] / cdf[-1]

    def explains(token, uniform, edge, sampling=sampling):
        return reference.explains(int(token), logits, sampling, uniform, edge=edge)

    for u, right, other in ((at - EDGE / 2, token, after), (at + EDGE / 2, after, token)):
        assert explains(right, u, 0.0)
        assert explains(right, u, EDGE)
        assert not explains(other, u, 0.0)
        assert explains(other, u, EDGE)
    assert not explains(after, at - 2 * EDGE, EDGE)
    assert not explains(token, at + 2 * EDGE, EDGE)
    dropped = next(i for i in range(token + 1, V) if i not in set(kept))
    assert dropped < after
    assert not explains(dropped, at, EDGE)
    assert not any(explains(i, at, EDGE) for i in np.argsort(logits)[:50])


def test_without_float64_the_last_token_of_top_p_may_stay_or_go():
    logits = np.log(np.asarray([0.5, 0.3, 0.2])).astype(np.float32)
    sampling = Sampling(1.0, top_p=0.8 - 2.0**-21)
    likely = [reference.explains(2, logits, replace(sampling, top_p=p), 0.999, edge=EDGE) for p in (0.8, 0.7999)]
    assert likely == [True, False]
    assert not reference.explains(2, logits, replace(sampling, top_p=0.7999), 0.999)


def test_greedy_choices_are_explained_by_their_logits():
    logits = np.asarray([3.0, 20.0, 20.0 - 1e-5, 19.0], dtype=np.float64)
    assert [reference.explains(i, logits, Sampling(), 0.0) for i in range(4)] == [False, True, False, False]
    assert [reference.explains(i, logits, Sampling(), 0.0, edge=EDGE) for i in range(4)] == [False, True, True, False]
