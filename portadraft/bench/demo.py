"""`portadraft demo`: the main job on a real model, with figures measured on the spot."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from portadraft.api import Model, load
from portadraft.bench.agreement import Divergence, compare
from portadraft.errors import InvalidArgument
from portadraft.generation import Generation
from portadraft.profiles.shape import default_shape
from portadraft.tuner.measure import interleave, median_ratio

PLAIN = "none"


@dataclass
class PromptResult:
    """What one prompt showed; `runs` maps a drafter's name to its generations, one a repeat."""

    name: str
    runs: dict[str, list[Generation]]
    divergences: list[Divergence] = field(default_factory=list)

    def tokens_per_s(self, drafter: str) -> float:
        return statistics.median(_rate(g) for g in self.runs[drafter])

    def speedup(self, drafter: str) -> float:
        return median_ratio([_rate(g) for g in self.runs[drafter]], [_rate(g) for g in self.runs[PLAIN]])

    def tokens_per_step(self, drafter: str) -> float | None:
        """Median of the repeats: how much is drafted follows the clock where the shape is watched."""
        known = [step for g in self.runs[drafter] if (step := g.stats.tokens_per_step) is not None]
        return statistics.median(known) if known else None


def prompts() -> list[dict[str, str]]:
    """The demo's prompts: name and text."""
    text = resources.files("portadraft.bench").joinpath("prompts.json").read_text("utf-8")
    loaded: list[dict[str, str]] = json.loads(text)
    return loaded


def run(
    model: str = "smollm2-135m",
    *,
    repeats: int = 3,
    max_tokens: int = 96,
    dtype: str = "auto",
    json_only: bool = False,
) -> dict[str, Any]:
    """Generate plainly and with each drafter, in turns; print a table and one line of JSON, and return it.

    repeats: runs of each alternative per prompt, of which the median counts. max_tokens: of
    each answer. Speeds are of decoding; the prefill is the same for all.

    Raises: InvalidArgument, and what `load` raises.
    """
    for name, value in (("repeats", repeats), ("max_tokens", max_tokens)):
        if value < 1:
            raise InvalidArgument(f"{name}={value}: expected an integer of at least 1")
    console = Console(stderr=json_only, quiet=json_only)
    console.print(f"Loading [bold]{model}[/bold] …")
    loaded = load(model, dtype=dtype)
    for what, choice in loaded.chosen.items():
        console.print(f"  {what}: [bold]{choice.value}[/bold] ({choice.reason})", highlight=False)
    drafters = _drafters(loaded)
    results = _measure(loaded, drafters, repeats, max_tokens, console)
    _table(results, drafters, console)
    _show_divergences(loaded, results, console)
    identical = _identity(model, loaded, max_tokens, console)
    report = _report(model, loaded, results, drafters, identical)
    print(json.dumps(report))
    return report


def _rate(generation: Generation) -> float:
    """Decoded tokens per second."""
    return generation.stats.tokens_per_s or float("nan")


def _drafters(model: Model) -> list[str]:
    """What is compared with plain decoding, the model's own choice first."""
    name = model.chosen["drafter"].value
    return [name, *(part for part in name.split("+") if part != name)]


def _measure(model: Model, drafters: list[str], repeats: int, max_tokens: int, console: Console) -> list[PromptResult]:
    def once(text: str, drafter: str, count: int = max_tokens) -> Generation:
        return model.generate(text, drafter=drafter, max_tokens=count)

    results = []
    with Progress(console=console, transient=True) as bar:
        todo = prompts()
        task = bar.add_task("generating", total=len(todo))
        for drafter in (PLAIN, *drafters):  # warm up: first passes of each kind are slow
            once(todo[0]["prompt"], drafter, 8)
        for prompt in todo:
            text = prompt["prompt"]
            alternatives = {d: (lambda d=d, text=text: once(text, d)) for d in (PLAIN, *drafters)}
            result = PromptResult(prompt["name"], interleave(alternatives, repeats))
            result.divergences = _compare(model, text, result, drafters[0])
            results.append(result)
            bar.advance(task)
    return results


def _compare(model: Model, text: str, result: PromptResult, drafter: str) -> list[Divergence]:
    selected = model.drafter_for(drafter)
    shape, _ = default_shape(selected.name, model.target.ops.device)
    return compare(
        model.target,
        selected.drafter,
        model.codec.encode_prompt(text, raw=False),
        shape,
        max_tokens=len(result.runs[PLAIN][0].ids),
        end_tokens=sorted(model.codec.end_tokens),
    ).divergences


