"""load, generate, stream on a tiny random model: what comes back, what is refused, what never changes."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")

import torch
import transformers

import portadraft
from portadraft import InvalidArgument, Model, WeightsMismatch
from portadraft.backends.quiet import quiet_transformers
from portadraft.core.recurrent import RecurrentConfig
from portadraft.drafters.checkpoint import Checkpoint, Identity, write_checkpoint
from portadraft.errors import CorruptFile, IncompatibleDrafter, ModelNotFound
from portadraft.identity import tokenizer_fingerprint
from tests.test_text import byte_level

PROMPT = "The quick brown"
LIMIT = 160


def save_model(folder: Path, seed: int = 0, hidden: int = 32, **changes: Any) -> None:
    tokenizer = byte_level()
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LIMIT,
        "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**options, **changes})).eval()
    with quiet_transformers():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_model(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return portadraft.load(folder, dtype="float32", device="cpu")


def save_drafter(folder: Path, model: Model, size: int | None = None, **identity: Any) -> Path:
    facts = model.target.facts
    size = size or facts.hidden_size
    config = RecurrentConfig(size, size, 2 * size, 1, facts.vocabulary_size, tied_head=False)
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=s).astype(np.float32) / np.sqrt(size) for k, s in config.shapes().items()}
    known = {
        "vocabulary_size": facts.vocabulary_size,
        "hidden_size": size,
        "name": "tiny",
        "tokenizer": tokenizer_fingerprint(model.codec.tokenizer),
        "weights_id": facts.weights_id,
    }
    write_checkpoint(folder, Checkpoint(config, params, Identity(**{**known, **identity})))
    return folder


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory, model: Model) -> Path:
    return save_drafter(tmp_path_factory.mktemp("drafters") / "random", model)


# what comes back


def test_the_answer_never_depends_on_the_drafter(model: Model, drafter: Path) -> None:
    plain = model.generate(PROMPT, max_tokens=40, drafter=None)
    assert len(plain.ids) == 40
    assert plain.finish_reason == "length"
    assert plain.stats.accepted == {0: 39}
    for name in ("lookup", drafter, "auto"):
        for shape in ({}, {"width": 1, "length": 4}, {"width": 4, "length": 4, "nodes": 8}, {"width": 8, "length": 5}):
            got = model.generate(PROMPT, max_tokens=40, drafter=name, **shape)
            assert (got.text, got.ids, got.finish_reason) == (plain.text, plain.ids, plain.finish_reason)


def test_all_kinds_of_prompts(model: Model) -> None:
    text = model.generate(PROMPT, max_tokens=12)
    messages = model.generate([{"role": "user", "content": PROMPT}], max_tokens=12)
    ids = model.generate(model.codec.encode_prompt(PROMPT, raw=False), max_tokens=12)
    assert text.ids == messages.ids == ids.ids
    raw = model.generate(PROMPT, raw=True, max_tokens=12)
    assert raw.stats.prompt_tokens < text.stats.prompt_tokens


def test_a_batch_is_its_rows_alone(model: Model, drafter: Path) -> None:
    prompts = [PROMPT, "Stop here", "x", [{"role": "user", "content": "naïve café 👍🏽 " * 3}]]
    for name in (drafter, "lookup", None):
        answers = model.generate(prompts, max_tokens=24, drafter=name)
        assert isinstance(answers, list)
        assert [a.ids for a in answers] == [model.generate(p, max_tokens=24, drafter=None).ids for p in prompts]


def test_sampling_is_the_same_however_it_is_drafted(model: Model, drafter: Path) -> None:
    plain = model.generate(PROMPT, max_tokens=40, temperature=0.8, seed=3, drafter=None)
    drafted = model.generate(PROMPT, max_tokens=40, temperature=0.8, seed=3, drafter=drafter)
    assert plain.ids == drafted.ids
    assert plain.ids != model.generate(PROMPT, max_tokens=40, temperature=0.8, seed=4, drafter=drafter).ids
    assert plain.ids != model.generate(PROMPT, max_tokens=40).ids


def test_streamed_pieces_are_the_whole(model: Model, drafter: Path) -> None:
    for options in ({}, {"stop": ["e", "\n"]}, {"drafter": drafter}, {"drafter": "none", "stop": "zz"}):
        whole = model.generate(PROMPT, max_tokens=40, **options)
        pieces = list(model.stream(PROMPT, max_tokens=40, **options))
        assert "".join(p.text for p in pieces) == whole.text
        assert tuple(i for p in pieces for i in p.ids) == whole.ids
        assert pieces[-1].generation is not None
        assert pieces[-1].generation.ids == whole.ids
        assert all(p.generation is None for p in pieces[:-1])


def test_an_abandoned_stream_frees_the_model(model: Model) -> None:
    stream = model.stream(PROMPT, max_tokens=40)
    next(stream)
    stream.close()
    assert model.target.lengths == ()
    assert model.generate(PROMPT, max_tokens=4).finish_reason == "length"


def test_stop_strings_cut_text_and_ids(model: Model, drafter: Path) -> None:
    whole = model.generate(PROMPT, max_tokens=60, drafter=None)
    stop = whole.text[len(whole.text) // 2 :][:2]
    cut = whole.text[: whole.text.index(stop)]
    for name in (None, drafter, "lookup"):
        got = model.generate(PROMPT, max_tokens=60, stop=stop, drafter=name)
        assert got.text == cut
        assert got.finish_reason == "stop"
        assert got.ids == whole.ids[: len(got.ids)]
        assert stop not in model.codec.decode(got.ids)


def test_an_end_token_inside_an_accepted_block(folder: Path, model: Model, tmp_path: Path) -> None:
    whole = model.generate(PROMPT, max_tokens=40, drafter=None).ids
    place = next(i for i in range(12, 40) if whole[i] not in whole[:i])
    ended = tmp_path / "ended"
    save_model(ended)
    (ended / "generation_config.json").write_text(json.dumps({"eos_token_id": whole[place]}))
    other = portadraft.load(ended, dtype="float32", device="cpu", drafter=None)
    assert whole[place] in other.codec.end_tokens
    from portadraft.drafters import OracleDrafter

    ids = tuple(other.codec.encode_prompt(PROMPT, raw=False))
    oracle = OracleDrafter(other.target.ops, {ids: whole}, other.target.facts.vocabulary_size, 1.0)
    cut_inside = False
    for length in (3, 4, 5, 6):
        for name in (None, oracle):
            got = other.generate(PROMPT, max_tokens=40, drafter=name, width=1, length=length)
            assert got.ids == whole[: place + 1]
            assert got.finish_reason == "end"
            assert got.text == other.codec.decode(whole[:place])
        cut_inside |= place % (length + 1) not in (0, length)
    assert cut_inside


def test_the_context_ends_the_answer(model: Model, drafter: Path) -> None:
    ids = [5 + i % 7 for i in range(LIMIT - 10)]
    for name in (None, drafter):
        got = model.generate(ids, max_tokens=100, drafter=name)
        assert got.finish_reason == "context"
        assert len(got.ids) == 10


def test_stats(model: Model, drafter: Path) -> None:
    got = model.generate("a b a b a b a b", max_tokens=30, drafter="lookup", profile=True)
    stats = got.stats
    assert stats.generated_tokens == len(got.ids)
    assert 1 + sum((n + 1) * count for n, count in stats.accepted.items()) <= len(got.ids)
    assert sum(stats.accepted.values()) <= stats.steps <= len(got.ids) - 1
    assert set(stats.stages_s or {}) >= {"prefill", "verify", "accept", "commit"}
    assert set(stats.chosen) == {"backend", "device", "dtype", "drafter", "shape"}
    assert all(choice.reason for choice in stats.chosen.values())
    json.dumps(got.as_dict())
    assert model.generate(PROMPT, max_tokens=3).stats.stages_s is None


def test_what_a_target_notes_is_said(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    before = model.generate("hello", max_tokens=2).notices
    monkeypatch.setattr(type(model.target), "notes", ("no CUDA graph for the pass (a reason)",), raising=False)
    assert model.generate("hello", max_tokens=2).notices == (*before, "no CUDA graph for the pass (a reason)")


def test_threads_queue(model: Model) -> None:
    prompts = ["one", "two", "three", "four"]
    expected = [model.generate(p, max_tokens=20).ids for p in prompts]
    got: dict[int, tuple[int, ...]] = {}
    threads = [
        threading.Thread(target=lambda i=i: got.update({i: model.generate(prompts[i], max_tokens=20).ids}))
        for i in range(len(prompts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(len(prompts))] == expected


def test_by_name(folder: Path, model: Model) -> None:
    got = portadraft.generate(str(folder), PROMPT, max_tokens=6)
    assert isinstance(got, portadraft.Generation)
    assert (
        "".join(p.text for p in portadraft.stream(model, PROMPT, max_tokens=6))
        == model.generate(PROMPT, max_tokens=6).text
    )


# what is refused


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("", {}, "prompt"),
        ([], {}, "batch of no prompts"),
        (["fine", ""], {}, "prompt"),
        ([5, 10**6], {}, "1000000"),
        ([-1], {}, "-1"),
        ([3] * LIMIT, {}, "context"),
        (3.5, {}, "float"),
        (PROMPT, {"max_tokens": 0}, "max_tokens=0"),
        (PROMPT, {"max_tokens": -3}, "max_tokens=-3"),
        (PROMPT, {"max_tokens": 2.5}, "max_tokens=2.5"),
        (PROMPT, {"width": 0}, "width=0"),
        (PROMPT, {"length": 0}, "length=0"),
        (PROMPT, {"nodes": 1}, "nodes=1"),
        (PROMPT, {"temperature": -1}, "temperature=-1"),
        (PROMPT, {"temperature": float("nan")}, "temperature=nan"),
        (PROMPT, {"seed": -1}, "seed=-1"),
        (PROMPT, {"stop": [""]}, "stop"),
        (PROMPT, {"stop": 5}, "stop=5"),
        (PROMPT, {"width": 9000, "length": 1}, "width=9000"),
        (PROMPT, {"drafter": ""}, "drafter=''"),
        (PROMPT, {"drafter": 7}, "drafter=7"),
    ],
)
def test_bad_arguments(model: Model, prompt: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words.replace("(", r"\(")):
        model.generate(prompt, **options)
    assert model.target.lengths == ()
    assert model.generate(PROMPT, max_tokens=2).finish_reason == "length"


def test_bytes_and_booleans_are_no_prompts(model: Model) -> None:
    for prompt in (b"abc", [True, False]):
        with pytest.raises(InvalidArgument, match="prompt"):
            model.generate(prompt)
    with pytest.raises(InvalidArgument, match="surrogate"):
        model.generate("a\ud800b")


def test_a_call_inside_an_open_stream_is_refused_not_waited_for(model: Model) -> None:
    stream = model.stream(PROMPT, max_tokens=20)
    next(stream)
    with pytest.raises(InvalidArgument, match="still open in this thread"):
        model.generate(PROMPT, max_tokens=2)
    with pytest.raises(InvalidArgument, match="still open in this thread"):
        next(model.stream(PROMPT, max_tokens=2))
    stream.close()
    assert model.generate(PROMPT, max_tokens=2).finish_reason == "length"


def test_a_huge_max_tokens_is_a_wish(model: Model) -> None:
    ids = [5 + i % 7 for i in range(LIMIT - 10)]
    got = model.generate(ids, max_tokens=10**18)
    assert got.finish_reason == "context"
    assert len(got.ids) == 10


def test_a_folder_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ModelNotFound, match="no tokenizer"):
        portadraft.load(tmp_path)


def test_unknown_option(model: Model) -> None:
    with pytest.raises(TypeError, match="max_token"):
        model.generate(PROMPT, max_token=3)


def test_width_beyond_the_drafters_vocabulary(model: Model, drafter: Path) -> None:
    stream = model.stream(PROMPT, drafter=drafter, width=3000, length=1)
    with pytest.raises(InvalidArgument, match="width=3000"):
        next(stream)  # before anything is shown
    assert model.target.lengths == ()


def test_drafters_that_do_not_fit(model: Model, drafter: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no-such-drafter"):
        model.generate(PROMPT, drafter="no-such-drafter")
    with pytest.raises(ModelNotFound, match="train one"):
        model.generate(PROMPT, drafter="redrafter")
    wide = save_drafter(tmp_path / "wide", model, size=48)
    with pytest.raises(IncompatibleDrafter, match="48"):
        model.generate(PROMPT, drafter=wide)
    lying = save_drafter(tmp_path / "lying", model)
    document = json.loads((lying / "config.json").read_text())
    for name in ("hidden_size", "vocabulary_size"):
        changed = {**document, "target": {**document["target"], name: 4000}}
        (lying / "config.json").write_text(json.dumps(changed))
        with pytest.raises((IncompatibleDrafter, CorruptFile), match="4000"):
            model.generate(PROMPT, drafter=lying)
    foreign = save_drafter(tmp_path / "foreign", model, tokenizer="0" * 16)
    with pytest.raises(IncompatibleDrafter, match="tokenizer"):
        model.generate(PROMPT, drafter=foreign)


def test_a_drafter_for_other_weights_warns_and_stays_exact(model: Model, drafter: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "other", seed=1)
    other = portadraft.load(tmp_path / "other", dtype="float32", device="cpu", drafter=None)
    plain = other.generate(PROMPT, max_tokens=20)
    with pytest.warns(WeightsMismatch, match="other weights"):
        drafted = other.generate(PROMPT, max_tokens=20, drafter=drafter)
    assert drafted.ids == plain.ids
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(PROMPT, max_tokens=2, drafter=drafter)


def test_damaged_files(folder: Path, model: Model, tmp_path: Path) -> None:
    broken = save_drafter(tmp_path / "broken", model)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CorruptFile, match=r"model\.safetensors"):
        model.generate(PROMPT, drafter=broken)
    (broken / "config.json").write_text("{")
    with pytest.raises(CorruptFile, match=r"config\.json"):
        model.generate(PROMPT, drafter=broken)
    damaged = tmp_path / "model"
    save_model(damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(CorruptFile):
        portadraft.load(damaged)


def test_models_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        portadraft.load("smollm2-135")
    with pytest.raises(ModelNotFound):
        portadraft.load(tmp_path / "missing")
    with pytest.raises(InvalidArgument, match="backend"):
        portadraft.load(folder, backend="abacus")
