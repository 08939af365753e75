"""Arrays as options and prompts: what is plainly a number or a list is taken, the rest refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import torch

from portadraft import InvalidArgument, Model
from tests.test_api import PROMPT


@pytest.mark.parametrize("of", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_arrays_that_hold_one_number_or_a_list_are_that(model: Model, drafter: Path, of: Any) -> None:
    plain: dict[str, Any] = {
        "max_tokens": 12, "temperature": 0.75, "top_k": 40, "top_p": 0.5, "repetition_penalty": 1.25, "min_tokens": 3,
        "seed": 5, "width": 2, "length": 2, "nodes": 4, "logprobs": 2, "timeout_s": 100.0, "raw": True, "reuse": False,
        "banned": [11, 12], "end_tokens": [7, 8],
    }  # fmt: skip
    theirs = {name: of(value) for name, value in plain.items()}
    bias = {9: 2.0}
    expected = model.generate(PROMPT, drafter=drafter, logit_bias=bias, **plain)
    got = model.generate(PROMPT, drafter=drafter, logit_bias={of(9): of(2.0)} if of is torch.tensor else bias, **theirs)
    assert (got.ids, got.logprobs) == (expected.ids, expected.logprobs)
    ids = [[5, 6, 7], [8, 9]]
    alone = [model.generate(one, max_tokens=4).ids for one in ids]
    assert model.generate(of(ids[0]), max_tokens=4).ids == alone[0]
    assert [a.ids for a in model.generate([of(one) for one in ids], max_tokens=4)] == alone
    seeded = model.generate(ids, max_tokens=4, temperature=1.0, seed=of([3, 4]))
    assert [a.ids for a in seeded] == [a.ids for a in model.generate(ids, max_tokens=4, temperature=1.0, seed=[3, 4])]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": torch.tensor([0.7])}, r"temperature=tensor\(\[0.7"),
        ({"temperature": torch.tensor(0.7, device="meta")}, "temperature=tensor"),
        ({"top_k": torch.tensor(5.0)}, r"top_k=tensor\(5"),
        ({"max_tokens": np.asarray([3])}, r"max_tokens=array\(\[3"),
        ({"banned": [torch.tensor(5.5)]}, r"banned: tensor\(5\.5"),
        ({"banned": torch.tensor([[5]])}, r"banned=tensor"),
        ({"end_tokens": [torch.tensor(5.0)]}, "end_tokens="),
        ({"logit_bias": torch.zeros(500)}, r"logit_bias=tensor.{0,60}: expected a mapping"),
        ({"raw": torch.tensor(1)}, r"raw=tensor\(1"),
        ({"acceptance": np.asarray([1, 2])}, "acceptance=array"),
        ({"sampling": np.asarray([1, 2])}, "sampling=array"),
        ({"seed": np.asarray([3])}, "seed: a list of 1 for one prompt"),
    ],
)
def test_other_arrays_are_refused_by_name(model: Model, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"(?s)^{words}"):
        model.generate(PROMPT, **options)


def test_arrays_of_prompts_have_one_dimension(model: Model) -> None:
    with pytest.raises(InvalidArgument, match=r"^prompt: Tensor of shape \(1, 2\).*wrap\(model\)"):
        model.generate(torch.tensor([[5, 6]]))
    with pytest.raises(InvalidArgument, match=r"^prompt #1 .*ndarray of shape \(1, 2\)"):
        model.generate([[5, 6], np.asarray([[5, 6]])])
    with pytest.raises(InvalidArgument, match=r"^prompt #0 .*5\.5"):
        model.generate([torch.tensor(5.5)])
