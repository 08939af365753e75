"""`portadraft generate`: every option arrives under its name, and what is left out stays out."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from portadraft.cli.app import app
from portadraft.cli.generate import describe, read_biases, read_prompt
from portadraft.cli.guard import complain, guarded
from portadraft.errors import InvalidArgument
from portadraft.options import NAMES
from tests.test_cli import STATS, Fake, fake, runner  # noqa: F401


def test_sampling_options_arrive(runner: CliRunner, fake: Fake) -> None:  # noqa: F811
    line = (
        "generate hi --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.2 --presence-penalty 0.5 "
        "--frequency-penalty 0.25 --logit-bias 7=-2.5 --logit-bias 9=1 --ban x --ban y --min-tokens 3 --sampling model "
        "--acceptance rejection --logprobs 2 --timeout 1.5 --temperature 0.7"
    )
    assert runner.invoke(app, line.split()).exit_code == 0
    expected: dict[str, Any] = {
        "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "logit_bias": {7: -2.5, 9: 1.0}, "banned": ["x", "y"], "min_tokens": 3,
        "sampling": "model", "acceptance": "rejection", "logprobs": 2, "timeout_s": 1.5, "temperature": 0.7,
    }  # fmt: skip
    asked = fake.asked[1]
    assert {name: asked[name] for name in expected} == expected
    assert set(asked) <= NAMES


def test_what_is_left_out_stays_out(runner: CliRunner, fake: Fake) -> None:  # noqa: F811
    """So that `--sampling model` is not overruled by a default of the command."""
    assert runner.invoke(app, ["generate", "hi"]).exit_code == 0
    assert fake.asked[1] == {"max_tokens": 256, "raw": False, "seed": 0, "profile": False}


@pytest.mark.parametrize("bad", ["7", "=1", "7=x", "a=1"])
def test_biases_of_another_form(bad: str) -> None:
    with pytest.raises(InvalidArgument, match=f"logit_bias='{bad}': expected ID=BIAS"):
        read_biases([bad])
    assert read_biases([]) is None


def test_every_end_has_words() -> None:
    from typing import get_args

    from portadraft.generation import FinishReason, Generation

    for reason in get_args(FinishReason):
        assert "ended by " in describe(Generation("x", (1,), reason, STATS))


def test_streams_that_were_closed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Python sets them to None (`portadraft generate <&-`, `>&-`, `2>&-`)."""
    monkeypatch.setattr("sys.stdin", None)
    for prompt in (None, "-"):
        with pytest.raises(InvalidArgument, match="prompt: none given"):
            read_prompt(prompt)
    assert read_prompt("hello") == "hello"
    monkeypatch.setattr("sys.stderr", None)
    complain("something")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("sys.stdout", None)
    assert guarded(lambda: 5)() == 5
