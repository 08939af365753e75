"""The recurrent drafter's forward (paper section 3.1), on `Ops`; training runs these functions too.

    s_1 = f(W e(root) + b)      s_t = f(U s_{t-1} + W e(token_t) + b)      f = SiLU
    g_t = [s_t, h]              h stays fixed for the whole draft
    logits_t = head(project(res_blocks(input_proj(g_t))))

The paper writes s_1 = e(root); its published code does the above, and so do we unless
`first_state="embedding"`.

Parameters are a flat mapping. Names follow Apple's published layout where it has the
part: `rnn_u.weight` (D, D), `rnn_u.bias` (D,), `rnn_w.weight` (D, E), `input_proj.weight`
(I, 2D) and `.bias` (only if I != 2D), `lm_head.{i}.linear.weight` (I, I) and `.bias` for each
residual block, `lm_head.{blocks}.weight` (V', I) for an untied head; ours alone:
`project.weight` (D, I) for a tied head, whose rows are the target's own and are passed in
as `head.weight` (V', D), with `head.bias` (V',) if it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from portadraft.core.ops import Ops
from portadraft.core.types import Array

Parameters = Mapping[str, Array]


@dataclass(frozen=True)
class RecurrentConfig:
    """The drafter's architecture.

    hidden_size: D, of the target's features and of the state.
    embedding_size: E, of the target's embedding table (D in most models).
    inner_size: I, width of the residual blocks; 2D needs no input projection.
    blocks: number of residual blocks x + SiLU(Linear(x)).
    vocabulary_size: V', how many tokens the drafter can predict.
    tied_head: whether the head is the target's own LM-head rows.
    first_state: how the root enters: "recurrence" as in the published code, "embedding" as in the paper.
    """

    hidden_size: int
    embedding_size: int
    inner_size: int
    blocks: int
    vocabulary_size: int
    tied_head: bool = True
    first_state: Literal["recurrence", "embedding"] = "recurrence"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter of the checkpoint (a tied head's rows are not among them)."""
        d, inner = self.hidden_size, self.inner_size
        shapes: dict[str, tuple[int, ...]] = {
            "rnn_u.weight": (d, d),
            "rnn_u.bias": (d,),
            "rnn_w.weight": (d, self.embedding_size),
        }
        if inner != 2 * d:
            shapes |= {"input_proj.weight": (inner, 2 * d), "input_proj.bias": (inner,)}
        for i in range(self.blocks):
            shapes |= {f"lm_head.{i}.linear.weight": (inner, inner), f"lm_head.{i}.linear.bias": (inner,)}
        if self.tied_head:
            shapes["project.weight"] = (d, inner)
        else:
            shapes[f"lm_head.{self.blocks}.weight"] = (self.vocabulary_size, inner)
        return shapes


def first_state(ops: Ops, p: Parameters, config: RecurrentConfig, root: Array) -> Array:
    """s_1 from the root's embedding (…, E): (…, D)."""
    if config.first_state == "embedding":
        return root
    return ops.silu(ops.linear(root, p["rnn_w.weight"], p["rnn_u.bias"]))


def next_state(ops: Ops, p: Parameters, state: Array, token: Array) -> Array:
    """s_t from s_{t-1} (…, D) and the embedding of the token drafted last (…, E): (…, D)."""
    return ops.silu(ops.linear(state, p["rnn_u.weight"], p["rnn_u.bias"]) + ops.linear(token, p["rnn_w.weight"]))


def trunk(ops: Ops, p: Parameters, config: RecurrentConfig, state: Array, hidden: Array) -> Array:
    """What the head reads, from s_t (…, D) and h (…, D): (…, D) if tied, (…, I) if not."""
    x = ops.concat([state, hidden], axis=-1)
    if config.inner_size != 2 * config.hidden_size:
        x = ops.linear(x, p["input_proj.weight"], p["input_proj.bias"])
    for i in range(config.blocks):
        x = x + ops.silu(ops.linear(x, p[f"lm_head.{i}.linear.weight"], p[f"lm_head.{i}.linear.bias"]))
    return ops.linear(x, p["project.weight"]) if config.tied_head else x


def head(ops: Ops, p: Parameters, config: RecurrentConfig, x: Array) -> Array:
    """Logits over the draft vocabulary from `trunk`'s result: (…, V')."""
    if config.tied_head:
        return ops.linear(x, p["head.weight"], p.get("head.bias"))
    return ops.linear(x, p[f"lm_head.{config.blocks}.weight"])
