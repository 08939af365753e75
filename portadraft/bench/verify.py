"""Whether drafting changes anything: drafted against plain decoding, and samples against their distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from portadraft.api import Model
from portadraft.bench import reference
from portadraft.bench.agreement import Comparison, compare
from portadraft.bench.goodness import chi_square, fair_variation, total_variation
from portadraft.core.choice import Chooser, Situation
from portadraft.core.draw import numbers
from portadraft.core.sampling import Sampling
from portadraft.core.types import BeamShape
from portadraft.core.uniforms import uniforms
from portadraft.drafters.select import Selected
from portadraft.errors import InvalidArgument
from portadraft.prompts import encode_prompts

LEAST_P = 1e-4
"""A chi-square less likely than this is taken for a fault."""
LEAST_DRAWS = 100
"""A cell of a chi-square should expect five draws, so that fewer than this leave next to nothing to compare."""
TIES = 1e-3
"""The most ties a token in float32; in half precision there is no such limit."""


@dataclass(frozen=True)
class Samples:
    """Many draws after one prompt. noise: the total variation that so many fair draws have on average."""

    prompt: str
    draws: int
    chi_square: float
    degrees: int
    p: float
    total_variation: float
    noise: float

    @property
    def ok(self) -> bool:
        return self.p >= LEAST_P


@dataclass(frozen=True)
class Report:
    """What `verify` found. comparisons: (prompt's name, sampling, comparison), in the order of the runs."""

    facts: dict[str, Any]
    comparisons: list[tuple[str, Sampling, Comparison]]
    samples: list[Samples]

    @property
    def tokens(self) -> int:
        return sum(c.tokens for _, _, c in self.comparisons)

    @property
    def bugs(self) -> int:
        return sum(c.bugs for _, _, c in self.comparisons)

    @property
    def ties(self) -> int:
        return sum(len(c.divergences) for _, _, c in self.comparisons) - self.bugs

    @property
    def faults(self) -> list[str]:
        """What is wrong, a line each; empty where all is well."""
        found = []
        if self.bugs:
            found.append(f"{self.bugs} of {self.tokens} tokens differ from plain decoding by more than rounding")
        if self.facts["dtype"] == "float32" and self.ties > max(1.0, TIES * self.tokens):
            found.append(f"{self.ties} of {self.tokens} tokens are ties, more than one in a thousand in float32")
        found += [
            f"samples after {s.prompt!r} miss their distribution (p = {s.p:.1e})" for s in self.samples if not s.ok
        ]
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.facts,
            "ok": not self.faults,
            "faults": self.faults,
            "tokens": self.tokens,
            "ties": self.ties,
            "bugs": self.bugs,
            "runs": [
                {
                    "prompt": name,
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "tokens": c.tokens,
                    "divergences": [asdict(d) for d in c.divergences],
                }
                for name, sampling, c in self.comparisons
            ],
            "samples": [{**asdict(s), "ok": s.ok} for s in self.samples],
        }


def verify(
    model: Model,
    selected: Selected,
    shape: BeamShape,
    prompts: Sequence[tuple[str, str]],
    *,
    sampling: Sampling,
    max_tokens: int = 64,
    draws: int = 2048,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compare drafted with plain decoding on (name, text) prompts, greedy and sampled, and draws with probabilities.

    sampling: of the second run and of the draws; where its temperature is 0 there are neither.
    Raises: InvalidArgument for a prompt that the model cannot take, by its name, before any is run; for fewer
    draws than `LEAST_DRAWS`; for no prompts.
    """
    if draws < LEAST_DRAWS:
        raise InvalidArgument(
            f"draws={draws!r}: expected at least {LEAST_DRAWS}; a chi-square of fewer finds nothing, whatever is wrong"
        )
    if not prompts:
        raise InvalidArgument("prompts=[]: expected at least one")
    target, codec = model.target, model.codec
    ends = sorted(codec.end_tokens)
    prepared = [(name, encoded(model, name, text)) for name, text in prompts]  # all, before any is run
    kinds = [replace(sampling, temperature=0.0)] + ([] if sampling.greedy else [sampling])
    comparisons = []
    for kind in kinds:
        for name, ids in prepared:
            say(f"{'greedy' if kind.greedy else f'temperature {kind.temperature:g}'}: {name}")
            found = compare(target, selected.drafter, ids, shape, sampling=kind, max_tokens=max_tokens, end_tokens=ends)
            comparisons.append((name, kind, found))
    samples = []
    if not sampling.greedy:
        for name, ids in prepared[:3]:
            say(f"{draws} draws: {name}")
            samples.append(_samples(model, name, ids, sampling, draws))
    facts = {
        "verify": model.name,
        "backend": target.ops.name,
        "device": target.ops.device,
        "dtype": target.facts.dtype,
        "drafter": selected.name,
        "shape": [shape.width, shape.length, shape.nodes],
    }
    return Report(facts, comparisons, samples)


def encoded(model: Model, name: str, text: str) -> Sequence[int]:
    """The ids of a prompt of that name.

    Raises: InvalidArgument where the model cannot take it, naming it.
    """
    try:
        (ids,) = encode_prompts(model.codec, model.target.facts, [text], raw=False, batch=False)
    except InvalidArgument as error:
        raise InvalidArgument(f"prompt {name}: {str(error).removeprefix('prompt: ')}") from None
    return ids


def _samples(model: Model, name: str, ids: Sequence[int], sampling: Sampling, draws: int, rows: int = 64) -> Samples:
    """Draw the token after a prompt with many seeds, by the very function that decoding calls."""
    target, ops = model.target, model.target.ops
    # What looks at the text before is compared in the runs; here one position stands alone.
    alone = replace(sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0)
    chooser = Chooser(ops, alone, target.facts.vocabulary_size)
    counts = np.zeros(target.facts.vocabulary_size, dtype=np.int64)
    with ops.no_grad():
        logits = target.admit([list(ids)]).logits[:, 0]
        target.release(len(target.lengths) - 1)
        for start in range(0, draws, rows):
            seeds = range(start, min(start + rows, draws))
            drawn = numbers(ops, uniforms(seeds, [len(ids)] * len(seeds), 1))
            wide = ops.broadcast_to(logits, (len(seeds), logits.shape[1]))
            chosen = chooser.choose(wide, Situation(drawn), 0, None)
            np.add.at(counts, ops.to_numpy(chosen), 1)
        host = ops.to_numpy(logits)[0]
    p = reference.distribution(host, alone)
    statistic, degrees, chance = chi_square(counts, _apart_from_rounding(p, counts))
    noise = fair_variation(p, draws)
    return Samples(name, draws, statistic, degrees, chance, total_variation(counts, p), noise)


def _apart_from_rounding(p: Any, counts: Any) -> Any:
    """p, where a token at a filter's very edge, kept by one rounding and not by the other, is not called impossible."""
    edge = (p == 0) & (counts > 0)
    if edge.sum() <= 1:
        p = p + edge * p[p > 0].min()
    return p / p.sum()
