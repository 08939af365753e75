"""`portadraft bench`: figures measured on this machine; each prints a table and one JSON document as its last line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from portadraft.cli.guard import guarded
from portadraft.errors import InvalidArgument

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)

Model = Annotated[str, typer.Option("--model", "-m", help="A short name, a Hugging Face id, a folder, or a GGUF file.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, or float16.")]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds; in each, the alternatives take turns.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of torch on the CPU.")]
DEFAULT_MODEL = "smollm2-135m"


@app.command()
@guarded
def plain(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    repeats: Repeats = 7,
    threads: Threads = None,
    backend: Annotated[str, typer.Option(help="torch (against transformers) or mlx (against mlx-lm).")] = "torch",
) -> None:
    """Our plain decoding against transformers' own generate, or mlx-lm's."""
    if backend == "mlx":
        from portadraft.bench.mlx_lm import plain_against_mlx_lm

        _print(plain_against_mlx_lm(model, dtype=dtype, repeats=repeats))
        return
    if backend != "torch":
        raise InvalidArgument(f"backend={backend!r}: expected 'torch' or 'mlx'")
    from portadraft.bench.costs import plain_against_transformers

    _threads(threads)
    _print(plain_against_transformers(model, dtype=dtype, repeats=repeats))


@app.command()
@guarded
def packed(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    context: Annotated[list[int] | None, typer.Option(min=1, help="Context lengths; may be given again.")] = None,
    repeats: Repeats = 9,
    threads: Threads = None,
) -> None:
    """What a pass over N slots costs, against a plain one."""
    from portadraft.bench.costs import packed_passes

    _threads(threads)
    _print(packed_passes(model, dtype=dtype, contexts=context or (200, 4000), repeats=repeats), "passes")


@app.command()
@guarded
def sampling(
    model: Model = DEFAULT_MODEL, dtype: Dtype = "auto", repeats: Repeats = 7, threads: Threads = None
) -> None:
    """What choosing tokens costs, as a share of plain and of drafted steps."""
    from portadraft.bench.sampling import sampling_costs

    _threads(threads)
    _print(sampling_costs(model, dtype=dtype, repeats=repeats), "kinds")


@app.command()
@guarded
def temperatures(
    prompts: Annotated[Path, typer.Argument(help="JSONL with `turns` or `prompt` a line.")],
    model: Model = DEFAULT_MODEL,
    drafter: Annotated[str, typer.Option(help="As in `portadraft generate`.")] = "redrafter",
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="May be given again (0, 0.7 and 1).")] = None,
    width: Annotated[list[int] | None, typer.Option(min=1, help="May be given again (1, 2, 4 and 8).")] = None,
    length: Annotated[int, typer.Option(min=1, help="Drafted tokens of a candidate.")] = 4,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Of each answer.")] = 48,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many prompts, spread over the file.")] = None,
    limit_s: Annotated[float | None, typer.Option(min=0, help="Begin no prompt after so many seconds.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 1,
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """Tokens per step and speedup by temperature and width, and by the classical rule at width 1."""
    from portadraft.bench.temperatures import temperatures as run

    _threads(threads)
    _print(
        run(
            prompts,
            model=model,
            drafter=drafter,
            values=temperature or (0.0, 0.7, 1.0),
            widths=width or (1, 2, 4, 8),
            length=length,
            max_tokens=max_tokens,
            limit=limit,
            limit_s=limit_s,
            batch=batch,
            dtype=dtype,
        ),
        "rows",
    )


@app.command()
@guarded
def oracle(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "float32",
    probability: Annotated[float, typer.Option(min=0, max=1, help="Of keeping each true token.")] = 0.8,
    repeats: Repeats = 3,
    threads: Threads = 1,
) -> None:
    """Whole decoding with a drafter that knows the answer: what our costs leave of a given acceptance."""
    from portadraft.bench.costs import oracle_steps

    _threads(threads)
    _print(oracle_steps(model, dtype=dtype, probability=probability, repeats=repeats), "shapes")


@app.command()
@guarded
def acceptance(
    prompts: Annotated[Path, typer.Argument(help="JSONL with `turns` or `prompt` a line.")],
    model: Model = DEFAULT_MODEL,
    drafter: Annotated[str, typer.Option(help="As in `portadraft generate`.")] = "redrafter",
    shape: Annotated[list[str] | None, typer.Option(help="WxL or WxLxN, such as 4x4x8; may be given again.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Of each answer.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many prompts, spread over the file.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 1,
    dtype: Dtype = "auto",
) -> None:
    """Tokens per step on a file of prompts."""
    from portadraft.bench.acceptance import acceptance as run

    options: dict[str, Any] = {"shapes": [_shape(s) for s in shape]} if shape else {}
    _print(
        run(
            prompts,
            model=model,
            drafter=drafter,
            max_tokens=max_tokens,
            limit=limit,
            batch=batch,
            dtype=dtype,
            **options,
        ),
        "shapes",
    )


@app.command()
@guarded
def batches(
    prompts: Annotated[Path, typer.Argument(help="JSONL with `turns` or `prompt` a line.")],
    model: Model = DEFAULT_MODEL,
    slots: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompts decoded together; may be given again (1 and 4).")
    ] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="May be given again (none and auto).")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many prompts, spread over the file by length.")] = 40,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Of each answer.")] = 48,
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """Many prompts through the slots of a batch, against one by one."""
    from portadraft.bench.batches import batches as run

    _threads(threads)
    _print(
        run(
            prompts,
            model=model,
            slots=slots or (1, 4),
            drafters=drafter or ("none", "auto"),
            count=count,
            max_tokens=max_tokens,
            dtype=dtype,
        ),
        "runs",
    )


def _shape(text: str) -> Any:
    from portadraft.core.types import BeamShape

    try:
        numbers = [int(part) for part in text.lower().split("x")]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3):
        raise InvalidArgument(f"shape={text!r}: expected WxL or WxLxN, such as 4x4 or 4x4x8")
    return BeamShape(*numbers)


def _threads(count: int | None) -> None:
    if count is not None:
        import torch

        torch.set_num_threads(count)


def _print(report: dict[str, Any], rows: str | None = None) -> None:
    from rich.console import Console
    from rich.table import Table

    lines: list[dict[str, Any]] = report[rows] if rows else [{k: v for k, v in report.items() if k != "bench"}]
    table = Table(title=", ".join(str(report[k]) for k in ("bench", "model", "dtype")))
    for name in lines[0]:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*(str(v) for v in line.values()))
    Console().print(table)
    print(json.dumps(report))
