"""load, generate, stream: the surface that applications use."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from portadraft import backends, models
from portadraft.asynchronous import Worker
from portadraft.backends.choice import choose_backend
from portadraft.call import Call
from portadraft.core.drafter import Drafter
from portadraft.core.scalars import as_flag
from portadraft.core.target import Target
from portadraft.drafters.select import Selected, select
from portadraft.errors import InvalidArgument
from portadraft.generation import Choice, Delta, Generation
from portadraft.identity import tokenizer_fingerprint
from portadraft.prefix import DEFAULT_BYTES, PrefixCache
from portadraft.prompts import Message, Prompt
from portadraft.text import TextCodec
from portadraft.turns import Turn

if TYPE_CHECKING:
    from portadraft.conversation import Chat
    from portadraft.profiles.book import Book
    from portadraft.profiles.evidence import Evidence
    from portadraft.profiles.schema import Profile


def load(
    model: Any,
    *,
    tokenizer: Any = None,
    drafter: str | Path | Drafter | None = "auto",
    backend: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    check: bool = True,
    profiles: str | Path | Profile = "auto",
) -> Model:
    """Load a model and the drafter that goes with it.

    model: a short name (`portadraft doctor` lists them), a Hugging Face id, a folder, a GGUF file,
    or a model that is loaded already (transformers or mlx-lm; it stays as it is), with its
    tokenizer. drafter: "auto" (the trained one that belongs to these weights, if there is one,
    and prompt lookup beside it), "lookup", "redrafter", "redrafter+lookup", the folder of a
    checkpoint, an object of your own, or "none" (None) for plain decoding. backend, device,
    dtype: "auto" says why in `stats.chosen`; the variable PORTADRAFT_BACKEND decides where backend
    is "auto". check: prove on a small clone of the model's
    architecture that trees are verified exactly (cached; False trusts you). profiles: which measurements of
    this machine choose the beam's shape: "auto" (yours, your fleet's, published ones), "none", a
    profile or its file, or a store instead of the configured one (docs/profiles.md).

    Raises: ModelNotFound, UnsupportedModel, IncompatibleDrafter, CorruptFile,
    MissingDependency, InvalidArgument. Warns: WeightsMismatch.
    """
    if as_flag(check) is None:
        raise InvalidArgument(f"check={check!r}: expected True or False")
    if not isinstance(model, (str, Path, models.ModelSource)):
        from portadraft.compat.loaded import from_loaded

        loaded = from_loaded(model, tokenizer, backend=backend, device=device, dtype=dtype, check=check)
        codec = TextCodec(loaded.tokenizer, loaded.generation_config)
        label, name, why = loaded.label, loaded.backend, "the model that was passed is one of its own"
    else:
        if tokenizer is not None:
            raise InvalidArgument("tokenizer: expected only beside a model that is loaded already; leave it out")
        source = models.resolve(model)
        name, why = choose_backend(backend)
        loaded = backends.get(name).load().load_target(source, dtype=dtype, device=device, check=check)
        codec = TextCodec(loaded.tokenizer, loaded.generation_config, template=source.template)
        label = source.label
    fingerprint = tokenizer_fingerprint(loaded.tokenizer)
    selected = select(drafter, loaded.target, fingerprint)
    chosen = {
        "backend": Choice(name, why),
        "device": Choice(*loaded.device),
        "dtype": Choice(*loaded.dtype),
        "drafter": Choice(selected.name, selected.reason),
    }
    out = Model(label, loaded.target, codec, selected, chosen, fingerprint, profiles)
    if profiles not in ("auto", "none"):
        out.profiles  # noqa: B018  # a file that was named and cannot be read is an error at once
    return out


class Model:
    """A loaded model with its drafter. May be called from several threads: calls queue, first come, first served."""

    def __init__(
        self,
        name: str,
        target: Target,
        codec: TextCodec,
        selected: Selected,
        chosen: Mapping[str, Choice],
        fingerprint: str = "",
        profiles: str | Path | Profile = "auto",
    ) -> None:
        self.name = name
        self.target = target
        self.codec = codec
        self.selected = selected
        self.chosen = dict(chosen)
        self.prefixes = PrefixCache()
        """What `reuse=True` keeps and finds: see `portadraft.prefix.PrefixCache`."""
        self.evidence: dict[tuple[object, ...], Evidence] = {}
        """What steps cost and gave in earlier calls, by drafter: see `portadraft.profiles.governor`."""
        self._fingerprint = fingerprint
        self._profiles = profiles
        self._known: dict[str, Selected] = {}
        self._guard = threading.Lock()
        self._turn = Turn()
        self._worker = Worker(f"portadraft {name}")

    @cached_property
    def profiles(self) -> Book:
        """Look-ups of profiles for this model on this machine."""
        from portadraft.profiles.book import Book

        return Book(self.target, self.name, self._fingerprint, self._profiles)

    @overload
    def generate(self, prompt: Prompt, **options: Any) -> Generation: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], **options: Any) -> list[Generation]: ...
    def generate(self, prompt: Prompt | Sequence[Prompt], **options: Any) -> Generation | list[Generation]:
        """The answer to a prompt, or the answers to a list of prompts of any length, in its order.

        Options, all by keyword:
          max_tokens: the most tokens of an answer (256).
          raw: prompt as it is, without the chat template (False).
          stop: a string or strings that end an answer; none of them appears in it.
          temperature: 0 is greedy (0). top_k, top_p, min_p: filters. repetition_penalty,
            presence_penalty, frequency_penalty, logit_bias ({id: bias}), banned (ids, or strings of
            one token each), min_tokens: as `portadraft.core.sampling.Sampling` says.
          sampling: "model" takes what the model's files recommend; what is named beside it counts.
          seed: of sampling (0); row i of a list derives its own, or pass one for each prompt.
          acceptance: "match", or "rejection" (Leviathan et al., width 1, for comparison).
          logprobs: True, or how many top tokens beside the chosen one, for `Generation.logprobs`.
          end_tokens: ids that end an answer (those that the model's files name).
          timeout_s: seconds from an answer's prefill after which it ends as it stands.
          batch_size: how many prompts of a list are decoded at once (8 at most).
          reuse: keep the keys and values of prompt and answer, and use those of an earlier call
            with the same beginning: True (`Model.prefixes`) or a `PrefixCache` (False).
          width, length, nodes: the beam's shape; what is None is chosen, see `stats.chosen`.
          drafter: as in `load`, for this call alone; None or "none" decodes plainly.
          profile: stage times in the stats, at the cost of a synchronisation per stage (False).

        Everything that is wrong with any prompt or option is found before the model runs.
        Raises: InvalidArgument; TypeError for an unknown option.
        """
        results = self._run(prompt, options, None)
        assert results is not None
        return results

    def as_completed(self, prompts: Sequence[Prompt], **options: Any) -> Iterator[tuple[int, Generation]]:
        """As `generate` for a list, each answer as soon as it is finished: (number of the prompt, answer) pairs.

        The model is busy until the iterator ends or is closed.
        """
        call = Call(self, prompts, options)
        if not call.batch:
            raise InvalidArgument("prompts: one prompt; expected a list of them")
        return ((i, piece.generation) for i, piece in self._pieces(call, None) if piece.generation is not None)

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Delta]:
        """As `generate` for one prompt, piece by piece, as soon as text is certain.

        The model is busy until the iterator ends or is closed. The last piece carries the
        whole `Generation`.
        """
        return self._stream(self._one(prompt, options), None)

    async def agenerate(self, prompt: Prompt | Sequence[Prompt], **options: Any) -> Any:
        """`generate` for asyncio. Calls wait for each other; cancelling the task frees the model after a step."""
        self._turn.refuse_if_mine()
        return await self._worker.run(lambda cancelled: self._run(prompt, options, cancelled))

    def astream(self, prompt: Prompt, **options: Any) -> AsyncGenerator[Delta, None]:
        """`stream` for asyncio. A slow reader does not hold the model up; closing or cancelling frees it."""
        self._turn.refuse_if_mine()
        return self._worker.iterate(lambda cancelled: self._stream(self._one(prompt, options), cancelled))

    def chat(
        self,
        system: str | None = None,
        messages: Sequence[Message] = (),
        *,
        max_bytes: int = DEFAULT_BYTES,
        **options: Any,
    ) -> Chat:
        """A conversation that keeps its keys and values between turns: see `portadraft.conversation.Chat`."""
        from portadraft.conversation import Chat

        return Chat(self, system, messages, max_bytes=max_bytes, **options)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The model for this thread alone, for work on `target` itself or calls that nothing may come between."""
        self._turn.take(block=True)
        try:
            yield
        finally:
            self._turn.give_back(block=True)

    def drafter_for(self, drafter: str | Path | Drafter | None) -> Selected:
        """The drafter of that name or folder for this model (see `load`); named ones are made once."""
        if not isinstance(drafter, (str, Path)):
            return select(drafter, self.target, self._fingerprint)
        key = str(drafter)
        with self._guard:
            if key not in self._known:
                self._known[key] = select(drafter, self.target, self._fingerprint)
            return self._known[key]

    # what all of these have in common

    def _one(self, prompt: Prompt, options: Mapping[str, Any]) -> Call:
        call = Call(self, prompt, options)
        if call.batch:
            raise InvalidArgument("prompt: stream takes one prompt; pass lists of prompts to generate")
        return call

    def _run(
        self, prompt: Any, options: Mapping[str, Any], cancelled: threading.Event | None
    ) -> Generation | list[Generation] | None:
        """All answers; None where it was cancelled."""
        call = Call(self, prompt, options)
        done: dict[int, Generation] = {}
        for i, piece in self._pieces(call, cancelled):
            if piece.generation is not None:
                done[i] = piece.generation
        if len(done) < call.count:
            return None
        return [done[i] for i in range(call.count)] if call.batch else done[0]

    def _stream(self, call: Call, cancelled: threading.Event | None) -> Iterator[Delta]:
        for _, piece in self._pieces(call, cancelled):
            yield piece

    def _pieces(self, call: Call, cancelled: threading.Event | None) -> Iterator[tuple[int, Delta]]:
        """The call's run, in its turn, up to its end or its cancellation."""
        if not self._turn.take(cancelled):
            return
        try:
            with closing(call.run()) as run:
                for pieces in run:
                    for piece in pieces:
                        yield piece
                        self._turn.pass_on()
                    if cancelled is not None and cancelled.is_set():
                        return
        finally:
            self._turn.give_back()


@lru_cache(maxsize=1)
def _cached(model: str) -> Model:
    return load(model)


def _model(model: str | Path | Model) -> Model:
    return model if isinstance(model, Model) else _cached(str(model))


def generate(model: str | Path | Model, prompt: Any, **options: Any) -> Any:
    """`Model.generate` by name: the model loaded last stays loaded for the next call."""
    return _model(model).generate(prompt, **options)


def stream(model: str | Path | Model, prompt: Prompt, **options: Any) -> Iterator[Delta]:
    """`Model.stream` by name: the model loaded last stays loaded for the next call."""
    return _model(model).stream(prompt, **options)
