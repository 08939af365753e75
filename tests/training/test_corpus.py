"""A corpus: sources of text, modes, mixtures, pieces that survive a kill, shares, streaming."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from portadraft.errors import CorruptFile, InvalidArgument, MissingDependency, ModelNotFound
from portadraft.training import pieces
from portadraft.training.corpus import CorpusRequest, parse_mix
from portadraft.training.local import LocalFeatures
from portadraft.training.pieces import Groups
from portadraft.training.recording import features_of

from .small import BEGIN_TURN, END, END_TURN, V, build, codec, language_model, word, write

RNG = np.random.default_rng(5)


def words(n: int) -> str:
    return " ".join(word(i) for i in RNG.integers(7, V, n))


PROMPTS = [{"prompt": words(4)} for _ in range(40)]
PAIRS = [{"prompt": words(3), "reference": words(9)} for _ in range(20)]
TEXTS = [{"text": words(20)} for _ in range(12)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "data.jsonl", PROMPTS + PAIRS)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write(tmp_path / "texts.jsonl", TEXTS)


def spans(source: Any) -> list[list[int]]:
    return [source.tokens[source.offsets[d] : source.offsets[d + 1]].tolist() for d in range(len(source))]


def content(folder: Path) -> dict[str, bytes]:
    """All files but the lines' order over processes: JSONL is read by group."""
    out = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix == ".npy"}
    for name in ("prompts", "held", "answers"):
        lines = [json.loads(x) for p in folder.glob(f"{name}.*.jsonl") for x in p.read_text().splitlines()]
        out[name] = json.dumps(sorted(lines, key=lambda line: line["group"])).encode()
    return out


# what is in it


def test_answers_and_texts_each_once_by_default(tmp_path: Path, data: Path, texts: Path) -> None:
    corpus = build(tmp_path / "c", data=[data], text=[texts])
    answers, read = corpus.sources
    assert corpus.weights == [1.0, 1.0]
    assert set(corpus.facts["modes"]) == {"sequence", "text"}
    assert len(answers) + len(corpus.held_out) == 60 - corpus.facts["answers_empty"]
    assert len(read) == 12
    model = language_model()
    for ids, (start, answer, _, _) in list(zip(spans(answers), answers.documents.tolist(), strict=True))[:6]:
        assert start == 2  # <turn> user
        given = torch.tensor([ids[:answer]])
        own = model.generate(given, max_new_tokens=12, do_sample=False, eos_token_id=[END, END_TURN], pad_token_id=0)
        assert own[0].tolist() == ids
    # held-out prompts are nowhere in training
    prompts = {tuple(ids[: d[1]]) for ids, d in zip(spans(corpus.held_out), corpus.held_out.documents, strict=True)}
    trained = {tuple(ids[: d[1]]) for ids, d in zip(spans(answers), answers.documents, strict=True)}
    assert prompts and not prompts & trained
    assert len(corpus.recordings()) == len(corpus.held_out)
    generated = sum(
        len(ids) - d[1] for s in (answers, corpus.held_out) for ids, d in zip(spans(s), s.documents, strict=True)
    )
    assert corpus.facts["generated_tokens"] == generated
    assert 0 < corpus.facts["target_passes"] < generated + 200


def test_every_mode_and_its_share_of_an_epoch(tmp_path: Path, data: Path, texts: Path) -> None:
    mix = {"sequence": 1, "text": 0.5, "local": 0.5, "ground-truth": 0.25}
    corpus = build(tmp_path / "c", data=[data], text=[texts], mix=mix)
    assert list(corpus.facts["modes"]) == ["sequence", "text", "ground-truth", "local"]
    assert [s.teaching for s in corpus.sources] == ["distribution", "distribution", "tokens", "distribution"]
    assert isinstance(corpus.sources[3], LocalFeatures)
    visited = [0] * 4
    for source, segments in corpus.jobs(32, 8, np.random.default_rng(0)):
        visited[[source is s for s in corpus.sources].index(True)] += int((segments[:, 1] - segments[:, 0]).sum())
    shares = np.array(visited) / visited[0]
    np.testing.assert_allclose(shares, [1, 0.5, 0.25, 0.5], rtol=0.1)
    assert max(corpus.weights) == 1.0 and min(corpus.weights) < 0.9
    # references of data and texts of both files are read; the held-out pairs are not
    held = {tuple(ids[: d[1]]) for ids, d in zip(spans(corpus.held_out), corpus.held_out.documents, strict=True)}
    read = [(ids, d[1]) for ids, d in zip(spans(corpus.sources[1]), corpus.sources[1].documents, strict=True)]
    assert 28 <= len(read) <= 32
    assert not {tuple(ids[:answer]) for ids, answer in read} & held
    # the next epoch takes another part, in as many jobs
    rng = np.random.default_rng(0)
    one, two = (corpus.jobs(32, 8, rng) for _ in range(2))
    assert len(one) == len(two)
    assert [s[0, 0] for _, s in one] != [s[0, 0] for _, s in two]


