"""Pictures of a run: tokens per second over width and length, and the cost of a pass by slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from portadraft.errors import InvalidArgument, MissingDependency
from portadraft.scratch import sweep
from portadraft.tuner.outcome import DrafterResult, Outcome, shape_name
from portadraft.tuner.search import Result


def load_matplotlib() -> Any:
    """Raises: MissingDependency."""
    try:
        import matplotlib
    except ImportError:
        raise MissingDependency("plots need matplotlib: pip install 'portadraft[tune]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def place(where: Path) -> tuple[Path, str]:
    """The folder, which is made, and the beginning of the names.

    Raises: InvalidArgument for a file of another kind; OSError.
    """
    if where.suffix and where.suffix.lower() != ".png":
        raise InvalidArgument(f"plot={str(where)!r}: expected a folder or a name that ends in .png")
    folder, stem = (where.parent, where.stem) if where.suffix else (where, "tuning")
    folder.mkdir(parents=True, exist_ok=True)
    return folder, stem


def draw(outcome: Outcome, where: Path) -> list[Path]:
    """Write a heat map for each drafter and batch size and one cost curve for each drafter.

    where: a folder, or a .png file, which then gives the beginning of the names.

    Raises: InvalidArgument for a file of another kind; MissingDependency; OSError.
    """
    plt = load_matplotlib()
    folder, stem = place(where)
    out = []
    for one in outcome.drafters:
        kind = one.name.replace("+", "-")
        for r in one.results:
            out.append(_save(plt, _heat_map(plt, outcome, one, r), folder / f"{stem}-{kind}-batch{r.batch}.png"))
        out.append(_save(plt, _cost_curve(plt, outcome, one), folder / f"{stem}-{kind}-costs.png"))
    return out


def _save(plt: Any, figure: Any, path: Path) -> Path:
    sweep(path.parent, ".*.tmp.png")
    temporary = path.with_name(f".{path.name}.tmp.png")
    try:
        figure.savefig(temporary, dpi=80)
        temporary.replace(path)
    finally:
        plt.close(figure)
        temporary.unlink(missing_ok=True)
    return path


def _heat_map(plt: Any, outcome: Outcome, one: DrafterResult, r: Result) -> Any:
    """The best node budget of each (W, L): corrected by measurements where there are any."""
    grid = one.table.grid
    values = r.prediction.tokens_per_s if r.corrected is None else r.corrected
    with np.errstate(all="ignore"):
        filled = np.where(np.isfinite(values), values, -1.0)
    best, budget = filled.max(axis=2), filled.argmax(axis=2)
    best = np.where(best < 0, np.nan, best)
    figure, axes = plt.subplots(figsize=(7.0, 4.8), layout="constrained")
    image = axes.imshow(best.T / r.plain_tokens_per_s, origin="lower", aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(grid.widths)), grid.widths)
    axes.set_yticks(range(len(grid.lengths)), grid.lengths)
    axes.set_xlabel("width W")
    axes.set_ylabel("length L (drafted tokens)")
    low, high = float(np.nanmin(best)), float(np.nanmax(best))
    for w in range(len(grid.widths)):
        for k in range(len(grid.lengths)):
            if np.isfinite(best[w, k]):
                slots = grid.budgets[budget[w, k]]
                text = f"{best[w, k]:.0f}" + (f"\n{slots}" if slots else "")
                dark = best[w, k] < low + 0.6 * (high - low)
                axes.text(w, k, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    if r.shape is not None:
        at = grid.index(r.shape)
        box = plt.Rectangle((at[0] - 0.5, at[1] - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2)
        axes.add_patch(box)
    axes.set_title(
        f"{outcome.model}, {one.name}, batch {r.batch}: tokens/s, best slots below\n"
        f"chosen {shape_name(r.shape)}: {r.tokens_per_s:.1f}, plain {r.plain_tokens_per_s:.1f}",
        fontsize=10,
    )
    figure.colorbar(image, label="speedup over plain decoding")
    return figure


def _cost_curve(plt: Any, outcome: Outcome, one: DrafterResult) -> Any:
    figure, axes = plt.subplots(figsize=(7.0, 4.0), layout="constrained")
    for costs, timings in one.costs:
        slots = sorted(timings.check)
        (line,) = axes.plot(slots, [costs.check(n) for n in slots], marker="o", label=f"batch {costs.batch}")
        for n in slots:
            axes.plot([n] * len(timings.check[n]), timings.check[n], ".", color=line.get_color(), alpha=0.3)
    axes.set_xlabel("slots of a pass")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{outcome.model}: cost of a step without drafting", fontsize=10)
    axes.legend()
    return figure
