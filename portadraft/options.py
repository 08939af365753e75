"""The options of generating: named, checked and completed before the model runs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from portadraft.core.rejection import Acceptance
from portadraft.core.sampling import Sampling, row_seed
from portadraft.core.scalars import as_flag, as_integer, as_items, as_number
from portadraft.errors import InvalidArgument, UnknownOption
from portadraft.prefix import PrefixCache
from portadraft.stopping import check_stops
from portadraft.text import TextCodec

DEFAULT_MAX_TOKENS = 256
DEFAULT_BATCH_SIZE = 8
"""Rows that are decoded at once, where a list of prompts is longer and the caller names no number: every row
needs a cache of its own, and on a CPU eight rows with drafts already fill a pass."""
MOST_LOGPROBS = 64

_SAMPLING = tuple(field.name for field in fields(Sampling))
_OTHERS = (
    "max_tokens", "raw", "stop", "sampling", "end_tokens", "logprobs", "acceptance", "timeout_s", "batch_size",
    "reuse", "drafter", "width", "length", "nodes", "profile",
)  # fmt: skip
NAMES = frozenset((*_OTHERS, *_SAMPLING))


@dataclass(frozen=True)
class Options:
    """What a call was asked for, checked.

    seeds: one for each prompt. end_tokens: ids that end an answer. drafter: what was named, or
    `...` where nothing was. reuse: the cache of prefixes, True for the model's own, or False.
    """

    max_tokens: int
    raw: bool
    stop: tuple[str, ...]
    sampling: Sampling
    seeds: tuple[int, ...]
    end_tokens: frozenset[int]
    logprobs: int | None
    acceptance: Acceptance
    timeout_s: float | None
    batch_size: int | None
    reuse: bool | PrefixCache
    drafter: Any
    width: int | None
    length: int | None
    nodes: int | None
    profile: bool


def check_names(options: Mapping[str, Any]) -> None:
    """Raises: UnknownOption, naming the nearest."""
    for name in options:
        if name not in NAMES:
            near = difflib.get_close_matches(name, sorted(NAMES), n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}? Expected" if near else "expected"
            raise UnknownOption(f"unknown option {name!r}; {hint} one of {', '.join(sorted(NAMES))}")


def parse(options: Mapping[str, Any], prompts: int, batch: bool, codec: TextCodec) -> Options:
    """Check all options of a call for so many prompts.

    Raises: UnknownOption; InvalidArgument for a value outside what is allowed.
    """
    check_names(options)
    sampling, seeds = _sampling(options, prompts, batch, codec)
    max_tokens = _max_tokens(options.get("max_tokens"))
    if sampling.min_tokens > max_tokens:
        default = "" if options.get("max_tokens") is not None else ", as nothing else was asked for"
        raise InvalidArgument(
            f"min_tokens={sampling.min_tokens}: expected at most max_tokens, which is {max_tokens}{default}; "
            "raise that, or pass end_tokens=[] for answers that only max_tokens ends"
        )
    return Options(
        max_tokens=max_tokens,
        raw=_flag("raw", options.get("raw")),
        stop=check_stops(options.get("stop")),
        sampling=sampling,
        seeds=seeds,
        end_tokens=_end_tokens(options.get("end_tokens"), codec),
        logprobs=_logprobs(options.get("logprobs")),
        acceptance=_acceptance(options.get("acceptance")),
        timeout_s=_timeout(options.get("timeout_s")),
        batch_size=_at_least_one("batch_size", options.get("batch_size")),
        reuse=_reuse(options.get("reuse", False)),
        drafter=options.get("drafter", ...),
        width=options.get("width"),
        length=options.get("length"),
        nodes=options.get("nodes"),
        profile=_flag("profile", options.get("profile")),
    )


def check_ids(options: Options, asked: Mapping[str, Any], vocabulary: int) -> None:
    """Raises: InvalidArgument for ids outside the vocabulary, which end tokens of the model's own files may be."""
    options.sampling.check_vocabulary(vocabulary, options.end_tokens)
    if asked.get("end_tokens") is not None:
        wrong = [token for token in options.end_tokens if token >= vocabulary]
        if wrong:
            raise InvalidArgument(
                f"end_tokens: token id {min(wrong)} is outside the model's vocabulary 0…{vocabulary - 1}"
            )


