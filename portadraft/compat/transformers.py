"""`generate` as transformers has it: tensors in, tensors out.

    from portadraft.compat.transformers import wrap
    fast = wrap(portadraft.load("smollm2-135m"))
    ids = fast.generate(**tokenizer(["Hello", "Good morning"], return_tensors="pt", padding=True))

Only the arguments change, never the way to decode: see docs/applications.md for the differences.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from portadraft.api import Model
from portadraft.core.scalars import as_flag, as_integer, as_items
from portadraft.errors import InvalidArgument
from portadraft.generation import Generation

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_NEW_TOKENS = 20
"""What transformers takes where neither the call nor the model's generation config says anything."""
DEFAULT_TOP_K = 50
"""The same, where it samples."""

_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_OURS = ("width", "length", "nodes", "drafter", "batch_size", "reuse", "timeout_s", "acceptance", "seed")
_UNSERVED: Mapping[str, Any] = {
    "num_beams": 1, "num_beam_groups": 1, "penalty_alpha": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "top_h": None, "guidance_scale": 1.0, "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "force_words_ids": None,
    "sequence_bias": None, "constraints": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "exponential_decay_length_penalty": None,
    "min_length": 0, "watermarking_config": None, "dola_layers": None,
}  # fmt: skip
"""What of a generation config changes the text and is not served, with the value that changes nothing."""
_HINTS = {
    "num_beams": "beam search chooses other texts than the model's own sampling does; leave it at 1",
    "assistant_model": "portadraft drafts by itself; leave it out, and pass drafter= to choose how",
    "prompt_lookup_num_tokens": "pass drafter='lookup'",
    "logits_processor": "pass logit_bias, banned, min_tokens or penalties to portadraft's own generate",
    "stopping_criteria": "pass stop_strings, max_new_tokens or timeout_s",
    "inputs_embeds": "pass input_ids",
    "past_key_values": "pass reuse=True",
    "synced_gpus": "leave it out",
}


def wrap(model: Model) -> TransformersStyle:
    """An object with transformers' `generate` around a loaded model."""
    if not isinstance(model, Model):
        raise InvalidArgument(
            f"model: {type(model).__name__}; expected what portadraft.load returns (it takes a loaded model, too)"
        )
    return TransformersStyle(model)


