"""`portadraft generate`: every option arrives under its name, and what is left out stays out."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
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


def test_log_probabilities_are_said_to_be_elsewhere(
    runner: CliRunner,  # noqa: F811
    fake: Fake,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generate = fake.generate
    monkeypatch.setattr(fake, "generate", lambda *given, **more: replace(generate(*given, **more), logprobs=()))
    line = ["generate", "hi", "--logprobs", "1"]
    assert "note: log-probabilities are shown with --json\n" in runner.invoke(app, line).stderr
    assert "note:" not in runner.invoke(app, [*line, "--json"]).stderr


def test_arguments_that_the_locale_cannot_read_are_taken_as_utf8() -> None:
    assert read_prompt("h\udcc3\udca9llo") == "h\u00e9llo"  # as Python passes UTF-8 on under LC_ALL=C
    with pytest.raises(InvalidArgument, match=r"^prompt: the argument is not UTF-8 \(invalid start byte at byte 1\)"):
        read_prompt("h\udcff")


def test_a_mark_of_byte_order_is_no_text(runner: CliRunner, fake: Fake) -> None:  # noqa: F811
    assert runner.invoke(app, ["generate"], input=b"\xef\xbb\xbfhello\n").exit_code == 0
    assert fake.asked[0] == "hello"


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_tracebacks_on_request(
    runner: CliRunner,  # noqa: F811
    fake: Fake,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    shown: bool,
) -> None:
    fake.error = InvalidArgument("wrong")
    monkeypatch.setenv("PORTADRAFT_DEBUG", value)
    assert isinstance(runner.invoke(app, ["generate", "hi"]).exception, InvalidArgument) is shown


INTERRUPTED_WHILE = """
    import os, signal, sys, types
    import portadraft.cli.app as cli

    module = types.ModuleType("torch")
    module.__spec__ = types.SimpleNamespace(_initializing={importing})
    sys.modules["torch"] = module

    @cli.app.command()
    @cli.guarded
    def native() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            print("an exception in native code", flush=True)
            raise

    sys.argv = ["portadraft", "native"]
    cli.main()
"""


@pytest.mark.parametrize(("importing", "printed"), [(True, ""), (False, "an exception in native code\n")])
def test_an_interrupted_import_ends_at_once(importing: bool, printed: str) -> None:
    code = textwrap.dedent(INTERRUPTED_WHILE.format(importing=importing))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, printed, "")


def test_a_second_interrupt_is_as_quiet() -> None:
    code = """
        import atexit, os, signal, sys
        import portadraft.cli.app as cli

        atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), print("shut down to the end", flush=True)))

        @cli.app.command()
        @cli.guarded
        def long() -> None:
            os.kill(os.getpid(), signal.SIGINT)

        sys.argv = ["portadraft", "long"]
        cli.main()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_help_on_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "portadraft", "generate", "--help"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("portadraft: error: [Errno 28] ") and done.stderr.count("\n") == 1
