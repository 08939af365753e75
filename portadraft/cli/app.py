"""The commands and their options. What a command does stands in a module of its own, imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import portadraft
from portadraft.cli import bench, bench_training, profiles, tuning
from portadraft.cli.guard import INTERRUPTED, complain, guarded, interrupt_imports, interrupt_shutdown

DEFAULT_MODEL = "smollm2-135m"

app = typer.Typer(
    name="portadraft",
    help="Faster text generation from causal language models by recurrent drafting, with unchanged output.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

bench_training.register(bench.app)
app.add_typer(bench.app, name="bench")
app.add_typer(profiles.app, name="profiles")
tuning.register(app, bench.app)

Model = Annotated[str, typer.Option("--model", "-m", help="A short name, a Hugging Face id, a folder, or a GGUF file.")]
Drafter = Annotated[
    str,
    typer.Option(
        help="auto, redrafter, lookup, both (redrafter+lookup), none (plain decoding), or a drafter's folder."
    ),
]
Backend = Annotated[
    str, typer.Option(help="auto, torch, or another backend's name; PORTADRAFT_BACKEND decides where it is auto.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, ...")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, or float16.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def _version(value: bool) -> None:
    if value:
        print(f"portadraft {portadraft.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@guarded
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; read from standard input if left out or '-'.")
    ] = None,
    model: Model = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="The most tokens of the answer.")] = 256,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the answer; may be given again.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among so many of the most probable tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the tokens that make up this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Leave out tokens below this part of the best one's.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: what was said is said less.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Taken off a token's logit once it was said.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="The same, for every time it was said.")] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=BIAS, added to a token's logit; may be given again.")
    ] = None,
    ban: Annotated[
        list[str] | None, typer.Option(help="A string of one token that is never chosen; may be given again.")
    ] = None,
    min_tokens: Annotated[int | None, typer.Option(help="No end before so many tokens.")] = None,
    sampling: Annotated[str | None, typer.Option(help="'model': sample as the model's own files recommend.")] = None,
    acceptance: Annotated[
        str | None, typer.Option(help="match, or rejection (Leviathan et al., width 1, for comparison).")
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of sampling.")] = 0,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities in the JSON, with so many of the top tokens.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="End the answer after so many seconds.")] = None,
    width: Annotated[int | None, typer.Option(help="Candidates of a draft.")] = None,
    length: Annotated[int | None, typer.Option(help="Drafted tokens of a candidate.")] = None,
    nodes: Annotated[
        int | None, typer.Option(help="The most slots that the model checks in a step, root included.")
    ] = None,
    drafter: Drafter = "auto",
    backend: Backend = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    profiles_: Annotated[
        str, typer.Option("--profiles", help="auto, none, a profile's file, or a store instead of the fleet's.")
    ] = "auto",
    stats: Annotated[
        bool, typer.Option("--stats", help="Print what was chosen, and the speed, on standard error.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Stage times in the statistics; slows decoding.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt, printing as the text comes."""
    from portadraft.cli import generate as command

    command.main(
        prompt,
        model=model,
        drafter=drafter,
        backend=backend,
        device=device,
        dtype=dtype,
        profiles=profiles_,
        stats=stats or profile,
        as_json=as_json,
        options={
            "max_tokens": max_tokens,
            "raw": raw,
            "stop": stop or None,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logit_bias": command.read_biases(logit_bias or ()),
            "banned": ban or None,
            "min_tokens": min_tokens,
            "sampling": sampling,
            "acceptance": acceptance,
            "seed": seed,
            "logprobs": logprobs,
            "timeout_s": timeout,
            "width": width,
            "length": length,
            "nodes": nodes,
            "profile": profile,
        },
    )


@app.command()
@guarded
def doctor(as_json: AsJson = False) -> None:
    """Say what was found on this machine, and what would be used and why."""
    from portadraft.cli import doctor as command

    command.main(as_json=as_json)


