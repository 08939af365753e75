"""Tokens per step of a few shapes of a recurrent drafter, without running the target, as training asks for it.

A recording holds the target's own answer and the features it had there, so what a step would
accept at any root is known from the drafter's search alone. Decoding visits only some of the
roots: after a tokens were accepted at t, the next root is t + a + 1. Replay follows that
chain; averaging over all positions would be biased, since steps start where guesses failed.
The whole grid of shapes, for any drafter, is `portadraft.tuner.acceptance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from portadraft.core.beam import beam_search
from portadraft.core.ops import Ops
from portadraft.core.recurrent import RecurrentConfig
from portadraft.core.tree import pack_beam
from portadraft.core.types import Array, BeamShape, PackedBeam
from portadraft.tuner.recordings import Recording

__all__ = ["Recording", "Replay", "matched", "replay"]


@dataclass(frozen=True)
class Replay:
    """What a shape would have given.

    accepted: per recording, the accepted counts of the steps that decoding would take, in order;
        a last step that runs past the recording's end is left out.
    nodes: mean number of unique nodes verified per step, root included.
    """

    shape: BeamShape
    accepted: list[list[int]]
    nodes: float

    @property
    def steps(self) -> int:
        return sum(len(x) for x in self.accepted)

    @property
    def tokens_per_step(self) -> float:
        return 1.0 + sum(map(sum, self.accepted)) / max(self.steps, 1)


def matched(ops: Ops, packed: PackedBeam, true: Array) -> Array:
    """How many tokens of the true continuation (B, L) the packed beam holds from its root on: (B,) int32.

    Entries of `true` past what is known are negative, and match nothing.
    """
    on_path = packed.depths == 0
    on_path = on_path & (packed.parents == ops.arange(packed.tokens.shape[1])[None])  # slot 0 alone, not dead slots
    best = ops.cast(ops.any(on_path, axis=1), "int32") * 0
    for depth in range(1, packed.length + 1):
        parent = ops.gather(ops.cast(on_path, "int32"), packed.parents, axis=1) > 0
        on_path = parent & (packed.depths == depth) & (packed.tokens == true[:, depth - 1 : depth])
        best = best + ops.cast(ops.any(on_path, axis=1), "int32")
    return best


def replay(
    ops: Ops,
    config: RecurrentConfig,
    params: Mapping[str, Array],
    embeddings: Array,
    recordings: Sequence[Recording],
    shapes: Sequence[BeamShape],
    draft_vocabulary: Array | None = None,
    rows: int = 64,
    dtype: str = "float32",
) -> list[Replay]:
    """Follow the chain of every recording for each shape; `rows` positions are drafted at once."""
    out = []
    if draft_vocabulary is not None:
        draft_vocabulary = ops.asarray(draft_vocabulary, "int32")
    for shape in shapes:
        # Chains are followed side by side: each round drafts the current root of many recordings.
        at = [0] * len(recordings)
        accepted: list[list[int]] = [[] for _ in recordings]
        live = [i for i, r in enumerate(recordings) if len(r.tokens) > 1]
        nodes = steps = 0
        while live:
            for start in range(0, len(live), rows):
                part = live[start : start + rows]
                roots = np.array([recordings[i].tokens[at[i]] for i in part], np.int32)
                hidden = ops.stack([ops.asarray(recordings[i].hidden[at[i]], dtype) for i in part], axis=0)
                true = np.full((len(part), shape.length), -1, np.int32)
                for k, i in enumerate(part):
                    known = recordings[i].tokens[at[i] + 1 : at[i] + 1 + shape.length]
                    true[k, : len(known)] = known
                with ops.no_grad():
                    native = ops.asarray(roots, "int32")
                    beam = beam_search(
                        ops, config, params, embeddings, native, hidden, shape.width, shape.length, draft_vocabulary
                    )
                    packed = pack_beam(ops, native, beam, shape.nodes)
                    counts = ops.stack([matched(ops, packed, ops.asarray(true, "int32")), packed.sizes], axis=0)
                got, sizes = ops.to_numpy(counts)
                for i, a, size in zip(part, got.tolist(), sizes.tolist(), strict=True):
                    if at[i] + a + 1 < len(recordings[i].tokens):
                        accepted[i].append(a)
                        nodes += size
                        steps += 1
                    at[i] += a + 1
            live = [i for i in live if at[i] < len(recordings[i].tokens) - 1]
        out.append(Replay(shape, accepted, nodes / max(steps, 1)))
    return out
