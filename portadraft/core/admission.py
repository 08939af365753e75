"""What every target asks of its caller.

Host numbers only: a target calls these first, so that an argument that cannot be served
raises before anything was allocated or computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from portadraft.core.target import Known
from portadraft.core.types import PackedBeam
from portadraft.errors import InvalidArgument


def check_prompts(prompts: Sequence[Sequence[int]], vocabulary_size: int) -> None:
    """Raises: InvalidArgument for no prompts, an empty one, or ids outside the vocabulary."""
    if not prompts:
        raise InvalidArgument("prompts=[]: expected at least one prompt")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise InvalidArgument(f"prompts[{i}] is empty: expected at least one token id")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= vocabulary_size:
            raise InvalidArgument(
                f"prompts[{i}] holds the id {low if low < 0 else high}: expected 0…{vocabulary_size - 1}; "
                "use the model's own tokenizer"
            )


def check_known(prompts: Sequence[Sequence[int]], known: Sequence[Known] | None, owner: object) -> list[Known]:
    """`known` with one entry for each prompt.

    owner: what the target's own states carry as `RowState.owner`.
    Raises: InvalidArgument where a state does not fit its prompt, or is another target's.
    """
    if known is None:
        return [None] * len(prompts)
    if len(known) != len(prompts):
        raise InvalidArgument(f"known has {len(known)} entries: expected {len(prompts)}, one for each prompt")
    for i, (prompt, entry) in enumerate(zip(prompts, known, strict=True)):
        if entry is None:
            continue
        state, length = entry
        if state.owner is not owner:
            raise InvalidArgument(f"known[{i}]: its state was exported by another target; expected one of this target")
        most = min(len(prompt) - 1, len(state.ids))
        if not 0 <= length <= most:
            raise InvalidArgument(
                f"known[{i}]: length={length}; expected 0…{most}, since the state holds {len(state.ids)} tokens and "
                f"at least one of the prompt's {len(prompt)} is to be computed"
            )
        for place in range(length):
            if state.ids[place] != prompt[place]:
                raise InvalidArgument(
                    f"known[{i}]: its token {place} is {state.ids[place]}, the prompt's is {prompt[place]}; expected "
                    f"the same ids up to length={length}; restore no more than the common prefix"
                )
    return list(known)


def check_export(row: int, ids: Sequence[int], lengths: Sequence[int]) -> None:
    """Raises: InvalidArgument for a row that is not live, or ids of another length than the row's."""
    check_row(row, lengths)
    if len(ids) != lengths[row]:
        raise InvalidArgument(f"ids has {len(ids)} tokens: expected {lengths[row]}, what row {row} has committed")


def check_row(row: int, lengths: Sequence[int]) -> None:
    """Raises: InvalidArgument for a row that is not live."""
    if not 0 <= row < len(lengths):
        raise InvalidArgument(f"row={row}: expected one of the {len(lengths)} live rows")


def check_truncate(row: int, length: int, lengths: Sequence[int]) -> None:
    """Raises: InvalidArgument for a row that is not live, or a length it does not hold; at least one token stays."""
    check_row(row, lengths)
    if not 1 <= length <= lengths[row]:
        raise InvalidArgument(f"length={length}: expected 1…{lengths[row]}, what row {row} holds")


def check_packed(packed: PackedBeam, lengths: Sequence[int]) -> None:
    """Raises: InvalidArgument for a packed beam of another number of rows than are live."""
    if packed.tokens.shape[0] != len(lengths):
        raise InvalidArgument(
            f"packed has {packed.tokens.shape[0]} rows: expected one for each of the {len(lengths)} live rows"
        )


def check_commit(counts: Sequence[int], slots: Sequence[Sequence[int]], verified: int | None) -> None:
    """verified: rows of the `verify` before, None where there was none.

    Raises: InvalidArgument without a `verify` before, or for another number of rows.
    """
    if verified is None:
        raise InvalidArgument("commit without a verify before it: call verify first")
    for name, given in (("counts", counts), ("slots", slots)):
        if len(given) != verified:
            raise InvalidArgument(f"{name} has {len(given)} rows: expected {verified}, as in the last verify")
