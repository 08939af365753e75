"""`portadraft verify`: what was compared and found, and an exit status that says whether all is well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import portadraft
from portadraft.bench.acceptance import read_prompts
from portadraft.bench.demo import prompts as builtin_prompts
from portadraft.bench.verify import Report, verify
from portadraft.cli.generate import drafter_name
from portadraft.cli.guard import complain
from portadraft.core.sampling import Sampling
from portadraft.core.types import BeamShape
from portadraft.errors import InvalidArgument
from portadraft.profiles.shape import default_shape


def main(
    model: str,
    *,
    prompts: Path | None,
    limit: int | None,
    shape: dict[str, int | None],
    sampling: dict[str, Any],
    max_tokens: int,
    draws: int,
    drafter: str,
    as_json: bool,
    **loading: Any,
) -> bool:
    """Run the command; returns whether all is well.

    Raises: InvalidArgument where there is nothing to compare; ModelNotFound for the model or the file.
    """
    chosen = Sampling(**sampling)  # refused before anything is loaded
    texts = (_builtin() if prompts is None else _from(prompts))[:limit]
    loaded = portadraft.load(model, drafter=drafter_name(drafter), **loading)
    selected = loaded.drafter_for(drafter_name(drafter))
    if selected.drafter is None:
        raise InvalidArgument("drafter='none': plain decoding has nothing to be compared with; name a drafter")
    base, _ = default_shape(selected.name, loaded.target.ops.device)
    asked = {name: value for name, value in shape.items() if value is not None}
    if prompts is None:
        texts = _fitting(loaded, texts)
    beam = BeamShape(**{"width": base.width, "length": base.length, **asked}) if asked else base
    say = _quiet if as_json else _progress()
    report = verify(loaded, selected, beam, texts, sampling=chosen, max_tokens=max_tokens, draws=draws, say=say)
    if as_json:
        print(json.dumps(report.as_dict(), ensure_ascii=False))
    else:
        _show(report)
    return not report.faults


def _builtin() -> list[tuple[str, str]]:
    return [(one["name"], one["prompt"]) for one in builtin_prompts()]


def _from(path: Path) -> list[tuple[str, str]]:
    return [(f"#{i}", text) for i, text in enumerate(read_prompts(path), start=1)]


def _fitting(model: portadraft.Model, texts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The built-in prompts that the model's context holds; what is left out is said."""
    limit = model.target.facts.context_limit
    if limit is None:
        return texts
    lengths = {name: len(model.codec.encode_prompt(text)) for name, text in texts}
    fit = [(name, text) for name, text in texts if lengths[name] < limit]
    out = [f"{name} ({lengths[name]} tokens)" for name, _ in texts if lengths[name] >= limit]
    if not fit:
        raise InvalidArgument(
            f"prompts: the model's context of {limit} tokens holds none of the built-in ones, of which the shortest "
            f"has {min(lengths.values())}; pass shorter ones with --prompts FILE"
        )
    if out:
        complain(f"note: left out, as the model's context holds {limit} tokens: {', '.join(out)}")
    return fit


def _quiet(_: str) -> None: ...


def _progress() -> Any:
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    return lambda text: console.print(f"[dim]{text}[/dim]")


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    facts = report.facts
    width, length, nodes = facts["shape"]
    shape = f"{width}x{length}" + (f", {nodes} slots" if nodes else "")
    console.print(
        f"{facts['verify']}, {facts['dtype']} on {facts['device']}; drafter {facts['drafter']}, shape {shape}"
    )
    console.print(f"{report.tokens} tokens compared with plain decoding: {report.ties} ties, {report.bugs} bugs")
    table = Table("prompt", "temp.", "token", "plain, drafted", "gap in either pass", "differ by", "")
    for name, sampling, found in report.comparisons:
        for d in found.divergences:
            table.add_row(
                name,
                f"{sampling.temperature:g}",
                str(d.position),
                f"{d.plain}, {d.drafted}",
                f"{d.gap:+.3f}, {d.drafted_gap:+.3f}",
                f"{d.difference:.3g} of {d.allowed:.2g}",
                d.verdict if d.verdict == "tie" else f"[red]bug[/red]: {d.reason}",
            )
    if table.rows:
        console.print(table)
    for s in report.samples:
        said = f"chi-square {s.chi_square:.1f} over {s.degrees} degrees, p = {s.p:.3f}"
        if not s.degrees:
            said = "one token is nearly certain there, so that no chi-square can be told"
        console.print(
            f"{s.draws} draws after {s.prompt!r}: {said}; "
            f"total variation {s.total_variation:.4f} (fair draws: {s.noise:.4f})"
        )
    for fault in report.faults:
        console.print(f"[red]{fault}[/red]")
    console.print("all is well" if not report.faults else "NOT all is well")
