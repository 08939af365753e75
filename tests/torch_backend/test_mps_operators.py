"""Nothing on the way of generating or training asks MPS for what it lacks, as far as that shows without a Mac.

Every operator and data type is recorded on a CPU, in float16 as on Apple GPUs, and held against
tables of operators that come with torch: that of the oldest supported version, kept in
`tests/data/mps_operators.json`, and the installed torch's own where that is another version.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from portadraft.backends.torch import attention, make_target
from portadraft.backends.torch.cache import RowCache
from portadraft.backends.torch.ops import TorchOps
from portadraft.core.decode import Request
from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.sampling import Sampling
from portadraft.core.types import BeamShape
from portadraft.drafters.lookup import PromptLookup
from portadraft.drafters.oracle import OracleDrafter
from portadraft.drafters.together import Together
from portadraft.testing import OpsConformance, decode, random_redrafter
from tests.torch_backend.families import FAMILIES, VOCABULARY
from tests.torch_backend.mps_recorder import ALTERNATIVES, TABLE, Recorder, complaints, recording

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = [Request((5, 6, 7, 5, 6, 7, 5, 6), 7, 1), Request((9, 8, 3), 4, 2)]
KERNELS, COMPOSITE = frozenset(TABLE["kernels"]), frozenset(TABLE["composite"])


@pytest.fixture(autouse=True, scope="module")
def _as_on_mps() -> Iterator[None]:
    """The ways that `TorchOps` takes on MPS alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchOps, "careful", True)
        patch.setattr(TorchOps, "host", False)
        patch.setattr(RowCache, "one_by_one", True)
        patch.setattr(attention, "_reads_views", lambda device: False)
        yield


def generate(family: str = "llama", temperatures: tuple[float, ...] = (0.0, 0.8)) -> set[int]:
    """Plain, drafted and sampled decoding of a ragged batch and of one row; how many drafted tokens steps accepted."""
    target = make_target(FAMILIES[family]().to(torch.float16), check=False)
    both = Together(target.ops, [random_redrafter(target), PromptLookup(target.ops)])
    part = random_redrafter(target, draft_vocabulary=range(0, VOCABULARY, 2), inner_size=24)
    accepted: set[int] = set()
    for temperature in temperatures:
        decode(target, both, REQUESTS, BeamShape(3, 3, 7), temperature=temperature)
        decode(target, part, REQUESTS[:1], BeamShape(2, 2), temperature=temperature)
        # The oracle knows the answers, so that commits of every length occur; alone and in a ragged batch.
        requests = [Request(r.ids, 24, r.seed) for r in REQUESTS]
        plain, _ = decode(target, None, requests, temperature=temperature)
        answers = {r.ids: ids for r, ids in zip(requests, plain, strict=True)}
        for some in (requests, requests[:1]):
            oracle = OracleDrafter(target.ops, answers, VOCABULARY, probability=0.6, seed=len(some))
            _, progress = decode(target, oracle, some, BeamShape(2, 3), temperature=temperature)
            accepted |= {p.accepted for p in progress if p.drafted and p.accepted is not None}
    return accepted


EVERYTHING = Sampling(
    temperature=0.9,
    top_k=40,
    top_p=0.8,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={5: 1.5},
    banned=[6],
    min_tokens=2,
)


def sample() -> int:
    """Every filter and penalty, log-probabilities, a row restored from a copy, and acceptance by rejection."""
    target = make_target(FAMILIES["llama"]().to(torch.float16), check=False)
    both = Together(target.ops, [random_redrafter(target), PromptLookup(target.ops)])
    greedy = replace(EVERYTHING, temperature=0.0)
    for sampling in (EVERYTHING, greedy, replace(EVERYTHING, top_k=0), replace(EVERYTHING, top_p=1.0)):
        decode(target, both, REQUESTS, BeamShape(3, 3, 7), end_tokens=[2], sampling=sampling, logprobs=3)
    decode(target, random_redrafter(target), REQUESTS, BeamShape(1, 3), temperature=0.8, acceptance="rejection")
    kept = [replace(request, keep=True) for request in REQUESTS]
    _, progress = decode(target, both, kept, BeamShape(2, 2))
    (state,) = [p.state for p in progress if p.state is not None and p.key == 0]
    again = Request((*state.ids, 7), 5, 3, prefix=(state, len(state.ids)))
    ids, _ = decode(target, both, [again], BeamShape(2, 2))
    return len(ids[0])


