"""What a step may cost: one target pass, one host read, and nothing read behind our back."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from portadraft import backends
from portadraft.backends.numpy import NumpyTarget
from portadraft.core.decode import Decoder, Request
from portadraft.core.sampling import Sampling
from portadraft.core.types import BeamShape
from portadraft.drafters import OracleDrafter, PromptLookup, Together
from portadraft.testing import random_redrafter

PHRASE = (5, 9, 2, 44, 17, 30)
PROMPTS = [PHRASE * 2, (1, 2, 3)]


@pytest.fixture(scope="module")
def torch_target():
    missing = backends.REGISTRY["torch"].missing()
    if missing:
        pytest.skip(f"torch: {', '.join(missing)} not installed")
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    return backends.get("torch").load().make_target(transformers.LlamaForCausalLM(config).eval())


@pytest.fixture(params=["numpy", "torch"])
def target(request):
    if request.param == "torch":
        target = request.getfixturevalue("torch_target")
    else:
        target = NumpyTarget.random(1, vocabulary_size=64)
    yield target
    while target.lengths:
        target.release(0)


@pytest.fixture
def counts(target, monkeypatch):
    """How often the host reads, and how often the target runs."""
    counter = Counter()

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            counter[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(target.ops, "to_numpy")
    for name in ("verify", "commit", "admit"):
        count(target, name)
    return counter


IMPLICIT = (
    "item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__",
)  # fmt: skip


def forbid_implicit_reads(ops, monkeypatch):
    """From here on reading a tensor's values raises, except inside `to_numpy`."""
    import torch

    inside = []
    to_numpy = ops.to_numpy

    def allowed(x):
        inside.append(True)
        try:
            return to_numpy(x)
        finally:
            inside.pop()

    def guard(owner, name):
        original = getattr(owner, name)

        def guarded(*args, **kwargs):
            if not inside:
                raise ImplicitRead(f"{owner.__name__}.{name}")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, guarded)

    monkeypatch.setattr(ops, "to_numpy", allowed)
    for name in IMPLICIT:
        guard(torch.Tensor, name)
    for name in ("nonzero", "equal", "allclose", "masked_select", "unique"):
        guard(torch, name)


class ImplicitRead(Exception):
    pass


@pytest.fixture
def no_implicit_reads(target, monkeypatch):
    if target.ops.name == "torch":
        forbid_implicit_reads(target.ops, monkeypatch)


def drafter_for(target, name):
    if name == "none":
        return None
    if name == "lookup":
        return PromptLookup(target.ops)
    parts = [random_redrafter(target, 3, draft_vocabulary=list(range(40))), PromptLookup(target.ops)]
    return Together(target.ops, parts)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["none", "lookup", "redrafter+lookup"])
@pytest.mark.parametrize("shape", [BeamShape(4, 4), BeamShape(3, 3, 6)], ids=str)
def test_one_pass_and_one_read_a_step(target, no_implicit_reads, counts, name, shape, temperature):
    drafter = drafter_for(target, name)
    assert name == "none" or drafter.name == name
    counts.clear()
    decoder = Decoder(target, drafter, shape, temperature=temperature, end_tokens=[63])
    decoder.admit([Request(p, 24, seed=i) for i, p in enumerate(PROMPTS)])
    assert counts == {"admit": 1, "to_numpy": 1}
    steps = 0
    while decoder.live:
        counts.clear()
        decoder.step()
        assert counts == {"verify": 1, "commit": 1, "to_numpy": 1}
        steps += 1
    assert steps > 3


EVERYTHING = Sampling(
    0.9, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.2, frequency_penalty=0.1,
    logit_bias={3: 1.0}, banned=[4], min_tokens=5,
)  # fmt: skip


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_all_that_sampling_offers_costs_no_further_read(target, no_implicit_reads, counts, monkeypatch, acceptance):
    """As a device would run it: what torch does otherwise in the host's own memory is put aside."""
    if target.ops.name == "torch":
        monkeypatch.setattr(type(target.ops), "host", False)
    drafter = random_redrafter(target, 3, draft_vocabulary=list(range(40)))
    decoder = Decoder(
        target, drafter, BeamShape(1, 3), sampling=EVERYTHING, end_tokens=[63], logprobs=4, acceptance=acceptance
    )
    counts.clear()
    progress = decoder.admit([Request(p, 24, seed=i) for i, p in enumerate(PROMPTS)])
    assert counts == {"admit": 1, "to_numpy": 1}
    assert all(len(p.logprobs) == 1 and len(p.logprobs[0].top) == 4 for p in progress)
    while decoder.live:
        counts.clear()
        decoder.step()
        assert counts == {"verify": 1, "commit": 1, "to_numpy": 1}


def test_the_guard_notices(torch_target, monkeypatch):
    """A negative control: each way to read a tensor is caught, and to_numpy is not."""
    import torch

    x, ops = torch.ones(1, dtype=torch.int32), torch_target.ops
    with monkeypatch.context() as patch:
        forbid_implicit_reads(ops, patch)
        reads = (
            bool,
            int,
            float,
            np.asarray,
            torch.nonzero,
            lambda x: [1, 2][x],
            lambda x: x.item(),
            lambda x: x.tolist(),
        )
        for read in reads:
            with pytest.raises(ImplicitRead):
                read(x)
        assert ops.to_numpy(x).tolist() == [1]
    assert x.item() == 1


def test_a_second_read_would_be_counted(target, counts):
    """A negative control: a drafter that reads its roots is noticed."""

    class Curious(OracleDrafter):
        def draft(self, roots, features, shape):
            self._ops.to_numpy(roots)
            return super().draft(roots, features, shape)

    drafter = Curious(target.ops, {PROMPTS[1]: [1] * 40}, 64, 1.0)
    decoder = Decoder(target, drafter, BeamShape(2, 2))
    decoder.admit([Request(PROMPTS[1], 10)])
    counts.clear()
    decoder.step()
    assert counts["to_numpy"] == 2
