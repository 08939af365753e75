"""load, generate, stream: the surface that applications use."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, overload

from portadraft import backends, models
from portadraft.backends.choice import choose_backend
from portadraft.core.decode import Decoder, FinishReason, Progress, Request
from portadraft.core.drafter import Drafter
from portadraft.core.sampling import Sampling, row_seed
from portadraft.core.target import Target
from portadraft.core.types import BeamShape
from portadraft.drafters.select import Selected, select
from portadraft.errors import InvalidArgument
from portadraft.generation import Choice, Delta, Generation, Stats, Tally
from portadraft.identity import tokenizer_fingerprint
from portadraft.profiles.shape import default_shape
from portadraft.text import AnswerText, TextCodec, check_stops

Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]
"""Text, chat messages (`{"role": …, "content": …}`), or token ids, which are taken as they are."""

_DEFAULT_MAX_TOKENS = 256


def load(
    model: str | Path,
    *,
    drafter: str | Path | Drafter | None = "auto",
    backend: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    check: bool = True,
) -> Model:
    """Load a model and the drafter that goes with it.

    model: a short name (`portadraft doctor` lists them), a Hugging Face id, a folder, or a
    GGUF file. drafter: "auto" (the trained one that belongs to these weights, if there is one,
    and prompt lookup beside it), "lookup", "redrafter", "redrafter+lookup", the folder of a
    checkpoint, an object of your own, or "none" (None) for plain decoding. backend, device,
    dtype: "auto" says why in `stats.chosen`; the variable PORTADRAFT_BACKEND decides where backend
    is "auto". check: prove on a small clone of the model's
    architecture that trees are verified exactly (cached; False trusts you).

    Raises: ModelNotFound, UnsupportedModel, IncompatibleDrafter, CorruptFile,
    MissingDependency, InvalidArgument. Warns: WeightsMismatch.
    """
    source = models.resolve(model)
    name, why = choose_backend(backend)
    loaded = backends.get(name).load().load_target(source, dtype=dtype, device=device, check=check)
    codec = TextCodec(loaded.tokenizer, loaded.generation_config, template=source.template)
    fingerprint = tokenizer_fingerprint(loaded.tokenizer)
    selected = select(drafter, loaded.target, fingerprint)
    chosen = {
        "backend": Choice(name, why),
        "device": Choice(*loaded.device),
        "dtype": Choice(*loaded.dtype),
        "drafter": Choice(selected.name, selected.reason),
    }
    return Model(source.label, loaded.target, codec, selected, chosen, fingerprint)


class Model:
    """A loaded model with its drafter. May be called from several threads: calls queue."""

    def __init__(
        self,
        name: str,
        target: Target,
        codec: TextCodec,
        selected: Selected,
        chosen: Mapping[str, Choice],
        fingerprint: str = "",
    ) -> None:
        self.name = name
        self.target = target
        self.codec = codec
        self.chosen = dict(chosen)
        self._selected = selected
        self._fingerprint = fingerprint
        self._known: dict[str, Selected] = {}
        self._turn = _Turn()

    @overload
    def generate(self, prompt: Prompt, **options: Any) -> Generation: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], **options: Any) -> list[Generation]: ...
    def generate(self, prompt: Prompt | Sequence[Prompt], **options: Any) -> Generation | list[Generation]:
        """The answer to a prompt, or the answers to a list of prompts, decoded as one batch.

        Options, all by keyword:
          max_tokens: the most tokens of an answer (256).
          raw: prompt as it is, without the chat template (False).
          stop: a string or strings that end an answer; none of them appears in it.
          temperature: 0 is greedy (0). seed: of sampling (0); row i of a batch derives its own.
          width, length, nodes: the beam's shape; what is None is chosen, see `stats.chosen`.
          drafter: as in `load`, for this call alone; None or "none" decodes plainly.
          profile: stage times in the stats, at the cost of a synchronisation per stage (False).

        Raises: InvalidArgument.
        """
        call = _Call(self, prompt, options)
        with self._turn:
            for _ in call.run():
                pass
        results = call.results()
        return results if call.batch else results[0]

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Delta]:
        """As `generate` for one prompt, piece by piece, as soon as text is certain.

        The model is busy until the iterator ends or is closed. The last piece carries the
        whole `Generation`.
        """
        call = _Call(self, prompt, options)
        if call.batch:
            raise InvalidArgument("prompt: stream takes one prompt; pass lists of prompts to generate")
        return self._stream(call)

    def _stream(self, call: _Call) -> Iterator[Delta]:
        with self._turn:
            for _, text, ids in call.run():
                if text or ids:
                    yield Delta(text, ids)
            yield Delta("", (), call.results()[0])

    def drafter_for(self, drafter: str | Path | Drafter | None) -> Selected:
        """The drafter of that name or folder for this model (see `load`); named ones are made once."""
        if not isinstance(drafter, (str, Path)):
            return select(drafter, self.target, self._fingerprint)
        key = str(drafter)
        if key not in self._known:
            self._known[key] = select(drafter, self.target, self._fingerprint)
        return self._known[key]


class _Turn:
    """A lock that says so instead of waiting for ever for a stream of the same thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def __enter__(self) -> None:
        if self._holder == threading.get_ident():
            raise InvalidArgument(
                "model: a stream of it is still open in this thread; read it to its end, or close() it, first"
            )
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._holder = None
        self._lock.release()


@dataclass
class _Row:
    """One prompt of a call while it runs."""

    ids: list[int]
    text: AnswerText
    tally: Tally
    out: list[int]
    finish: FinishReason | None = None


_OPTIONS = frozenset(
    ("max_tokens", "raw", "stop", "temperature", "seed", "width", "length", "nodes", "drafter", "profile")
)


