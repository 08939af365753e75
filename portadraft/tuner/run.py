"""`tune`: acceptance, costs, prediction, search, and a profile at the end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from portadraft.core.drafter import Drafter
from portadraft.core.types import BeamShape
from portadraft.drafters import select
from portadraft.errors import InvalidArgument
from portadraft.tuner.acceptance import AcceptanceTable, Origin, make_table
from portadraft.tuner.config import TuneConfig
from portadraft.tuner.devices import MOST_ROUNDS, SimulatedMachine
from portadraft.tuner.fit import measure_costs
from portadraft.tuner.fitting import fitted
from portadraft.tuner.grid import Grid, Kind
from portadraft.tuner.machine import LiveMachine, Machine, check_context, is_out_of_memory
from portadraft.tuner.measure import Disturbance
from portadraft.tuner.memory import free_bytes, need_bytes
from portadraft.tuner.outcome import DrafterResult, Outcome, predicted
from portadraft.tuner.predict import predict
from portadraft.tuner.recordings import Recording, built_in, prompts_id, read_prompts, record
from portadraft.tuner.search import Search
from portadraft.tuner.surrogate import load_process
from portadraft.tuner.tables import find_table, store_table, user_tables

if TYPE_CHECKING:
    from portadraft.api import Model

Say = Callable[[str], None]
_COST_SHARE = 0.3
_REPEATS, _REPEATS_ALONE = 5, 15
"""Of every part's timing, at most; more where the parts are all that is measured."""
TRAINING_HINT = (
    "no trained drafter for these weights: prompt lookup is tuned. A trained drafter guesses more; "
    "make one with `portadraft train {model} --out DRAFTER`, then `portadraft tune --model {model} --drafter DRAFTER`"
)


