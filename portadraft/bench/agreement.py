"""Where drafted decoding leaves plain decoding, and whether that is a tie or a bug.

In float32 the two are the same text. In half precision a packed pass and a one-token pass
round differently, so a tie may fall the other way, and everything after it is another text.
Each divergence is judged by the two passes' own logits, plain decoding's token is forced, and
the comparison goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from portadraft.bench import reference
from portadraft.core.decode import Decoder, Request
from portadraft.core.drafter import Drafter
from portadraft.core.draw import EDGE
from portadraft.core.sampling import Sampling
from portadraft.core.target import Target
from portadraft.core.types import BeamShape, PackedBeam, Verdict, Verified
from portadraft.core.uniforms import uniforms

TOLERANCE = {"float32": 1e-3, "bfloat16": 2.0**-4, "float16": 2.0**-7}
"""By how much two passes' logits may differ in rounding, by dtype: in float32 absolutely, else as a share of the
greatest logit's size, since those numbers are spaced by their size (bfloat16: 2**-8; layers add up).

bfloat16: between a one-token pass and a tree's pass of SmolLM2-135M, at 560 places along 14 answers, the logits of the
two likeliest tokens differed by 0.005 of the greatest in the median, by 0.016 at 99 %, and by 0.025 at the most
(docs/sampling.md). The allowance is two and a half times that. float16 has three bits more: 0.0016 at the most. In
float32 it was 2e-5 at the most, absolutely."""

Host = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Divergence:
    """One place where drafted decoding chose another token.

    position: index in the answer. plain, drafted: the two tokens. gap: by how much the logit of
    plain's token exceeds the drafted one's in the plain pass; drafted_gap: the same in the drafted
    pass. difference: the most by which the two passes' logits of these two tokens differ;
    allowed: the most that rounding explains. verdict: "tie" or "bug"; reason: why.
    """

    position: int
    plain: int
    drafted: int
    gap: float
    drafted_gap: float
    difference: float
    allowed: float
    verdict: Literal["tie", "bug"]
    reason: str


@dataclass
class Comparison:
    """tokens: how many were compared. divergences: in order. plain: the text that was compared with."""

    tokens: int
    plain: list[int]
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def bugs(self) -> int:
        return sum(d.verdict == "bug" for d in self.divergences)


def compare(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    shape: BeamShape | None = None,
    *,
    sampling: Sampling | None = None,
    max_tokens: int = 96,
    end_tokens: Sequence[int] = (),
    most: int = 32,
) -> Comparison:
    """Decode one prompt plainly and drafted, with sampling.seed, and judge every difference.

    The target's rows must be free. Stops after `most` divergences. Beside a drafter's bug this
    finds wrong passes over trees, wrong commits and wrong histories, since each shows in the text.
    """
    sampling = Sampling() if sampling is None else sampling
    decode = _Decoding(target, sampling, end_tokens)
    plain, plain_logits = decode.run(None, None, prompt, [], max_tokens)
    found = Comparison(len(plain), plain)
    start = 0
    while start < len(plain) and len(found.divergences) < most:
        drafted, logits = decode.run(drafter, shape, prompt, plain[:start], max_tokens)
        where = next((i for i, (a, b) in enumerate(zip(plain[start:], drafted, strict=False)) if a != b), None)
        if where is None:
            if len(drafted) != len(plain) - start:
                raise AssertionError("two decodings of equal tokens ended at different places")
            break
        position = start + where
        found.divergences.append(
            decode.judge(prompt, plain, position, drafted[where], plain_logits[position], logits[where])
        )
        start = position + 1
    return found


class _Decoding:
    """Decodes one row at a time and keeps the logits that chose each token."""

    def __init__(self, target: Target, sampling: Sampling, end_tokens: Sequence[int]) -> None:
        self._target = target
        self._sampling = sampling
        self._end_tokens = list(end_tokens)

    def run(
        self,
        drafter: Drafter | None,
        shape: BeamShape | None,
        prompt: Sequence[int],
        answer: Sequence[int],
        max_tokens: int,
    ) -> tuple[list[int], list[Host]]:
        """What follows prompt and answer, to `max_tokens` of answer altogether, and the logits at each token."""
        recorder = _Recorder(self._target)
        decoder = Decoder(recorder, drafter, shape, sampling=self._sampling, end_tokens=self._end_tokens)
        ids = (*prompt, *answer)
        request = Request(ids, max_tokens - len(answer), self._sampling.seed, answered=len(answer))
        tokens: list[int] = []
        try:
            news = decoder.admit([request])
            while True:
                for progress in news:
                    tokens.extend(progress.tokens)
                if not decoder.live:
                    return tokens, recorder.logits
                news = decoder.step()
        finally:
            decoder.close()

    def judge(
        self, prompt: Sequence[int], plain: list[int], position: int, drafted: int, ours: Host, theirs: Host
    ) -> Divergence:
        """Whether each pass's own logits, recomputed in float64, explain its token, and rounding their difference.

        Where choices are computed in float64, they must be the very same; elsewhere within `draw.EDGE`.
        """
        token = plain[position]
        uniform = uniforms([self._sampling.seed], [len(prompt) + position], 1)[0, 0]
        edge = 0.0 if self._target.ops.wide == "float64" else EDGE

        def explain(logits: Host, token: int) -> bool:
            return reference.explains(
                token, logits, self._sampling, uniform, edge=edge,
                prompt=prompt, answer=plain[:position], end_tokens=self._end_tokens,
            )  # fmt: skip

        pair = np.asarray([token, drafted])
        dtype = self._target.facts.dtype
        size = 1.0 if dtype == "float32" else float(max(np.abs(ours).max(), np.abs(theirs).max()))
        allowed = TOLERANCE.get(dtype, TOLERANCE["bfloat16"]) * size
        difference = float(np.abs(ours[pair] - theirs[pair]).max())
        if difference > allowed:
            verdict, reason = "bug", "the two passes' logits differ by more than rounding"
        elif not explain(ours, token):
            verdict, reason = "bug", "plain decoding's own logits choose another token"
        elif not explain(theirs, drafted):
            verdict, reason = "bug", "the drafted pass's own logits choose another token"
        else:
            verdict, reason = "tie", "each pass chose rightly, and they differ by rounding"
        gap, drafted_gap = float(ours[token] - ours[drafted]), float(theirs[token] - theirs[drafted])
        return Divergence(position, token, drafted, gap, drafted_gap, difference, allowed, verdict, reason)  # type: ignore[arg-type]


class _Recorder:
    """A target that keeps, on the host, the logits at the slots of every accepted path of its only row."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._last: Any = None
        self.logits: list[Host] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def admit(self, *args: Any, **more: Any) -> Verified:
        verified = self._target.admit(*args, **more)
        self._keep(verified.logits[0, 0])
        return verified

    def verify(self, packed: PackedBeam) -> Verified:
        verified = self._target.verify(packed)
        self._last = verified.logits
        return verified

    def commit(self, verdict: Verdict, counts: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
        for slot in slots[0][: counts[0]]:
            self._keep(self._last[0, slot])
        self._target.commit(verdict, counts, slots)

    def _keep(self, logits: Any) -> None:
        self.logits.append(self._target.ops.to_numpy(logits).astype(np.float64))