def _identity(name: str, loaded: Model, max_tokens: int, console: Console) -> bool:
    """Whether plain and drafted decoding of one prompt are the same in float32."""
    model = loaded if loaded.target.facts.dtype == "float32" else load(name, dtype="float32")
    text = prompts()[0]["prompt"]
    plain = model.generate(text, drafter=PLAIN, max_tokens=max_tokens)
    drafted = model.generate(text, max_tokens=max_tokens)
    same = plain.ids == drafted.ids
    verdict = "identical" if same else "[red]DIFFERENT[/red]"
    console.print(f"float32, prompt 'chat', {len(plain.ids)} tokens: plain and drafted are {verdict}")
    return same


def _table(results: list[PromptResult], drafters: list[str], console: Console) -> None:
    table = Table(
        title="Decoding, median of the repeats", caption="tokens/s; in brackets: speedup over plain, tokens per step"
    )
    table.add_column("prompt")
    table.add_column("plain", justify="right")
    for drafter in drafters:
        table.add_column(drafter, justify="right")
    for result in results:
        cells = [
            _cell(result.tokens_per_s(d), result.speedup(d), result.tokens_per_step(d) or float("nan"))
            for d in drafters
        ]
        table.add_row(result.name, f"{result.tokens_per_s(PLAIN):.1f}", *cells)
    table.add_section()
    totals = [
        _cell(_total_rate(results, d), _total_speedup(results, d), _total_tokens_per_step(results, d)) for d in drafters
    ]
    table.add_row("total", f"{_total_rate(results, PLAIN):.1f}", *totals, style="bold")
    console.print(table)


def _cell(tokens_per_s: float, speedup: float, tokens_per_step: float) -> str:
    return f"{tokens_per_s:.1f} ({speedup:.2f}×, {tokens_per_step:.2f})"


def _show_divergences(model: Model, results: list[PromptResult], console: Console) -> None:
    tokens = sum(len(r.runs[PLAIN][0].ids) for r in results)
    count = sum(len(r.divergences) for r in results)
    dtype = model.target.facts.dtype
    console.print(
        f"{dtype}: {tokens - count} of {tokens} tokens agree with plain decoding; {count} diverge", highlight=False
    )
    for result in results:
        for d in result.divergences:
            console.print(f"  {result.name}, token {d.position}: {d.verdict}, logit gap {d.gap:+.3f}", highlight=False)


def _total_rate(results: list[PromptResult], drafter: str) -> float:
    """Tokens per second over all prompts: the sum of tokens over the sum of median times."""
    tokens = sum(len(r.runs[drafter][0].ids) - 1 for r in results)
    seconds = sum(statistics.median(g.stats.decode_s for g in r.runs[drafter]) for r in results)
    return tokens / seconds if seconds else float("nan")


def _total_speedup(results: list[PromptResult], drafter: str) -> float:
    return _total_rate(results, drafter) / _total_rate(results, PLAIN)


def _total_tokens_per_step(results: list[PromptResult], drafter: str) -> float:
    """Of all prompts and repeats together."""
    steps = tokens = 0
    for run in (run for result in results for run in result.runs[drafter]):
        for accepted, count in run.stats.accepted.items():
            steps += count
            tokens += (accepted + 1) * count
    return tokens / steps if steps else float("nan")


def _report(
    name: str, model: Model, results: list[PromptResult], drafters: list[str], identical: bool
) -> dict[str, Any]:
    best = drafters[0]

    def figures(drafter: str, result: PromptResult) -> dict[str, Any]:
        step = result.tokens_per_step(drafter)
        return {
            "tokens_per_s": round(result.tokens_per_s(drafter), 2),
            "speedup": round(result.speedup(drafter), 3),
            "tokens_per_step": None if step is None else round(step, 3),
        }

    return {
        "model": name,
        "chosen": {what: choice.value for what, choice in model.chosen.items()},
        "shape": results[0].runs[best][0].stats.chosen["shape"].value if best != PLAIN else None,
        "speedup": round(_total_speedup(results, best), 3),
        "tokens_per_step": round(_total_tokens_per_step(results, best), 3),
        "identical_f32": identical,
        "divergences": sum(len(r.divergences) for r in results),
        "plain_tokens_per_s": round(_total_rate(results, PLAIN), 2),
        "drafted_tokens_per_s": round(_total_rate(results, best), 2),
        "drafters": {
            d: {
                "speedup": round(_total_speedup(results, d), 3),
                "tokens_per_step": round(_total_tokens_per_step(results, d), 3),
            }
            for d in drafters
        },
        "prompts": [
            {
                "name": r.name,
                "tokens": len(r.runs[PLAIN][0].ids),
                "plain_tokens_per_s": round(r.tokens_per_s(PLAIN), 2),
                "drafted_tokens_per_s": round(r.tokens_per_s(best), 2),
                **{k: v for k, v in figures(best, r).items() if k != "tokens_per_s"},
                "divergences": [{"position": d.position, "logit_gap": round(d.gap, 4)} for d in r.divergences],
                "identical_f32": identical if r.name == results[0].name else None,
                "drafters": {d: figures(d, r) for d in drafters},
            }
            for r in results
        ],
    }
