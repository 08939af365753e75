"""What a caller may pass as a prompt: text, chat messages or token ids, one of them or a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from portadraft.core.requests import Request
from portadraft.core.target import TargetFacts
from portadraft.errors import InvalidArgument
from portadraft.text import TextCodec

Ids: TypeAlias = tuple[int, ...]
Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]
"""Text, chat messages (`{"role": …, "content": …}`), or token ids, which are taken as they are."""


def is_ids(prompt: Any) -> bool:
    """Whether a sequence is token ids; what can be turned into an index (numpy's integers too) is one."""
    if isinstance(prompt, (str, bytes)) or len(prompt) == 0:
        return False
    return all(hasattr(x, "__index__") and not isinstance(x, bool) for x in prompt)


def _is_messages(prompt: Any) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(x, Mapping) for x in prompt)


def split_prompts(prompt: Any) -> tuple[bool, list[Any]]:
    """Whether it is a list of prompts, and the prompts.

    Raises: InvalidArgument for anything that is no prompt, naming the place in a list.
    """
    if isinstance(prompt, str):
        return False, [prompt]
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise InvalidArgument(
            f"prompt: {type(prompt).__name__}; expected a string, chat messages, token ids, or a list of these"
        )
    if not prompt:
        raise InvalidArgument("prompt=[]: a batch of no prompts; expected at least one")
    if is_ids(prompt) or _is_messages(prompt):
        return False, [prompt]
    for i, one in enumerate(prompt):
        if not (isinstance(one, str) or (isinstance(one, Sequence) and (is_ids(one) or _is_messages(one)))):
            raise InvalidArgument(
                f"prompt #{i} (counting from 0) is {one!r:.60}; expected a non-empty string, list of chat messages, "
                "or list of token ids"
            )
    return True, list(prompt)


def encode_prompts(codec: TextCodec, facts: TargetFacts, prompts: Sequence[Any], raw: bool, batch: bool) -> list[Ids]:
    """The ids of each prompt, which the model can take and say at least one more after.

    Raises: InvalidArgument as `TextCodec.encode_prompt` and `Request.check`; of a batch the error
    names the prompt's number.
    """
    out = []
    for i, one in enumerate(prompts):
        try:
            ids = tuple(x.__index__() for x in one) if is_ids(one) else tuple(codec.encode_prompt(one, raw=raw))
            Request(ids, 1).check(facts)
        except InvalidArgument as error:
            if batch:
                raise InvalidArgument(f"prompt #{i} (counting from 0): {error}") from error
            raise
        out.append(ids)
    return out
