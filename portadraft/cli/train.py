"""`portadraft train`: a drafter for your own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def train(
    model: Annotated[str, typer.Argument(help="A short name, a Hugging Face id, a folder, or a GGUF file.")],
    out: Annotated[Path, typer.Option(help="The drafter's folder, which is made.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL of prompts; the model answers those without `response_ids`. May be repeated."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL of `text`, or `prompt` and `reference`, that the model only reads. May be repeated."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Time for training itself, after reading and answering.")
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the texts; whichever of both ends first.")] = 4.0,
    draft_vocabulary: Annotated[int, typer.Option(help="How many tokens the drafter may predict.")] = 8192,
    inner_size: Annotated[
        int | None, typer.Option(help="Width of the residual blocks (twice the hidden size).")
    ] = None,
    blocks: Annotated[int, typer.Option(help="How many residual blocks.")] = 2,
    text_tokens: Annotated[int | None, typer.Option(help="The most tokens of plain text to learn from.")] = None,
    max_answer: Annotated[int, typer.Option(help="The most tokens of a generated answer.")] = 224,
    rate: Annotated[float, typer.Option(help="The greatest learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, ...")] = "auto",
    work: Annotated[Path | None, typer.Option(help="Where features are kept meanwhile (a temporary folder).")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the drafter in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Train a drafter for a model by distillation; the best so far is on disk at every evaluation."""
    from portadraft.training.loop import FitConfig
    from portadraft.training.run import TrainConfig
    from portadraft.training.run import train as run

    config = TrainConfig(
        draft_vocabulary=draft_vocabulary,
        inner_size=inner_size,
        blocks=blocks,
        max_answer=max_answer,
        text_tokens=text_tokens,
        fit=FitConfig(epochs=epochs, minutes=minutes, rate=rate, seed=seed),
    )
    done = run(
        model,
        list(data or ()),
        text=list(text or ()),
        out=out,
        config=config,
        dtype=dtype,
        device=device,
        work=work,
        overwrite=overwrite,
        progress=not as_json,
    )
    if as_json:
        summary: dict[str, Any] = {"folder": str(done.folder), "tokens_per_step": done.tokens_per_step}
        print(json.dumps(summary | done.training))
        return
    figures = ", ".join(f"{shape} {value:.2f}" for shape, value in done.tokens_per_step.items())
    print(f"{done.folder}: tokens per step on held-out answers: {figures or 'not measured (no held-out answer)'}")
