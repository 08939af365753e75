"""Training: alignment, gradients, learning, vocabulary, files, and the whole way to a drafter's folder."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from portadraft.backends.torch import make_target
from portadraft.backends.torch.ops import TorchOps
from portadraft.core import recurrent
from portadraft.core.decode import Request
from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.types import BeamShape
from portadraft.core.uniforms import row_seed
from portadraft.drafters.checkpoint import read_checkpoint
from portadraft.drafters.redrafter import ReDrafter
from portadraft.errors import InvalidArgument, ModelNotFound
from portadraft.testing import decode
from portadraft.training import data, vocabulary
from portadraft.training.features import Document, Features
from portadraft.training.generate import greedy_answers
from portadraft.training.loop import FitConfig, fit, initial
from portadraft.training.loss import LossConfig, distil
from portadraft.training.recording import features_of, record
from portadraft.tuner.recordings import record as made
from portadraft.tuner.replay import replay

V, D = 48, 16
EVERY = LossConfig(steps=3, hard=0.1, floor=1.0, dropout=0.0)


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.6, tie_word_embeddings=True, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def tables(model: Any) -> tuple[Any, Any]:
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()


@pytest.fixture(scope="module")
def answered(model: Any) -> list[Document]:
    """Random prompts with the model's own greedy answers, every fifth held out."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, V, rng.integers(3, 9)).tolist() for _ in range(60)]
    answers = greedy_answers(make_target(model), prompts, 24, (), batch=16)
    return [
        Document([*p, *a], 0, len(p), "answer", i % 5 == 0)
        for i, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]


@pytest.fixture(scope="module")
def features(model: Any, answered: list[Document], tmp_path_factory: pytest.TempPathFactory) -> Features:
    return record(model, answered, tmp_path_factory.mktemp("features"), batch_tokens=256)


def architecture(size: int = V) -> RecurrentConfig:
    return RecurrentConfig(D, D, 2 * D, 1, size)


# what is recorded


def test_batched_answers_are_the_models_own(model: Any, answered: list[Document]) -> None:
    for document in answered[:8]:
        ids = torch.tensor([document.tokens[: document.answer]])
        own = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert own[0].tolist() == document.tokens


def test_features_are_what_the_head_reads(model: Any, features: Features) -> None:
    assert sorted(map(tuple, features.documents.tolist())) == sorted(map(tuple, features.documents.tolist()))
    for d in range(0, len(features), 7):
        low, high = features.offsets[d : d + 2]
        ids = torch.from_numpy(features.tokens[low:high].astype(np.int64))[None]
        alone = model.model(input_ids=ids).last_hidden_state[0]
        torch.testing.assert_close(features_of(model, ids, torch.ones_like(ids))[0], alone)
        torch.testing.assert_close(features.bits(np.arange(low, high)).float(), alone, rtol=1e-2, atol=1e-2)


def test_every_document_is_recorded_once(answered: list[Document], features: Features) -> None:
    def key(tokens: list[int], answer: int, held: bool) -> str:
        return json.dumps([tokens, answer, bool(held)])

    wanted = sorted(key(d.tokens, d.answer, d.held_out) for d in answered)
    found = sorted(
        key(features.tokens[features.offsets[d] : features.offsets[d + 1]].tolist(), int(a), h)
        for d, (_, a, _, h) in enumerate(features.documents)
    )
    assert wanted == found


