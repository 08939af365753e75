"""Which profile is found, from where, and what is said about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from portadraft.core.types import BeamShape
from portadraft.errors import CorruptFile, InvalidArgument
from portadraft.profiles import home, save
from portadraft.profiles.catalog import places, shipped
from portadraft.profiles.folder import Folder
from portadraft.profiles.following import MOST_PASS, profile_policy, shape_at
from portadraft.profiles.indexing import index_bytes, push
from portadraft.profiles.lookup import Found, find
from portadraft.profiles.nearness import Query, Step, Summary, context_class, model_key, temperature_class
from portadraft.profiles.prediction import predict
from portadraft.profiles.schema import BatchChoice, Costs, DrafterIdentity, Machine, ModelIdentity, Profile, Software
from portadraft.profiles.stores import open_store
from portadraft.profiles.tables import stored_acceptance
from portadraft.tuner.acceptance import AcceptanceTable, Origin
from portadraft.tuner.grid import Grid
from portadraft.tuner.tables import user_tables

from .examples import DRAFTER, MACHINE, MODEL, OTHER_WEIGHTS, SOFTWARE, WHEN, costs, make, query, sample, shape, table

pytestmark = pytest.mark.usefixtures("new_home")


def _versions(**versions: str) -> Software:
    return SOFTWARE.model_copy(update={"versions": {**SOFTWARE.versions, **versions}})


def _machine(**changes: object) -> Machine:
    return MACHINE.model_copy(update=changes)


def test_nothing_is_found_in_an_empty_home() -> None:
    found = find(query())
    assert (found.step, found.profile) == ("none", None)
    assert found.reason.startswith("no profile for this machine and model (your folder ")


def test_exact() -> None:
    save(make())
    found = find(query())
    assert (found.step, found.differences, found.profile) == ("exact", (), make())
    assert found.reason.startswith("profile, exact: your folder ")


CASES: dict[str, tuple[Query, Step, str]] = {
    "library": (query(software=_versions(torch="2.15.0")), "other-versions", "torch 2.13.0+cu126, here 2.15.0"),
    "our own version": (
        query(software=SOFTWARE.model_copy(update={"portadraft": "0.9.0"})),
        "other-versions",
        "portadraft 0.1.0, here 0.9.0",
    ),
    "memory": (query(machine=_machine(memory_gb=24)), "other-conditions", "48 GB of memory, here 24"),
    "temperature": (query(temperature=0.7), "other-conditions", "temperature 0, here 0.7"),
    "context": (query(context=32_000), "other-conditions", "context 200, here 32000"),
    "weights": (
        query(model=MODEL.model_copy(update={"weights_id": OTHER_WEIGHTS})),
        "other-conditions",
        "other weights of the same architecture",
    ),
    "drafter": (query(drafter=DrafterIdentity(name=DRAFTER.name, id="x")), "other-conditions", "another drafter"),
    "generation": (query(machine=_machine(name="NVIDIA L4")), "similar-device", "measured on NVIDIA L40S"),
}


@pytest.mark.parametrize(("asked", "step", "difference"), CASES.values(), ids=CASES)
def test_near(asked: Query, step: Step, difference: str) -> None:
    save(make())
    found = find(asked)
    assert found.step == step
    assert difference in " ".join(found.differences)
    assert difference in found.reason
    assert found.profile == make()


@pytest.mark.parametrize(
    "asked",
    [
        query(software=_versions(torch="2.13.4", transformers="5.24.9")),
        query(machine=_machine(driver="999.1", reported="another word for it")),
        query(context=600),
    ],
    ids=["patch release", "driver", "somewhat longer"],
)
def test_what_does_not_matter(asked: Query) -> None:
    save(make())
    assert find(asked).step == "exact"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (query(machine=_machine(name="AMD Instinct MI300X")), "of NVIDIA L40S"),
        (query(machine=_machine(name="NVIDIA L40S MIG 1g.6gb")), "of NVIDIA L40S"),
        (query(machine=_machine(name="something new")), "of NVIDIA L40S"),
        (query(machine=_machine(kind="cpu")), "of NVIDIA L40S"),
        (query(model=MODEL.model_copy(update={"architecture_id": "b" * 16})), "for smollm2-135m, of another arch"),
        (query(model=MODEL.model_copy(update={"architecture_id": ""})), "for smollm2-135m, of another arch"),
        (query(dtype="float32"), "for bfloat16"),
        (query(drafter=DrafterIdentity(name="lookup", id="lookup-2-6-8")), "for the drafter redrafter+lookup"),
        (query(software=SOFTWARE.model_copy(update={"backend": "mlx"})), "for the backend torch"),
    ],
    ids=["vendor", "slice", "unknown", "cpu", "architecture", "no id", "dtype", "kind of drafter", "backend"],
)
def test_of_no_use(asked: Query, why: str) -> None:
    save(make())
    found = find(asked)
    assert found.step == "none"
    own, shipped = found.looked
    assert own.why[0].startswith(why) and len(own.why) == 1
    assert shipped.why == ("published figures of another model or device",)
    assert find(query()).looked[0].why == ()


def test_cpus_differ_by_threads() -> None:
    cpu = Machine(name="AMD EPYC 7763", kind="cpu", cores=8, threads=8, memory_gb=32)
    save(make(machine=cpu))
    assert find(query(machine=cpu)).step == "exact"
    assert find(query(machine=cpu.model_copy(update={"threads": 6}))).step == "similar-device"
    assert find(query(machine=cpu.model_copy(update={"threads": 2}))).step == "none"
    other = cpu.model_copy(update={"name": "AMD EPYC 9R14"})
    assert "measured on AMD EPYC 7763 with 8 threads" in find(query(machine=other)).reason


def test_a_profile_of_a_busy_machine_is_not_exact() -> None:
    save(make(disturbed=True))
    found = find(query())
    assert found.step == "other-conditions"
    assert "measured on a busy machine" in found.differences


def test_nearer_before_newer_and_own_before_fleet(tmp_path: Path) -> None:
    far = make(software=_versions(torch="2.11.0"), created=WHEN.replace(year=2027))
    save(far)
    push(Folder(tmp_path), [make(software=_versions(torch="2.12.0")).to_bytes()])
    found = find(query(), tmp_path)
    assert f"the fleet store {tmp_path} (asked for)" in found.place
    assert found.differences == ("torch 2.12.0, here 2.13.0+cu126",)
    push(Folder(tmp_path), [make(batches=(BatchChoice(batch_size=1, shape=None),)).to_bytes()])
    assert find(query(), tmp_path).step == "exact"
    save(make(source="mine"))
    assert find(query(), tmp_path).place.startswith("your folder")


def test_newest_of_equals() -> None:
    for year, width in ((2025, 1), (2027, 3), (2026, 2)):
        temperature = make().conditions.model_copy(update={"context": year})  # so that they are not pooled
        choice = BatchChoice(batch_size=1, shape=shape(width))
        save(make(created=WHEN.replace(year=year), batches=(choice,), conditions=temperature))
    found = find(query(context=2000))
    assert found.profile is not None and found.profile.batches[0].shape == shape(3)


def test_equal_machines_are_pooled(tmp_path: Path) -> None:
    save(make(samples=(sample("ann", 20.0, shape()), sample("ann", 10.0, None))))
    theirs = make(samples=(sample("bob", 30.0, shape()), sample("bob", 10.0, None)))
    push(Folder(tmp_path), [theirs.to_bytes()])
    found = find(query(), tmp_path)
    assert found.pooled == 2
    assert found.profile is not None and found.profile.batches[0].speedup == pytest.approx(2.5)
    assert "2 pooled" in found.reason


# prediction


def test_predicted_from_costs_and_acceptance() -> None:
    """The device was tuned with another drafter; this one's acceptance is known from another device."""
    save(make(costs=costs(), drafter=DrafterIdentity(name="lookup", id="l")))
    save(make(machine=_machine(name="AMD Instinct MI300X"), acceptance=table()))
    found = find(query())
    assert found.step == "predicted"
    assert found.differences == ("costs measured on NVIDIA L40S", "acceptance from a profile of AMD Instinct MI300X")
    assert found.profile is not None and found.profile.origin == "predicted"
    assert {c.batch_size: c.shape for c in found.profile.batches}[1] == shape(4, 4, 8)
    older = find(query(software=_versions(torch="2.15.0"), machine=_machine(memory_gb=24)))
    assert older.step == "predicted"
    assert older.differences[1:3] == ("48 GB of memory, here 24", "torch 2.13.0+cu126, here 2.15.0")


