"""Which models are accepted, which are refused, and how the outcome is remembered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import portadraft.backends.torch.attention as attention
from portadraft.backends.torch import make_target, selfcheck, shrink
from portadraft.backends.torch.cache import RowCache
from portadraft.backends.torch.shrink import shrunken, shrunken_clones
from portadraft.core.target import Target
from portadraft.errors import UnsupportedModel

from .families import _BASE, FAMILIES, REFUSED


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PORTADRAFT_CACHE", str(tmp_path))
    return tmp_path / "selfcheck"


@pytest.mark.parametrize("family", FAMILIES)
def test_families_pass(family: str) -> None:
    assert selfcheck.check(FAMILIES[family]()) == ""


@pytest.mark.parametrize("family", REFUSED)
def test_others_are_refused_by_name_with_the_reason(family: str) -> None:
    make, reason = REFUSED[family]
    model = make()
    with pytest.raises(UnsupportedModel, match=rf"model type '{family}'.*({reason}).*use another model"):
        make_target(model)


@pytest.mark.parametrize("family", REFUSED)
def test_the_check_finds_them_without_looking_at_names(family: str) -> None:
    make, _ = REFUSED[family]
    assert selfcheck.check(make())


def test_target_satisfies_the_protocol() -> None:
    target = make_target(FAMILIES["llama"]())
    assert isinstance(target, Target)
    facts = target.facts
    assert (facts.vocabulary_size, facts.hidden_size, facts.context_limit) == (97, 32, 256)
    assert facts.dtype == "float32"
    assert facts.cache_bytes_per_token == 4 * 2 * 2 * 8 * 4  # layers, keys and values, heads, dim, bytes
    assert target.embeddings().shape == target.head_rows().shape == (97, 32)
    assert target.head_bias() is None


# negative controls: a broken mask, position or cache must fail the check


def _all_visible(self: Any, function: Any, plain: bool) -> torch.Tensor:
    return torch.ones((*self.positions.shape, self.past + self.positions.shape[1]), dtype=torch.bool)[:, None]


def _window_by_slot(self: Any, function: Any, plain: bool) -> torch.Tensor:
    visible = self._committed_or_ancestor()
    if plain:
        return visible
    # The usual mistake: the sixth slot of a tree taken for the sixth position.
    rows, slots = self.positions.shape
    slot = torch.arange(self.past + slots)
    batch = torch.arange(rows)[:, None, None, None]
    return visible & function(batch, batch, slot[None, None, self.past :, None], slot[None, None, None, :])


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_control_everything_visible(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.Pass, "mask", _all_visible)
    assert "standard deviations" in selfcheck.check(FAMILIES[family]())


def test_control_window_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.Pass, "mask", _window_by_slot)
    assert "standard deviations" in selfcheck.check(FAMILIES["mistral-sliding"]())
    assert selfcheck.check(FAMILIES["llama"]()) == ""


def test_control_commit_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def count_only(self: RowCache, bases: Any, counts: list[int], *rest: Any) -> None:
        self.lengths[:] = [n + c for n, c in zip(self.lengths, counts, strict=True)]

    monkeypatch.setattr(RowCache, "move", count_only)
    assert "standard deviations" in selfcheck.check(FAMILIES["llama"]())


def test_control_soft_cap_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = attention._explicit
    monkeypatch.setattr(attention, "_explicit", lambda q, k, v, m, s, cap, sinks: stock(q, k, v, m, s, None, sinks))
    assert "standard deviations" in selfcheck.check(FAMILIES["gemma2"]())


def test_control_sinks_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = attention._explicit
    monkeypatch.setattr(attention, "_explicit", lambda q, k, v, m, s, cap, sinks: stock(q, k, v, m, s, cap, None))
    assert "standard deviations" in selfcheck.check(FAMILIES["gpt-oss"]())


# the record


def test_outcome_is_recorded_and_reused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["llama"]()
    selfcheck.require_supported(model)
    (record,) = folder.iterdir()
    assert json.loads(record.read_text()) == {"reason": ""}
    monkeypatch.setattr(selfcheck, "check", lambda model: pytest.fail("checked again"))
    selfcheck.require_supported(model)
    record.write_text(json.dumps({"reason": "it was found wanting"}))
    with pytest.raises(UnsupportedModel, match="found wanting"):
        selfcheck.require_supported(model)


@pytest.mark.parametrize("junk", ["", "{", "[]", '{"reason": 3}', "\x00"])
def test_a_corrupt_record_is_a_miss(folder: Path, junk: str) -> None:
    model = FAMILIES["llama"]()
    selfcheck.require_supported(model)
    (record,) = folder.iterdir()
    record.write_text(junk)
    selfcheck.require_supported(model)
    assert json.loads(record.read_text()) == {"reason": ""}


def test_another_configuration_is_another_record(folder: Path) -> None:
    selfcheck.require_supported(FAMILIES["llama"]())
    selfcheck.require_supported(FAMILIES["qwen2"]())
    assert len(list(folder.iterdir())) == 2


def test_an_unwritable_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "selfcheck").write_text("a file where the folder should be")
    selfcheck.require_supported(FAMILIES["llama"]())


# shrinking


def test_a_large_configuration_is_cut() -> None:
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(num_hidden_layers=48, hidden_size=3840, intermediate_size=15360, num_attention_heads=16,
                              num_key_value_heads=8, head_dim=256, vocab_size=262144, sliding_window=1024)  # fmt: skip
    small = shrunken(config, 0)
    assert small.num_hidden_layers == len(small.layer_types)
    assert set(small.layer_types) == set(config.layer_types)
    assert (small.sliding_window, small.head_dim, small.vocab_size) == (8, 256, 128)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    clone = next(iter(shrunken_clones(model)))
    assert sum(p.numel() for p in clone.parameters()) < 20_000_000
    assert selfcheck.check(model) == ""


def test_nothing_that_fits_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink, "MOST_PARAMETERS", 10)
    reason = selfcheck.check(FAMILIES["llama"]())
    assert re.search("cut 0 has [0-9,]+ parameters, more than 10; cut 1 has", reason)
    assert "portadraft.load(…, check=False)" in reason


def test_a_reason_is_said_once() -> None:
    config = transformers.RwkvConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    with pytest.raises(UnsupportedModel) as caught:
        make_target(transformers.AutoModelForCausalLM.from_config(config).eval())
    assert str(caught.value).count("cannot verify trees") == str(caught.value).count("model type 'rwkv'") == 1
    assert caught.value.reason == "its forward takes no key-value cache (a recurrent model?)"


@pytest.mark.parametrize(("kinds", "what"), [(["mamba", "attention"], "hybrid"), (["mamba", "mamba"], "recurrent")])
def test_hybrid_and_recurrent_are_told_apart(kinds: list[str], what: str) -> None:
    model = FAMILIES["llama"]()
    model.config.layers_block_type = kinds
    assert f"it is a {what} model with layers of type mamba," in (selfcheck.obvious_reason(model) or "")


def test_bidirectional_attention_is_refused() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**{**_BASE, "num_hidden_layers": 2})
    config.is_causal = False
    model = AutoModelForCausalLM.from_config(config).eval()
    assert "bidirectional" in selfcheck.check(model)