class TransformersStyle:
    """`generate(input_ids, …)` of transformers, decoded by portadraft."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def generation_config(self) -> Any:
        """The model's own, from which defaults come as in transformers."""
        return self.model.codec.generation_config

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        inputs: Tensor | None = None,
        streamer: Any = None,
        generation_config: Any = None,
        **options: Any,
    ) -> Tensor:
        """Prompts and answers as one tensor.

        input_ids: (B, T) integers; rows are padded on the left or on the right where attention_mask, (B, T),
        is 0. Returns (B, T + longest answer): the prompts as they came, then the answers, padded behind
        their end. On the device of input_ids.
        streamer: gets the prompt's ids, then each new id, then `end()`; for one row only.
        options: max_new_tokens, max_length, do_sample, temperature, top_k, top_p, min_p, repetition_penalty,
        min_new_tokens, eos_token_id, pad_token_id, stop_strings, max_time, num_return_sequences, and portadraft's own
        width, length, nodes, drafter, batch_size, reuse, timeout_s, acceptance, seed. generation_config: what it leaves
        open the model's own says. Without a seed, sampling draws one from torch's generator, so
        `torch.manual_seed` repeats it.

        Raises: InvalidArgument, also for options of transformers that are not served, with what to do.
        """
        import torch

        ids = input_ids if input_ids is not None else inputs
        prompts = _rows(ids, attention_mask, torch)
        assert ids is not None
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise InvalidArgument(f"streamer={streamer!r:.60}: expected an object with put and end")
        config = _Config(generation_config, self.generation_config, options)
        ours, pad = self._translate(config, int(ids.shape[1]), torch)
        copies = config.number("num_return_sequences", 1)
        if copies > 1:
            prompts = [prompt for prompt in prompts for _ in range(copies)]
            ids = ids.repeat_interleave(copies, dim=0)
        if streamer is None:
            answers = self.model.generate(prompts, **ours)
        else:
            answers = [self._streamed(prompts, ids, streamer, ours, torch)]
        longest = max(len(answer.ids) for answer in answers)
        out = ids.new_full((len(prompts), longest), pad)
        for row, answer in zip(out, answers, strict=True):
            row[: len(answer.ids)] = torch.tensor(answer.ids, dtype=ids.dtype, device=ids.device)
        return torch.cat([ids, out], dim=1)

    def _streamed(self, prompts: list[list[int]], ids: Tensor, streamer: Any, ours: Any, torch: Any) -> Generation:
        if len(prompts) != 1:
            raise InvalidArgument(f"streamer with {len(prompts)} rows: expected one row")
        seed = ours.pop("seed", 0)
        pieces = self.model.stream(prompts[0], **ours, seed=_only(seed))
        answer = None
        with closing(pieces):  # type: ignore[type-var]  # a streamer that raises leaves the model free
            streamer.put(ids.cpu())
            for piece in pieces:
                for token in piece.ids:
                    streamer.put(torch.tensor([token]))
                answer = piece.generation or answer
            streamer.end()
        assert answer is not None
        return answer

    def _translate(self, config: _Config, length: int, torch: Any) -> tuple[dict[str, Any], int]:
        """Our own options, and the id that pads."""
        ours: dict[str, Any] = {name: config.take(name) for name in _OURS if config.given(name)}
        ours["max_tokens"] = _new_tokens(config, length)
        if (seconds := config.take("max_time")) is not None:
            ours.setdefault("timeout_s", seconds)
        penalty = config.take("repetition_penalty")
        if penalty is not None:
            ours["repetition_penalty"] = penalty
        filters = {name: config.take(name) for name in _FILTERS}
        do_sample = config.take("do_sample")
        if do_sample is not None and as_flag(do_sample) is None:
            raise InvalidArgument(f"do_sample={do_sample!r}: expected True or False")
        if do_sample:
            if filters["temperature"] == 0:
                raise InvalidArgument(
                    f"temperature={filters['temperature']!r} with do_sample=True: expected a number above 0, as in "
                    "transformers; for greedy decoding pass do_sample=False"
                )
            ours["temperature"] = 1.0 if filters["temperature"] is None else filters["temperature"]
            ours["top_k"] = DEFAULT_TOP_K if filters["top_k"] is None else filters["top_k"] or None
            ours.update({name: filters[name] for name in ("top_p", "min_p") if filters[name] is not None})
            if "seed" not in ours:
                ours["seed"] = int(torch.randint(2**62, ()))
        ours["end_tokens"] = _ends(config.take("eos_token_id"))
        ours["stop"] = config.take("stop_strings")
        ours["min_tokens"] = _least(config.take("min_new_tokens"), ours["max_tokens"])
        pad = config.take("pad_token_id")
        if pad is None:
            pad = ours["end_tokens"][0] if ours["end_tokens"] else 0
        if (pad_id := as_integer(pad)) is None:
            raise InvalidArgument(f"pad_token_id={pad!r}: expected a token id")
        config.done()
        return ours, pad_id


class _Config:
    """What the call says, else what the generation config that was passed says, else the model's own."""

    def __init__(self, passed: Any, own: Any, options: Mapping[str, Any]) -> None:
        """Raises: InvalidArgument where `passed` is no generation config."""
        if passed is not None and not hasattr(passed, "max_new_tokens"):
            raise InvalidArgument(
                f"generation_config: {type(passed).__name__}; expected a transformers.GenerationConfig"
            )
        self._configs, self._options = [one for one in (passed, own) if one is not None], options
        # A tokenizer is what transformers needs for stop_strings, and a model of ours has.
        self._read = {"num_return_sequences", "use_cache", "tokenizer"}

    def given(self, name: str) -> bool:
        return name in self._options

    def take(self, name: str) -> Any:
        self._read.add(name)
        value = self._options.get(name)
        return self._configured(name) if value is None else value

    def _configured(self, name: str) -> Any:
        values = (getattr(config, name, None) for config in self._configs)
        return next((value for value in values if value is not None), None)

    def number(self, name: str, default: int) -> int:
        value = self.take(name)
        value = default if value is None else value
        whole = as_integer(value)
        if whole is None or whole < 1:
            raise InvalidArgument(f"{name}={value!r}: expected an integer of at least 1")
        return whole

    def done(self) -> None:
        """Raises: InvalidArgument for an option, or a value of a config, that nothing has read and that would change
        something.
        """
        for name, neutral in _UNSERVED.items():
            value = self._configured(name)
            if not self.given(name) and value and value != neutral:
                hint = _HINTS.get(name, "set it to None there, or use transformers' own generate")
                raise InvalidArgument(f"generation_config.{name}={value!r:.60}: not served here; {hint}")
        for name, value in self._options.items():
            empty = isinstance(value, (list, tuple)) and not len(value)  # such as logits_processor=[]
            idle = value is None or value is False or empty or (name == "num_beams" and value == 1)
            if name not in self._read and not idle:
                hint = _HINTS.get(name, "leave it out, or use transformers' own generate")
                raise InvalidArgument(f"{name}={value!r:.60}: not served here; {hint}")