def test_prediction_at_the_temperature_that_is_asked_for() -> None:
    save(make(costs=costs(), acceptance=(*table(), *table(0.7))))
    assert find(query()).step == "exact"
    assert find(query(temperature=0.7)).step == "predicted"
    assert find(query(temperature=5.0)).step == "other-conditions"


def _store_table(temperature: float, drafter_id: str = DRAFTER.id) -> Path:
    """One recording of ten steps, in which 4 candidates of 2 give 2.5 tokens a step and everything else 1.5."""
    grid = Grid(widths=(1, 4), lengths=(1, 2), budgets=(8,))
    steps = np.full((1, *grid.size), 10, np.int32)
    accepted = np.full_like(steps, 5)
    accepted[0, 1, 1, 0] = 15
    origin = Origin(drafter=DRAFTER.name, drafter_id=drafter_id, weights_id=MODEL.weights_id, temperature=temperature)
    made = AcceptanceTable(grid, origin, ("chat",), steps, accepted, steps, steps * 8)
    path = user_tables() / f"{temperature}.safetensors"
    made.save(path)
    return path


def test_tables_beside_drafters_serve_prediction() -> None:
    save(make(costs=costs(), conditions=make().conditions.model_copy(update={"temperature": 0.0})))
    hot = query(temperature=0.7)
    assert stored_acceptance(hot) == () and find(hot, acceptance=stored_acceptance).step == "other-conditions"
    _store_table(0.0)
    assert stored_acceptance(hot) == ()
    path = _store_table(0.7)
    assert {line.shape: line.tokens_per_step for line in stored_acceptance(hot)}[shape(4, 2, 8)] == 2.5
    found = find(hot, acceptance=stored_acceptance)
    assert found.step == "predicted" and "acceptance from the drafter's own table" in found.reason
    assert found.profile is not None and found.profile.batches[0].shape == shape(4, 2, 8)
    assert stored_acceptance(query(temperature=0.7, drafter=DrafterIdentity(name=DRAFTER.name, id="x"))) == ()
    path.write_bytes(b"no table")
    with pytest.warns(UserWarning, match="an acceptance table is passed over"):
        assert find(hot, acceptance=stored_acceptance).step == "other-conditions"