def _sampling(
    options: Mapping[str, Any], prompts: int, batch: bool, codec: TextCodec
) -> tuple[Sampling, tuple[int, ...]]:
    """How to choose, and each prompt's seed."""
    values = _model_defaults(options.get("sampling"), codec)
    values.update({name: options[name] for name in _SAMPLING if options.get(name) is not None and name != "seed"})
    if "banned" in values:
        values["banned"] = _banned(values["banned"], codec)
    seed = options.get("seed")
    seeds = as_items(seed)
    if seeds is not None:
        if len(seeds) != prompts or not batch:
            given = f"a list of {len(seeds)}"
            raise InvalidArgument(
                f"seed: {given} for {prompts} prompts; expected one for each of them"
                if batch
                else f"seed: {given} for one prompt; expected an integer"
            )
        return Sampling(**values), tuple(Sampling(seed=one).seed for one in seeds)
    if seed is not None:
        values["seed"] = seed
    sampling = Sampling(**values)
    return sampling, tuple(row_seed(sampling.seed, i) for i in range(prompts))


_OF_MODELS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _model_defaults(sampling: Any, codec: TextCodec) -> dict[str, Any]:
    """What the model's generation config recommends, where `sampling="model"` asks for it."""
    if sampling is None:
        return {}
    if not isinstance(sampling, str) or sampling != "model":
        raise InvalidArgument(f"sampling={sampling!r}: expected 'model' (what the model's files recommend), or None")
    config = codec.generation_config
    found = {name: getattr(config, name, None) for name in _OF_MODELS}
    values = {name: value for name, value in found.items() if value is not None}
    if getattr(config, "do_sample", None):
        values.setdefault("temperature", 1.0)
        return values
    # transformers then takes the best token, whatever temperature and filters say.
    return {name: value for name, value in values.items() if name == "repetition_penalty"}


def _banned(banned: Any, codec: TextCodec) -> tuple[int, ...]:
    """Ids and strings that are never to be chosen, as ids."""
    items = [banned] if isinstance(banned, str) or as_integer(banned) is not None else as_items(banned)
    if items is None:
        raise InvalidArgument(f"banned={banned!r:.60}: expected token ids or strings of one token, or a list of them")
    out = []
    for item in items:
        if isinstance(item, str):
            out.append(codec.token_of(item, "banned"))
        elif (token := as_integer(item)) is not None:
            out.append(token)
        else:
            raise InvalidArgument(f"banned: {item!r}; expected a token id or a string of one token")
    return tuple(dict.fromkeys(out))


def _max_tokens(value: Any) -> int:
    checked = _at_least_one("max_tokens", value)
    return DEFAULT_MAX_TOKENS if checked is None else checked


def _at_least_one(name: str, value: Any) -> int | None:
    if value is None:
        return None
    whole = as_integer(value)
    if whole is None or whole < 1:
        raise InvalidArgument(f"{name}={value!r}: expected an integer of at least 1")
    return whole


def _flag(name: str, value: Any) -> bool:
    flag = False if value is None else as_flag(value)
    if flag is None:
        raise InvalidArgument(f"{name}={value!r}: expected True or False")
    return flag


def _end_tokens(value: Any, codec: TextCodec) -> frozenset[int]:
    if value is None:
        return codec.end_tokens
    items = [value] if as_integer(value) is not None else as_items(value)
    ids = None if items is None else [as_integer(item) for item in items]
    if ids is None or any(token is None or token < 0 for token in ids):
        raise InvalidArgument(f"end_tokens={value!r:.60}: expected token ids; None takes those of the model's files")
    return frozenset(token for token in ids if token is not None)


def _logprobs(value: Any) -> int | None:
    flag = False if value is None else as_flag(value)
    if flag is not None:
        return 0 if flag else None
    whole = as_integer(value)
    if whole is None or not 0 <= whole <= MOST_LOGPROBS:
        raise InvalidArgument(
            f"logprobs={value!r}: expected True, or how many of the most probable tokens to name beside the chosen one "
            f"(0…{MOST_LOGPROBS})"
        )
    return whole


def _acceptance(value: Any) -> Acceptance:
    if value is not None and not (isinstance(value, str) and value in ("match", "rejection")):
        raise InvalidArgument(
            f"acceptance={value!r}: expected 'match' (the text that plain decoding gives) or 'rejection' (the rule of "
            "Leviathan et al., for comparison)"
        )
    return "rejection" if value == "rejection" else "match"


def _timeout(value: Any) -> float | None:
    if value is None:
        return None
    seconds = as_number(value)
    if seconds is None or not seconds > 0:
        raise InvalidArgument(f"timeout_s={value!r}: expected seconds above 0, or None for no limit")
    return seconds


def _reuse(value: Any) -> bool | PrefixCache:
    if isinstance(value, PrefixCache):
        return value
    flag = False if value is None else as_flag(value)
    if flag is not None:
        return flag
    raise InvalidArgument(f"reuse={value!r}: expected True, False or a PrefixCache")
