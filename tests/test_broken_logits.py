"""A model that computes NaN or infinity: an error that says so, however tokens are chosen; the model stays usable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import portadraft
from portadraft import Model, PortadraftError
from portadraft.backends.numpy import NumpyTarget
from portadraft.core.decode import Decoder, Request
from portadraft.core.sampling import Sampling
from portadraft.core.types import BeamShape
from portadraft.errors import BrokenLogits
from portadraft.testing import random_redrafter

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "all filters": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {3: 1.0}},
    "greedy with penalties": {"repetition_penalty": 1.3},
}
PROMPT = (1, 2, 3)


class Breaking:
    """A target whose logits at one slot of its n-th pass are as given."""

    def __init__(self, target: Any, after: int, value: float) -> None:
        self._target, self._left, self._value = target, after, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def admit(self, *args: Any, **more: Any) -> Any:
        return self._broken(self._target.admit(*args, **more))

    def verify(self, packed: Any) -> Any:
        return self._broken(self._target.verify(packed))

    def _broken(self, verified: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            verified.logits[0, 0, :] = self._value
        return verified


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("passes", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafted", [None, "match", "rejection"])
def test_the_place_is_named(way: str, passes: int, value: float, drafted: str | None) -> None:
    target = NumpyTarget.random(1, vocabulary_size=64)
    drafter = random_redrafter(target, 5) if drafted else None
    chain = drafted == "rejection"
    decoder = Decoder(
        Breaking(target, passes, value), drafter, BeamShape(1, 2) if chain else BeamShape(2, 2),
        sampling=Sampling(**WAYS[way]), logprobs=2, acceptance="rejection" if chain else "match",
    )  # fmt: skip
    given: list[int] = []

    def run() -> None:
        progress = decoder.admit([Request(PROMPT, 40)])
        while True:
            given.extend(progress[0].tokens)
            progress = decoder.step()

    with pytest.raises(BrokenLogits, match=r"logits: NaN or infinite at position \d+ of row 0, .* float32 on cpu") as e:
        run()
    assert f"position {len(PROMPT) + len(given)} " in str(e.value)
    decoder.close()
    assert target.lengths == ()
    assert Decoder(target).admit([Request(PROMPT, 4)])[0].tokens


def test_only_rows_that_are_broken_are_named() -> None:
    target = NumpyTarget.random(1, vocabulary_size=64)
    decoder = Decoder(Breaking(target, 1, 0.0), sampling=Sampling(0.7))
    decoder.admit([Request(PROMPT, 4), Request((5,), 4)])
    assert len(decoder.step()) == 2, "equal logits are no broken ones"


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Model:
    pytest.importorskip("torch", reason="the torch extra is not installed")
    from tests.test_api import save_model

    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    save_model(path)
    return portadraft.load(path, dtype="float32", device="cpu")


@pytest.mark.parametrize("way", WAYS)
def test_the_model_is_named_and_stays_usable(poisoned: Model, way: str) -> None:
    import torch

    before = poisoned.generate("hello", max_tokens=4).ids
    weight = next(p for name, p in poisoned.target.model.named_parameters() if "norm" in name)
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.fill_(float("nan"))
        with pytest.raises(PortadraftError, match=rf"^model='{poisoned.name}': logits: NaN .*dtype='bfloat16'"):
            poisoned.generate("hello", max_tokens=4, **WAYS[way])
        with pytest.raises(BrokenLogits):
            list(poisoned.stream("hello", max_tokens=4, **WAYS[way]))
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert poisoned.generate("hello", max_tokens=4).ids == before