def test_similar_device_predicts() -> None:
    save(make(costs=costs(3.0), machine=_machine(name="NVIDIA L4"), drafter=DrafterIdentity(name="lookup", id="l")))
    found = find(query(), acceptance=lambda asked: table())
    assert found.step == "similar-device"
    assert found.differences == ("costs measured on NVIDIA L4", "acceptance from the drafter's own table")


def test_predict() -> None:
    # batch 1: 2.2 tokens in 20 + 2.6 ms is better than 2.25 in 24 + 2.6; batch 4: 8 slots a row already cost 12 ms
    choices = {choice.batch_size: choice for choice in predict(table(), costs())}
    assert choices[1].shape == shape(4, 4, 8)
    assert choices[1].speedup == pytest.approx(2.2 / (20 + 2.6) * 20)
    assert choices[1].plain_tokens_per_s == pytest.approx(50.0)
    assert choices[4].shape is not None and choices[4].shape.beam().slots() < 8
    dear = Costs(verify=tuple(point.model_copy(update={"ms": point.slots * 20.0}) for point in costs().verify))
    assert {choice.shape for choice in predict(table(), dear)} == {None}
    assert predict((), costs()) == () == predict(table(), Costs()) == predict(table(0.7), costs())


def test_what_often_finds_nothing_costs_its_mean() -> None:
    """Lookup's 8 tokens are checked in one step of ten: such a step costs little on average."""
    rare = table()[1].model_copy(update={"slots": 1.5, "tokens_per_step": 1.2})
    dear = Costs(verify=tuple(p.model_copy(update={"ms": 20.0 + 5 * (p.slots - 1)}) for p in costs().verify))
    assert {choice.shape for choice in predict((rare,), dear)} == {None}
    (choice, _) = predict((rare,), dear, drafter="lookup")
    assert choice.speedup == pytest.approx(1.2 * 20 / 22.5)


def test_lookup_beside_a_trained_drafter_has_slots_of_its_own() -> None:
    """(1, 2) is a pass of 3 slots, with lookup's 8 nodes one of 11; a budget cuts both."""
    line = table()[0].model_copy(update={"shape": shape(1, 2, None), "tokens_per_step": 1.5, "slots": None})
    dear = Costs(verify=tuple(p.model_copy(update={"ms": 18.0 + 2 * p.slots}) for p in costs().verify))
    (alone, _) = predict((line,), dear, drafter="redrafter")
    assert alone.speedup == pytest.approx(1.5 * 20 / 24)
    assert {choice.shape for choice in predict((line,), dear, drafter="redrafter+lookup")} == {None}
    cut = line.model_copy(update={"shape": shape(1, 2, 4)})
    (both, _) = predict((cut,), dear, drafter="redrafter+lookup")
    assert both.speedup == pytest.approx(1.5 * 20 / 26)


