"""Recordings: the target's own generations over prompts, with the features that chose each token.

Made by the decode loop itself, through a drafter that drafts nothing and looks on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from portadraft.core.decode import Decoder
from portadraft.core.drafter import StatelessDrafter
from portadraft.core.requests import Request
from portadraft.core.target import Target
from portadraft.core.types import Array, BeamShape
from portadraft.core.uniforms import row_seed
from portadraft.errors import InvalidArgument, ModelNotFound

MAX_TOKENS = 128


@dataclass(frozen=True)
class Recording:
    """One generation: its n tokens, and the n - 1 or more features that chose them.

    tokens: the answer's ids, (n,) int32. hidden: hidden[t] is the feature from which tokens[t]
    was chosen (so hidden[0] stands at the prompt's last token), (≥ n - 1, D), any array `ops.asarray` takes.
    prompt: the ids before the answer, which only a lookup reads. category: the kind of text, "" unknown.
    """

    tokens: NDArray[np.int32]
    hidden: Any
    prompt: tuple[int, ...] = ()
    category: str = ""


@dataclass(frozen=True)
class Prompt:
    """A prompt and its kind of text."""

    text: str
    category: str = ""


def built_in() -> list[Prompt]:
    """The package's own prompts, of several kinds."""
    text = resources.files("portadraft.tuner").joinpath("prompts.json").read_text("utf-8")
    return [Prompt(row["prompt"], row["category"]) for row in json.loads(text)]


def read_prompts(path: Path) -> list[Prompt]:
    """JSONL with `prompt` (or `turns`, of which the first counts) and, if it has one, `category` on each line.

    Raises: ModelNotFound for a missing file; InvalidArgument, naming the line, for anything else.
    """
    if not path.is_file():
        raise ModelNotFound(f"prompts={str(path)!r}: no such file; expected JSONL with `prompt` or `turns` a line")
    try:
        lines = path.read_text("utf-8").split("\n")  # not splitlines: texts may hold other line separators
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"prompts={str(path)!r}: not UTF-8 ({error.reason}, byte {error.start})") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row["turns"][0] if "turns" in row else row["prompt"]
            category = row.get("category", "")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            text = category = None
        if not isinstance(text, str) or not text:
            raise InvalidArgument(f"{path}, line {number}: expected a JSON object with `prompt` or `turns`")
        if not isinstance(category, str) or len(category) > 100 or not category.isprintable():
            raise InvalidArgument(
                f"{path}, line {number}: category={category!r:.60}: expected a short name of the kind of text, or none"
            )
        found.append(Prompt(text, category))
    if not found:
        raise InvalidArgument(f"{path}: it holds no prompts")
    return found


def prompts_id(prompts: Sequence[Prompt], max_tokens: int) -> str:
    """A short hash of what was generated from."""
    text = json.dumps([max_tokens, [[p.text, p.category] for p in prompts]], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Onlooker(StatelessDrafter):
    """Drafts nothing; remembers the features that every row's root was chosen from."""

    name = "onlooker"
    wants: Literal["none", "last", "all"] = "last"

    def __init__(self, target: Target) -> None:
        self._ops = target.ops
        self.rows: list[list[Any]] = []
        self.all: list[list[Any]] = []

    def admit(self, row: int, ids: Sequence[int]) -> None:
        self.all.append([])
        self.rows.insert(row, self.all[-1])

    def draft(self, roots: Array, features: Array, shape: BeamShape) -> None:
        host = self._ops.to_numpy(features)
        for row, feature in zip(self.rows, host, strict=True):
            row.append(np.array(feature))

    def release(self, row: int) -> None:
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last


def record(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    categories: Sequence[str] = (),
    max_tokens: int = MAX_TOKENS,
    temperature: float = 0.0,
    seed: int = 0,
    end_tokens: Collection[int] = (),
    batch: int = 16,
    report: Callable[[int], None] | None = None,
) -> list[Recording]:
    """Generate plainly after each prompt and keep tokens and features; prompt i samples with seed `row_seed(seed, i)`.

    report: called with the number of finished answers. Answers of a single token are kept, too: they have no step.
    """
    out: list[Recording] = []
    for start in range(0, len(prompts), batch):
        part = [tuple(p) for p in prompts[start : start + batch]]
        onlooker = _Onlooker(target)
        # Room is asked for by depth: with a beam of one token the last steps before the context's end are seen, too.
        decoder = Decoder(target, onlooker, BeamShape(1, 1), temperature=temperature, end_tokens=sorted(end_tokens))
        tokens: list[list[int]] = [[] for _ in part]
        try:
            requests = [Request(p, max_tokens, row_seed(seed, start + i)) for i, p in enumerate(part)]
            progress = decoder.admit(requests)
            while True:
                for one in progress:
                    tokens[one.key].extend(one.tokens)
                if not decoder.live:
                    break
                progress = decoder.step()
        finally:
            decoder.close()
        for i, (ids, answer, features) in enumerate(zip(part, tokens, onlooker.all, strict=True)):
            size = target.facts.hidden_size
            hidden = np.stack(features) if features else np.zeros((0, size), np.float32)
            category = categories[start + i] if categories else ""
            out.append(Recording(np.array(answer[: len(hidden) + 1], np.int32), hidden, ids, category))
        if report:
            report(len(out))
    return out
