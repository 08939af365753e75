"""Helpers for tests: whole decodings, hand-made trees, drafters with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from portadraft.core.decode import Decoder, Progress, Request
from portadraft.core.drafter import Drafter
from portadraft.core.ops import Ops
from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.target import Target
from portadraft.core.types import BeamShape, PackedBeam, Verdict
from portadraft.drafters.redrafter import ReDrafter


@dataclass(frozen=True)
class Tree:
    """A packed beam of one row in plain numbers: slot 0 is the root and its own parent."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def path(self, slot: int) -> list[int]:
        """Slots from the root to this one."""
        path = [slot]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def path_tokens(self, slot: int) -> list[int]:
        return [self.tokens[s] for s in self.path(slot)]

    def depth(self, slot: int) -> int:
        return len(self.path(slot)) - 1


def random_tree(generator: np.random.Generator, slots: int, vocabulary_size: int) -> Tree:
    """A tree of random form; siblings differ in their token. Slots are in order of depth."""
    shape = [0]
    for slot in range(1, slots):
        # A slot has at most as many children as there are tokens.
        open_slots = [s for s in range(slot) if shape[1:].count(s) < vocabulary_size]
        shape.append(open_slots[int(generator.integers(0, len(open_slots)))])
    depth = [0] * slots
    for slot in range(1, slots):
        depth[slot] = depth[shape[slot]] + 1
    order = sorted(range(slots), key=lambda s: depth[s])
    place = {s: i for i, s in enumerate(order)}
    parents = tuple(place[shape[s]] for s in order)
    tokens: list[int] = []
    for slot in range(slots):
        token = int(generator.integers(0, vocabulary_size))
        while slot and any(parents[s] == parents[slot] and tokens[s] == token for s in range(1, slot)):
            token = (token + 1) % vocabulary_size
        tokens.append(token)
    return Tree(tuple(tokens), parents)


def pack_tree(ops: Ops, trees: Sequence[Tree], slots: int | None = None) -> PackedBeam:
    """Trees of several rows as one packed beam, filled up with dead slots."""
    slots = max(len(t.tokens) for t in trees) if slots is None else slots
    tokens = np.zeros((len(trees), slots), dtype=np.int32)
    parents, depths = np.zeros_like(tokens), np.zeros_like(tokens)
    mask = np.zeros((len(trees), slots, slots), dtype=bool)
    for b, tree in enumerate(trees):
        for slot in range(slots):
            mask[b, slot, [0, slot]] = True
            if slot < len(tree.tokens):
                tokens[b, slot], parents[b, slot] = tree.tokens[slot], tree.parents[slot]
                depths[b, slot] = tree.depth(slot)
                mask[b, slot, tree.path(slot)] = True
    return PackedBeam(
        tokens=ops.asarray(tokens),
        parents=ops.asarray(parents),
        depths=ops.asarray(depths),
        mask=ops.asarray(mask, "bool"),
        sizes=ops.asarray([len(t.tokens) for t in trees]),
        length=max(1, int(depths.max())),
    )


def verdict_for(
    ops: Ops, packed: PackedBeam, paths: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]] | None = None
) -> tuple[Verdict, list[int], list[list[int]]]:
    """A verdict that accepts these paths (slots, the root first), with its host numbers.

    tokens: the choices along each path; zeros where the caller does not care.
    """
    steps = packed.length + 1
    counts = [len(path) for path in paths]
    slots = [list(path) + [path[-1]] * (steps - len(path)) for path in paths]
    chosen = [[0] * steps for _ in paths] if tokens is None else [list(t) + [0] * (steps - len(t)) for t in tokens]
    return Verdict(ops.asarray(chosen), ops.asarray(counts), ops.asarray(slots)), counts, slots


def decode(
    target: Target,
    drafter: Drafter | None,
    requests: Sequence[Request],
    shape: BeamShape | None = None,
    *,
    temperature: float = 0.0,
    end_tokens: Sequence[int] = (),
    **options: Any,
) -> tuple[list[list[int]], list[Progress]]:
    """Decode all requests as one batch to their ends: each one's ids, and all that was reported.

    options: what else `Decoder` takes.
    """
    if "sampling" not in options:
        options["temperature"] = temperature
    decoder = Decoder(target, drafter, shape, end_tokens=end_tokens, **options)
    out: list[list[int]] = [[] for _ in requests]
    reported: list[Progress] = []
    news = decoder.admit(requests)
    while True:
        for progress in news:
            out[progress.key].extend(progress.tokens)
        reported.extend(news)
        if not decoder.live:
            return out, reported
        news = decoder.step()


def random_redrafter(
    target: Target,
    seed: int = 0,
    *,
    blocks: int = 2,
    inner_size: int | None = None,
    tied: bool = True,
    draft_vocabulary: Sequence[int] | None = None,
    first_state: Literal["recurrence", "embedding"] = "recurrence",
) -> ReDrafter:
    """A ReDrafter with random weights, large enough that its state decides what it drafts."""
    facts = target.facts
    config = RecurrentConfig(
        hidden_size=facts.hidden_size,
        embedding_size=target.embeddings().shape[1],
        inner_size=2 * facts.hidden_size if inner_size is None else inner_size,
        blocks=blocks,
        vocabulary_size=facts.vocabulary_size if draft_vocabulary is None else len(draft_vocabulary),
        tied_head=tied,
        first_state=first_state,
    )
    generator = np.random.default_rng(seed)
    params = {
        name: (generator.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in config.shapes().items()
    }
    vocabulary = None if draft_vocabulary is None else np.asarray(draft_vocabulary, dtype=np.int32)
    return ReDrafter(target, config, params, vocabulary)