def tune() -> int:
    """What tuning does on the device: answers with features, replay at every position, timings of passes and drafts."""
    from portadraft.tuner.grid import Grid
    from portadraft.tuner.machine import LiveMachine
    from portadraft.tuner.positions import positions
    from portadraft.tuner.recordings import record

    target = make_target(FAMILIES["llama"]().to(torch.float16), check=False)
    drafter = Together(target.ops, [random_redrafter(target), PromptLookup(target.ops)])
    recordings = record(target, [r.ids for r in REQUESTS], max_tokens=6, temperature=0.8)
    grid = Grid(widths=(1, 2), lengths=(1, 2), budgets=(4, 0))
    assert len(positions(target.ops, drafter, recordings, grid, dtype="float16")) == 2
    with LiveMachine(target, drafter, [r.ids for r in REQUESTS], batch=2, context=12) as machine:
        machine.check_ms(1, 2)
        machine.check_ms(5, 2)
        machine.draft_ms(2, 2)
        return len(machine.steps(BeamShape(2, 2), 2).ms)


def train(folder: Path) -> int:
    """All of training but the loading of a model: answers, features, vocabulary, updates, replay."""
    from portadraft.training import vocabulary
    from portadraft.training.features import Document
    from portadraft.training.generate import greedy_answers
    from portadraft.training.loop import FitConfig, fit
    from portadraft.training.recording import record
    from portadraft.training.run import SHAPES, computation

    model = FAMILIES["llama"]().to(torch.float16)
    target = make_target(model, check=False)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCABULARY, 4).tolist() for _ in range(6)]
    answers = greedy_answers(target, prompts, 12, (), batch=3)
    documents = [
        Document([*p, *a], 0, len(p), "answer", i == 0) for i, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]
    features = record(model, documents, folder)
    head, table = target.head_rows(), target.embeddings()
    chosen = vocabulary.choose(
        vocabulary.counts([features], VOCABULARY), vocabulary.mean_prediction(features, head), 64, always={1}
    )
    hidden = target.facts.hidden_size
    result = fit(
        RecurrentConfig(hidden, hidden, 48, 1, 64),
        table,
        head[torch.from_numpy(chosen).long()],
        chosen,
        [features],
        features.recordings(),
        FitConfig(epochs=1, positions=32, segment=8, dtype=computation(head)),
        shapes=SHAPES[:1],
    )
    assert result.history
    return result.updates