def test_alignment(model: Any, features: Features) -> None:
    """Root i+1; step t reads h_i and the tokens up to i+t, and learns the target's choice of token i+1+t."""
    _, head = tables(model)
    steps = 4
    every = np.arange(V)
    seen = agreed = shifted = 0
    for held in (False, True):
        for segment in features.segments(7, held)[::3]:
            first, last, end = segment
            block = features.block(segment[None], steps, head, every)
            assert block.hidden.shape == (last - first, D)
            for row, i in enumerate(range(first, last)):
                torch.testing.assert_close(block.hidden[row], features.bits(np.array([i]))[0].float())
                assert block.tokens[row, 0] == features.tokens[i + 1]
                for t in range(1, steps + 1):
                    if i + 1 + t >= end:
                        assert block.draft[row, t] == -1
                        continue
                    true = int(features.tokens[i + 1 + t])
                    assert block.tokens[row, t] == block.draft[row, t] == true
                    said = block.soft[block.rows[row, t - 1]]
                    expected = torch.softmax(head @ features.bits(np.array([i + t]))[0].float(), -1)
                    torch.testing.assert_close(said, expected)
                    d = int(np.searchsorted(features.offsets, i, side="right")) - 1
                    if i + 1 + t >= features.offsets[d] + features.documents[d, 1]:
                        # In an answer the model's first choice IS the next token; one off, it is not.
                        seen += 1
                        agreed += int(said.argmax()) == true
                        shifted += int(block.soft[block.rows[row, max(t - 2, 0)]].argmax()) == true
    assert seen > 500
    assert agreed > 0.98 * seen
    assert shifted < 0.8 * seen


def test_segments_cover_each_position_once(features: Features) -> None:
    for held in (False, True):
        segments = features.segments(5, held)
        positions = np.concatenate([np.arange(a, b) for a, b, _ in segments])
        assert len(np.unique(positions)) == len(positions)
        wanted = sum(
            int(features.offsets[d + 1] - features.offsets[d]) - 2
            for d in range(len(features))
            if bool(features.documents[d, 3]) == held
        )
        assert len(positions) == wanted


# the loss


@pytest.mark.parametrize("size", [V, 30])
def test_gradients_are_those_of_the_plain_formula(model: Any, features: Features, size: int) -> None:
    """Chunks, shared distributions and the hand-written gradient against autograd on the definition."""
    table, head = tables(model)
    chosen = np.sort(np.random.default_rng(3).permutation(V)[:size])
    to_draft = np.full(V, -1)
    to_draft[chosen] = np.arange(size)
    rows, config = head[torch.from_numpy(chosen)], architecture(size)
    segments = features.segments(9, False)[:12]
    params = {k: v.requires_grad_() for k, v in initial(config, 0).items()}
    ops = TorchOps("cpu")
    block = features.block(segments, EVERY.steps, rows, to_draft)
    tally = distil(ops, params | {"head.weight": rows}, config, table, block, EVERY, torch.Generator())
    got = {k: v.grad.clone() for k, v in params.items()}

    total, count = torch.zeros(()), 0
    for first, last, end in segments:
        for i in range(first, last):
            state = recurrent.first_state(ops, params, config, table[int(features.tokens[i + 1])])
            hidden = features.bits(np.array([i]))[0].float()
            for t in range(1, EVERY.steps + 1):
                place = i + 1 + t
                if place >= end or to_draft[features.tokens[place]] < 0:
                    break
                x = recurrent.trunk(ops, params, config, state, hidden)
                log_q = torch.log_softmax(recurrent.head(ops, {"head.weight": rows}, config, x), -1)
                p = torch.softmax(rows @ features.bits(np.array([place - 1]))[0].float(), -1)
                total = total - 0.9 * (p * log_q).sum() - 0.1 * log_q[p.argmax()]
                count += 1
                state = recurrent.next_state(ops, params, state, table[int(features.tokens[place])])
    wanted = torch.autograd.grad(total / count, list(params.values()))
    assert tally.rows and sum(tally.rows) == count
    assert tally.mean_loss() == pytest.approx(float(total.detach()) / count, rel=1e-4)
    for name, gradient in zip(params, wanted, strict=True):
        torch.testing.assert_close(got[name], gradient, rtol=2e-3, atol=1e-5)
        assert gradient.abs().max() > 1e-4, f"{name} has no gradient to compare"