@app.command()
@guarded
def demo(
    model: Model = DEFAULT_MODEL,
    repeats: Annotated[int, typer.Option(help="Runs of each way to decode, per prompt; the median counts.")] = 3,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="The most tokens of each answer.")] = 96,
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Run a real model on fixed prompts, plain and drafted; the last line is one JSON document."""
    from portadraft.bench.demo import run

    report = run(model, repeats=repeats, max_tokens=max_tokens, dtype=dtype, json_only=as_json)
    if report.get("identical_f32") is False:
        complain("error: drafted and plain decoding differ in float32, which they never should; please report this")
        raise typer.Exit(1)


@app.command()
@guarded
def train(
    model: Annotated[str, typer.Argument(help="A short name, a Hugging Face id, a folder, or a GGUF file.")],
    out: Annotated[
        Path | None, typer.Option(help="The folder to write the drafter to; MODEL-drafter if left out.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="JSONL with prompt, messages or text a line, a .txt or .md file, or a data set's name; may be given "
            "again. Left out: the model writes its own prompts."
        ),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="The same, which the model only reads: cheaper than answering.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="For the whole run: a time (20m, 2h) or tokens to train on (3Mtok).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an unfinished run; options left out are as they were.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a drafter in the folder, or begin again.")
    ] = False,
    init: Annotated[
        Path | None, typer.Option(help="Begin with this drafter; its shape and draft vocabulary are kept.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="What to imitate: sequence, text, local, or ground-truth.")] = None,
    mix: Annotated[str | None, typer.Option(help="Several modes by weight: sequence=1,text=0.5.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the answers to learn from; 0 is greedy.")] = None,
    prompts: Annotated[int | None, typer.Option(help="How many prompts the model writes without --data.")] = None,
    draft_vocabulary: Annotated[int | None, typer.Option(help="How many tokens the drafter may predict.")] = None,
    ship_vocabulary: Annotated[int | None, typer.Option(help="Cut the finished drafter to so many tokens.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Number of residual blocks.")] = None,
    inner_size: Annotated[int | None, typer.Option(help="Width of the residual blocks.")] = None,
    untied_head: Annotated[
        bool, typer.Option("--untied-head", help="A head of the drafter's own, instead of the model's.")
    ] = False,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the data; with --budget, whichever ends first.")
    ] = None,
    patience: Annotated[int | None, typer.Option(help="End after so many evaluations without a better one.")] = None,
    max_answer: Annotated[int | None, typer.Option(help="The most tokens of a generated answer.")] = None,
    max_length: Annotated[int | None, typer.Option(help="The most tokens of a whole text.")] = None,
    text_tokens: Annotated[int | None, typer.Option(help="The most tokens of plain text.")] = None,
    rows: Annotated[int | None, typer.Option(help="The most rows of one file or data set.")] = None,
    batch: Annotated[int | None, typer.Option(help="Answers generated at once.")] = None,
    rate: Annotated[float | None, typer.Option(help="The learning rate.")] = None,
    steps: Annotated[int | None, typer.Option(help="Drafting steps that are trained at each position.")] = None,
    hard: Annotated[
        float | None, typer.Option(help="Share of cross-entropy in the loss; the rest is KL divergence.")
    ] = None,
    loss_temperature: Annotated[
        float | None, typer.Option(help="At which the model speaks in the KL divergence; 1 is as it is.")
    ] = None,
    step_weights: Annotated[
        str | None, typer.Option(help="What the loss counts for at each drafting step: 1,0.8,0.6,0.5,0.4.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of everything random.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    cache_limit: Annotated[str | None, typer.Option(help="The most disk for recorded features, such as 20GB.")] = None,
    work: Annotated[
        Path | None, typer.Option(help="The folder in which unfinished runs are kept, instead of beside --out.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a drafter for a model. What is unfinished is kept in OUT.partial; --resume goes on after any stop."""
    from portadraft.cli import train as command

    command.main(
        model,
        data=data or [],
        text=text or [],
        out=out,
        mode=mode,
        mix=mix,
        cache_limit=cache_limit,
        choices={
            "budget": budget,
            "draft_vocabulary": draft_vocabulary,
            "ship_vocabulary": ship_vocabulary,
            "inner_size": inner_size,
            "blocks": blocks,
            "tied_head": False if untied_head else None,
            "temperature": temperature,
            "own_prompts": prompts,
            "max_answer": max_answer,
            "max_length": max_length,
            "text_tokens": text_tokens,
            "rows": rows,
            "batch": batch,
        },
        schedule={
            "epochs": epochs,
            "patience": patience,
            "rate": rate,
            "seed": seed,
            "steps": steps,
            "hard": hard,
            "loss_temperature": loss_temperature,
            "step_weights": step_weights,
        },
        as_json=as_json,
        init=init,
        device=device,
        dtype=dtype,
        work=work,
        resume=resume,
        overwrite=overwrite,
        progress=not quiet,
    )


@app.command()
@guarded
def verify(
    model: Annotated[str, typer.Argument(help="A short name, a Hugging Face id, a folder, or a GGUF file.")],
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL with `turns` or `prompt` a line, in place of the built-in prompts.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Of each answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="Of the sampled runs beside the greedy ones; 0 for none.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Of the sampled runs.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the sampled runs.")] = 0,
    draws: Annotated[int, typer.Option(min=100, help="Samples that are tested against their distribution.")] = 2048,
    width: Annotated[int | None, typer.Option(help="Candidates of a draft.")] = None,
    length: Annotated[int | None, typer.Option(help="Drafted tokens of a candidate.")] = None,
    nodes: Annotated[int | None, typer.Option(help="The most slots that the model checks in a step.")] = None,
    drafter: Drafter = "auto",
    backend: Backend = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare drafted with plain decoding, token by token; exit status 1 where they differ by more than rounding."""
    from portadraft.cli import verify as command

    fine = command.main(
        model,
        prompts=prompts,
        limit=limit,
        shape={"width": width, "length": length, "nodes": nodes},
        sampling={"temperature": temperature, "top_p": top_p, "seed": seed},
        max_tokens=max_tokens,
        draws=draws,
        drafter=drafter,
        backend=backend,
        device=device,
        dtype=dtype,
        as_json=as_json,
    )
    if not fine:
        raise typer.Exit(1)


def main() -> None:
    """The console script."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter is no reason to stop
    interrupt_imports()
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:  # while help is printed (a full disk)
        complain(f"error: {error}")
        sys.exit(1)
    finally:
        interrupt_shutdown()