@pytest.fixture(scope="module", params=["generate llama", "generate gemma2", "sample", "tune", "train"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    what, _, family = request.param.partition(" ")
    with recording() as recorder:
        if what == "train":
            pytest.importorskip("portadraft.training.run", reason="training is not there")
            assert train(tmp_path_factory.mktemp("features")) > 0
        elif what == "sample":
            assert sample() == 5
        elif what == "tune":
            pytest.importorskip("portadraft.tuner.machine", reason="tuning is not there")
            assert tune() == 2
        else:
            # Soft-capping and sliding windows matter to the pass alone, so that one temperature does.
            assert generate(family, (0.0, 0.8) if family == "llama" else (0.0,)) == {0, 1, 2, 3}
    return recorder


def test_mps_serves_all_of_it(recorded: Recorder) -> None:
    assert len(recorded.names) > 80
    assert complaints(recorded.seen, KERNELS, COMPOSITE) == []


def test_the_installed_torch_serves_all_of_it(recorded: Recorder, script: ModuleType) -> None:
    if _version() == TABLE["torch"]:
        pytest.skip("the installed torch is the one that the list was made from")
    kernels, composite = script.sort_out(_entries(script))
    assert complaints(recorded.seen, kernels, composite) == []


def test_the_other_ways_that_torch_takes_on_mps_are_kernels() -> None:
    assert set(ALTERNATIVES) <= KERNELS


def test_the_recorder_sees_what_matters(recorded: Recorder) -> None:
    """Attention, the tree's arithmetic, and the inside of composite operators; no operator of another backend."""
    assert {"mm", "bmm", "cumsum", "gather", "topk", "where.self", "scatter.src"} <= recorded.names
    assert {"amax", "sum.IntList_out"} <= recorded.names  # logsumexp is made of them
    assert not [name for name in recorded.names if "for_cpu" in name or "mkldnn" in name]
    assert "float16" in {kind for _, kinds in recorded.seen for kind in kinds}
    # What MPS has and does otherwise (see `TorchOps.careful` and `RowCache.one_by_one`).
    assert not {"max.dim", "scatter_.src"} & recorded.names
    # A sort is asked for by `mass_threshold` alone, which reads its values: the order of equals does not matter.
    assert "sort.stable" not in recorded.names or "sort" in recorded.names


# the check can fail


@pytest.mark.parametrize(
    ("method", "wrong", "complaint"),
    [
        ("max", lambda self, x, axis: x.double().amax(axis).to(x.dtype), "amax: float64"),
        ("max", lambda self, x, axis: torch.mode(x.sort(axis).values, axis).values, "mode: not among the operators"),
        ("cumsum", lambda self, x, axis: x.long().cumsum(axis).to(self.arange(1).dtype), "cumsum: int64"),
        ("silu", lambda self, x: (x.to(torch.bfloat16) * 2).to(x.dtype), "mul.Tensor: bfloat16"),
    ],
    ids=["float64", "unlisted", "int64", "bfloat16"],
)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, method: str, wrong: Any, complaint: str) -> None:
    monkeypatch.setattr(TorchOps, method, wrong)
    target = make_target(FAMILIES["llama"]().to(torch.float16), check=False)
    with recording() as recorder:
        decode(target, random_redrafter(target), REQUESTS[1:], BeamShape(2, 2, 4), temperature=0.8)
    found = complaints(recorder.seen, KERNELS, COMPOSITE)
    assert any(line.startswith(complaint) for line in found), found


def test_a_fault_inside_a_composite_operator_is_found() -> None:
    with recording() as recorder:
        torch.zeros((2, 3)).logsumexp(-1)
    assert "amax: not among the operators that MPS serves" in complaints(recorder.seen, KERNELS - {"amax"}, COMPOSITE)


def test_host_numbers_in_float64_are_cast_before_they_move() -> None:
    with recording() as recorder:
        out = TorchOps().asarray(np.array([0.1, 0.2]), "float16")
    assert out.dtype == torch.float16
    assert complaints(recorder.seen, KERNELS, COMPOSITE) == []


# what MPS does not promise is not relied on


class TestOpsAsOnMps(OpsConformance):
    @pytest.fixture
    def ops(self) -> TorchOps:
        assert TorchOps.careful is True
        return TorchOps()


def test_attention_is_given_no_views(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = attention.scaled_dot_product_attention

    def seen(*tensors: torch.Tensor, **rest: Any) -> torch.Tensor:
        calls.append([x.is_contiguous() for x in (*tensors, rest["attn_mask"]) if x is not None])
        return real(*tensors, **rest)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", seen)
    target = make_target(FAMILIES["llama"](), check=False)
    decode(target, random_redrafter(target), REQUESTS, BeamShape(2, 2))
    assert all(map(all, calls))
    monkeypatch.setattr(attention, "_reads_views", lambda device: True)
    decode(target, random_redrafter(target), REQUESTS, BeamShape(2, 2))
    assert not all(map(all, calls))  # elsewhere keys and values are read where they lie


def test_a_ragged_batch_is_exact_on_this_way() -> None:
    """Rows moved one by one, attention over copies, ranks for a sort: the tokens are those of the usual way."""
    target = make_target(FAMILIES["llama"](), check=False)
    drafter = random_redrafter(target)
    requests = [Request(r.ids, 20, r.seed) for r in REQUESTS]
    careful, _ = decode(target, drafter, requests, BeamShape(4, 3, 8))
    answers = {r.ids: ids for r, ids in zip(requests, careful, strict=True)}
    oracle = OracleDrafter(target.ops, answers, VOCABULARY, probability=0.6)
    assert decode(target, oracle, requests, BeamShape(3, 3))[0] == careful
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchOps, "careful", False)
        patch.setattr(RowCache, "one_by_one", False)
        patch.setattr(attention, "_reads_views", lambda device: True)
        assert decode(target, None, requests)[0] == careful


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_order_and_first_greatest_without_the_devices_own(axis: int) -> None:
    ops = TorchOps()
    x = np.random.default_rng(3).integers(0, 4, (7, 9, 5)).astype(np.float32)
    np.testing.assert_array_equal(ops.argsort(torch.from_numpy(x), axis).numpy(), np.argsort(x, axis, kind="stable"))
    np.testing.assert_array_equal(ops.argmax(torch.from_numpy(x), axis).numpy(), np.argmax(x, axis))
    with recording() as recorder:
        ops.argsort(torch.from_numpy(x), axis)
        ops.argmax(torch.from_numpy(x), axis)
    assert not {"sort", "sort.stable", "argsort.stable", "max.dim", "argmax"} & recorder.names


def test_synchronize_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: calls.append("mps"))
    ops = TorchOps()
    ops.torch_device = torch.device("mps")
    ops.synchronize()
    assert calls == ["mps"]


