"""Between text and token ids, around any Hugging Face tokenizer. Backend-free: it is handed the tokenizer.

Templated text is encoded without adding special tokens again. A model without a template is
prompted raw, and says so in `TextCodec.notices`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from portadraft.detokenize import TOKENIZER, TextStream, decode, special_ids
from portadraft.errors import InvalidArgument
from portadraft.stopping import Answer, Piece, Scan, StopStrings, check_stops

__all__ = ["AnswerText", "Piece", "Scan", "StopStrings", "TextCodec", "TextStream", "check_stops"]

Message = Mapping[str, Any]
_PROBE = "portadraft"
NO_TEMPLATE = "the model has no chat template, so the prompt was given to it as it is"


class TextCodec:
    """Encodes prompts and decodes answers.

    tokenizer: a Hugging Face tokenizer. generation_config: anything with `eos_token_id`, or None.
    template: a chat template, used only where the tokenizer brings none.
    """

    def __init__(self, tokenizer: Any, generation_config: Any = None, template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.generation_config = generation_config
        self.chat_template: str | dict[str, str] | None = getattr(tokenizer, "chat_template", None) or template
        self.notices: list[str] = []
        self.end_token_sources = self._find_end_tokens(generation_config)
        self.end_tokens = frozenset(i for ids in self.end_token_sources.values() for i in ids)

    def encode_prompt(self, prompt: str | Sequence[Message], raw: bool = False) -> list[int]:
        """The ids of a prompt: a string is one user message, unless `raw` or the model has no template.

        A conversation that ends with an assistant message is continued within it.
        Raises: InvalidArgument for an empty prompt, messages that are no messages, messages with
        `raw` or without a template, or a conversation that the template refuses.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidArgument("prompt='': expected at least one character")
            if raw:
                return self._encode(prompt, special=True)
            messages: list[Message] = [{"role": "user", "content": prompt}]
        else:
            messages = _check_messages(prompt)
            if raw:
                raise InvalidArgument(
                    "raw=True with a list of messages: expected a string; drop raw, or join the messages yourself"
                )
        if self.chat_template is None:
            if len(messages) > 1:
                raise InvalidArgument(
                    f"prompt has {len(messages)} messages, but the model has no chat template to render them with; "
                    "pass one string, or a tokenizer with a chat template"
                )
            if NO_TEMPLATE not in self.notices:
                self.notices.append(NO_TEMPLATE)
            return self._encode(str(messages[0]["content"]), special=True)
        return self._encode(self.render(messages), special=False)

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation as the text that the model reads, ready for its answer.

        Raises: InvalidArgument if the template refuses it or the model has none.
        """
        continued = messages[-1]["role"] == "assistant"
        return self._render(messages, add_generation_prompt=not continued, continue_final_message=continued)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens left out; equals the joined deltas of `stream`."""
        return decode(self.tokenizer, ids)

    def token_of(self, text: str, argument: str) -> int:
        """The one token that is this text.

        Raises: InvalidArgument, naming the argument, where it is none or several.
        """
        ids = self._encode(text, special=False) if text else []
        if len(ids) != 1:
            pieces = self.tokenizer.convert_ids_to_tokens(ids)
            raise InvalidArgument(
                f"{argument}: {text!r} is {len(ids)} tokens here {pieces}; expected text of exactly one token (a word "
                "with its leading space is another token than without), or pass token ids"
            )
        return ids[0]

    def stream(self) -> TextStream:
        """A new incremental decoder."""
        return TextStream(self.tokenizer)

    def scanner(self, stop: str | Sequence[str] | None = None) -> StopStrings:
        """A new incremental decoder that watches for stop strings.

        Raises: InvalidArgument for an empty stop string.
        """
        return StopStrings(self.stream(), stop)

    def _render(self, messages: Sequence[Message], **options: bool) -> str:
        if self.chat_template is None:
            raise InvalidArgument("the model has no chat template; pass raw=True and a string")
        own = getattr(self.tokenizer, "chat_template", None)
        if not own:
            options["chat_template"] = self.chat_template  # type: ignore[assignment]
        try:
            with TOKENIZER:
                text = self.tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, **options)
        except Exception as error:  # templates are programs: jinja errors, ValueError, TypeError, …
            roles = [message["role"] for message in messages]
            raise InvalidArgument(
                f"prompt with roles {roles}: the model's chat template refuses it ({error}); "
                "change the roles, or pass raw=True and a string"
            ) from error
        return str(text)

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"prompt: the character at {error.start} is half of a surrogate pair, which is no text; "
                "decode the bytes it came from with errors='replace'"
            ) from None
        with TOKENIZER:
            ids = [int(i) for i in self.tokenizer.encode(text, add_special_tokens=special)]
        if not ids:
            raise InvalidArgument(f"prompt={text[:40]!r}: the tokenizer makes no token of it; expected at least one")
        return ids

    def _find_end_tokens(self, generation_config: Any) -> dict[str, tuple[int, ...]]:
        """End tokens by who names them."""
        found = {
            "generation config": _as_ids(getattr(generation_config, "eos_token_id", None)),
            "tokenizer": _as_ids(getattr(self.tokenizer, "eos_token_id", None)),
            "chat template": _as_ids(self._end_of_turn()),
        }
        return {source: ids for source, ids in found.items() if ids}

    def _end_of_turn(self) -> int | None:
        """The special token that the template writes after an assistant's message, if any."""
        if self.chat_template is None:
            return None
        turns = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self._render(turns, add_generation_prompt=False)
        except InvalidArgument:
            return None
        tail = text.rpartition(_PROBE)[2]
        if not tail.strip():
            return None
        first = [int(i) for i in self.tokenizer.encode(tail.lstrip(), add_special_tokens=False)][:1]
        marked = special_ids(self.tokenizer) | frozenset(getattr(self.tokenizer, "all_special_ids", ()))
        return first[0] if first and first[0] in marked else None


class AnswerText(Answer):
    """The text and the certain ids of one answer, as its tokens come."""

    def __init__(self, codec: TextCodec, stop: str | Sequence[str] | None = None) -> None:
        """Raises: InvalidArgument for an empty stop string."""
        super().__init__(codec.scanner(stop))


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(i) for i in value)


def _check_messages(prompt: Any) -> list[Message]:
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise InvalidArgument(f"prompt={prompt!r}: expected a string or a list of messages")
    messages = list(prompt)
    if not messages:
        raise InvalidArgument("prompt=[]: expected at least one message, such as {'role': 'user', 'content': '…'}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InvalidArgument(f"prompt[{index}]={message!r}: expected {{'role': 'user', 'content': '…'}}")
        if not isinstance(message["content"], (str, list, tuple, type(None))):
            raise InvalidArgument(
                f"prompt[{index}]: its content is {type(message['content']).__name__} ({message['content']!r:.40}); "
                "expected a string"
            )
    if all(not message["content"] for message in messages):
        raise InvalidArgument("prompt: every message is empty; expected at least one character")
    return messages
