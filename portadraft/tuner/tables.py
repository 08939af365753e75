"""Where acceptance tables lie: beside the drafter that they belong to, else in the user's folder."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from portadraft.errors import CorruptFile
from portadraft.identity import same_weights
from portadraft.tuner.acceptance import AcceptanceTable, Origin
from portadraft.tuner.grid import Grid

FOLDER = "acceptance"


def user_tables() -> Path:
    """The user's own tables."""
    return platformdirs.user_data_path("portadraft") / FOLDER


def file_name(origin: Origin) -> str:
    """Readable, and different for different origins."""
    digest = hashlib.sha256(repr(origin).encode()).hexdigest()[:8]
    kind = "".join(c if c.isalnum() or c in "+-_" else "-" for c in origin.drafter)[:60]
    return f"{kind}-t{origin.temperature:g}-{digest}.safetensors"


def same_origin(a: Origin, b: Origin) -> bool:
    """Whether a table made from one serves the other; weights may differ by half-precision rounding."""
    plain = ("drafter", "prompts", "temperature", "seed")
    if any(getattr(a, f) != getattr(b, f) for f in plain) or not same_weights(a.weights_id, b.weights_id):
        return False
    mine, theirs = a.drafter_id.split("+"), b.drafter_id.split("+")
    return len(mine) == len(theirs) and all(x == y or same_weights(x, y) for x, y in zip(mine, theirs, strict=True))


def find_table(origin: Origin, grid: Grid, beside: Path | None) -> tuple[AcceptanceTable, Path] | None:
    """A stored table of this origin and grid. Damaged files are passed over with a warning."""
    for path in _files(beside):
        try:
            table = AcceptanceTable.load(path)
        except (CorruptFile, OSError) as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
            continue
        if table.grid == grid and same_origin(table.origin, origin):
            return table, path
    return None


def store_table(table: AcceptanceTable, beside: Path | None) -> Path:
    """Write it beside the drafter if that folder can be written, else into the user's. Raises: OSError."""
    name = file_name(table.origin)
    if beside is not None and os.access(beside, os.W_OK):
        try:
            table.save(beside / FOLDER / name)
            return beside / FOLDER / name
        except OSError:
            pass
    path = user_tables() / name
    table.save(path)
    return path


def _files(beside: Path | None) -> Iterator[Path]:
    for folder in ([] if beside is None else [beside / FOLDER]) + [user_tables()]:
        if folder.is_dir():
            yield from sorted(folder.glob("*.safetensors"))
