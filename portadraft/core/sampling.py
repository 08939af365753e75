"""How the target chooses its tokens: the parameters, checked.

What they do stands in `penalties` (bias, bans, penalties), `filters` (temperature, top-k, top-p,
min-p) and `choice` (argmax or inverse CDF), in that order of application.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from portadraft.core.scalars import as_integer, as_items, as_number
from portadraft.core.uniforms import philox as philox
from portadraft.core.uniforms import row_seed as row_seed
from portadraft.core.uniforms import uniforms as uniforms
from portadraft.errors import InvalidArgument

MOST = 1e15
"""The greatest size of a bias, a penalty, or the inverse of a temperature: far beyond any logit, and sums and
quotients with logits still fit into float32, where infinities would cancel to something that is no number."""


@dataclass(frozen=True)
class Sampling:
    """How the target chooses. The defaults are greedy decoding of the model as it is.

    temperature: 0 is greedy; above 0 the target's distribution at that temperature.
    seed: of the position-keyed uniforms; rows derive their own from it (`row_seed`).
    top_k: keep the k likeliest tokens, and those as likely as the k-th; 0 keeps all.
    top_p: keep the likeliest tokens until they hold this share of the probability, and those as
        likely as the last of them; 1 keeps all. Of the distribution that top_k left.
    min_p: keep tokens at least this share as likely as the likeliest; 0 keeps all.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or
        the answer so far (Keskar et al. 2019); 1 changes nothing.
    presence_penalty: subtracted from the logits of tokens in the answer so far.
    frequency_penalty: subtracted as often as the token stands in the answer so far.
    logit_bias: added to the logits of these ids; -inf bans. Kept as pairs in order of id.
    banned: ids that are never chosen.
    min_tokens: end tokens are banned until the answer holds this many tokens.
    Raises: InvalidArgument.
    """

    temperature: float = 0.0
    seed: int = 0
    _: KW_ONLY
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    banned: Sequence[int] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        self._number("temperature", 0, math.inf, "a finite number of at least 0 (0 is greedy)")
        if 0 < self.temperature < 1 / MOST:
            raise InvalidArgument(f"temperature={self.temperature!r}: expected 0 (greedy), or at least {1 / MOST:g}")
        seed = as_integer(self.seed)
        if seed is None or not 0 <= seed < 2**64:
            raise InvalidArgument(f"seed={self.seed!r}: expected an integer from 0 to 2**64 - 1")
        object.__setattr__(self, "seed", seed)
        self._integer("top_k", "0 keeps every token")
        self._number("top_p", 0, 1, "a number above 0 and at most 1 (1 keeps every token)", open_low=True)
        self._number("min_p", 0, 1, "a number from 0 to 1 (0 keeps every token)")
        self._number(
            "repetition_penalty",
            1 / MOST,
            MOST,
            f"a number above 0, from {1 / MOST:g} to {MOST:g} (1 changes nothing, above 1 discourages)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            self._number(name, -MOST, MOST, f"a number from {-MOST:g} to {MOST:g} (0 changes nothing)")
        self._integer("min_tokens", "0 lets an answer end at once")
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "banned", _ids("banned", self.banned))

    def _number(self, name: str, low: float, high: float, expected: str, *, open_low: bool = False) -> None:
        given = getattr(self, name)
        value = as_number(given)
        if value is None or not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
            raise InvalidArgument(f"{name}={given!r}: expected {expected}")
        object.__setattr__(self, name, value)

    def _integer(self, name: str, zero: str) -> None:
        given = getattr(self, name)
        value = as_integer(given)
        if value is None or value < 0:
            raise InvalidArgument(f"{name}={given!r}: expected an integer of at least 0 ({zero})")
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and filters is asked for."""
        return bool(self.logit_bias or self.banned or self.min_tokens or self.needs_history)

    @property
    def needs_history(self) -> bool:
        """Whether a choice depends on which tokens came before, other than through the model."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def check_vocabulary(self, size: int, end_tokens: Iterable[int] = ()) -> None:
        """Raises: InvalidArgument where an id lies outside 0 … size-1, or nothing would be left to choose.

        end_tokens: of the model, which min_tokens bans for a while.
        """
        bias = dict(self.logit_bias)
        for name, ids in (("logit_bias", list(bias)), ("banned", list(self.banned))):
            for token in ids:
                if token >= size:
                    raise InvalidArgument(f"{name}: token id {token} is outside the model's vocabulary 0…{size - 1}")
        gone = set(self.banned) | {token for token, value in bias.items() if value == -math.inf}
        if len(gone) >= size:
            raise InvalidArgument(f"banned: all {size} tokens of the vocabulary; leave at least one to choose")
        if self.min_tokens and len(gone | {token for token in end_tokens if 0 <= token < size}) >= size:
            raise InvalidArgument(
                f"min_tokens={self.min_tokens}: all tokens but end tokens are banned, so nothing is left to choose; "
                "leave it out, or ban fewer"
            )


def _ids(name: str, values: Any) -> tuple[int, ...]:
    items = as_items(values)
    if items is None:
        raise InvalidArgument(f"{name}={values!r:.60}: expected token ids, such as [5, 17]")
    ids = set()
    for value in items:
        token = as_integer(value)
        if token is None or token < 0:
            raise InvalidArgument(f"{name}: {value!r} is no token id; expected integers of at least 0")
        ids.add(token)
    return tuple(sorted(ids))


def _bias(values: Any) -> tuple[tuple[int, float], ...]:
    wrong = InvalidArgument(
        f"logit_bias={values!r:.60}: expected a mapping of token ids to numbers, such as {{5: -2.0}}"
    )
    if not isinstance(values, (Mapping, tuple)):
        raise wrong
    try:
        pairs = dict(values)
    except (TypeError, ValueError):
        raise wrong from None
    _ids("logit_bias", list(pairs))
    checked = {}
    for token, given in pairs.items():
        value = as_number(given)
        if value is None or math.isnan(value) or (abs(value) > MOST and value != -math.inf):
            raise InvalidArgument(
                f"logit_bias: {given!r} for token {token}; expected a finite number from {-MOST:g} to {MOST:g}, or "
                "-inf to ban the token"
            )
        checked[int(token)] = value
    return tuple(sorted(checked.items()))