class _Call:
    """One call of generate or stream: its arguments, checked, and its run."""

    def __init__(self, model: Model, prompt: Prompt | Sequence[Prompt], options: Mapping[str, Any]) -> None:
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; expected one of {', '.join(sorted(_OPTIONS))}")
        self._model = model
        self.batch, prompts = _prompts(prompt)
        self._notices: list[str] = []
        self._max_tokens = _max_tokens(options.get("max_tokens"))
        self._profile = bool(options.get("profile", False))
        self._sampling = Sampling(options.get("temperature", 0.0), options.get("seed", 0))
        stop = check_stops(options.get("stop"))
        codec = model.codec
        self._rows = []
        for one in prompts:
            ids = _ids(one) if _is_ids(one) else codec.encode_prompt(one, raw=bool(options.get("raw", False)))
            self._rows.append(_Row(ids, AnswerText(codec, stop), Tally(), []))
        self._notices.extend(codec.notices)
        selected = model.drafter_for(options["drafter"]) if "drafter" in options else model._selected
        self._drafter = selected.drafter
        shape, reason = _shape(options, selected, model.target.ops.device)
        self._shape = shape
        self._chosen = dict(model.chosen)
        if "drafter" in options:
            self._chosen["drafter"] = Choice(selected.name, selected.reason)
        if self._drafter is not None:
            text = f"{shape.width}x{shape.length}" + (f", {shape.nodes} slots" if shape.nodes else "")
            self._chosen["shape"] = Choice(text, reason)
        self._prefill_s = self._decode_s = 0.0
        self._stages: Mapping[str, float] | None = None

    def run(self) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        """Decode; yields (row, certain text, ids) as they come."""
        with self._decoder() as decoder:
            start = time.perf_counter()
            requests = [
                Request(tuple(row.ids), self._max_tokens, row_seed(self._sampling.seed, i))
                for i, row in enumerate(self._rows)
            ]
            progress = decoder.admit(requests)
            self._prefill_s = time.perf_counter() - start
            while True:
                for one in progress:
                    yield (one.key, *self._take(decoder, one))
                if not decoder.live:
                    break
                start = time.perf_counter()
                progress = decoder.step()
                self._decode_s += time.perf_counter() - start
                for one in progress:
                    self._rows[one.key].tally.add(one)
            if decoder.times is not None:
                self._stages = dict(decoder.times.seconds)

    @contextmanager
    def _decoder(self) -> Iterator[Decoder]:
        decoder = Decoder(
            self._model.target,
            self._drafter,
            self._shape,
            temperature=self._sampling.temperature,
            end_tokens=sorted(self._model.codec.end_tokens),
            profile=self._profile,
        )
        try:
            yield decoder
        finally:
            decoder.close()  # also after an error or an abandoned stream

    def _take(self, decoder: Decoder, progress: Progress) -> tuple[str, tuple[int, ...]]:
        row = self._rows[progress.key]
        row.finish = progress.finish
        piece = row.text.push(progress.tokens, ended=progress.finish == "end", last=progress.finish is not None)
        row.out.extend(piece.ids)
        if piece.stop is not None:
            decoder.stop(progress.key)
            row.finish = "stop"
        return piece.text, piece.ids

    def results(self) -> list[Generation]:
        """The answers, once `run` has ended."""
        out = []
        for row in self._rows:
            assert row.finish is not None
            stats = Stats(
                prompt_tokens=len(row.ids),
                generated_tokens=len(row.out),
                steps=row.tally.steps,
                plain_steps=row.tally.plain_steps,
                accepted=dict(row.tally.accepted),
                prefill_s=self._prefill_s,
                decode_s=self._decode_s,
                chosen=self._chosen,
                stages_s=self._stages,
            )
            out.append(Generation(row.text.text, tuple(row.out), row.finish, stats, tuple(self._notices)))
        return out


# arguments


def _is_ids(prompt: Any) -> bool:
    if isinstance(prompt, (str, bytes)) or len(prompt) == 0:
        return False
    return all(isinstance(x, int) and not isinstance(x, bool) for x in prompt)


def _ids(prompt: Sequence[int]) -> list[int]:
    return [int(x) for x in prompt]


def _is_messages(prompt: Any) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(x, Mapping) for x in prompt)


def _prompts(prompt: Any) -> tuple[bool, list[Any]]:
    """Whether it is a batch, and the prompts."""
    if isinstance(prompt, str):
        return False, [prompt]
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise InvalidArgument(
            f"prompt: {type(prompt).__name__}; expected a string, chat messages, token ids, or a list of these"
        )
    if not prompt:
        raise InvalidArgument("prompt=[]: a batch of no prompts; expected at least one")
    if _is_ids(prompt) or _is_messages(prompt):
        return False, [prompt]
    for i, one in enumerate(prompt):
        if not (isinstance(one, str) or (isinstance(one, Sequence) and (_is_ids(one) or _is_messages(one)))):
            raise InvalidArgument(
                f"prompt #{i} (counting from 0) is {one!r:.60}; expected a non-empty string, list of chat messages, "
                "or list of token ids"
            )
    return True, list(prompt)


def _max_tokens(value: Any) -> int:
    if value is None:
        return _DEFAULT_MAX_TOKENS
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"max_tokens={value!r}: expected an integer of at least 1")
    return value


def _shape(options: Mapping[str, Any], selected: Selected, device: str) -> tuple[BeamShape, str]:
    """The beam's shape from the options, completed by the default."""
    base, reason = default_shape(selected.name, device)
    width, length, nodes = (options.get(name) for name in ("width", "length", "nodes"))
    if width is None and length is None and nodes is None:
        return base, reason
    # A shape that the caller began is not cut by a budget that was meant for the default.
    return BeamShape(
        base.width if width is None else width, base.length if length is None else length, nodes
    ), "asked for"


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
