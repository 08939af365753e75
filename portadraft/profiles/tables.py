"""Acceptance tables that lie beside drafters or in the user's folder, as prediction takes them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from portadraft.drafters.select import folders
from portadraft.errors import PortadraftError
from portadraft.identity import same_weights
from portadraft.profiles.ids import same_drafter
from portadraft.profiles.nearness import Query, same_temperature
from portadraft.profiles.schema import MOST_LENGTH, Acceptance, DrafterIdentity, Shape


def stored_acceptance(query: Query) -> tuple[Acceptance, ...]:
    """Of the query's model and drafter at about its temperature; () where no table is known.

    A damaged file is passed over with a warning.
    """
    from portadraft.tuner.acceptance import AcceptanceTable

    for path in _files():
        try:
            table = AcceptanceTable.load(path)
        except (PortadraftError, OSError) as error:
            warnings.warn(f"an acceptance table is passed over: {error}", stacklevel=2)
            continue
        origin = table.origin
        fits = (
            origin.drafter_id != ""
            and same_temperature(origin.temperature, query.temperature)
            and same_drafter(DrafterIdentity(name=origin.drafter[:200], id=origin.drafter_id[:2000]), query.drafter)
            and same_weights(origin.weights_id, query.model.weights_id)
        )
        if fits:
            given, slots = table.tokens_per_step(), table.mean_nodes()
            return tuple(
                Acceptance(
                    shape=Shape(width=shape.width, length=shape.length, nodes=shape.nodes),
                    temperature=origin.temperature,
                    tokens_per_step=min(float(given[index]), MOST_LENGTH + 1.0),
                    slots=max(1.0, float(slots[index])),
                )
                for index, shape in table.grid.cells()
                if shape.length <= MOST_LENGTH
            )
    return ()


def _files() -> Iterator[Path]:
    from portadraft.tuner.tables import FOLDER, user_tables

    for folder in (*(drafter / FOLDER for drafter in folders()), user_tables()):
        yield from sorted(folder.glob("*.safetensors"))