def test_nothing_of_ours_sets_the_fallback() -> None:
    """With it, torch would quietly compute on the CPU what MPS lacks. The doctor warns where someone has set it."""
    pattern = re.compile(
        r"""environ(\[|\.setdefault\(|\.update\().*PYTORCH_ENABLE_MPS_FALLBACK|FALLBACK\s*=\s*["']?1"""
    )
    for folder in ("portadraft", "scripts"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".sh"):
                assert not pattern.search(path.read_text(encoding="utf-8")), path
    assert "PYTORCH_ENABLE_MPS_FALLBACK" not in os.environ or os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] == "0"


@pytest.mark.mps
def test_generates_on_an_apple_gpu() -> None:
    """The one test here that needs the device: nothing falls back, and a drafted answer is the plain one."""
    target = make_target(FAMILIES["llama"]().to("mps"), check=False)
    plain, _ = decode(target, None, REQUESTS)
    drafted, _ = decode(target, random_redrafter(target), REQUESTS, BeamShape(3, 3, 7))
    assert drafted == plain


# the list


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/mps_operators.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("mps_operators", ROOT / "scripts" / "mps_operators.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _version() -> str:
    return str(torch.__version__).partition("+")[0]


def _entries(script: ModuleType) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries: list[dict[str, Any]] = yaml.load(script.table().read_bytes(), Loader=loader)
    return entries


def test_the_list_is_of_the_oldest_torch() -> None:
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (oldest,) = [d for d in metadata["project"]["optional-dependencies"]["torch"] if re.match(r"torch\b", d)]
    assert re.search(r">=\s*([\d.]+)", oldest).group(1) in TABLE["torch"]  # type: ignore[union-attr]
    assert TABLE["made_by"] == "scripts/mps_operators.py"
    assert len(TABLE["kernels"]) > 500


def test_the_script_reads_a_wheel(script: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    text = script.table().read_bytes()
    wheel = tmp_path / "torch-9.8.7+cpu-cp311-none-macosx_11_0_arm64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(script.INSIDE, text)
    script.main(tmp_path / "from_wheel.json", wheel)
    script.main(tmp_path / "installed.json")
    made, installed = (json.loads((tmp_path / f"{n}.json").read_text("utf-8")) for n in ("from_wheel", "installed"))
    assert made["source_sha256"] == hashlib.sha256(text).hexdigest()
    assert (made["torch"], installed["torch"]) == ("9.8.7", _version())
    assert {**made, "torch": ""} == {**installed, "torch": ""}
    if _version() == TABLE["torch"]:
        assert installed == TABLE


def test_the_script_reads_dispatch_keys(script: ModuleType) -> None:
    entries = [
        {"func": "own(Tensor self) -> Tensor", "dispatch": {"CPU": "a", "CUDA, MPS": "b"}},
        {"func": "made.out(Tensor self) -> Tensor", "dispatch": {"MPS": "c"}},
        {"func": "made(Tensor self) -> Tensor", "structured_delegate": "made.out"},
        {
            "func": "parts(Tensor self) -> Tensor",
            "dispatch": {"CompositeExplicitAutograd": "d"},
            "autogen": "parts.out",
        },
        {"func": "implicit(Tensor self) -> Tensor"},
        {"func": "elsewhere(Tensor self) -> Tensor", "dispatch": {"CPU, CUDA": "e", "SparseMPS": "f"}},
    ]
    assert script.sort_out(entries) == (["made", "made.out", "own"], ["parts", "parts.out"])
