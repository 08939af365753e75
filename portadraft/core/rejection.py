"""The classical rule of speculative sampling (Leviathan et al. 2023), for one chain of drafted tokens.

Drafted tokens are samples of the drafter's distribution q; each is accepted with probability
min(1, p(x) / q(x)), and the first that is not is replaced by a sample of max(p - q, 0). The
text then has the target's distribution, p being what penalties and filters leave of it. It
is not the text that plain decoding gives with the same seed, and it holds for samples of q
only, not for the candidates of a beam search. It is here for comparison; the rule that
portadraft uses otherwise is in `accept`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from portadraft.core.choice import Chooser, Situation
from portadraft.core.draw import draw
from portadraft.core.filters import weights
from portadraft.core.ops import Ops
from portadraft.core.penalties import History
from portadraft.core.sampling import Sampling
from portadraft.core.types import Array, BeamShape, PackedBeam, Verdict
from portadraft.errors import InvalidArgument

Acceptance = Literal["match", "rejection"]


@dataclass(frozen=True)
class Chain:
    """One drafted chain a row and what it was drawn from.

    tokens: (B, L) int32. probabilities: (B, L, V) of type `ops.wide`, q at each step over the target's whole
    vocabulary, of which each token was drawn.
    """

    tokens: Array
    probabilities: Array


@runtime_checkable
class ChainDrafter(Protocol):
    """A drafter that can also draw its drafts."""

    def draw_chain(self, roots: Array, features: Array, temperature: float, uniforms: Array) -> Chain:
        """A chain of L sampled tokens after each root.

        roots: (B,) int32; features: (B, D); uniforms: (B, L) from `draw.numbers`, one for each
        token, which must be what decides it. Makes no host read.
        """


def check_rejection(acceptance: str, drafter: object, shape: BeamShape, sampling: Sampling) -> bool:
    """Whether drafts are accepted by rejection. Greedy decoding has one rule only, which is the walk.

    Raises: InvalidArgument where the rule does not hold: beams, drafters without a distribution.
    """
    if acceptance not in ("match", "rejection"):
        raise InvalidArgument(f"acceptance={acceptance!r}: expected 'match' or 'rejection'")
    if acceptance == "match" or drafter is None:
        return False
    if shape.width != 1:
        raise InvalidArgument(
            f"width={shape.width}: acceptance='rejection' holds for one sampled chain, not for a beam; take width=1, "
            "or acceptance='match', which is exact for any width"
        )
    if not isinstance(drafter, ChainDrafter):
        raise InvalidArgument(
            f"acceptance='rejection': the drafter {getattr(drafter, 'name', drafter)!r} gives no probabilities of its "
            "drafts; take 'redrafter', or acceptance='match'"
        )
    return not sampling.greedy


def draft_chain(
    ops: Ops, drafter: object, roots: Array, features: Array, temperature: float, uniforms: Array
) -> tuple[PackedBeam, Chain]:
    """A sampled chain, and the packed beam that holds it: slot d at depth d."""
    assert isinstance(drafter, ChainDrafter)
    chain = drafter.draw_chain(roots, features, temperature, uniforms)
    batch, length = chain.tokens.shape
    slots = length + 1
    numbers = ops.arange(slots)
    depths = ops.broadcast_to(numbers[None, :], (batch, slots))
    packed = PackedBeam(
        tokens=ops.concat([roots[:, None], chain.tokens], axis=1),
        parents=ops.clip(depths - 1, 0, slots),
        depths=depths,
        mask=ops.broadcast_to((numbers[:, None] >= numbers[None, :])[None], (batch, slots, slots)),
        sizes=ops.full((batch,), slots, "int32"),
        length=length,
    )
    return packed, chain


def accept_chain(
    ops: Ops, chain: Chain, logits: Array, coins: Array, chooser: Chooser, situation: Situation
) -> tuple[Verdict, History | None]:
    """Accept a prefix of each chain, and draw the token after it.

    logits: (B, L+1, V) at the chain's slots. coins: (B, L) in [0, 1) of type `ops.wide`, for the acceptance; the token
    that replaces a rejected one, or follows the whole chain, is drawn at the position's own
    uniform (situation.uniforms, (B, L+1)). Returns what `accept` returns.
    """
    batch, slots, _ = logits.shape
    length = slots - 1
    counts = ops.full((batch,), 1, "int32")
    walking = ops.full((batch,), 1, "bool")
    history = situation.history
    tokens = []
    for depth in range(slots):
        p = weights(ops, chooser.processed(logits[:, depth], situation, depth, history), chooser.sampling)
        p = p / p.sum(axis=1)[:, None]
        if depth == length:
            token = draw(ops, p, situation.uniform(depth))
        else:
            token, kept = _one(ops, p, chain, depth, coins[:, depth], situation.uniform(depth))
        tokens.append(token)
        if history is not None:
            history = history.after(ops, token, walking)
        if depth < length:
            walking = walking & kept
            counts = counts + ops.cast(walking, "int32")
            if ops.surely_none(walking):
                tokens += [token] * (length - depth)
                break
    numbers = ops.broadcast_to(ops.arange(slots)[None, :], (batch, slots))
    path = ops.where(numbers < counts[:, None], numbers, counts[:, None] - 1)
    return Verdict(ops.stack(tokens, axis=1), counts, path), history


def _one(ops: Ops, p: Array, chain: Chain, depth: int, coin: Array, uniform: Array | None) -> tuple[Array, Array]:
    """The drafted token where it is accepted, else a sample of the residual; and which it is."""
    drafted, q = chain.tokens[:, depth], ops.cast(chain.probabilities[:, depth], ops.wide)
    at = drafted[:, None]
    kept = coin * ops.gather(q, at, axis=1)[:, 0] < ops.gather(p, at, axis=1)[:, 0]
    residual = ops.where(p > q, p - q, 0.0)
    # p = q leaves nothing; a rejection is then a rounding, and p itself the right distribution.
    some = residual.sum(axis=1) > 0
    replacement = draw(ops, ops.where(some[:, None], residual, p), uniform)
    return ops.where(kept, drafted, replacement), kept
