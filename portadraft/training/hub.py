"""Rows of a dataset of the Hugging Face hub, read as a stream: nothing more is fetched than is used."""

from __future__ import annotations

from itertools import islice
from typing import Any

from portadraft.errors import InvalidArgument, MissingDependency, ModelNotFound
from portadraft.training.data import Row, row

ROWS = 20_000
"""Rows that are read where no limit is given."""


def read_dataset(name: str, limit: int | None = None) -> list[Row]:
    """The first rows of `[hf:]NAME[:CONFIG][@SPLIT]`; the split is "train" unless named.

    Columns as in `portadraft.training.data.read_rows`. Code that a dataset brings is never run.

    Raises: MissingDependency without the package `datasets`; ModelNotFound where it cannot be read.
    """
    shown = f"data={name!r}"
    try:
        import datasets
    except ImportError:
        raise MissingDependency(
            f"{shown}: no such file; to read it as a dataset of the Hugging Face hub: pip install 'datasets>=3'"
        ) from None
    path, _, split = name.removeprefix("hf:").partition("@")
    path, _, config = path.partition(":")
    options: dict[str, Any] = {"split": split or "train", "streaming": True}
    if int(datasets.__version__.split(".")[0]) < 4:
        options["trust_remote_code"] = False  # later versions know no such code
    try:
        stream = datasets.load_dataset(path, config or None, **options)
        values = list(islice(stream, limit or ROWS))
    except Exception as error:  # network, names, formats: the package raises dozens of kinds
        raise ModelNotFound(f"{shown}: the dataset cannot be read ({type(error).__name__}: {error})") from error
    if not values:
        raise InvalidArgument(f"{shown}: no rows in split {options['split']!r}")
    return [row(f"{shown}, row {number}", value) for number, value in enumerate(values)]
