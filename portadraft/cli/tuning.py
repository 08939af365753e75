"""The options of `portadraft tune`, `bench tuner` and `bench table3`; what they do is imported when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from portadraft.cli.guard import guarded

DEFAULT_MODEL = "smollm2-135m"


def register(app: typer.Typer, bench: typer.Typer) -> None:
    """Add the commands to the main and the benchmarks' application."""
    app.command()(tune)
    bench.command("tuner")(bench_tuner)
    bench.command("table3")(bench_table3)


@guarded
def tune(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A short name, a Hugging Face id, a folder, or a GGUF file.")
    ] = DEFAULT_MODEL,
    budget: Annotated[
        str, typer.Option(help="Time for each batch size and drafter, after loading and recording: 60s, 5m, 1h.")
    ] = "60s",
    batch_sizes: Annotated[str, typer.Option(help="Rows decoded at once, with commas: 1,2,4,8.")] = "1",
    objective: Annotated[
        str, typer.Option(help="latency, or throughput, which also recommends a batch size.")
    ] = "latency",
    context: Annotated[int, typer.Option(min=1, help="Tokens before the steps that are measured, about.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL with `prompt` and `category` a line, in place of the built-in prompts.")
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="As in `portadraft generate`; given several times, the fastest is named."),
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, torch, or another backend's name.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, or float16.")] = "auto",
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Of each recorded answer.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Of sampled recordings.")] = 0,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Measure every shape, however long it takes.")
    ] = False,
    predict_only: Annotated[
        bool, typer.Option("--predict-only", help="No whole steps: acceptance and the cost of parts alone.")
    ] = False,
    device_curve: Annotated[
        str | None, typer.Option(help="Costs of a device that is not here: a JSON file, or a name shipped with us.")
    ] = None,
    acceptance: Annotated[
        Path | None, typer.Option(help="An acceptance table; with --device-curve no model is loaded.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write heat maps and cost curves (PNG) into this folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Store the profile though the machine was busy.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Find how wide and how long to draft on this machine, and store it; `generate` then uses it by itself."""
    from portadraft.cli import tune as command

    command.main(
        model,
        budget=budget,
        batch_sizes=batch_sizes,
        drafters=drafter or ["auto"],
        device_curve=device_curve,
        acceptance=acceptance,
        plot=plot,
        force=force,
        as_json=as_json,
        backend=backend,
        device=device,
        dtype=dtype,
        objective=objective,
        context=context,
        temperature=temperature,
        prompts=prompts,
        max_tokens=max_tokens,
        seed=seed,
        exhaustive=exhaustive,
        predict_only=predict_only,
    )


@guarded
def bench_tuner(
    model: Annotated[str, typer.Option("--model", "-m", help="As in `portadraft tune`.")] = DEFAULT_MODEL,
    batch: Annotated[int, typer.Option(min=1, help="Rows decoded at once.")] = 1,
    budget: Annotated[str, typer.Option(help="The tuner's time.")] = "60s",
    drafter: Annotated[str, typer.Option(help="As in `portadraft tune`.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, or float16.")] = "auto",
    rounds: Annotated[int, typer.Option(min=2, help="Of whole answers; half select, half score.")] = 4,
    turns: Annotated[int, typer.Option(min=0, help="Of every shape of the grid; 0: predictions alone.")] = 2,
    cells: Annotated[int, typer.Option(min=0, help="Shapes whose prediction is compared with decoding.")] = 0,
    tokens: Annotated[int, typer.Option(min=8, help="Of each answer.")] = 48,
    limit: Annotated[str, typer.Option(help="No new turn or round after this time.")] = "10m",
    plot: Annotated[Path | None, typer.Option(help="Write the heat map and the cost curve into this folder.")] = None,
) -> None:
    """The tuner's choice against the exhaustive truth."""
    from portadraft.bench.tuner import tuner_bench
    from portadraft.cli.generate import drafter_name
    from portadraft.cli.tune import can_draw, progress, seconds

    if plot is not None:
        can_draw(plot)

    with progress() as say:
        report = tuner_bench(
            model,
            batch=batch,
            budget_s=seconds(budget),
            drafter=drafter_name(drafter),
            dtype=dtype,
            rounds=rounds,
            turns=turns,
            cells=cells,
            tokens=tokens,
            seconds=seconds(limit, "limit"),
            plot=plot,
            say=say,
        )
    _show(report, ("predictions", "confirmed"))


@guarded
def bench_table3(
    model: Annotated[str, typer.Option("--model", "-m", help="As in `portadraft tune`.")] = DEFAULT_MODEL,
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1,2,4,8,10,20",
    width: Annotated[str, typer.Option(help="Widths, with commas.")] = "1,2,4,8,16,32,64",
    length: Annotated[int, typer.Option(min=1, help="Drafted tokens of a candidate.")] = 4,
    nodes: Annotated[int | None, typer.Option(min=2, help="The most slots; every node where left out.")] = None,
    drafter: Annotated[str, typer.Option(help="As in `portadraft tune`.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, or float16.")] = "auto",
    limit: Annotated[str, typer.Option(help="No new cell after this time.")] = "1h",
) -> None:
    """Tokens per second by width and batch size, in the form of the paper's table 3; out of memory is a cell."""
    from portadraft.bench.table3 import table3
    from portadraft.cli.generate import drafter_name
    from portadraft.cli.tune import numbers, progress, seconds

    with progress() as say:
        report = table3(
            model,
            drafter=drafter_name(drafter),
            dtype=dtype,
            widths=numbers(width, "width"),
            batches=numbers(batch, "batch"),
            length=length,
            nodes=nodes,
            seconds=seconds(limit, "limit"),
            say=say,
        )
    _show(report, ("cells",))


def _show(report: dict[str, Any], long: tuple[str, ...]) -> None:
    """A table of the short figures and of lists of lines, then the JSON document."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for name, value in report.items():
        if name not in long:
            console.print(f"{name}: {value}", highlight=False)
    for name in long:
        lines = report.get(name)
        if isinstance(lines, dict):
            console.print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in lines.items()), highlight=False)
        elif lines and isinstance(lines, list):
            table = Table(title=name)
            for column in lines[0]:
                table.add_column(column, justify="right")
            for line in lines:
                table.add_row(*(str(v) for v in line.values()))
            console.print(table)
    print(json.dumps(report))
