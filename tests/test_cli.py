"""The command line: output, errors and exit statuses, with a stand-in for the model."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

import portadraft
from portadraft.cli.app import app
from portadraft.generation import Choice, Delta, Generation, Stats

STATS = Stats(
    prompt_tokens=5,
    generated_tokens=4,
    steps=2,
    plain_steps=0,
    accepted={0: 1, 1: 1},
    prefill_s=0.01,
    decode_s=0.1,
    chosen={"drafter": Choice("lookup", "asked for")},
)


class Fake:
    """Says what it was asked, in pieces."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.asked: tuple[str, dict[str, Any]] = ("", {})
        self.error: BaseException | None = None

    def load(self, model: str, **options: Any) -> Fake:
        self.loaded = {"model": model, **options}
        return self

    def generate(self, prompt: str, **options: Any) -> Generation:
        self.asked = (prompt, options)
        if self.error is not None:
            raise self.error
        return Generation(f"You said: {prompt}", (1, 2, 3, 4), "end", STATS, ("a notice",))

    def stream(self, prompt: str, **options: Any) -> Iterator[Delta]:
        result = self.generate(prompt, **options)
        for word in result.text.split(" "):
            yield Delta(word + "_", (1,))
        yield Delta("", (), result)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    monkeypatch.setattr(portadraft, "load", fake.load)
    return fake


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setattr("warnings.showwarning", lambda *rest: None)  # put back after a command has changed it
    monkeypatch.delenv("PORTADRAFT_DEBUG", raising=False)
    return CliRunner()


def test_version(runner: CliRunner) -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"portadraft {portadraft.__version__}\n")


def test_every_command_has_help(runner: CliRunner) -> None:
    for command in ("generate", "demo", "doctor", "train"):
        assert runner.invoke(app, [command, "--help"]).exit_code == 0


def test_streams(runner: CliRunner, fake: Fake) -> None:
    result = runner.invoke(app, ["generate", "hello"])
    assert (result.exit_code, result.stdout) == (0, "You_said:_hello_\n")
    assert result.stderr == "portadraft: note: a notice\n"


def test_options_arrive(runner: CliRunner, fake: Fake) -> None:
    line = "generate hi -m some/model -n 7 --raw --stop X --stop Y --width 2 --length 3 --nodes 5 --drafter both"
    line += " --dtype float32 --device cpu --backend torch --temperature 0.5 --seed 3 --profiles mine.json"
    assert runner.invoke(app, line.split()).exit_code == 0
    assert fake.loaded == {
        "model": "some/model",
        "drafter": "redrafter+lookup",
        "backend": "torch",
        "device": "cpu",
        "dtype": "float32",
        "profiles": "mine.json",
    }
    prompt, options = fake.asked
    assert prompt == "hi"
    assert options == {
        "max_tokens": 7,
        "raw": True,
        "stop": ["X", "Y"],
        "temperature": 0.5,
        "seed": 3,
        "width": 2,
        "length": 3,
        "nodes": 5,
        "profile": False,
    }


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "-"]])
def test_prompt_from_standard_input(runner: CliRunner, fake: Fake, arguments: list[str]) -> None:
    assert runner.invoke(app, arguments, input="two\nlines\n").exit_code == 0
    assert fake.asked[0] == "two\nlines"


def test_input_that_is_not_text(runner: CliRunner, fake: Fake) -> None:
    result = runner.invoke(app, ["generate"], input=b"\xff\xfe")
    assert result.exit_code == 2
    assert "not UTF-8" in result.stderr


def test_json(runner: CliRunner, fake: Fake) -> None:
    result = runner.invoke(app, ["generate", "hello", "--json"])
    document = json.loads(result.stdout)
    assert document["model"] == "smollm2-135m"
    assert document["text"] == "You said: hello"
    assert document["stats"]["tokens_per_step"] == 1.5
    assert result.stderr == ""


