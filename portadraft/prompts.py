"""What a caller may pass as a prompt: text, chat messages or token ids, one of them or a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from portadraft.core.requests import Request
from portadraft.core.scalars import as_integer, as_items
from portadraft.core.target import TargetFacts
from portadraft.errors import InvalidArgument
from portadraft.text import TextCodec

Ids: TypeAlias = tuple[int, ...]
Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]
"""Text, chat messages (`{"role": …, "content": …}`), or token ids, which are taken as they are."""


def is_ids(prompt: Any) -> bool:
    """Whether a sequence is token ids, of whatever library's integers."""
    if isinstance(prompt, (str, bytes)) or len(prompt) == 0:
        return False
    return all(as_integer(x) is not None for x in prompt)


def _is_messages(prompt: Any) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(x, Mapping) for x in prompt)


def split_prompts(prompt: Any) -> tuple[bool, list[Any]]:
    """Whether it is a list of prompts, and the prompts.

    Raises: InvalidArgument for anything that is no prompt, naming the place in a list.
    """
    if isinstance(prompt, str):
        return False, [prompt]
    prompt = _without_arrays(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise InvalidArgument(
            f"prompt: {type(prompt).__name__}; expected a string, chat messages, token ids, or a list of these"
        )
    if not prompt:
        raise InvalidArgument("prompt=[]: a batch of no prompts; expected at least one")
    if is_ids(prompt) or _is_messages(prompt):
        return False, [prompt]
    prompt = [_without_arrays(one, f" #{i} (counting from 0)") for i, one in enumerate(prompt)]
    for i, one in enumerate(prompt):
        if not (isinstance(one, str) or (isinstance(one, Sequence) and (is_ids(one) or _is_messages(one)))):
            raise InvalidArgument(
                f"prompt #{i} (counting from 0) is {one!r:.60}; expected a non-empty string, list of chat messages, "
                "or list of token ids"
            )
    return True, prompt


def _without_arrays(prompt: Any, which: str = "") -> Any:
    """An array of one dimension as a list; anything else as it is.

    Raises: InvalidArgument for an array of more dimensions, whose rows may be padded.
    """
    shape = getattr(prompt, "shape", None)
    if not isinstance(shape, tuple) or not shape:
        return prompt
    items = as_items(prompt)
    if items is None:
        raise InvalidArgument(
            f"prompt{which}: {type(prompt).__name__} of shape {tuple(shape)}; expected one dimension. For padded rows "
            "call portadraft.compat.transformers.wrap(model).generate; without padding pass rows.tolist()"
        )
    return items


def _ids(prompt: Sequence[Any]) -> Ids:
    return tuple(token for token in map(as_integer, prompt) if token is not None)


def encode_prompts(codec: TextCodec, facts: TargetFacts, prompts: Sequence[Any], raw: bool, batch: bool) -> list[Ids]:
    """The ids of each prompt, which the model can take and say at least one more after.

    Raises: InvalidArgument as `TextCodec.encode_prompt` and `Request.check`; of a batch the error
    names the prompt's number.
    """
    out = []
    for i, one in enumerate(prompts):
        try:
            ids = _ids(one) if is_ids(one) else tuple(codec.encode_prompt(one, raw=raw))
            Request(ids, 1).check(facts)
        except InvalidArgument as error:
            if batch:
                raise InvalidArgument(f"prompt #{i} (counting from 0): {error}") from error
            raise
        out.append(ids)
    return out
