"""What a target keeps of its rows where a rotary switch may make it compute one again (see `limits`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from portadraft.backends.torch.limits import RotaryLimit


class RotaryRows:
    """The tokens of each row, and by which frequencies its keys were turned. Rows are dense, as in the target."""

    def __init__(self, limit: RotaryLimit, device: torch.device) -> None:
        self.limit = limit
        self.beyond: list[bool] = []
        """Of each row: whether its keys were turned by the frequencies past the switch."""
        self._ids = torch.zeros((0, 0), dtype=torch.int64, device=device)

    def grow(self, rows: int, tokens: int) -> None:
        """Room for as many rows and tokens as the cache has."""
        if self._ids.shape != (rows, tokens):
            ids = self._ids.new_zeros((rows, tokens))
            ids[: self._ids.shape[0], : self._ids.shape[1]] = self._ids
            self._ids = ids

    def admit(self, prompts: Sequence[Sequence[int]]) -> None:
        """New rows behind the known ones."""
        for prompt in prompts:
            self._ids[len(self.beyond), : len(prompt)] = self._ids.new_tensor(prompt)
            self.beyond.append(len(prompt) > self.limit.at)

    def usable(self, beyond: bool, total: int) -> bool:
        """Whether a row of `total` tokens has the keys of a state: past the switch all of them differ."""
        wanted = total > self.limit.at
        return not wanted and not beyond if self.limit.kind == "dynamic" else wanted == beyond

    def stale(self, row: int, length: int) -> Tensor | None:
        """The ids (1, length) of a row that must be computed again before a step, if it must."""
        beyond = self.limit.beyond(length)
        # With LongRoPE all keys change at the switch; transformers' own generate starts anew there too. With
        # dynamic NTK only new keys do, but a row that was cut back before the switch has keys from past it.
        again = beyond != self.beyond[row] and (self.limit.kind == "longrope" or not beyond)
        self.beyond[row] = beyond
        return self._ids[row : row + 1, :length].clone() if again else None

    def commit(self, row: int, length: int, tokens: Tensor) -> None:
        """Tokens (n,) behind the first `length` of a row."""
        self._ids[row, length : length + tokens.shape[0]] = tokens

    def release(self, row: int) -> None:
        """Drop a row; the last one takes its number."""
        self._ids[row] = self._ids[len(self.beyond) - 1]
        self.beyond[row] = self.beyond[-1]
        self.beyond.pop()
