"""What a drafter may imitate, and in which mixture."""

from __future__ import annotations

import math
from collections.abc import Mapping

from portadraft.errors import InvalidArgument

MODES = ("sequence", "text", "local", "ground-truth")
"""The target's own answers; its distributions over a given text; what it would say next at each
position of a given text; the text itself."""

OF_TEXTS = ("text", "local", "ground-truth")
"""The modes that need texts; "sequence" needs prompts."""


def parse_mix(spec: str) -> dict[str, float]:
    """A mixture as it is typed: "sequence=1,text=0.5", or one mode alone.

    Raises: InvalidArgument.
    """
    out: dict[str, float] = {}
    for part in spec.split(","):
        name, equals, weight = part.strip().partition("=")
        if name in out:
            raise InvalidArgument(f"mix={spec!r}: {name} stands there twice")
        try:
            out[name] = float(weight) if equals else 1.0
        except ValueError:
            raise InvalidArgument(f"mix={spec!r}: {weight!r} is not a number; expected MODE=WEIGHT,…") from None
    return check_mix(out)


def check_mix(mix: Mapping[str, float]) -> dict[str, float]:
    """The mixture without modes of weight 0, in the order of MODES.

    Raises: InvalidArgument for an unknown mode, a weight that is no number above 0, or no mode left.
    """
    for name, weight in mix.items():
        if name not in MODES:
            raise InvalidArgument(f"mix={dict(mix)!r}: no mode {name!r}; expected some of {', '.join(MODES)}")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            raise InvalidArgument(f"mix={dict(mix)!r}: weight {weight!r} of {name!r}; expected a number of at least 0")
    out = {name: float(mix[name]) for name in MODES if mix.get(name)}
    if mix and not out:
        raise InvalidArgument(f"mix={dict(mix)!r}: every weight is 0; expected one above 0")
    return out