def test_plain_text_files_are_read_and_their_openings_answered(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(words(400))
    corpus = build(tmp_path / "c", data=[tmp_path / "book.txt"])
    assert list(corpus.facts["modes"]) == ["text"]
    assert corpus.facts["texts_split"] == 1
    assert [len(ids) for ids in sorted(spans(corpus.sources[0]), key=len, reverse=True)][:6] == [64] * 6
    (tmp_path / "empty.md").write_text(" \n ")
    with pytest.raises(InvalidArgument, match="no rows; expected some text"):
        build(tmp_path / "d", data=[tmp_path / "empty.md"])
    many = write(tmp_path / "many.jsonl", TEXTS)
    answered = build(tmp_path / "e", data=[many], mix={"sequence": 1})
    starts = {tuple(codec().tokenizer.encode(row["text"])[:10]) for row in TEXTS}
    assert {tuple(ids[:10]) for ids in spans(answered.sources[0])} <= starts
    assert answered.sources[0].documents[:, 1].tolist() == [10] * len(answered.sources[0])


def test_conversations(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": words(2)}, {"role": "user", "content": words(3)}]
    last = {"role": "assistant", "content": words(5)}
    file = write(tmp_path / "m.jsonl", [{"messages": [*turns, last]}, {"messages": turns}])
    corpus = build(tmp_path / "c", data=[file], mix={"text": 1, "sequence": 1})
    answers, read = corpus.sources
    assert corpus.facts["prompts_repeated"] == 1  # the same conversation, with and without its end
    (ids,) = spans(read)
    whole = codec().encode_prompt(turns)
    assert ids == [*whole, *codec().tokenizer.encode(last["content"]), END]
    assert spans(answers)[0][: len(whole)] == whole
    assert read.documents[0].tolist()[:2] == [1, len(whole)]  # only <turn> is shared with other prompts


def test_the_target_writes_its_own_prompts(tmp_path: Path) -> None:
    corpus = build(tmp_path / "c", own_prompts=24)
    assert corpus.facts["prompts_written"] == 31
    assert 4 <= corpus.facts["prompts_kept"] <= 24
    shown = [
        codec().decode(ids[2 : d[1]])
        for ids, d in zip(spans(corpus.sources[0]), corpus.sources[0].documents, strict=True)
    ]
    assert len(set(shown)) == len(shown)
    assert all(ids[:2] == [BEGIN_TURN, 4] for ids in spans(corpus.sources[0]))
    again = build(tmp_path / "d", own_prompts=24)
    assert content(tmp_path / "c") == content(tmp_path / "d")
    other = build(tmp_path / "e", own_prompts=24, seed=1)
    assert spans(again.sources[0]) != spans(other.sources[0])


def test_a_model_without_a_template_begins_at_its_begin_token(tmp_path: Path) -> None:
    corpus = build(tmp_path / "c", own_prompts=12, template=False)
    assert corpus.facts["prompts_kept"] >= 8
    assert corpus.sources[0].documents[:, 0].tolist() == [0] * len(corpus.sources[0])


def test_sampled_answers_have_seeds_of_their_own_and_held_out_ones_are_greedy(tmp_path: Path, data: Path) -> None:
    greedy = build(tmp_path / "a", data=[data])
    warm = build(tmp_path / "b", data=[data], temperature=1.0)
    again = build(tmp_path / "c", data=[data], temperature=1.0)
    other = build(tmp_path / "d", data=[data], temperature=1.0, seed=3)
    assert sorted(spans(warm.held_out)) == sorted(spans(greedy.held_out))
    assert spans(warm.sources[0]) == spans(again.sources[0])
    assert sorted(spans(warm.sources[0])) != sorted(spans(greedy.sources[0]))
    assert sorted(spans(warm.sources[0])) != sorted(spans(other.sources[0]))


# kills, shares, limits


class Killed(BaseException):
    pass


@pytest.mark.parametrize("request_", [{"own_prompts": 40}, {"mix": {"sequence": 1, "local": 1, "text": 1}}])
def test_a_killed_build_goes_on_and_makes_the_same_bytes(
    tmp_path: Path, data: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any]
) -> None:
    """Killed at each durable write, with what a kill leaves behind: half a line, half a file."""
    given = request_ if "own_prompts" in request_ else {"data": [data], "text": [texts]} | request_
    monkeypatch.setattr("portadraft.training.shelf.CHUNK_BYTES", 4096)
    monkeypatch.setattr("portadraft.training.shelf.BATCH_TOKENS", 128)
    model = language_model()
    whole = build(tmp_path / "whole", model=model, **given)
    sync, calls = os.fsync, [0]

    def die_at_the_second(handle: int) -> None:
        calls[0] += 1
        if calls[0] == 2:
            calls[0] = 0
            raise Killed
        sync(handle)

    broken = tmp_path / "broken"
    monkeypatch.setattr(pieces.os, "fsync", die_at_the_second)
    kills = 0
    for _ in range(200):
        calls[0] = 0
        try:
            corpus = build(broken, model=model, **given)
            break
        except Killed:
            kills += 1
            for file in broken.glob("*.jsonl"):  # the line that was being written, cut short
                lines = file.read_bytes()
                file.write_bytes(lines + b'{"group":7,"va' if lines.endswith(b"\n") and kills % 2 else lines)
            (broken / ".texts-00000.npy.123").write_bytes(b"half")
    else:
        pytest.fail("it never ends")
    assert kills >= 5
    monkeypatch.setattr(pieces.os, "fsync", sync)
    assert content(broken) == content(tmp_path / "whole")
    assert not list(broken.glob(".*.npy.*"))
    assert corpus.facts == whole.facts
    # and a finished one is only opened
    monkeypatch.setattr("portadraft.training.building.generate", None)
    monkeypatch.setattr("portadraft.training.shelf.record_batches", None)
    assert build(broken, model=model, **given).facts == whole.facts


def test_work_for_something_else_is_refused(tmp_path: Path, data: Path) -> None:
    build(tmp_path / "c", data=[data])
    with pytest.raises(InvalidArgument, match=r"max_answer=5: the work begun in .*c was for 12"):
        build(tmp_path / "c", data=[data], max_answer=5)
    data.write_text(data.read_text() + '{"prompt": "w9"}\n')
    with pytest.raises(InvalidArgument, match="files="):
        build(tmp_path / "c", data=[data])


def test_two_processes_make_the_same_corpus(
    tmp_path: Path, data: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portadraft.training.shelf.CHUNK_BYTES", 4096)
    given = {"data": [data], "text": [texts], "mix": {"sequence": 1, "local": 1}}
    alone = build(tmp_path / "alone", **given)
    barrier = threading.Barrier(2, timeout=60)
    (tmp_path / "both").mkdir()
    results: dict[int, Any] = {}
    models = [language_model() for _ in range(2)]  # one each, made before: both from the process' one random state

    def work(rank: int) -> None:
        results[rank] = build(tmp_path / "both", model=models[rank], shard=(rank, 2), barrier=barrier.wait, **given)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1]
    assert content(tmp_path / "both") == content(tmp_path / "alone")
    assert results[0].facts == results[1].facts == alone.facts
    made = [len(list((tmp_path / "both").glob(f"answers.{rank}.jsonl"))) for rank in range(2)]
    assert made == [1, 1]
    one, two = (results[r].jobs(32, 8, np.random.default_rng(1)) for r in range(2))
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(one, two, strict=True))