class Tuner:
    """Tunes one loaded model. say: progress, one line each."""

    def __init__(self, model: Model, config: TuneConfig, say: Say = lambda text: None) -> None:
        self.model, self.config, self.say = model, config, say
        self.target = model.target
        limit = self.target.facts.context_limit
        check_context(config.context, limit)
        prompts = built_in() if config.prompts is None else read_prompts(config.prompts)
        ids = [model.codec.encode_prompt(p.text) for p in prompts]
        fit = fitted(prompts, ids, config.max_tokens, limit, built_in=config.prompts is None)
        self.prompts, self.ids, self.max_tokens = fit.prompts, fit.ids, fit.max_tokens
        self.notes = [] if fit.note is None else [fit.note]
        for note in self.notes:
            say(note)
        self._recordings: list[Recording] | None = None

    def run(self) -> Outcome:
        """Both parts. Raises: as `prepare`."""
        return self.measure(self.prepare())

    def prepare(self) -> Outcome:
        """Select the drafters, and make or find their acceptance tables: nothing here is timed.

        Raises: InvalidArgument, ModelNotFound, MissingDependency, and what selecting a drafter raises.
        """
        config = self.config
        if not config.predict_only:
            load_process()
        outcome = Outcome(self.model.name, config, [], secrets.token_hex(8), self.notes)
        for name in config.drafters:
            selected = self.model.drafter_for(name)
            if selected.drafter is None:
                raise InvalidArgument(
                    f"drafter={name!r}: plain decoding has nothing to tune; it is measured with any other"
                )
            if selected.name == "lookup" and name == "auto":
                outcome.notes.append(TRAINING_HINT.format(model=self.model.name))
            table = self.table(selected.drafter, selected.name, self._folder(name))
            outcome.drafters.append(DrafterResult(selected.name, selected.reason, selected.drafter, table))
        return outcome

    def measure(self, outcome: Outcome) -> Outcome:
        """Time every batch size with every drafter. Ctrl-C keeps what was found so far.

        Raises: KeyboardInterrupt where nothing was found yet; InvalidArgument where no batch size fits into memory.
        """
        try:
            for batch in self.config.batch_sizes:
                for one in outcome.drafters:
                    self.say(f"batch size {batch}, {one.name}")
                    self._tune(one, batch)
                    if one.results and one.results[-1].interrupted:
                        raise KeyboardInterrupt
        except KeyboardInterrupt:
            outcome.stopped = True
            outcome.notes.append("interrupted: this is what was found so far")
            if not any(d.results for d in outcome.drafters):
                raise
        outcome.drafters = [d for d in outcome.drafters if d.results]
        if not outcome.drafters:
            raise InvalidArgument(
                f"batch_sizes={self.config.batch_sizes!r}: not even plain decoding fits into memory; take smaller ones"
            )
        return outcome

    # acceptance

    def _folder(self, name: str) -> Path | None:
        """The folder of a trained drafter, beside which its table lies."""
        if name in ("auto", "redrafter", "redrafter+lookup"):
            return select.find(self.target)
        path = Path(name).expanduser()
        return path if path.is_dir() else None

    def table(self, drafter: Drafter, name: str, folder: Path | None) -> AcceptanceTable:
        """The stored acceptance table, or a new one, which is stored."""
        config, facts = self.config, self.target.facts
        origin = Origin(
            drafter=name,
            drafter_id=str(getattr(drafter, "id", "")),
            weights_id=facts.weights_id,
            prompts=prompts_id(self.prompts, self.max_tokens),
            temperature=config.temperature,
            seed=config.seed,
        )
        grid = Kind.of(name).shapes(allowed(config.grid, drafter))
        if origin.drafter_id and (found := find_table(origin, grid, folder)):
            self.say(f"acceptance of {name}: {found[1]}")
            return found[0]
        recordings = self.recordings()
        total = sum(max(len(r.tokens) - 1, 0) for r in recordings)
        started = time.monotonic()

        def report(done: int) -> None:
            self.say(
                f"acceptance of {name}: replaying, {100 * done // max(total, 1)} % ({time.monotonic() - started:.0f} s)"
            )

        table = make_table(self.target.ops, drafter, recordings, origin, grid, dtype=facts.dtype, report=report)
        if origin.drafter_id:
            try:
                self.say(f"acceptance of {name}: stored in {store_table(table, folder)}")
            except OSError as error:
                why = f"{user_tables()} cannot be written to ({error.strerror or error})"
                self.notes.append(f"acceptance of {name}: not stored, so the next run makes it again: {why}")
        return table

    def recordings(self) -> list[Recording]:
        """The target's own answers; made once a run."""
        if self._recordings is None:
            config = self.config
            self._recordings = record(
                self.target,
                self.ids,
                categories=[p.category for p in self.prompts],
                max_tokens=self.max_tokens,
                temperature=config.temperature,
                seed=config.seed,
                end_tokens=self.model.codec.end_tokens,
                report=lambda done: self.say(f"recording answers, {done} of {len(self.ids)}"),
            )
        return self._recordings

    # one batch size

    def machine(self, drafter: Drafter, batch: int) -> LiveMachine:
        """This machine with the target, at one batch size."""
        config = self.config
        return LiveMachine(self.target, drafter, self.ids, batch, config.context, config.temperature, config.seed)

    def fits(self, batch: int) -> Callable[[int], bool]:
        """Whether a pass over so many slots is expected to fit into the free memory."""
        free, facts, config = free_bytes(self.target.ops), self.target.facts, self.config
        if free is None:
            return lambda slots: True
        return lambda slots: need_bytes(facts, batch, slots, config.context, sampled=config.temperature > 0) < free

    def _tune(self, one: DrafterResult, batch: int) -> None:
        config = self.config
        if config.device_curve is not None:
            simulated = SimulatedMachine(config.device_curve.at(batch), one.table, seed=config.seed)
            nobody = Disturbance(others=lambda: None)
            self._search(one, simulated, simulated.clock, nobody, lambda slots: True)
            return
        with self.machine(one.drafter, batch) as live:
            try:
                self._search(one, live, time.perf_counter, Disturbance(), self.fits(batch))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.say(f"batch size {batch}: out of memory even for plain decoding; left out")

    def _search(
        self,
        one: DrafterResult,
        machine: Machine,
        clock: Callable[[], float],
        disturbance: Disturbance,
        fits: Callable[[int], bool],
    ) -> None:
        config, start = self.config, clock()
        disturbance.begin()
        costs, timings = measure_costs(
            machine,
            one.table.kind,
            one.table.grid,
            seconds=config.budget_s * (1.0 if config.predict_only else _COST_SHARE),
            fits=fits,
            repeats=_REPEATS_ALONE if config.predict_only else _REPEATS,
            clock=clock,
            report=self.say,
        )
        most = None if timings.too_large is None else timings.too_large - 1
        prediction = predict(one.table, costs, most_slots=most)
        one.costs.append((costs, timings))
        if config.predict_only:
            busy = disturbance.end_of_parts(timings.check)
            one.results.append(predicted(prediction, clock() - start, busy))
            return
        left = max(config.budget_s - (clock() - start), 0.1)
        search = Search(machine, prediction, left, clock, disturbance, self.say)
        search.most_rounds = MOST_ROUNDS if isinstance(machine, SimulatedMachine) else None
        result = search.run(config.exhaustive)
        if result.interrupted and not result.measured:
            raise KeyboardInterrupt  # not a single round: there is nothing to keep but a prediction
        result.seconds = clock() - start
        if timings.too_large is not None:
            result.too_large = min(timings.too_large, result.too_large or timings.too_large)
        one.results.append(result)


def allowed(grid: Grid, drafter: Drafter) -> Grid:
    """The grid without widths that the drafter cannot draft (it predicts fewer tokens)."""

    def possible(width: int) -> bool:
        try:
            drafter.candidates(BeamShape(width, 1))
        except InvalidArgument:
            return False
        return True

    return Grid(tuple(w for w in grid.widths if possible(w)), grid.lengths, grid.budgets)
