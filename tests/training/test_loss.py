"""The loss: what is imitated, at which temperature, weighed how; and what targets say beyond their head's product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from portadraft.backends.torch.ops import TorchOps
from portadraft.core import recurrent
from portadraft.core.recurrent import RecurrentConfig
from portadraft.errors import InvalidArgument, UnsupportedModel
from portadraft.training.features import Features
from portadraft.training.initial import initial
from portadraft.training.loss import LossConfig, distil
from portadraft.training.recording import features_of
from portadraft.training.said import Said, said_by
from tests.torch_backend.families import FAMILIES, VOCABULARY, from_config

V, D, STEPS = 40, 12, 3
PLAIN = {"steps": STEPS, "floor": 1.0, "dropout": 0.0}


@pytest.fixture(scope="module")
def tables() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(V, D, generator=generator), torch.randn(V, D, generator=generator)


def features(teaching: Any = "distribution", said: Said | None = None) -> Features:
    rng = np.random.default_rng(0)
    lengths = [9, 14, 6]
    bits = torch.from_numpy(rng.standard_normal((sum(lengths), D))).to(torch.bfloat16).view(torch.int16)
    return Features(
        bits.numpy().view(np.uint16), rng.integers(0, V, sum(lengths)).astype(np.int32),
        np.cumsum([0, *lengths]).astype(np.int64), np.zeros((3, 4), np.int32), teaching, said,
    )  # fmt: skip


def architecture(tied: bool = True) -> RecurrentConfig:
    return RecurrentConfig(D, D, 2 * D, 1, V, tied_head=tied)


def by_definition(
    source: Features, tables: Any, config: RecurrentConfig, params: Any, loss: LossConfig, said: Said
) -> Any:
    """Equations 1 and 2 as they are written, position by position."""
    table, head = tables
    total, weights = torch.zeros(()), 0.0
    for first, last, end in source.segments(5, False):
        for i in range(first, last):
            state = recurrent.first_state(TorchOps("cpu"), params, config, table[int(source.tokens[i + 1])])
            hidden = source.bits(np.array([i]))[0].float()
            for t in range(1, min(loss.steps, end - i - 2) + 1):
                x = recurrent.trunk(TorchOps("cpu"), params, config, state, hidden)
                frozen = {"head.weight": head} if config.tied_head else {}
                log_q = torch.log_softmax(recurrent.head(TorchOps("cpu"), params | frozen, config, x), -1)
                true = int(source.tokens[i + 1 + t])
                if source.teaching == "tokens":
                    row = -log_q[true]
                else:
                    logits = said(head @ source.bits(np.array([i + t]))[0].float())
                    p = torch.softmax(logits / loss.temperature, -1)
                    row = -(1 - loss.hard) * (p * log_q).sum() - loss.hard * log_q[int(logits.argmax())]
                weight = loss.step_weights[t - 1] if loss.step_weights else 1.0
                total, weights = total + weight * row, weights + weight
                state = recurrent.next_state(TorchOps("cpu"), params, state, table[true])
    return total / weights


CASES = {
    "mixed": (LossConfig(hard=0.1, **PLAIN), "distribution", Said(), True),
    "soft at a temperature": (LossConfig(hard=0.0, temperature=0.5, **PLAIN), "distribution", Said(), True),
    "first choices": (LossConfig(hard=1.0, **PLAIN), "distribution", Said(), True),
    "the text's own tokens": (LossConfig(hard=0.1, **PLAIN), "tokens", Said(), True),
    "weighed steps": (LossConfig(step_weights=(1.0, 0.5, 0.0), **PLAIN), "distribution", Said(), True),
    "soft-capped": (LossConfig(**PLAIN), "distribution", Said(0.5, 2.0), True),
    "untied head": (LossConfig(step_weights=(1.0, 0.5, 0.25), **PLAIN), "distribution", Said(), False),
}


def gradients(source: Features, tables: Any, loss: LossConfig, tied: bool) -> tuple[Any, dict[str, Any]]:
    table, head = tables
    config = architecture(tied)
    params = {k: v.requires_grad_() for k, v in initial(config, 0).items()}
    block = source.block(source.segments(5, False), STEPS, head, np.arange(V), temperature=loss.temperature)
    frozen = {"head.weight": head} if tied else {}
    tally = distil(TorchOps("cpu"), params | frozen, config, table, block, loss, torch.Generator())
    return tally, {k: v.grad for k, v in params.items()}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_definition(tables: Any, case: str) -> None:
    loss, teaching, said, tied = CASES[case]
    source, config = features(teaching, said), architecture(tied)
    tally, got = gradients(source, tables, loss, tied)
    params = {k: v.requires_grad_() for k, v in initial(config, 0).items()}
    expected = torch.autograd.grad(by_definition(source, tables, config, params, loss, said), list(params.values()))
    for (name, gradient), wanted in zip(got.items(), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-5)
        assert wanted.abs().max() > 1e-4, name
    assert sum(tally.rows) > 30


def test_the_options_make_a_difference(tables: Any) -> None:
    """Negative control: no two of the cases have the same gradients."""
    found = [gradients(features(t, s), tables, loss, tied)[1] for loss, t, s, tied in CASES.values()]
    for i, a in enumerate(found):
        for b in found[:i]:
            assert not torch.allclose(a["rnn_w.weight"], b["rnn_w.weight"], rtol=1e-2, atol=1e-4)


def test_gradients_are_added_to_what_is_there(tables: Any) -> None:
    source, table, head, config = features(), *tables, architecture(False)
    params = {k: v.requires_grad_() for k, v in initial(config, 0).items()}
    block = source.block(source.segments(5, False), STEPS, head, np.arange(V))
    loss = LossConfig(**PLAIN)
    distil(TorchOps("cpu"), params, config, table, block, loss, torch.Generator())
    once = {k: v.grad.clone() for k, v in params.items()}
    distil(TorchOps("cpu"), params, config, table, block, loss, torch.Generator())
    for k, v in params.items():
        torch.testing.assert_close(v.grad, 2 * once[k])


def test_nothing_to_learn_is_no_loss_and_no_nan(tables: Any) -> None:
    """Every true token is outside the draft vocabulary."""
    table, head = tables
    to_draft = np.full(V, -1)
    to_draft[0] = 0
    for teaching in ("distribution", "tokens"):
        source = features(teaching)
        source.tokens[source.tokens == 0] = 1
        params = {k: v.requires_grad_() for k, v in initial(RecurrentConfig(D, D, 2 * D, 1, 1), 0).items()}
        block = source.block(source.segments(5, False), STEPS, head[:1], to_draft)
        tally = distil(
            TorchOps("cpu"), params | {"head.weight": head[:1]}, RecurrentConfig(D, D, 2 * D, 1, 1), table, block,
            LossConfig(**PLAIN), torch.Generator(),
        )  # fmt: skip
        assert tally.rows == [] and tally.mean_loss() == 0.0 and tally.top1() == []
        assert all(v.grad is None for v in params.values())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 0}, "steps=0"),
        ({"hard": 1.5}, r"hard=1.5: expected a number from 0 to 1"),
        ({"temperature": 0.0}, r"temperature=0.0: .* pass hard=1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"steps": 3, "step_weights": (1.0, 2.0)}, "step_weights=.*expected 3 numbers"),
        ({"steps": 2, "step_weights": (0.0, 1.0)}, "the first above 0"),
    ],
)
def test_bounds_of_the_loss(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        LossConfig(**options)


# what targets say


def scaled(name: str, **options: Any) -> Any:
    base = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0,
    }  # fmt: skip
    return from_config(getattr(transformers, f"{name}Config")(**(base | options)))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (FAMILIES["llama"], Said()),
        (FAMILIES["gemma2"], Said(1.0, 8.0)),
        (lambda: scaled("Cohere", logit_scale=0.25), Said(0.25)),
        (lambda: scaled("Granite", logits_scaling=4.0), Said(0.25)),
    ],
    ids=["llama", "gemma2", "cohere", "granite"],
)
def test_what_a_model_says_follows_from_its_features(make: Any, said: Said) -> None:
    model = make().eval()
    found = said_by(model)
    assert found.cap == said.cap and found.scale == pytest.approx(said.scale, rel=1e-4)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
        z = model.get_output_embeddings()(features_of(model, ids, torch.ones_like(ids))[0])
    torch.testing.assert_close(found(z), logits, rtol=1e-3, atol=1e-3)
    if not said.plain:  # Negative control
        assert (z - logits).abs().max() > 0.5
    assert said_by(model.to(torch.bfloat16)).cap == said.cap
    assert said_by(model).scale == pytest.approx(said.scale, rel=2e-2)


def test_a_model_whose_logits_are_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["llama"]().eval()
    forward = model.forward

    def squared(**options: Any) -> Any:
        out = forward(**options)
        out.logits = out.logits**2
        return out

    monkeypatch.setattr(model, "forward", squared)
    with pytest.raises(UnsupportedModel, match="neither a multiple"):
        said_by(model)
