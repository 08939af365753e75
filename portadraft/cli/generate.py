"""`portadraft generate`: the answer to standard output, everything else to standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import portadraft
from portadraft.cli.guard import complain
from portadraft.errors import InvalidArgument
from portadraft.generation import Generation, Stats


def main(
    prompt: str | None,
    *,
    model: str,
    drafter: str,
    backend: str,
    device: str,
    dtype: str,
    stats: bool,
    as_json: bool,
    options: Mapping[str, Any],
    profiles: str = "auto",
) -> None:
    """Run the command."""
    text = read_prompt(prompt)
    options = {name: value for name, value in options.items() if value is not None}
    loaded = portadraft.load(
        model, drafter=drafter_name(drafter), backend=backend, device=device, dtype=dtype, profiles=profiles
    )
    if as_json:
        result = loaded.generate(text, **options)
        print(json.dumps({"model": model, **result.as_dict()}, ensure_ascii=False))
    else:
        result = _stream(loaded, text, options)
    if not as_json:
        for notice in result.notices:
            complain(f"note: {notice}")
        if result.logprobs is not None:
            complain("note: log-probabilities are shown with --json")
    if stats:
        print(describe(result), file=sys.stderr)


def read_prompt(prompt: str | None) -> str:
    """The argument, or all of standard input.

    Raises: InvalidArgument where there is none, or it is not UTF-8.
    """
    if prompt is not None and prompt != "-":
        strange = any("\ud800" <= character <= "\udfff" for character in prompt)  # bytes that the locale cannot read
        return _decoded(os.fsencode(prompt), "the argument") if strange else prompt
    if sys.stdin is None or (prompt is None and sys.stdin.isatty()):  # None: it was closed
        raise InvalidArgument("prompt: none given; pass it as an argument, or on standard input")
    return _decoded(sys.stdin.buffer.read(), "standard input").removesuffix("\n")


def _decoded(raw: bytes, what: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"prompt: {what} is not UTF-8 ({error.reason} at byte {error.start})") from None


def read_biases(texts: Sequence[str]) -> dict[int, float] | None:
    """`ID=BIAS` options as a mapping.

    Raises: InvalidArgument, naming the one that is not of that form.
    """
    out = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            out[int(token)] = float(bias)
        except ValueError:
            raise InvalidArgument(f"logit_bias={text!r}: expected ID=BIAS, such as 42=-5") from None
    return out or None


def drafter_name(name: str) -> str:
    """What `portadraft.load` calls it."""
    return "redrafter+lookup" if name == "both" else name


def _stream(loaded: portadraft.Model, prompt: str, options: Mapping[str, Any]) -> Generation:
    last, result = "", None
    for delta in loaded.stream(prompt, **options):
        if delta.text:
            print(delta.text, end="", flush=True)
            last = delta.text
        result = delta.generation or result
    if not last.endswith("\n"):
        print(flush=True)
    assert result is not None
    return result


def describe(result: Generation) -> str:
    """The statistics of one answer, for people."""
    stats = result.stats
    lines = [
        f"{stats.generated_tokens} tokens in {stats.steps} steps, ended by {_ENDS[result.finish_reason]}; "
        f"prompt of {stats.prompt_tokens} tokens{_reused(stats)} read in {stats.prefill_s * 1000:.0f} ms",
        _speed(stats),
    ]
    if stats.accepted:
        counts = ", ".join(f"{n}: {count}" for n, count in sorted(stats.accepted.items()))
        lines.append(f"steps by drafted tokens accepted: {counts}")
    lines += [f"{name}: {choice.value} ({choice.reason})" for name, choice in stats.chosen.items()]
    if stats.stages_s:
        lines.append("stages: " + ", ".join(f"{name} {s * 1000:.0f} ms" for name, s in stats.stages_s.items()))
    return "\n".join(lines)


_ENDS = {
    "end": "an end token",
    "length": "max_tokens",
    "context": "the model's context limit",
    "stop": "a stop string",
    "timeout": "its time limit",
}


def _reused(stats: Stats) -> str:
    return f" ({stats.reused_tokens} of them kept from before)" if stats.reused_tokens else ""


def _speed(stats: Stats) -> str:
    speed = "too short to time" if stats.tokens_per_s is None else f"{stats.tokens_per_s:.1f} tokens/s"
    return speed if stats.tokens_per_step is None else f"{speed}, {stats.tokens_per_step:.2f} tokens per step"
