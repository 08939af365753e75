"""What the drafter is taught, and where: T drafting steps at each position, on the drafter's own forward.

Alignment. `hidden[i]` is the target's feature at token i, the one that token i + 1 was chosen
from. So the root of the draft is token i + 1, step 1 reads e(token i + 1) and predicts token
i + 2, and step t predicts token i + 1 + t. What the target itself says about token i + 1 + t is
softmax(head · hidden[i + t]). Between the steps the drafter is fed the text's own tokens.

Which steps count. A drafter gets to step t only if its guesses before it were right. So a
position goes on to step t + 1 with a probability that follows the probability which the drafter
gave the true token, `reach` times as much and never less than `floor`. That spends the
computation, most of which is the head, where decoding will spend it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from portadraft.backends.torch.ops import TorchOps
from portadraft.core import recurrent
from portadraft.core.recurrent import RecurrentConfig
from portadraft.errors import InvalidArgument

CHUNK = 192
"""Rows of logits held at once: few enough to stay in a CPU's cache."""


@dataclass(frozen=True)
class LossConfig:
    """How the drafter is taught.

    steps: T, drafting steps per position.
    hard: share of the cross-entropy with the target's first choice (the paper's equation 2); the rest
        is the divergence from the target's whole distribution over the draft vocabulary (equation 1).
    temperature: at which the target speaks, in equation 1: 1 is its own distribution, and towards 0
        it becomes its first choice. The drafter learns probabilities as they are at that temperature.
    step_weights: what a position's loss counts for at steps 1 … T; all the same if empty.
    reach, floor: see the module's text; floor = 1 trains every step at every position.
    dropout: on states and residual branches.
    """

    steps: int = 5
    hard: float = 0.1
    temperature: float = 1.0
    step_weights: tuple[float, ...] = ()
    reach: float = 5.0
    floor: float = 0.2
    dropout: float = 0.15

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InvalidArgument(f"steps={self.steps!r}: expected an integer of at least 1")
        for name, low, high in (("hard", 0.0, 1.0), ("floor", 0.0, 1.0), ("dropout", 0.0, 0.99), ("reach", 0.0, 1e9)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(f"{name}={value!r}: expected a number from {low:g} to {high:g}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise InvalidArgument(
                f"temperature={self.temperature!r}: expected a number above 0; to learn first choices alone pass hard=1"
            )
        object.__setattr__(self, "step_weights", tuple(self.step_weights))
        if self.step_weights and (
            len(self.step_weights) != self.steps
            or not all(math.isfinite(w) and w >= 0 for w in self.step_weights)
            or not self.step_weights[0] > 0
        ):
            raise InvalidArgument(
                f"step_weights={self.step_weights!r}: expected {self.steps} numbers of at least 0, one for each of "
                f"steps={self.steps}, the first above 0"
            )

    def weight(self, step: int) -> float:
        """Of step 1 … T."""
        return self.step_weights[step - 1] if self.step_weights else 1.0


@dataclass
class Block:
    """Some positions of a text, and all that the loss reads there, on one device.

    hidden: (n, D); tokens: (n, T+1) int64 target ids, the root first, then the true tokens;
    draft: (n, T+1) int64, the same in the draft vocabulary, -1 where outside it or past the end;
    soft: (u, V') the target's distributions, and choice: (u,) int64 the first choice of each;
    rows: (n, T) int64, which of them belongs to step t. None of these three where the text's own
    tokens are what is imitated.
    """

    hidden: Tensor
    tokens: Tensor
    draft: Tensor
    soft: Tensor | None = None
    choice: Tensor | None = None
    rows: Tensor | None = None


@dataclass
class Tally:
    """Sums over the rows of each step: how many, loss, and how often the best guess was right."""

    rows: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for mine, theirs in ((self.rows, other.rows), (self.loss, other.loss), (self.right, other.right)):
            mine.extend([0.0] * (len(theirs) - len(mine)))
            for i, x in enumerate(theirs):
                mine[i] += x

    def mean_loss(self) -> float:
        return sum(self.loss) / max(sum(self.rows), 1.0)

    def top1(self) -> list[float]:
        return [r / max(n, 1.0) for r, n in zip(self.right, self.rows, strict=True)]


class DropoutOps(TorchOps):
    """Ops of which every activation drops some of its entries: regularisation without a second forward."""

    def __init__(self, device: str | torch.device, rate: float) -> None:
        super().__init__(device)
        self.rate = rate

    def silu(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(super().silu(x), self.rate)


class _Distil(torch.autograd.Function):
    """Row-wise mix of KL and cross-entropy, whose gradient by the logits is q - (mixed target).

    soft: the target's distributions, or None for cross-entropy alone.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, logits: Tensor, soft: Tensor | None, labels: Tensor, hard: float
    ) -> tuple[Tensor, Tensor]:
        log_q = torch.log_softmax(logits.float(), -1)
        # The entropy of the target is a constant: leave it out of what is minimised.
        if soft is None or hard >= 1.0:
            loss = -log_q.gather(-1, labels[:, None]).squeeze(-1)
            grad = log_q.exp()
            grad.scatter_add_(-1, labels[:, None], torch.full_like(loss, -1.0)[:, None])
        else:
            mixed = soft.float().mul_(1.0 - hard)
            mixed.scatter_add_(-1, labels[:, None], torch.full_like(mixed[:, :1], hard))
            loss = -(mixed * log_q).sum(-1)
            grad = log_q.exp() - mixed
        ctx.save_for_backward(grad.to(logits.dtype))
        ctx.mark_non_differentiable(log_q)
        return loss, log_q

    @staticmethod
    def backward(ctx, by_loss: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        (grad,) = ctx.saved_tensors
        return grad * by_loss[:, None].to(grad.dtype), None, None, None


def head_loss(
    ops: TorchOps,
    params: dict[str, Tensor],
    config: RecurrentConfig,
    x: Tensor,
    block: Block,
    at: Tensor,
    step: int,
    hard: float,
    gradients: bool,
    weight: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss, probability of the true token and whether it was the first guess for rows `at`, in chunks.

    Returns also the gradient of the summed loss times `weight` by x, if asked for: the logits are
    never all in memory. An untied head's own gradient is added to it on the way.
    """
    losses, probabilities, right, by_x = [], [], [], []
    true = block.draft[at, step]
    rows = labels = None
    if block.soft is not None and block.rows is not None and block.choice is not None:
        rows = block.rows[at, step - 1]
        labels = block.choice[rows]
    for i in range(0, x.shape[0], CHUNK):
        piece = slice(i, i + CHUNK)
        soft = None if block.soft is None or rows is None or hard >= 1.0 else block.soft[rows[piece]]
        leaf = x[piece].detach().requires_grad_(gradients)
        with torch.set_grad_enabled(gradients):
            logits = recurrent.head(ops, params, config, leaf)
            loss, log_q = _Distil.apply(logits, soft, (true if labels is None else labels)[piece], hard)
        if gradients:
            (loss.sum() * weight).backward()
            by_x.append(leaf.grad)
        losses.append(loss.detach())
        probabilities.append(log_q.gather(1, true[piece, None]).squeeze(1).exp())
        right.append(log_q.argmax(-1) == true[piece])
    return (
        torch.cat(losses),
        torch.cat(probabilities),
        torch.cat(right),
        torch.cat(by_x) if gradients else None,
    )


def distil(
    ops: TorchOps,
    params: dict[str, Tensor],
    config: RecurrentConfig,
    embeddings: Tensor,
    block: Block,
    loss: LossConfig,
    generator: torch.Generator,
    gradients: bool = True,
) -> Tally:
    """One pass over a block; with `gradients`, those of the mean loss are added to the parameters'.

    embeddings: (V, E), the target's table. `params` holds the trainable tensors and, for a tied
    head, the frozen `head.weight`. A block without a token to learn gives an empty tally and no gradients.
    """
    tally = Tally()
    own = None if config.tied_head else params[f"lm_head.{config.blocks}.weight"]
    before = None
    if own is not None:
        before, own.grad = own.grad, None
    live = torch.nonzero(block.draft[:, 1] >= 0).squeeze(1)
    outputs: list[Tensor] = []
    output_gradients: list[Tensor] = []
    with torch.set_grad_enabled(gradients):
        state = recurrent.first_state(ops, params, config, embeddings[block.tokens[live, 0]])
        for step in range(1, loss.steps + 1):
            if live.numel() == 0:
                break
            x = recurrent.trunk(ops, params, config, state, block.hidden[live])
            losses, probability, right, by_x = head_loss(
                ops, params, config, x, block, live, step, loss.hard, gradients, loss.weight(step)
            )
            if by_x is not None:
                outputs.append(x)
                output_gradients.append(by_x)
            tally.rows.append(float(live.numel()))
            tally.loss.append(float(losses.sum()))
            tally.right.append(float(right.sum()))
            if step == loss.steps:
                break
            chance = (probability * loss.reach).clamp(loss.floor, 1.0)
            stays = torch.rand(chance.shape, generator=generator) < chance.cpu()
            stays = stays.to(live.device) & (block.draft[live, step + 1] >= 0)
            kept = torch.nonzero(stays).squeeze(1)
            live = live[kept]
            state = recurrent.next_state(ops, params, state[kept], embeddings[block.tokens[live, step]])
    if outputs:
        scale = 1.0 / sum(loss.weight(t) * n for t, n in enumerate(tally.rows, 1))
        torch.autograd.backward(outputs, [g * scale for g in output_gradients])
        if own is not None and own.grad is not None:
            own.grad *= scale
    if own is not None and before is not None:
        own.grad = before if own.grad is None else own.grad + before
    return tally
