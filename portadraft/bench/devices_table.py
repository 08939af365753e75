"""A device check's report as tables for people."""

from __future__ import annotations

from typing import Any

_SECTIONS = {
    "passes": "Verification passes",
    "steps": "Whole steps (an oracle keeps each true token with a probability of 0.8)",
    "batches": "Whole steps with several rows",
    "drafts": "Drafting (ratio: to a plain step)",
    "kernels": "A plain pass by kernels",
}


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    console.print(
        f"{report['device']}, torch {report['torch']}, {report['dtype']}, "
        f"{report['bandwidth_gb_per_s']:.0f} GB/s of memory traffic reached",
        highlight=False,
    )
    for model in report["models"]:
        plain = model["plain"]
        console.print(
            f"\n{model['model']}: {model['parameters'] / 1e9:.2f} billion parameters; a plain pass "
            f"{plain['latency_ms']:.2f} ms, {100 * plain['share_of_bandwidth']:.0f} % of what memory traffic allows",
            highlight=False,
        )
        for key, title in _SECTIONS.items():
            rows = model.get(key)
            if not rows:
                continue
            table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
            columns = list(dict.fromkeys(name for row in rows for name in row))
            for name in columns:
                table.add_column(name, justify="right")
            for row in rows:
                table.add_row(*(_text(row.get(name)) for name in columns))
            console.print(table)
        for note in model["notes"]:
            console.print(f"note: {note}", markup=False)
    for text in report["left_out"]:
        console.print(f"left out: {text}", markup=False)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
