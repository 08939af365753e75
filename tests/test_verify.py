"""`portadraft verify`: ties are told from bugs, planted faults are found, the exit status says so."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import portadraft
import portadraft.core.decode as decode_module
from portadraft.backends.numpy import NumpyTarget
from portadraft.bench import agreement
from portadraft.bench import verify as verify_module
from portadraft.bench.acceptance import read_prompts
from portadraft.bench.agreement import compare
from portadraft.bench.demo import prompts as builtin_prompts
from portadraft.bench.goodness import fair_variation, total_variation
from portadraft.bench.verify import Report, verify
from portadraft.cli.app import app
from portadraft.core.sampling import Sampling
from portadraft.core.types import BeamShape
from portadraft.drafters import PromptLookup
from portadraft.drafters.select import Selected
from portadraft.errors import InvalidArgument
from portadraft.testing import random_redrafter

V = 48
PROMPT = (5, 9, 2, 14, 7, 3, 5, 9, 2)
SHAPE = BeamShape(16, 3)
SAMPLED = Sampling(0.9, seed=3, top_p=0.9, frequency_penalty=0.4, min_tokens=3)


@pytest.fixture
def target():
    return NumpyTarget.random(1, vocabulary_size=V)


def compared(target, sampling=None, **options):
    drafter = random_redrafter(target, 5)
    return compare(target, drafter, PROMPT, SHAPE, sampling=sampling, max_tokens=30, end_tokens=[1], **options)


@pytest.mark.parametrize("sampling", [None, SAMPLED])
def test_nothing_differs_in_float32(target, sampling):
    found = compared(target, sampling)
    assert found.tokens == len(found.plain) > 5
    assert found.divergences == []
    assert target.lengths == ()


def positions_off_by_one(monkeypatch):
    forward = NumpyTarget._forward

    def later(self, row, tokens, depths, mask):
        return forward(self, row, tokens, depths + (row.length > 0) * (depths > 0), mask)

    monkeypatch.setattr(NumpyTarget, "_forward", later)


@pytest.mark.parametrize("sampling", [None, SAMPLED])
def test_a_wrong_position_is_a_bug(target, monkeypatch, sampling):
    positions_off_by_one(monkeypatch)
    found = compared(target, sampling)
    assert found.bugs == len(found.divergences) > 0
    first = found.divergences[0]
    assert first.reason == "the two passes' logits differ by more than rounding"
    assert first.difference > first.allowed == 1e-3
    assert first.plain == found.plain[first.position] != first.drafted


def test_a_wrong_walk_is_a_bug(target, monkeypatch):
    """The logits are right, and the token that comes out of drafted steps is not what they say."""
    accept = decode_module.accept

    def wrong(ops, packed, logits, *rest):
        verdict, history = accept(ops, packed, logits, *rest)
        if packed.length:
            tokens = (verdict.tokens + 1) % V
            verdict = replace(verdict, tokens=tokens.astype(np.int32), counts=np.ones_like(verdict.counts))
        return verdict, history

    monkeypatch.setattr(decode_module, "accept", wrong)
    found = compared(target)
    assert found.bugs == len(found.divergences) > 5
    assert {d.reason for d in found.divergences} == {"the drafted pass's own logits choose another token"}
    assert max(d.difference for d in found.divergences) < 1e-3


def test_a_tie_is_a_tie(target):
    """Two passes that differ by rounding at two equal logits, each choosing rightly by its own."""
    decoding = agreement._Decoding(target, Sampling(), [])
    plain, logits = decoding.run(None, None, PROMPT, [], 6)
    ours = logits[3].copy()
    other = int(np.argsort(-ours)[1])
    ours[other] = ours[plain[3]] - 1e-5
    theirs = ours.copy()
    theirs[other] += 2e-5
    judged = decoding.judge(PROMPT, plain, 3, other, ours, theirs)
    assert judged.verdict == "tie"
    assert judged.gap == pytest.approx(1e-5)
    assert judged.drafted_gap == pytest.approx(-1e-5)
    theirs[other] += 1e-2  # and what rounding does not explain is none
    assert decoding.judge(PROMPT, plain, 3, other, ours, theirs).verdict == "bug"


def test_half_precision_is_allowed_its_own_rounding(target):
    target.facts = replace(target.facts, dtype="bfloat16")
    decoding = agreement._Decoding(target, Sampling(), [])
    plain, logits = decoding.run(None, None, PROMPT, [], 6)
    ours = logits[3] * 20 / np.abs(logits[3]).max()
    plain[3] = int(ours.argmax())
    other = int(np.argsort(-ours)[1])
    ours[other] = ours[plain[3]] - 0.03
    theirs = ours.copy()
    theirs[other] += 0.0625
    assert decoding.judge(PROMPT, plain, 3, other, ours, theirs).verdict == "tie"
    theirs[other] += 4
    assert decoding.judge(PROMPT, plain, 3, other, ours, theirs).verdict == "bug"


@pytest.fixture(scope="module")
def half():
    pytest.importorskip("torch", reason="the torch extra is not installed")
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().to(torch.bfloat16)
    return portadraft.backends.get("torch").load().make_target(model)


@pytest.mark.parametrize("sampling", [None, SAMPLED])
def test_in_half_precision_a_wrong_position_is_a_bug_and_nothing_else_is(half, monkeypatch, sampling):
    differences, bugs = [], {False: 0, True: 0}
    verify = type(half).verify

    def shifted(self, packed):
        return verify(self, replace(packed, depths=packed.depths + 3 * (packed.depths > 0).int()))

    for planted in (False, True):
        if planted:
            monkeypatch.setattr(type(half), "verify", shifted)
        for start in range(6):
            prompt = [(start * 7 + i * 5) % V for i in range(9)]
            found = compare(half, random_redrafter(half, 5), prompt, SHAPE, sampling=sampling, max_tokens=30)
            bugs[planted] += found.bugs
            differences += [] if planted else [d.difference / d.allowed for d in found.divergences]
    assert bugs[False] == 0
    assert bugs[True] > 5
    assert all(d < 1 for d in differences)


def test_it_goes_on_after_a_divergence(target, monkeypatch):
    positions_off_by_one(monkeypatch)
    found = compared(target)
    assert len(found.divergences) > 1
    assert [d.position for d in found.divergences] == sorted({d.position for d in found.divergences})
    assert len(compared(target, most=1).divergences) == 1


# whole reports


def model_of(target):
    codec = SimpleNamespace(end_tokens={1}, encode_prompt=lambda text, raw=False: [ord(c) % V for c in text])
    return SimpleNamespace(name="toy", target=target, codec=codec)


def report_of(target, sampling=SAMPLED, drafter=None, **options):
    drafter = random_redrafter(target, 5) if drafter is None else drafter
    selected = Selected(drafter, drafter.name, "")
    prompts = [("one", "abcabcab"), ("two", "what is it"), ("three", "x"), ("four", "yz")]
    return verify(model_of(target), selected, SHAPE, prompts, sampling=sampling, max_tokens=16, **options)


def test_a_sound_model_has_no_faults(target):
    said = []
    report = report_of(target, say=said.append)
    assert report.faults == []
    assert len(report.comparisons) == 8  # greedy and sampled
    assert len(report.samples) == 3
    assert all(s.p > 0.001 and s.total_variation < 3 * s.noise for s in report.samples)
    assert len(said) == 11
    document = json.loads(json.dumps(report.as_dict()))
    assert document["ok"] is True
    assert document["tokens"] == report.tokens


@pytest.mark.parametrize("draws", [1, 8, 500])
def test_fair_draws_vary_as_said(draws):
    rng = np.random.default_rng(draws)
    p = np.append(rng.dirichlet(np.full(40, 0.3)), 0.0)
    p[:40] *= 0.9
    p[0] += 0.1
    runs = [total_variation(counts, p) for counts in rng.multinomial(draws, p / p.sum(), size=4000)]
    error = 4 * np.std(runs) / np.sqrt(len(runs))
    assert abs(np.mean(runs) - fair_variation(p, draws)) < error + 1e-9
    assert abs(np.mean(runs) - fair_variation(p, 2 * draws)) > error
    assert fair_variation([1.0, 0.0], draws) == 0


def test_prompts_are_checked_before_any_is_run(target, monkeypatch):
    monkeypatch.setattr(verify_module, "compare", lambda *_, **__: pytest.fail("work was done"))
    selected = Selected(random_redrafter(target, 5), "redrafter", "")
    with pytest.raises(InvalidArgument, match=r"^prompt nothing: .*no tokens"):
        verify(model_of(target), selected, SHAPE, [("fine", "abc"), ("nothing", "")], sampling=SAMPLED)


@pytest.mark.parametrize("draws", [0, 8, 99])
def test_too_few_draws_to_find_anything_are_refused(target, monkeypatch, command, draws):
    monkeypatch.setattr(verify_module, "compare", lambda *_, **__: pytest.fail("work was done"))
    selected = Selected(random_redrafter(target, 5), "redrafter", "")
    with pytest.raises(InvalidArgument, match=rf"draws={draws}: expected at least 100"):
        verify(model_of(target), selected, SHAPE, [("fine", "abc")], sampling=SAMPLED, draws=draws)
    assert command("--draws", str(draws)).exit_code == 2


def test_a_certain_token_is_said_to_tell_nothing(command):
    result = command("--temperature", "0.001", "--draws", "100")
    assert result.exit_code == 0, result.output
    assert "one token is nearly certain" in " ".join(result.output.split())


def test_temperature_zero_samples_nothing(target):
    report = report_of(target, Sampling())
    assert len(report.comparisons) == 4
    assert report.samples == []


def test_a_wrong_position_is_a_fault(target, monkeypatch):
    positions_off_by_one(monkeypatch)
    report = report_of(target)
    assert report.bugs > 0
    assert any("differ from plain decoding by more than rounding" in fault for fault in report.faults)
    assert report.as_dict()["ok"] is False


def test_wrong_sampling_is_a_fault(target, monkeypatch):
    """Uniforms whose squares are used: every text of drafted and plain decoding is still the same."""
    uniforms = verify_module.uniforms
    monkeypatch.setattr(verify_module, "uniforms", lambda *args: uniforms(*args) ** 1.3)
    report = report_of(target)
    assert report.bugs == 0
    assert any("miss their distribution" in fault for fault in report.faults)


def test_too_many_ties_are_a_fault_in_float32_only(target):
    tie = SimpleNamespace(verdict="tie")
    many = SimpleNamespace(tokens=100, divergences=[tie] * 2, bugs=0)
    for dtype, faults in (("float32", 1), ("bfloat16", 0)):
        assert len(Report({"dtype": dtype}, [("a", Sampling(), many)], []).faults) == faults


def test_lookup_is_verified_too(target):
    assert report_of(target, drafter=PromptLookup(target.ops, shortest=1)).faults == []


# the command


@pytest.fixture
def command(target, monkeypatch):
    loaded = model_of(target)

    def drafter_for(name):
        drafter = None if name == "none" else random_redrafter(target, 5)
        return Selected(drafter, name, "")

    loaded.drafter_for = drafter_for
    monkeypatch.setattr(portadraft, "load", lambda model, **options: loaded)
    runner = CliRunner()
    return lambda *args: runner.invoke(
        app, ["verify", "toy", "--max-tokens", "12", "--width", "4", "--length", "3", *args]
    )


def test_the_command_says_that_all_is_well(command):
    result = command()
    assert result.exit_code == 0, result.output
    assert "all is well" in result.output
    assert "0 ties, 0 bugs" in result.output


def test_the_command_prints_one_document(command, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abcabc"}\n{"turns": ["hello", "there"]}\n', "utf-8")
    result = command("--json", "--prompts", str(prompts), "--limit", "1", "--draws", "100")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["shape"] == [4, 3, None]
    assert [run["prompt"] for run in document["runs"]] == ["#1", "#1"]


def test_the_command_fails_on_a_bug(command, monkeypatch):
    positions_off_by_one(monkeypatch)
    result = command()
    assert result.exit_code == 1
    assert "NOT all is well" in result.output
    assert "bug" in result.output
    document = json.loads(command("--json").stdout)
    assert document["ok"] is False


def test_the_command_refuses_what_it_cannot_compare(command):
    assert command("--drafter", "none").exit_code == 2
    assert command("--top-p", "1.5").exit_code == 2
    assert command("--prompts", "/no/such/file").exit_code == 2


def test_builtin_prompts_that_the_context_does_not_hold_are_left_out(command, target):
    lengths = sorted(len(model_of(target).codec.encode_prompt(one["prompt"])) for one in builtin_prompts())
    target.facts = replace(target.facts, context_limit=lengths[2])
    result = command("--json", "--temperature", "0")
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)["runs"]) == 2
    assert f"left out, as the model's context holds {lengths[2]} tokens" in result.stderr
    target.facts = replace(target.facts, context_limit=lengths[0])
    result = command()
    assert result.exit_code == 2
    assert f"context of {lengths[0]} tokens holds none" in result.stderr and "--prompts FILE" in result.stderr


def test_files_of_prompts_may_hold_any_separator_and_must_be_utf8(command, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('\ufeff{"prompt": "one\u2028two"}\r\n{"prompt": "three"}\n', "utf-8")
    assert read_prompts(prompts) == ["one\u2028two", "three"]
    prompts.write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(InvalidArgument, match=r"not UTF-8.*at byte 15"):
        read_prompts(prompts)
    assert command("--prompts", str(prompts)).exit_code == 2
