"""Conversations: messages that grow, and keys and values that are not computed twice."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from portadraft.core.types import BeamShape
from portadraft.errors import InvalidArgument
from portadraft.generation import Delta, Generation
from portadraft.options import check_ids, check_names, parse
from portadraft.prefix import DEFAULT_BYTES, PrefixCache
from portadraft.text import Message

if TYPE_CHECKING:
    from portadraft.api import Model


class Chat:
    """A conversation with a model.

    messages: a plain list of `{"role": …, "content": …}`; change it as you like (take turns back,
    edit one): the next answer is to what stands there then, and of the keys and values that are
    kept the common beginning is used. An answer is what a stateless call with the same
    messages gives; `Generation.stats.reused_tokens` says how much of the prompt was kept.
    prefixes: what is kept, with its limit. One chat is for one user: its calls are not to overlap.
    """

    def __init__(
        self,
        model: Model,
        system: str | None = None,
        messages: Sequence[Message] = (),
        *,
        max_bytes: int = DEFAULT_BYTES,
        **options: Any,
    ) -> None:
        """system: a first message of that role. max_bytes: of kept keys and values. options: of every turn.

        Raises: InvalidArgument for a model without a chat template, or options of a wrong value;
        TypeError for an unknown option.
        """
        if model.codec.chat_template is None:
            raise InvalidArgument(
                f"model={model.name!r}: it has no chat template, so it cannot tell turns apart; call generate "
                "with raw=True"
            )
        # What an iterator gives is there for every turn.
        options = {name: list(value) if isinstance(value, Iterator) else value for name, value in options.items()}
        _check(model, options)
        if system is not None and not isinstance(system, str):
            raise InvalidArgument(f"system={system!r}: expected a string")
        self.model = model
        self.options = dict(options)
        self.prefixes = PrefixCache(max_bytes)
        if isinstance(messages, (str, bytes, Mapping)):
            raise InvalidArgument(f"messages={messages!r:.60}: expected a list of {{'role': …, 'content': …}}")
        self.messages: list[dict[str, Any]] = [dict(message) for message in _checked(messages)]
        if system is not None:
            self.messages.insert(0, {"role": "system", "content": system})

    def send(self, text: str, **options: Any) -> Generation:
        """The answer to one more user message. Both are added to `messages`; after an error neither is.

        options: as `Model.generate`'s, for this turn alone.
        """
        asked = self._asked(text)
        answer = self.model.generate([*self.messages, asked], **self._options(options))
        self._add(asked, answer)
        return answer

    def stream(self, text: str, **options: Any) -> Iterator[Delta]:
        """As `send`, piece by piece; a stream that is closed early leaves `messages` as they were."""
        asked = self._asked(text)
        pieces = self.model.stream([*self.messages, asked], **self._options(options))
        return self._followed(asked, pieces)

    def _followed(self, asked: dict[str, Any], pieces: Iterator[Delta]) -> Iterator[Delta]:
        try:
            for piece in pieces:
                if piece.generation is not None:
                    self._add(asked, piece.generation)
                yield piece
        finally:
            pieces.close()  # type: ignore[attr-defined]

    async def asend(self, text: str, **options: Any) -> Generation:
        """`send` for asyncio."""
        asked = self._asked(text)
        answer: Generation = await self.model.agenerate([*self.messages, asked], **self._options(options))
        self._add(asked, answer)
        return answer

    def astream(self, text: str, **options: Any) -> AsyncAnswer:
        """`stream` for asyncio."""
        asked = self._asked(text)
        pieces = self.model.astream([*self.messages, asked], **self._options(options))
        return AsyncAnswer(pieces, lambda answer: self._add(asked, answer))

    def undo(self) -> str:
        """Take the last user message and what followed it back; returns its text.

        Raises: InvalidArgument where there is none.
        """
        for place in reversed(range(len(self.messages))):
            if self.messages[place]["role"] == "user":
                text = str(self.messages[place]["content"])
                del self.messages[place:]
                return text
        raise InvalidArgument("messages: no user message to take back")

    def _asked(self, text: str) -> dict[str, Any]:
        if not isinstance(text, str) or not text:
            raise InvalidArgument(f"text={text!r}: expected a string of at least one character")
        if not isinstance(self.messages, list):
            raise InvalidArgument(f"messages={self.messages!r:.60}: expected a list; `chat.messages = []` begins anew")
        _checked(self.messages)
        return {"role": "user", "content": text}

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        _check_free(options)
        return {**self.options, **options, "reuse": self.prefixes}

    def _add(self, asked: dict[str, Any], answer: Generation) -> None:
        self.messages += [asked, {"role": "assistant", "content": answer.text}]


class AsyncAnswer:
    """The pieces of a chat's answer; `messages` hold it when the last piece is given."""

    def __init__(self, pieces: AsyncGenerator[Delta, None], finished: Callable[[Generation], None]) -> None:
        self._pieces = pieces
        self._finished = finished

    def __aiter__(self) -> AsyncAnswer:
        return self

    async def __anext__(self) -> Delta:
        piece = await anext(self._pieces)
        if piece.generation is not None:
            self._finished(piece.generation)
        return piece

    async def aclose(self) -> None:
        """Free the model; `messages` stay as they were."""
        await self._pieces.aclose()


def _check(model: Model, options: Mapping[str, Any]) -> None:
    """Of every turn, before the first one. Raises: as `Model.generate` does."""
    check_names(options)
    _check_free(options)
    checked = parse(options, 1, False, model.codec)
    check_ids(checked, options, model.target.facts.vocabulary_size)
    named = {name: options[name] for name in ("width", "length", "nodes") if options.get(name) is not None}
    BeamShape(**named)
    if checked.drafter is not ...:
        model.drafter_for(checked.drafter)


def _check_free(options: Mapping[str, Any]) -> None:
    for name in ("raw", "reuse"):
        if name in options:
            raise InvalidArgument(f"{name}: a chat decides that itself; leave it out, or call generate")


def _checked(messages: Iterable[Any]) -> Iterable[Message]:
    """Raises: InvalidArgument for what is no message, naming its place."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise InvalidArgument(f"messages={messages!r:.60}: expected a list of messages")
    checked = list(messages)
    for place, message in enumerate(checked):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InvalidArgument(f"messages[{place}]={message!r:.60}: expected {{'role': 'user', 'content': '…'}}")
    return checked
