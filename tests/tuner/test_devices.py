"""Curves, cost models and devices that are not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from portadraft.core.types import BeamShape
from portadraft.errors import InvalidArgument, ModelNotFound
from portadraft.tuner.costs import Costs, Curve
from portadraft.tuner.devices import SimulatedMachine, parse_curve, read_curve, shipped
from portadraft.tuner.fit import measure_costs
from portadraft.tuner.grid import Grid, Kind
from portadraft.tuner.measure import Disturbance
from portadraft.tuner.recorded import fit_steps
from tests.tuner import synthetic

RECORDED = json.loads((Path(__file__).parent.parent / "data" / "apple_recordings.json").read_text("utf-8"))
NAMES = [f"{d['device']}-{d['dtype']}" for d in RECORDED["devices"]]
NOISE = 0.02


# Apple's recordings


def cells_of(device):
    return {(w, n): (steps, ms) for w, n, steps, ms in device["cells"]}


def pick(device, trained_on):
    """The fastest shape by costs fitted to some of the timings and the recorded steps, or None for plain decoding."""
    costs = fit_steps(trained_on)
    total = {c: costs(*c) * steps for c, (steps, _) in cells_of(device).items()}
    best = min(total, key=total.get)
    return best if total[best] < device["plain_ms"] * RECORDED["tokens"] else None


def judge(device, chosen, run=None):
    """Chosen ÷ best of the recorded times of a run (None: the mean of all), and the spread between runs."""
    cells = cells_of(device)
    time = {c: sum(ms) / len(ms) if run is None else ms[run] for c, (_, ms) in cells.items()}
    best = min(time, key=time.get)
    spread = max(max(cells[c][1]) / min(cells[c][1]) - 1 for c in (chosen, best))
    plain = device["plain_ms"] * RECORDED["tokens"]
    return time[best] / time[chosen], spread, plain / time[chosen]


def trials():
    for number, device in enumerate(RECORDED["devices"]):
        cells = cells_of(device)
        for half in (0, 1):
            # Of repeated timings the quicker counts: nothing makes a machine too fast.
            step = {c: min(ms) / steps for c, (steps, ms) in cells.items() if sum(c) % 2 == half}
            yield pytest.param(number, step, None, id=f"{NAMES[number]}-half{half}")
        runs = len(next(iter(cells.values()))[1])
        for run in range(runs if runs > 1 else 0):
            step = {c: ms[run] / steps for c, (steps, ms) in cells.items()}
            yield pytest.param(number, step, 1 - run, id=f"{NAMES[number]}-run{run}")


@pytest.mark.parametrize(("number", "step_ms", "judged_on"), list(trials()))
def test_recorded_devices_get_their_best_shape(number, step_ms, judged_on):
    """Fitted on half of the cells, or on one run: within 2 % or the spread between runs of the best recorded."""
    device = RECORDED["devices"][number]
    chosen = pick(device, step_ms)
    assert chosen is not None
    share, spread, speedup = judge(device, chosen, judged_on)
    assert share >= 1 - max(0.02, spread)
    assert speedup > 1


@pytest.mark.parametrize("number", [i for i, n in enumerate(NAMES) if "ultra" in n or "m1" in n])
def test_the_cliff_is_found_from_half_of_the_cells(number):
    """Without the jump in the model, an Ultra would be sent over its cliff at 16 rows: the negative control."""
    device = RECORDED["devices"][number]
    cells = cells_of(device)
    for half in (0, 1):
        costs = fit_steps({c: min(ms) / s for c, (s, ms) in cells.items() if sum(c) % 2 == half})
        assert costs.last is not None
        assert 12 <= costs.last < 16
        assert costs.jump > 0.2 * device["plain_ms"]
    beyond = min(cells[4, 3][1]) / cells[4, 3][0]
    assert beyond > 1.15 * (costs.base + costs.per_row * 16 + costs.per_length * 3)


def test_a_device_without_a_cliff_gets_none():
    smooth = {(w, n): 100 + 3 * w * (n + 1) + 2 * n for w in range(1, 5) for n in range(1, 5)}
    costs = fit_steps(smooth)
    assert costs.last is None
    assert all(costs(w, n) == pytest.approx(ms, rel=1e-3) for (w, n), ms in smooth.items())
    with pytest.raises(InvalidArgument, match="at least five"):
        fit_steps({(1, 1): 1.0})


# shipped curves and files


def test_shipped_curves_say_where_they_come_from():
    assert len(shipped()) == len(NAMES)
    for name in shipped():
        curve = read_curve(Path(name))
        assert "Apple" in curve.origin
        costs = curve.at(1)
        recorded = RECORDED["devices"][NAMES.index(name.replace("-vicuna-7b", ""))]
        assert costs.plain_ms == pytest.approx(recorded["plain_ms"], rel=0.01)
        for (width, length), (steps, ms) in cells_of(recorded).items():
            rows = width * (length + 1)
            # (1, 1) was timed first, and cold; 15 rows stand on both sides of the cliff, by run.
            if (width, length) != (1, 1) and rows not in (13, 14, 15):
                step = costs.check(rows) + costs.draft_ms(width, length)
                assert step == pytest.approx(min(ms) / steps, rel=0.16)


def test_a_larger_batch_costs_what_as_many_slots_do():
    curve = read_curve(Path("apple-m2-ultra-vicuna-7b-float16"))
    assert curve.at(8).check(2) == pytest.approx(curve.at(1).check(16))
    assert curve.at(4).plain_ms == pytest.approx(curve.at(1).check(4))


ROOFLINE = {"bandwidth_gb_per_s": 400.0, "tflop_per_s": 20.0, "model_gb": 13.5}


def test_a_roofline_is_flat_until_computing_takes_longer():
    curve = parse_curve({"name": "guess", "roofline": ROOFLINE})
    one = curve.at(1)
    assert one.plain_ms == pytest.approx(1000 * 13.5 / 400)
    assert one.check(16) == pytest.approx(one.plain_ms)
    assert one.check(256) > 3 * one.plain_ms
    assert curve.at(64).check(16) > 3 * one.plain_ms


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected an object"),
        ({"name": 3, "check": {}}, "name=3"),
        ({"name": "\x1b[31mred", "check": {}}, "name=.*expected a short text"),
        ({"name": "x"}, "check=None"),
        ({"name": "x", "check": {"slots": [2, 4], "ms": [1, 2]}}, "from 1 on"),
        ({"name": "x", "check": {"slots": [1, 1], "ms": [1, 2]}}, "rising slots"),
        ({"name": "x", "check": {"slots": [1, 2], "ms": [1]}}, "each with"),
        ({"name": "x", "check": {"slots": [1, 2], "ms": [1, float("nan")]}}, "check.ms"),
        ({"name": "x", "check": {"slots": [1, 2], "ms": [1, 10**400]}}, "check.ms"),
        ({"name": "x", "check": {"slots": [1, 2], "ms": [1, float("inf")]}}, "check.ms"),
        ({"name": "x", "check": {"slots": [1, 2], "ms": [1, 1e300]}}, "0.001 to 1e"),
        ({"name": "x", "check": {"slots": [1, 2], "ms": [0, 1]}}, "0.001 to 1e"),
        ({"name": "x", "check": {"slots": [1, 2], "ms": [1e-308, 1]}}, "check.ms: 1e-308; expected 0.001 to"),
        ({"name": "x", "check": {"slots": [1], "ms": [1]}, "draft": {"base_ms": 1e9}}, "draft.base_ms: .* 0 to 1"),
        ({"name": "x", "check": {"slots": [1], "ms": [1]}, "draft": {"bas_ms": 1}}, "draft.bas_ms: there is no such"),
        ({"name": "x", "check": {"slots": [1], "ms": [1], "unit": "s"}}, "check.unit: there is no such field"),
        ({"name": "x", "chek": {"slots": [1], "ms": [1]}}, "chek: there is no such field; expected name"),
        ({"name": "x", "check": {"slots": [1], "ms": [1]}, "roofline": ROOFLINE}, "roofline beside check"),
        ({"name": "x", "draft": {}, "batch": 4, "roofline": ROOFLINE}, "roofline beside batch, draft"),
        ({"name": "x", "roofline": {**ROOFLINE, "model_gb": 1e-9}}, "would take 2.5e-09 ms; .* check the units"),
        ({"name": "x", "roofline": {**ROOFLINE, "bandwidth_gb_per_s": 1e-9}}, "would take 1.35e.13 ms"),
        ({"name": "x", "roofline": {**ROOFLINE, "drafter_gb": 400}}, "drafter_gb=400; expected less than model_gb"),
        ({"name": "x", "roofline": {**ROOFLINE, "bandwith": 1}}, "roofline.bandwith: there is no such field"),
        ({"name": "x", "check": {"slots": [1], "ms": [1]}, "batch": True}, "batch"),
        ({"name": "x", "check": {"slots": [1], "ms": [1]}, "draft": [1]}, "draft"),
        ({"name": "x", "roofline": {"model_gb": 1}}, "bandwidth_gb_per_s"),
        ({"name": "x", "roofline": {**ROOFLINE, "model_gb": "big"}}, "model_gb"),
    ],
)
def test_a_wrong_curve_is_named(document, message):
    with pytest.raises(InvalidArgument, match=message):
        parse_curve(document)


def test_the_steepest_curve_goes_on_to_the_largest_batch():
    curve = parse_curve({"name": "x", "check": {"slots": [1, 2], "ms": [0.001, 1e8]}})
    assert curve.at(4096).plain_ms == pytest.approx(4095e8, rel=1e-3)


def test_files_that_are_no_curves(tmp_path):
    with pytest.raises(ModelNotFound, match="not a file; expected JSON"):
        read_curve(tmp_path)
    with pytest.raises(ModelNotFound, match="apple-m2"):
        read_curve(tmp_path / "none.json")
    for text in ("{", "[" * 100_000, ""):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(InvalidArgument, match="not JSON"):
            read_curve(tmp_path / "x.json")


# cost models


def test_a_curve_rises_and_goes_on():
    curve = Curve.fit({1: [40, 41, 39], 4: [44, 44], 8: [43, 43], 16: [60], 32: [80]})
    assert list(curve.ms) == sorted(curve.ms)
    assert curve(4) == curve(8) == pytest.approx(43.5)
    assert curve(24) == pytest.approx(70)
    assert curve(64) == pytest.approx(80 + 32 * 20 / 16)
    assert curve(0) == 40
    for at, ms in (((), ()), ((2, 1), (1.0, 2.0)), ((1, 2), (1.0,)), ((1,), (float("nan"),))):
        with pytest.raises(InvalidArgument):
            Curve(at, ms)


def test_parts_are_measured_and_a_cliff_is_pinned_between_neighbours():
    true = synthetic.device(per_slot=0.2, cliff=(21, 30.0))
    table = synthetic.table()
    machine = SimulatedMachine(true, table, noise=0.01)
    costs, timings = measure_costs(machine, table.kind, table.grid, seconds=30, clock=machine.clock)
    assert {21, 22} <= set(timings.check)
    for slots in (1, 4, 10, 16, 20, 21, 22, 30):
        assert costs.check(slots) == pytest.approx(true.check(slots), rel=0.03)
    for width, length in ((1, 1), (2, 5), (3, 4), (6, 8), (12, 3)):
        assert costs.draft_ms(width, length) == pytest.approx(true.draft_ms(width, length), rel=0.08)


def test_measuring_parts_keeps_to_its_time():
    table = synthetic.table()
    machine = SimulatedMachine(synthetic.device(), table)
    measure_costs(machine, table.kind, table.grid, seconds=4, clock=machine.clock)
    assert machine.clock() < 9  # the first round always runs


def test_what_is_denied_is_not_tried():
    table = synthetic.table()
    machine = SimulatedMachine(synthetic.device(), table, memory_slots=40)  # more would raise
    _, timings = measure_costs(machine, table.kind, table.grid, seconds=5, fits=lambda n: n <= 32, clock=machine.clock)
    assert max(timings.check) <= 32
    assert timings.too_large == 33


def test_out_of_memory_while_measuring_is_recorded():
    table = synthetic.table()
    machine = SimulatedMachine(synthetic.device(per_slot=0.1), table, memory_slots=50)
    _, timings = measure_costs(machine, table.kind, table.grid, seconds=5, clock=machine.clock)
    assert max(timings.check) <= 50
    assert timings.too_large == 64


def test_an_average_step_of_a_batch():
    costs = Costs(2, 0, Curve((1, 9), (10.0, 30.0)), {})
    kind, shape = Kind.of("lookup"), BeamShape(1, 8)
    assert kind.slots(shape, True) == 9
    assert costs.step_ms(kind, shape, 0.0) == pytest.approx(10)
    # Both rows find nothing in a quarter of the steps.
    assert costs.step_ms(kind, shape, 0.5) == pytest.approx(0.25 * 10 + 0.75 * 30)
    both = Kind.of("redrafter+lookup")
    assert both.slots(BeamShape(2, 3), False) == 7
    assert both.slots(BeamShape(2, 3), True) == 15
    assert both.slots(BeamShape(2, 3, 9), True) == 9
    assert both.depth(BeamShape(2, 3), True) == 8
    assert Kind.of("redrafter").slots(BeamShape(2, 3), True) == 7


@pytest.mark.parametrize("axes", [((), (1,), (0,)), ((1,), (2, 3), (0,)), ((1,), (1,), (1,)), ((4096,), (1, 2), (0,))])
def test_grids_that_make_no_sense(axes):
    with pytest.raises(InvalidArgument):
        Grid(*axes)


# disturbance


def test_disturbance_by_spread_and_by_slow_rounds():
    quiet = Disturbance(others=lambda: None)
    for plain, expected in (
        ([40, 41, 40, 42], False),
        ([40, 41, 40, 200], False),  # one hiccup
        ([40, 90, 41, 95], True),
        ([42, 41, 43, 42], False),
        ([70, 71, 70, 72], True),  # far slower than before
    ):
        quiet.begin()
        assert quiet.end(plain) is expected


def test_disturbance_by_other_processes():
    clock, used = iter([0.0, 1.0, 1.0, 2.0]), iter([0.0, 5.0, 5.0, 5.01])
    watch = Disturbance(others=lambda: next(used), clock=lambda: next(clock), load=0.01)
    watch.begin()
    assert watch.end([40, 40, 40])
    watch.begin()
    assert not watch.end([40, 40, 40])


def test_disturbance_by_the_spread_of_parts():
    quiet = Disturbance(others=lambda: None)
    even, uneven = [40, 41, 40, 42, 90], [40, 90, 41, 95, 43]
    for timed, expected in (
        ({1: even, 8: even}, False),  # a hiccup in each
        ({1: uneven, 8: even, 16: even, 32: even, 64: even}, True),  # what everything is compared with
        ({1: even, 8: uneven, 16: uneven}, True),
        ({1: even, 8: even, 16: even, 32: uneven}, False),
        ({1: [40], 8: [70]}, False),
    ):
        quiet.begin()
        assert quiet.end_of_parts(timed) is expected
    clock, used = iter([0.0, 1.0]), iter([0.0, 5.0])
    watch = Disturbance(others=lambda: next(used), clock=lambda: next(clock), load=0.01)
    watch.begin()
    assert watch.end_of_parts({1: even})