def test_stats_go_to_standard_error(runner: CliRunner, fake: Fake) -> None:
    result = runner.invoke(app, ["generate", "hello", "--stats"])
    assert result.stdout == "You_said:_hello_\n"
    assert "30.0 tokens/s, 1.50 tokens per step" in result.stderr
    assert "drafter: lookup (asked for)" in result.stderr


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (
            portadraft.InvalidArgument("max_tokens=0: expected\nmore"),
            2,
            "portadraft: error: max_tokens=0: expected more\n",
        ),
        (portadraft.ModelNotFound("no model"), 2, "portadraft: error: no model\n"),
        (OSError(28, "No space left on device"), 1, "portadraft: error: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors(runner: CliRunner, fake: Fake, error: BaseException, status: int, message: str) -> None:
    fake.error = error
    for extra in ([], ["--json"]):
        result = runner.invoke(app, ["generate", "hello", *extra])
        assert (result.exit_code, result.stderr, result.stdout) == (status, message, "")


def test_unforeseen_errors_are_not_hidden(runner: CliRunner, fake: Fake) -> None:
    fake.error = RuntimeError("a bug")
    assert isinstance(runner.invoke(app, ["generate", "hello"]).exception, RuntimeError)


def test_usage_error(runner: CliRunner) -> None:
    assert runner.invoke(app, ["generate", "hello", "--width", "many"]).exit_code == 2
    assert runner.invoke(app, ["nothing"]).exit_code == 2


def test_train_arguments_arrive(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra train)")
    from types import SimpleNamespace

    import portadraft.training

    asked: dict[str, Any] = {}

    def train(model: str, data: Any, **options: Any) -> Any:
        asked.update(options, model=model, data=data)
        return SimpleNamespace(folder=options["out"], tokens_per_step={"4x4": 1.5}, training={})

    monkeypatch.setattr(portadraft.training, "train", train)
    line = "train some/model --out drafter --data a.jsonl --data b.jsonl --budget 2m --blocks 3 --rate 0.001 --quiet"
    result = runner.invoke(app, line.split())
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("wrote drafter; tokens per step on held-out answers: 4x4: 1.50\n")
    assert (asked["model"], asked["data"]) == ("some/model", ["a.jsonl", "b.jsonl"])
    assert (asked["config"].blocks, asked["config"].budget, asked["config"].fit.rate) == (3, "2m", 0.001)
    assert not asked["progress"]
    assert json.loads(runner.invoke(app, [*line.split(), "--json"]).stdout)["folder"] == "drafter"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--budget soon", "--budget 'soon': expected a time such as 20m"),
        ("--mix sequence=0", "--mix {'sequence': 0.0}: every weight is 0"),
        ("--mode parrot", "--mode 'parrot': expected one of sequence"),
        ("--cache-limit lots", "--cache-limit 'lots': expected a size such as 20GB"),
        ("--draft-vocabulary 0", "--draft-vocabulary 0: expected a whole number"),
        ("--loss-temperature 0", "--loss-temperature 0.0: expected a number above 0; to learn first choices alone"),
        ("--step-weights 1,x", "--step-weights '1,x': expected a number for each drafting step"),
        ("--step-weights 1,1", "--step-weights (1.0, 1.0): expected 5 numbers of at least 0, one for each of"),
        ("--steps 2 --step-weights 0,1", "--step-weights (0.0, 1.0): expected 2 numbers of at least 0"),
        ("--resume --overwrite", "--resume, --overwrite: one goes on, the other starts again"),
        ("--data none.jsonl", "--data 'none.jsonl': no such file"),
        ("--out portadraft", "--out 'portadraft': exists already; choose another folder, or replace it with"),
    ],
)
def test_train_options_are_checked_before_the_model(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, options: str, says: str
) -> None:
    loading = pytest.importorskip("portadraft.training.teacher", reason="torch is not installed (extra train)")
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    line = ["train", "no-such-model", *([] if "--out" in options else ["--out", "no-such-folder"]), *options.split()]
    result = runner.invoke(app, line)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"portadraft: error: {says}")


def test_train_says_how_to_go_on(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra train)")
    import portadraft.training

    def train(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(portadraft.training, "train", train)
    result = runner.invoke(app, ["train", "some/model", "--work", "w x"])
    assert result.exit_code == 130
    assert result.stderr == (
        "portadraft: stopped; go on with: portadraft train some/model --out model-drafter --resume --work 'w x'\n"
    )


def _portadraft(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "portadraft", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)


def test_unknown_model_is_one_line() -> None:
    done = _portadraft("generate", "hello", "--model", "smollm2-135n")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("portadraft: error: model='smollm2-135n'")
    assert "smollm2-135m" in done.stderr


def test_closed_pipe_is_quiet() -> None:
    code = """
        import os, sys
        import portadraft.cli.app as cli
        @cli.app.command()
        @cli.guarded
        def flood() -> None:
            while True:
                print("x" * 10_000)
        sys.argv = ["portadraft", "flood"]
        cli.main()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0


def test_doctor_json() -> None:
    done = _portadraft("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["portadraft"] == portadraft.__version__
    numpy = next(b for b in report["backends"] if b["name"] == "numpy")
    assert numpy["works"]
    assert numpy["problem"] is None
    assert "smollm2-135m" in report["short_names"]
    assert all(choice["reason"] for choice in report["choice"].values())
    assert {"cuda on ROCm", "mps", "xpu"} <= {u["where"] for u in report["untested"] if u["backend"] == "torch"}
    assert report["warnings"] == []
    assert report["machine"]["cores"] >= 1


def test_doctor_for_people() -> None:
    done = _portadraft("doctor")
    assert done.returncode == 0, done.stderr
    for heading in ("Machine", "Backends", "Models", "Trained drafters", "What would be used", "Not tested"):
        assert heading in done.stdout


def test_doctor_survives_a_broken_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from portadraft import backends
    from portadraft.cli import doctor

    broken = backends.Backend("broken", "portadraft.no_such_module", ("numpy",), "x")
    absent = backends.Backend("absent", "portadraft.no_such_module", ("no_such_package",), "y")
    monkeypatch.setattr(backends, "REGISTRY", {**backends.REGISTRY, "broken": broken, "absent": absent})
    found = {b["name"]: b for b in doctor.collect()["backends"]}
    assert not found["broken"]["works"]
    assert "no_such_module" in found["broken"]["problem"]
    assert "portadraft[y]" in found["absent"]["problem"]


def test_doctor_warns_of_a_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    from portadraft.cli import doctor

    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    assert "PYTORCH_ENABLE_MPS_FALLBACK is set" in doctor.collect()["warnings"][0]
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "0")
    assert doctor.collect()["warnings"] == []


@pytest.mark.parametrize(("said", "value", "reason"), [("mlxx", None, "PORTADRAFT_BACKEND='mlxx'"), ("auto", ..., "")])
def test_doctor_shows_what_the_variable_does(
    monkeypatch: pytest.MonkeyPatch, said: str, value: object, reason: str
) -> None:
    from portadraft.cli import doctor

    monkeypatch.setenv("PORTADRAFT_BACKEND", said)
    chosen = doctor.collect()["choice"]["backend"]
    assert reason in chosen["reason"]
    assert value is ... or chosen["value"] == value