def test_features_beyond_the_limit_are_streamed(
    tmp_path: Path, data: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portadraft.training.shelf.BATCH_TOKENS", 64)  # for equal batches, so equal rounding
    given = {"data": [data], "text": [texts], "mix": {"sequence": 1, "local": 1}, "max_answer": 20}
    free = build(tmp_path / "free", **given)
    limit = free.facts["feature_bytes"] // 2
    tight = build(tmp_path / "tight", **given, cache_bytes=limit)
    assert tight.facts["streamed_bytes"] > limit // 4
    most = [0]

    def used(name: str = "") -> int:
        return sum(p.stat().st_size for p in (tmp_path / "tight").glob("*.npy") if "tokens" not in p.name)

    head = language_model().get_output_embeddings().weight
    seen: list[set[Any]] = [set(), set()]
    for k, corpus in enumerate((free, tight)):
        for source, segments in corpus.jobs(64, 16, np.random.default_rng(2)):
            block = source.block(segments, 3, head, np.arange(V))
            which = [source is s for s in corpus.sources].index(True)
            seen[k] |= {
                (which, t.tobytes(), h.tobytes())
                for t, h in zip(block.tokens.numpy(), block.hidden.numpy(), strict=True)
            }
            if k:
                most[0] = max(most[0], used())
    assert seen[0] == seen[1]  # every position, with the same features
    assert 0 < most[0] <= limit
    assert sum(s.hidden.made_again for s in tight.sources) > 2
    with pytest.raises(InvalidArgument, match=r"cache_bytes=2000: too little .* expected at least"):
        build(tmp_path / "less", **given, cache_bytes=2000)


def test_streamed_features_are_not_recorded_again_for_samples(tmp_path: Path, data: Path) -> None:
    size = build(tmp_path / "free", data=[data]).facts["feature_bytes"]
    corpus = build(tmp_path / "tight", data=[data], cache_bytes=size // 2)
    (source,) = corpus.sources
    assert source.hidden.streamed and len(source.sample(50)) == 50
    assert source.hidden.made_again == 0


# bad input


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": []}, "messages must be a list of at least one"),
        ({"messages": "hello"}, "messages must be a list"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is null or missing; expected a string"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"content is a list; expected a string"),
        ({"messages": [{"content": "w9"}]}, r"messages\[0\] must be an object with a `role`"),
        ({"messages": [{"role": "user", "content": ""}]}, "every message is empty"),
        ({"prompt": "w9", "messages": [{"role": "user", "content": "w9"}]}, "expected one of them"),
        ({"prompt": "w9", "reference": 5}, "must be strings"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: Any, says: str) -> None:
    file = write(tmp_path / "bad.jsonl", [{"prompt": "w9 w10"}, row])
    with pytest.raises(InvalidArgument, match=f"bad.jsonl', line 2: .*{says}"):
        build(tmp_path / "c", data=[file])


def test_rows_that_do_not_fit_are_counted_or_refused(tmp_path: Path) -> None:
    file = write(
        tmp_path / "long.jsonl", [{"prompt": words(80)}, *PROMPTS[:4], {"prompt": "w9", "reference": words(90)}]
    )
    corpus = build(tmp_path / "c", data=[file], mix={"sequence": 1, "text": 1}, held_out=0)
    assert corpus.facts["prompts_too_long"] == 1 and corpus.facts["texts_cut"] == 1
    assert max(map(len, spans(corpus.sources[1]))) == 64
    with pytest.raises(InvalidArgument, match=r"none of its 1 rows leaves a prompt .*1 too long for max_length=64"):
        build(tmp_path / "d", data=[write(tmp_path / "l.jsonl", [{"prompt": words(80)}])])
    with pytest.raises(InvalidArgument, match="steps=3: no text leaves room"):
        build(tmp_path / "e", text=[write(tmp_path / "t.jsonl", TEXTS)], mix={"local": 1}, model=language_model(4))
    with pytest.raises(InvalidArgument, match=r"line 1: response_ids .* another tokenizer"):
        build(tmp_path / "f", data=[write(tmp_path / "o.jsonl", [{"prompt": "w9", "response_ids": [V]}])])


def test_texts_longer_than_the_context_are_split_at_it(tmp_path: Path) -> None:
    """The model's context, not the length that was asked for, bounds a document."""
    plain = write(tmp_path / "t.jsonl", [{"text": words(n)} for n in (90, 20, 32, 33)])
    corpus = build(tmp_path / "c", text=[plain], model=language_model(32), held_out=0, max_answer=4)
    lengths = sorted(map(len, spans(corpus.sources[0])))
    assert lengths == [20, 26, 32, 32, 32, 32]  # 33 leaves a piece of one token, from which nothing can be learned
    assert corpus.facts["texts_split"] == 2
    pairs = write(tmp_path / "p.jsonl", [{"prompt": "w9 w8", "reference": words(60)}, {"prompt": words(40)}])
    corpus = build(tmp_path / "d", text=[pairs], model=language_model(32), held_out=0)
    assert [len(s) for s in spans(corpus.sources[0])] == [32] and corpus.facts["texts_cut"] == 1
    with pytest.raises(InvalidArgument, match="1 too long for max_length=32"):
        build(tmp_path / "e", data=[write(tmp_path / "q.jsonl", [{"prompt": words(40)}])], model=language_model(32))


def test_documents_know_the_file_and_line_they_are_from(tmp_path: Path) -> None:
    """However they were laid out, cut, split or continued; folders are nobody's business."""
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": words(6)} for _ in range(12)])
    texts = [{"text": words(20)} for _ in range(5)]
    corpus = build(
        tmp_path / "c", data=[prompts], text=[write(tmp_path / "texts.jsonl", [*texts, {"text": words(100)}])],
        mix={"sequence": 1, "text": 1, "local": 1}, held_out=1,
    )  # fmt: skip
    answers, read, local = corpus.sources
    lines = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    for tokens, place in zip(spans(answers), answers.named, strict=True):
        name, _, line = place.partition(", line ")
        assert name == "prompts.jsonl"
        assert codec().encode_prompt(lines[int(line) - 1]) == tokens[: len(codec().encode_prompt(lines[int(line) - 1]))]
    whole = [f"texts.jsonl, line {i}" for i in range(1, 7)]
    assert sorted(read.named) == sorted(local.named) == [*whole, "texts.jsonl, line 6, from token 64"]
    for tokens, place in zip(spans(read), read.named, strict=True):
        if "line 6" not in place:
            assert tokens == codec().tokenizer.encode(texts[int(place[-1]) - 1]["text"])


def test_requests_that_cannot_be(tmp_path: Path, data: Path) -> None:
    for options, says in (
        ({"mix": {"speech": 1}}, "no mode 'speech'"),
        ({"mix": {"text": -1}}, "weight -1"),
        ({"mix": {"text": 0}}, "every weight is 0"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"batch": 0}, "batch=0"),
        ({"max_length": 2}, "max_length=2"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            CorpusRequest(**options)
    assert parse_mix("sequence=1, text=0.5") == {"sequence": 1.0, "text": 0.5}
    assert parse_mix("local") == {"local": 1.0}
    for spec, says in (("text=x", "not a number"), ("text,text", "twice"), ("", "no mode ''")):
        with pytest.raises(InvalidArgument, match=says):
            parse_mix(spec)
    with pytest.raises(InvalidArgument, match="'local' needs texts, but no row"):
        build(tmp_path / "c", data=[write(tmp_path / "p.jsonl", PROMPTS)], mix={"sequence": 1, "local": 1})
    with pytest.raises(InvalidArgument, match="text needs texts; pass files"):
        build(tmp_path / "d", mix={"text": 1})
    with pytest.raises(InvalidArgument, match="no row has a `text`"):
        build(tmp_path / "e", text=[write(tmp_path / "q.jsonl", PROMPTS)])
    with pytest.raises(ModelNotFound, match="no such file"):
        build(tmp_path / "f", data=[tmp_path / "nothing.jsonl"])


def test_groups_need_every_process(tmp_path: Path) -> None:
    Groups(tmp_path, "answers", (0, 2)).add(0, [1])
    with pytest.raises(CorruptFile, match="group 1 of 'answers' is missing"):
        Groups(tmp_path, "answers").all(2)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build(tmp_path / "whole", data=[data])
    sync, left = os.fsync, [2]

    def full(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(pieces.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            build(tmp_path / "c", data=[data])
    assert not [p for p in (tmp_path / "c").iterdir() if p.name.startswith(".")]
    assert build(tmp_path / "c", data=[data]).facts == whole.facts
    assert content(tmp_path / "c") == content(tmp_path / "whole")


# datasets of the hub


def test_a_dataset_without_the_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("hf:squad", "someone/questions"):
        with pytest.raises(MissingDependency, match=rf"data='{name}'.*pip install 'datasets>=3'"):
            build(tmp_path / "c", data=[name])


@pytest.mark.parametrize("version", ["3.6.0", "4.1.0"])
def test_a_dataset_is_streamed_and_never_runs_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    asked: list[Any] = []

    def load_dataset(*names: Any, **options: Any) -> Any:
        asked.append((names, options))
        if names[0] == "none":
            raise FileNotFoundError("no dataset none")
        return iter(PROMPTS * 1000 + [{"prompt": 3}])

    fake = types.SimpleNamespace(__version__=version, load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    corpus = build(tmp_path / "c", data=["hf:some/questions:main@test"], rows=30)
    assert len(corpus.sources[0]) + len(corpus.held_out) + corpus.facts["answers_empty"] == 30
    (names, options), *_ = asked
    assert names == ("some/questions", "main")
    assert options["split"] == "test" and options["streaming"] is True
    assert options.get("trust_remote_code", False) is False
    assert ("trust_remote_code" in options) == (version < "4")
    with pytest.raises(ModelNotFound, match=r"cannot be read .FileNotFoundError: no dataset none"):
        build(tmp_path / "d", data=["hf:none"])


def test_features_of_the_corpus_are_the_models(tmp_path: Path, data: Path) -> None:
    (source,) = build(tmp_path / "c", data=[data]).sources
    model = language_model()
    for d in range(0, len(source), 9):
        low, high = source.offsets[d : d + 2]
        ids = torch.from_numpy(source.tokens[low:high].astype(np.int64))[None]
        expected = features_of(model, ids, torch.ones_like(ids))[0]
        torch.testing.assert_close(source.bits(np.arange(low, high)).float(), expected, rtol=1e-2, atol=1e-2)