def test_later_steps_are_trained_where_decoding_gets_to(model: Any, features: Features) -> None:
    table, head = tables(model)
    block = features.block(features.segments(16, False), 5, head, np.arange(V))
    params, config = initial(architecture(), 0), architecture()

    def rows(**options: Any) -> list[float]:
        loss = LossConfig(dropout=0.0, **options)
        generator = torch.Generator().manual_seed(0)
        return distil(
            TorchOps("cpu"), params | {"head.weight": head}, config, table, block, loss, generator, gradients=False
        ).rows

    every, some = rows(floor=1.0), rows(floor=0.2, reach=1.0)
    assert some[0] == every[0] and all(a < 0.7 * b for a, b in zip(some[1:], every[1:], strict=True))
    assert some == sorted(some, reverse=True)


# learning


def run(model: Any, features: Features, **changes: Any) -> Any:
    table, head = tables(model)
    settings = FitConfig(**({"epochs": 25, "positions": 128, "segment": 16, "rate": 3e-3, "average": 0.98} | changes))
    chosen = np.arange(V, dtype=np.int32)
    return fit(architecture(), table, head, chosen, [features], features.recordings(), settings)


def divergence(model: Any, features: Features, params: dict[str, Any]) -> float:
    """KL (up to the target's entropy) on held-out text."""
    table, head = tables(model)
    block = features.block(features.segments(16, True), 5, head, np.arange(V))
    loss = LossConfig(hard=0.0, floor=1.0, dropout=0.0)
    return distil(
        TorchOps("cpu"), params | {"head.weight": head}, architecture(), table, block, loss, torch.Generator(), False
    ).mean_loss()


def test_training_lowers_held_out_divergence(model: Any, features: Features) -> None:
    torch.set_num_threads(1)
    result = run(model, features)
    before, after = divergence(model, features, initial(architecture(), 0)), divergence(model, features, result.params)
    assert after < before - 0.3
    assert result.score > 1.15
    assert result.skipped == 0
    # Negative control: with features of other positions there is nothing to learn from.
    mixed = Features(
        np.random.default_rng(0).permutation(features.hidden[np.arange(len(features.tokens))]),
        features.tokens, features.offsets, features.documents,
    )  # fmt: skip
    assert run(model, mixed, epochs=8).score < result.score


def test_a_seed_fixes_the_result(model: Any, features: Features) -> None:
    a, b, c = (run(model, features, epochs=2, seed=s).params for s in (1, 1, 2))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not all(torch.equal(a[k], c[k]) for k in a)


def test_a_step_that_is_not_finite_is_skipped_and_counted(model: Any, features: Features) -> None:
    hidden = features.hidden[np.arange(len(features.tokens))]
    hidden[int(features.offsets[1]) + 4] = 0x7FC0  # NaN
    if features.documents[1, 3]:
        pytest.fail("the document is held out: choose another")
    broken = Features(hidden, features.tokens, features.offsets, features.documents)
    result = run(model, broken, epochs=2)
    assert result.skipped > 0
    assert result.updates > 0
    assert all(torch.isfinite(v).all() for v in result.params.values())


def test_the_best_by_replay_is_kept(model: Any, features: Features) -> None:
    table, head = tables(model)
    saved: list[Any] = []
    settings = FitConfig(epochs=2, positions=256, segment=16, rate=3e-3, evaluations=8, patience=None)
    result = fit(
        architecture(), table, head, np.arange(V, dtype=np.int32), [features], features.recordings(), settings,
        save=lambda params, entry: saved.append(({k: v.clone() for k, v in params.items()}, entry)),
    )  # fmt: skip
    scores = [entry["tokens_per_step"]["4x4"] for entry in result.history]
    assert len(scores) > 5
    assert result.score == pytest.approx(max(scores), abs=1e-4)
    assert [e["tokens_per_step"]["4x4"] for _, e in saved] == sorted({*np.maximum.accumulate(scores).tolist()})
    assert all(torch.equal(result.params[k], saved[-1][0][k]) for k in result.params)


# replay