def test_prediction_does_not_leave_what_was_measured() -> None:
    few = Costs(verify=tuple(p for p in costs().verify if p.slots <= 2), draft=costs().draft)
    assert {choice.shape for choice in predict(table(), few)} == {None}


# what was asked for


def test_a_named_profile_is_used_however_far(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(make().to_bytes())
    far = query(machine=_machine(name="something new"))
    found = find(far, path)
    assert (found.step, found.profile) == ("asked-for", make())
    assert f"the file {path}" in found.reason and "made for smollm2-135m" in found.reason
    assert find(far, make()).place == "the profile that was passed"
    assert find(far, "none") == Found("none", None)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(CorruptFile, match=r"mine\.json: not a profile"):
        find(far, path)
    plain = tmp_path / "without an ending"
    plain.write_bytes(make().to_bytes())
    assert find(far, plain).step == "asked-for"
    with pytest.raises(InvalidArgument, match="profiles='': expected a profile's file"):
        find(far, "")


# bad profiles and stores are misses


def test_broken_profiles_are_misses(tmp_path: Path) -> None:
    identity = save(make())
    own = home.user_folder()
    save(make(software=_versions(torch="2.12.0")))
    assert find(query()).step == "exact"  # and the index is written
    (own.path / f"{identity}.json").write_bytes(make().to_bytes()[:-9])
    with pytest.warns(UserWarning, match="passed over: .*not what its name says"):
        found = find(query())
    assert found.step == "other-versions"


def test_an_index_that_lies_is_a_miss() -> None:
    """It claims that a profile of another device is one of this device."""
    other = make(machine=_machine(name="AMD Instinct MI300X"), batches=(BatchChoice(batch_size=1, shape=shape(64)),))
    identity = save(other)
    home.user_folder().write_index(index_bytes({identity: Summary.of(make())}))
    assert find(query()).step == "none"


@pytest.mark.parametrize("index", [b"", b"{", b'{"index_version":7}', b"[" * 1000, b'{"entries":{"../../x":{}}}'])
def test_a_broken_index_is_made_anew(index: bytes) -> None:
    identity = save(make())
    home.user_folder().write_index(index)
    assert find(query()).step == "exact"
    assert identity.encode() in (home.user_folder().read_index() or b"")


def test_an_unreachable_store_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    save(make(software=_versions(torch="2.12.0")))
    monkeypatch.setenv("PORTADRAFT_PROFILES", "http://127.0.0.1:9/profiles")
    found = find(query())
    assert found.step == "other-versions"
    assert "not reachable" in found.looked[1].note and "there is no copy of it yet" in found.looked[1].note
    none = find(query(machine=_machine(name="something new")))
    assert "http://127.0.0.1:9/profiles ($PORTADRAFT_PROFILES): not reachable" in none.reason


def test_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert home.store_url() is None
    path = home.config_path()
    path.parent.mkdir(parents=True)
    path.write_text(f'[profiles]\nstore = "{tmp_path}"\n', encoding="utf-8")
    assert home.store_url() == (str(tmp_path), str(path))
    monkeypatch.setenv("PORTADRAFT_PROFILES", "s3://bucket/x")
    assert home.store_url() == ("s3://bucket/x", "$PORTADRAFT_PROFILES")
    assert home.store_url("gs://y") == ("gs://y", "asked for")
    monkeypatch.setenv("PORTADRAFT_PROFILES", "none")
    assert home.store_url() is None
    monkeypatch.delenv("PORTADRAFT_PROFILES")
    for text in ("[profiles", "profiles = 3\n[", "[profiles]\nstore = 3"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InvalidArgument, match=r"config\.toml"):
            home.store_url()
    assert [place.note for place in places() if "config.toml" in place.note]  # a note, not the end of a load


def test_stores_that_make_no_sense() -> None:
    with pytest.raises(InvalidArgument, match="store="):
        open_store("")
    with pytest.raises(InvalidArgument, match="store="):
        open_store("nonsense://x")


# shipped


def _vicuna(size: str, machine: str, backend: str, **changes: object) -> Query:
    return query(
        machine=Machine(name=machine, kind="gpu"),
        software=Software(backend=backend),
        model=ModelIdentity(name=f"lmsys/vicuna-{size}-v1.3", architecture_id="v" * 16),
        dtype="float16",
        **changes,
    )


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        (_vicuna("7b", "NVIDIA H100 SXM", "torch"), {1: (64, 4), 2: (64, 4), 8: (16, 4), 80: (2, 4)}),
        (_vicuna("7b", "Apple M1 Max", "mlx"), {1: (1, 4)}),
        (_vicuna("7b", "Apple M2 Ultra", "mlx"), {1: (3, 3)}),
        (_vicuna("13b", "Apple M2 Ultra", "mlx"), {1: (3, 3)}),
        (_vicuna("33b", "Apple M2 Ultra", "torch"), {1: (4, 3)}),
    ],
)
def test_published(asked: Query, sizes: dict[int, tuple[int, int]]) -> None:
    found = find(asked)
    assert found.step == "published"
    assert found.place == "shipped with portadraft"
    assert "published figures, not measured here" in found.reason
    assert found.profile is not None and found.profile.source
    shapes = {c.batch_size: (c.shape.width, c.shape.length) for c in found.profile.batches if c.shape}
    assert shapes == sizes


