"""Packing and acceptance as functions of arrays alone, so that `Ops.compile` may do something for them.

Each is dozens of tiny operations of static shape: on a GPU starting them takes longer than they
do. Compiled forms belong to the arrays' `Ops`, so that all decoders of a target share them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from portadraft.core.accept import accept
from portadraft.core.choice import Chooser, Situation
from portadraft.core.ops import Ops
from portadraft.core.penalties import History
from portadraft.core.tree import pack_beam
from portadraft.core.types import Array, Beam, PackedBeam, Verdict

_KEPT = "_compiled_stages"
"""The attribute of an `Ops` under which compiled forms are kept: they refer to it, and go with it."""


def pack_compiled(ops: Ops, roots: Array, beam: Beam, nodes: int | None = None) -> PackedBeam:
    """`pack_beam`, compiled for its static numbers."""
    most = beam.nodes

    def pack(roots: Array, tokens: Array, lengths: Array, scores: Array) -> tuple[Array, ...]:
        packed = pack_beam(ops, roots, Beam(tokens, lengths, scores, most), nodes)
        return packed.tokens, packed.parents, packed.depths, packed.mask, packed.sizes

    run = _compiled(ops, ("pack", nodes, most), pack)
    tokens, parents, depths, mask, sizes = run(roots, beam.tokens, beam.lengths, beam.scores)
    return PackedBeam(tokens, parents, depths, mask, sizes, beam.tokens.shape[2])


def accept_compiled(
    ops: Ops, packed: PackedBeam, logits: Array, chooser: Chooser, situation: Situation
) -> tuple[Verdict, History | None]:
    """`accept`, compiled where choices depend on logits and uniforms alone, and as it is elsewhere."""
    if not chooser.processors.idle or situation.history is not None or situation.may_end is not None:
        return accept(ops, packed, logits, chooser, situation)
    length, sampling = packed.length, chooser.sampling

    def walk(
        tokens: Array, parents: Array, sizes: Array, logits: Array, uniforms: Array | None = None
    ) -> tuple[Array, ...]:
        # Neither depths nor mask are read: the walk goes by parents.
        seen = PackedBeam(tokens, parents, parents, parents, sizes, length)
        verdict, _ = accept(ops, seen, logits, chooser, Situation(uniforms))
        return verdict.tokens, verdict.counts, verdict.slots

    key = ("accept", length, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    given = (packed.tokens, packed.parents, packed.sizes, logits)
    run = _compiled(ops, key, walk)
    return Verdict(*(run(*given) if situation.uniforms is None else run(*given, situation.uniforms))), None


def _compiled(ops: Ops, key: Hashable, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled once for its key: two functions of one key compute the same."""
    made: dict[Hashable, Callable[..., Any]] = vars(ops).setdefault(_KEPT, {})
    if key not in made:
        compiled = ops.compile(function)
        if compiled is function:
            return function  # nothing is gained, and a closure must not live longer than its call
        made[key] = compiled
    return made[key]
