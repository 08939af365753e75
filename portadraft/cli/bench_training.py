"""`portadraft bench table4` and `bench calibration`: drafters that are trained for a comparison."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from portadraft.cli import bench
from portadraft.cli.guard import guarded

Model = Annotated[str, typer.Argument(help="A short name, a Hugging Face id, a folder, or a GGUF file.")]
DraftVocabulary = Annotated[int | None, typer.Option(help="How many tokens a drafter may predict.")]
Blocks = Annotated[int | None, typer.Option(help="Number of residual blocks.")]
InnerSize = Annotated[int | None, typer.Option(help="Width of the residual blocks.")]
Work = Annotated[
    Path | None, typer.Option(help="A folder where all that is costly is kept, to go on or measure again.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, or mps.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the benchmarks' application."""
    app.command()(table4)
    app.command()(calibration)


@guarded
def table4(
    data: Annotated[list[Path], typer.Option(help="Prompts with references, as for `portadraft train --text`.")],
    model: Model = bench.DEFAULT_MODEL,
    budget: Annotated[str, typer.Option(help="Positions that each drafter is trained on.")] = "0.1Mtok",
    epochs: Annotated[float, typer.Option(help="Passes over the texts within the budget.")] = 2.0,
    distilled: Annotated[
        str, typer.Option(help="What the distilled one imitates: local, text, or sequence.")
    ] = "local",
    width: Annotated[list[int] | None, typer.Option(min=1, help="May be given again (1, 2, 4, 16 and 64).")] = None,
    length: Annotated[int, typer.Option(min=1, help="Drafted tokens of a candidate.")] = 4,
    nodes: Annotated[int | None, typer.Option(min=2, help="A budget of slots for every width.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="May be given again (0 and 0.7).")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held out at most.")] = 40,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Of each of their answers.")] = 80,
    draft_vocabulary: DraftVocabulary = None,
    blocks: Blocks = None,
    inner_size: InnerSize = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    repeats: bench.Repeats = 9,
    work: Work = None,
    dtype: bench.Dtype = "auto",
    device: Device = "auto",
    threads: bench.Threads = None,
) -> None:
    """The paper's table 4: distilled against ground truth and a mixture, trained from the same texts."""
    from portadraft.bench.table4 import TEMPERATURES, WIDTHS, tables
    from portadraft.bench.table4 import table4 as run

    bench._threads(threads)
    _print(
        run(
            model,
            data=data,
            budget=budget,
            epochs=epochs,
            distilled=distilled,
            widths=width or WIDTHS,
            length=length,
            nodes=nodes,
            temperatures=TEMPERATURES if temperature is None else temperature,
            prompts=prompts,
            repeats=repeats,
            config=_training(max_tokens, draft_vocabulary, blocks, inner_size, seed),
            work=work,
            dtype=dtype,
            device=device,
        ),
        tables,
    )


@guarded
def calibration(
    data: Annotated[list[Path], typer.Option(help="As for `portadraft train --data`: prompts, or recorded answers.")],
    model: Model = bench.DEFAULT_MODEL,
    budget: Annotated[str, typer.Option(help="Positions that each drafter is trained on.")] = "0.1Mtok",
    rows: Annotated[int, typer.Option(min=1, help="The most rows of one file.")] = 1000,
    shape: Annotated[list[str] | None, typer.Option(help="WxL or WxLxN, such as 4x4x8; may be given again.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="May be given again (0, 0.7 and 1).")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held out at most.")] = 40,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Of each of their answers.")] = 128,
    draft_vocabulary: DraftVocabulary = None,
    blocks: Blocks = None,
    inner_size: InnerSize = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    work: Work = None,
    dtype: bench.Dtype = "auto",
    device: Device = "auto",
    threads: bench.Threads = None,
) -> None:
    """Trained on the model's first choices alone, on its whole distributions, and on both: speed and calibration."""
    from portadraft.bench.calibration import SHAPES, TEMPERATURES, tables
    from portadraft.bench.calibration import calibration as run

    bench._threads(threads)
    _print(
        run(
            model,
            data=data,
            budget=budget,
            rows=rows,
            shapes=[bench._shape(s) for s in shape] if shape else SHAPES,
            temperatures=TEMPERATURES if temperature is None else temperature,
            prompts=prompts,
            config=_training(max_tokens, draft_vocabulary, blocks, inner_size, seed),
            work=work,
            dtype=dtype,
            device=device,
        ),
        tables,
    )


def _training(
    max_tokens: int, draft_vocabulary: int | None, blocks: int | None, inner_size: int | None, seed: int
) -> Any:
    """What drafters that are compared have in common."""
    from portadraft.training.config import FitConfig, TrainConfig

    return TrainConfig(
        max_answer=max_tokens,
        draft_vocabulary=draft_vocabulary,
        blocks=blocks,
        inner_size=inner_size,
        fit=FitConfig(seed=seed),
    )


def _print(report: dict[str, Any], tables: Callable[[dict[str, Any]], dict[str, list[dict[str, Any]]]]) -> None:
    """Tables for people, each with a title, and the report as the last line."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, lines in tables(report).items():
        table = Table(title=f"{report['bench']}, {report['model']}, {report['dtype']}: {title}")
        for name in lines[0]:
            table.add_column(name, justify="right")
        for line in lines:
            table.add_row(*(str(v) for v in line.values()))
        console.print(table)
    print(json.dumps(report))
