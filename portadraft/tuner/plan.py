"""Planning for a machine that is not here: a stored acceptance table and a cost curve, and no model at all."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from portadraft.errors import InvalidArgument, ModelNotFound
from portadraft.tuner.acceptance import AcceptanceTable
from portadraft.tuner.config import TuneConfig
from portadraft.tuner.devices import MOST_ROUNDS, SimulatedMachine
from portadraft.tuner.fit import measure_costs
from portadraft.tuner.measure import Disturbance
from portadraft.tuner.outcome import DrafterResult, Outcome, predicted
from portadraft.tuner.predict import predict
from portadraft.tuner.search import Search


def plan(acceptance: Path, config: TuneConfig) -> Outcome:
    """Tune a simulated device for the drafter of a table.

    Raises: ModelNotFound, CorruptFile, InvalidArgument, OSError.
    """
    curve = config.device_curve
    if curve is None:
        raise InvalidArgument("device_curve=None: expected the costs of a device to plan for")
    if not acceptance.is_file():
        what = "not a file" if acceptance.exists() else "no such file"
        raise ModelNotFound(
            f"acceptance={str(acceptance)!r}: {what}; expected a table that `portadraft tune` stored, such as "
            "DRAFTER/acceptance/NAME.safetensors"
        )
    table = AcceptanceTable.load(acceptance)
    config = replace(config, temperature=table.origin.temperature)  # what was recorded decides
    one = DrafterResult(table.origin.drafter, f"from {acceptance}", None, table)  # type: ignore[arg-type]
    for batch in config.batch_sizes:
        machine = SimulatedMachine(curve.at(batch), table, seed=config.seed)
        costs, timings = measure_costs(
            machine, table.kind, table.grid, seconds=0.3 * config.budget_s, clock=machine.clock
        )
        prediction = predict(table, costs)
        one.costs.append((costs, timings))
        if config.predict_only:
            one.results.append(predicted(prediction, machine.clock()))
        else:
            left = max(config.budget_s - machine.clock(), 0.1)
            nobody = Disturbance(others=lambda: None)
            search = Search(machine, prediction, left, machine.clock, nobody, most_rounds=MOST_ROUNDS)
            one.results.append(search.run(config.exhaustive))
    return Outcome(curve.name, config, [one], secrets.token_hex(8))
