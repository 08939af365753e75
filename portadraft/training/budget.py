"""How long a run may take, as a person writes it: `20m`, `2h`, `90s`, or a number of tokens, `3Mtok`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from portadraft.errors import InvalidArgument

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TOKENS = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"


@dataclass(frozen=True)
class Budget:
    """Either wall time of the whole run, in seconds, or tokens trained on (repeats count); the other is None."""

    seconds: float | None = None
    tokens: int | None = None

    def __str__(self) -> str:
        if self.tokens is not None:
            return f"{self.tokens} tokens"
        return "none" if self.seconds is None else f"{self.seconds / 60:g} min"


def parse_budget(text: str) -> Budget:
    """Read `90s`, `20m`, `1.5h`, `1h30m`, `500ktok`, `3Mtok`.

    Raises: InvalidArgument naming what was written.
    """
    plain = text.strip().lower().replace(" ", "")
    if match := re.fullmatch(_NUMBER + r"([kmg]?)tok(?:ens?)?", plain):
        tokens = round(float(match[1]) * _TOKENS[match[2]])
        if tokens > 0:
            return Budget(tokens=tokens)
    elif re.fullmatch(rf"(?:{_NUMBER}[smhdSHD])+", text.strip().replace(" ", "")):  # 3M is no 3 minutes
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_NUMBER + "([smhd])", plain))
        if seconds > 0:
            return Budget(seconds=seconds)
    raise InvalidArgument(
        f"budget={text!r}: expected a time such as 20m, 2h or 1h30m, or a number of tokens such as 500ktok or 3Mtok, "
        "above 0"
    )