@pytest.fixture(scope="module")
def params(model: Any, features: Features) -> dict[str, Any]:
    """Of a drafter that guesses some tokens right."""
    trained: dict[str, Any] = run(model, features, epochs=6).params
    return trained


REPLAYED = [
    BeamShape(*shape)
    for shape in (
        (1, 1), (1, 3), (1, 4), (1, 5, 3), (2, 2), (2, 4, 5), (3, 2), (3, 5, 4), (4, 1), (4, 3, 8), (4, 4), (4, 4, 6),
        (6, 2, 4), (6, 5, 12), (8, 4),
    )
]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replay_counts_what_the_loop_accepts(model: Any, params: dict[str, Any], temperature: float) -> None:
    """Fifteen shapes, whose accepted counts are those of the decode loop, step by step, in float32."""
    table, head = tables(model)
    prompts, most = [(3, 4, 5), (40, 2, 9, 9), (7,)], 40
    target = make_target(model)
    drafter = ReDrafter(target, architecture(), params)
    requests = [Request(p, most, row_seed(3, i)) for i, p in enumerate(prompts)]
    recordings = made(target, prompts, max_tokens=most, temperature=temperature, seed=3)
    own = params | {"head.weight": head}
    results = replay(TorchOps("cpu"), architecture(), own, table, recordings, REPLAYED, rows=2)
    for got in results:
        answers, reported = decode(target, drafter, requests, got.shape, temperature=temperature)
        # The loop also counts a last step that ends exactly at the limit; replay leaves out what it cannot know.
        for row, mine in enumerate(got.accepted):
            assert answers[row] == recordings[row].tokens.tolist()
            loop = [p.accepted for p in reported if p.key == row and p.accepted is not None]
            assert mine == loop[: len(mine)]
            assert len(loop) - len(mine) <= 1
        assert got.steps > 10
    assert sum(sum(map(sum, got.accepted)) for got in results) > 50
    # Negative control: every draft from its neighbour's feature.
    shifted = [replace(r, hidden=np.roll(r.hidden, 1, axis=0)) for r in recordings]
    wrong = replay(TorchOps("cpu"), architecture(), own, table, shifted, REPLAYED, rows=2)
    assert sum(a.accepted != b.accepted for a, b in zip(results, wrong, strict=True)) > 10


# the draft vocabulary


def test_vocabulary_takes_what_was_said_and_what_was_likely() -> None:
    occurrences, mean = np.zeros(10), np.zeros(10)
    occurrences[[2, 5]] = [6, 4]
    mean[[7, 1]] = [0.5, 0.3]
    assert vocabulary.choose(occurrences, mean, 4, always=[9]).tolist() == [2, 5, 7, 9]
    assert vocabulary.choose(occurrences, mean, 10, always=[]).tolist() == list(range(10))
    assert vocabulary.choose(occurrences, mean, 4, always=[9]).dtype == np.int32
    for size in (0, 11):
        with pytest.raises(InvalidArgument, match=f"draft_vocabulary={size}"):
            vocabulary.choose(occurrences, mean, size, always=[9])


def test_coverage_and_mean_prediction(model: Any, features: Features) -> None:
    _, head = tables(model)
    mean = vocabulary.mean_prediction(features, head)
    assert mean.sum() == pytest.approx(1)
    wanted = torch.zeros(V)
    for d in range(len(features)):
        if not features.documents[d, 3]:
            low, high = features.offsets[d : d + 2]
            wanted += torch.softmax(features.bits(np.arange(low, high)).float() @ head.T, -1).sum(0)
    np.testing.assert_allclose(mean, (wanted / wanted.sum()).numpy(), rtol=1e-4, atol=1e-7)
    counted = vocabulary.counts([features], V)
    held = sum(len(r.tokens) for r in features.recordings())
    assert counted.sum() == sum(len(d) - a for d, a in documents(features)) - held
    assert vocabulary.coverage(np.arange(3, dtype=np.int32), [np.array([0, 1, 7, 7])], V) == 0.5