def _new_tokens(config: _Config, length: int) -> int:
    """The most new tokens: of the call's two names the one that is given, else of the config's, else 20."""
    total, wanted = config.take("max_length"), config.take("max_new_tokens")
    if config.given("max_new_tokens") or (wanted is not None and not config.given("max_length")):
        total = None
    if total is not None:
        whole = as_integer(total)
        if whole is None or whole <= length:
            raise InvalidArgument(
                f"max_length={total!r}: input_ids has {length} columns; expected more than that, or max_new_tokens"
            )
        return whole - length
    return config.number("max_new_tokens", DEFAULT_NEW_TOKENS)


def _ends(value: Any) -> list[int]:
    """The ids that end an answer; none where transformers would know of none."""
    items = [] if value is None else [value] if as_integer(value) is not None else as_items(value)
    ids = None if items is None else [as_integer(item) for item in items]
    if ids is None or any(token is None or token < 0 for token in ids):
        raise InvalidArgument(f"eos_token_id={value!r:.60}: expected a token id or a list of them")
    return [token for token in ids if token is not None]


def _least(value: Any, most: int) -> Any:
    """The fewest new tokens, no more than the most, with transformers' own warning where more was asked for."""
    least = as_integer(value)
    if least is None or least <= most:
        return value
    warnings.warn(f"min_new_tokens={least}: more than may be generated, which is {most}", UserWarning, stacklevel=4)
    return most


def _only(seed: Any) -> Any:
    """The seed of the only row."""
    seeds = as_items(seed)
    return seeds[0] if seeds is not None and len(seeds) == 1 else seed


def _rows(ids: Any, mask: Any, torch: Any) -> list[list[int]]:
    """The prompts without their padding."""
    if not _are_ids(ids, torch):
        shape = f"{tuple(ids.shape)} of {ids.dtype}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise InvalidArgument(
            f"input_ids: {shape}; expected a torch tensor of token ids (rows, tokens), such as a tokenizer's with "
            "return_tensors='pt'"
        )
    if mask is None:
        return [[int(i) for i in row] for row in ids.tolist()]
    given = f"shape {tuple(mask.shape)}" if hasattr(mask, "shape") else type(mask).__name__
    if tuple(getattr(mask, "shape", ())) != tuple(ids.shape):
        raise InvalidArgument(f"attention_mask: {given}; expected the shape of input_ids, {tuple(ids.shape)}")
    rows = []
    marks = mask.tolist()
    wrong = next((mark for row in marks for mark in row if mark not in (0, 1)), None)
    if wrong is not None:
        raise InvalidArgument(f"attention_mask: it holds {wrong!r}; expected 1 for tokens and 0 for padding")
    for number, (row, keep) in enumerate(zip(ids.tolist(), marks, strict=True)):
        kept = [int(i) for i, k in zip(row, keep, strict=True) if k]
        if not kept:
            raise InvalidArgument(f"attention_mask: row {number} is 0 everywhere; expected at least one token")
        rows.append(kept)
    return rows


def _are_ids(ids: Any, torch: Any) -> bool:
    if not isinstance(ids, torch.Tensor) or ids.is_meta or ids.dtype == torch.bool:
        return False
    return ids.ndim == 2 and ids.numel() > 0 and not (ids.is_floating_point() or ids.is_complex())