def test_published_is_the_last_resort() -> None:
    asked = _vicuna("7b", "NVIDIA H100 SXM", "torch")
    far = make(
        machine=Machine(name="NVIDIA H200 SXM", kind="gpu"), software=asked.software, model=asked.model, drafter=DRAFTER
    )
    save(far.model_copy(update={"conditions": far.conditions.model_copy(update={"dtype": "float16"})}))
    assert find(asked).step == "similar-device"
    assert find(_vicuna("7b", "NVIDIA H100 SXM MIG 1g.10gb", "torch")).step == "none"
    assert find(_vicuna("7b", "NVIDIA A100 SXM", "torch")).step == "none"
    assert find(dataclasses.replace(asked, drafter=DrafterIdentity(name="lookup"))).step == "none"


def test_every_shipped_profile_is_published() -> None:
    known = shipped().known.values()
    assert len(known) >= 6
    assert all(profile.origin == "published" and "root" in profile.source for profile in known)


@pytest.mark.parametrize("name", ["lmsys/vicuna-7b-v1.3", "vicuna-7b", "models/Vicuna-7B-v1.5/", "vicuna-7b.gguf"])
def test_model_key(name: str) -> None:
    assert model_key(name) == "vicuna-7b"


# from a profile to shapes


def _sizes(**choices: object) -> Profile:
    return make(batches=tuple(BatchChoice(batch_size=int(k[1:]), shape=v) for k, v in choices.items()))


def test_between_measured_batch_sizes() -> None:
    profile = _sizes(b1=shape(16, 4, 64), b4=shape(4, 2, 16), b16=None)
    policy = profile_policy(profile, 40)
    assert policy.choose(1) == BeamShape(16, 4, 64)
    assert policy.choose(2) == BeamShape(8, 3, 32)
    assert policy.choose(4) == BeamShape(4, 2, 16)
    assert policy.choose(7) == BeamShape(4, 2, 16)
    assert policy.choose(8) is None
    assert policy.choose(40) is None
    assert policy.widest() == BeamShape(16, 4, 64)


def test_outside_of_measured_batch_sizes() -> None:
    profile = _sizes(b4=shape(4, 4, 16))
    assert shape_at(profile.batches, 1) == BeamShape(4, 4, 16)
    assert shape_at(profile.batches, 8) == BeamShape(2, 4, 8)
    assert shape_at(profile.batches, 32) == BeamShape(1, 1, 2)
    assert shape_at(profile.batches, 64) is None


def test_a_pass_is_bounded_whatever_a_profile_says() -> None:
    profile = _sizes(b1=shape(64, 64, None), b64=shape(64, 64, None))
    policy = profile_policy(profile, 64)
    sizes = [live * chosen.slots() for live in range(1, 65) if (chosen := policy.choose(live))]
    assert len(sizes) == 64 and max(sizes) <= MOST_PASS < 64 * 64 * 64
    assert policy.choose(1) == BeamShape(64, 64, None)


def test_classes_of_calls() -> None:
    """Calls that share a look-up are alike to `compare`."""
    assert temperature_class(0.0) != temperature_class(0.01)
    assert temperature_class(0.68) == temperature_class(0.72)
    assert context_class(3) == context_class(500) != context_class(5000)


def test_whole_trees_stay_whole() -> None:
    profile = _sizes(b1=shape(16, 4, None), b4=shape(4, 4, None))
    assert shape_at(profile.batches, 2) == BeamShape(8, 4, None)


@pytest.mark.parametrize("rows", [0, -1])
def test_rows(rows: int) -> None:
    with pytest.raises(InvalidArgument, match="rows="):
        profile_policy(make(), rows)