def documents(features: Features) -> list[tuple[Any, int]]:
    return [
        (features.tokens[features.offsets[d] : features.offsets[d + 1]], int(features.documents[d, 1]))
        for d in range(len(features))
    ]


# files


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "JSON object"),
        ("{}", "expected a `prompt` or a `text`"),
        ('{"prompt": ""}', "expected a `prompt` or a `text`"),
        ('{"prompt": 3}', "must be strings"),
        ('{"prompt": "a", "response_ids": ["b"]}', "list of token ids"),
        ('{"prompt": "a", "response_ids": [-1]}', "list of token ids"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(InvalidArgument, match=f"line 3.*{says}"):
        data.read_rows(path)


def test_files_without_rows_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(InvalidArgument, match="no rows"):
        data.read_rows(tmp_path / "empty.jsonl")
    with pytest.raises(ModelNotFound, match="no such file"):
        data.read_rows(tmp_path / "none.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match="UTF-8"):
        data.read_rows(tmp_path / "binary.jsonl")


def test_importing_training_loads_no_torch() -> None:
    code = "import sys, portadraft.training; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# the whole way


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, V)}
    tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    place = tmp_path / "model"
    model.save_pretrained(place)
    wrapped.save_pretrained(place)
    return place


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_from_files_to_a_drafter_that_decodes(folder: Path, tmp_path: Path) -> None:
    import portadraft
    from portadraft.training import train
    from portadraft.training.run import TrainConfig

    torch.set_num_threads(1)
    rng = np.random.default_rng(2)

    def words(n: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(2, V, n))

    prompts = [{"prompt": words(5)} for _ in range(60)] + [{"prompt": words(4), "response_ids": [5, 6, 7, 8, 1]}]
    texts = [{"prompt": words(4), "reference": words(9)} for _ in range(10)] + [{"text": words(12)}]
    out = tmp_path / "drafter"
    options: dict[str, Any] = {
        "out": out,
        "text": write(tmp_path / "text.jsonl", texts),
        "config": TrainConfig(
            draft_vocabulary=40, max_answer=16, batch=8,
            fit=FitConfig(epochs=6, positions=128, segment=16, rate=3e-3, report_seconds=0.0),
        ),
        "dtype": "float32",
        "progress": False,
    }  # fmt: skip
    done = train(str(folder), write(tmp_path / "data.jsonl", prompts), **options)
    assert done.folder == out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl", "drafter", "model", "text.jsonl"]
    loaded = read_checkpoint(out)
    assert loaded.config == RecurrentConfig(D, D, 2 * D, 2, 40)
    assert loaded.draft_vocabulary is not None and {0, 1} <= set(loaded.draft_vocabulary.tolist())
    assert loaded.training["generated_tokens"] > 100
    assert loaded.training["text_tokens"] > 100
    assert loaded.training["updates"] > 0
    assert loaded.identity.weights_id and loaded.identity.tokenizer

    model = portadraft.load(str(folder), drafter=out, dtype="float32")
    prompt = words(5)
    drafted = model.generate(prompt, max_tokens=24)
    assert drafted.ids == model.generate(prompt, max_tokens=24, drafter="none").ids
    assert drafted.stats.chosen["drafter"].value == "redrafter"

    with pytest.raises(InvalidArgument, match="exists already"):
        train(str(folder), tmp_path / "data.jsonl", **options)
    wrong = write(tmp_path / "wrong.jsonl", [{"prompt": "w2 w3", "response_ids": [V]}])
    with pytest.raises(InvalidArgument, match="another tokenizer"):
        train(str(folder), wrong, **(options | {"overwrite": True}))
    assert read_checkpoint(out).training == loaded.training


@pytest.mark.parametrize(("name", "value"), [("minutes", 0), ("epochs", -1), ("rate", 0.0), ("positions", 0)])
def test_bounds_of_a_run(name: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}={value}"):
        FitConfig(**{name: value})
