"""One attention function and one mask function for every Hugging Face model.

Both are registered once, under the name "portadraft", and act only while a `Pass` of ours
is active in the calling thread. Only a target's own copy of the modules names them (on the
same weights, see `TorchTarget`), so that the caller's model behaves as before at any time.

Masks go by POSITION, not by cache slot: the model's own mask function (causal, sliding,
chunked) is evaluated at the true positions of queries and keys, and what it allows is cut
down to the committed context and the slot's ancestors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from portadraft.errors import UnsupportedModel

NAME = "portadraft"
_SETTING = "_attn_implementation_internal"
"""The attribute itself: the property above it also rewrites every sub-configuration, which may differ."""
_OUTSIDE = "the attention named 'portadraft' works inside portadraft's own passes only; set another one"


@dataclass
class Pass:
    """One forward pass of ours: B rows, N new slots each, behind M slots of cache.

    positions: (B, N) int64; tree: (B, N, N) or (N, N) bool, slot j is slot i or an ancestor;
    lengths: (B,) int64 on the device, None where every row is M long; past: M;
    last_position: no query stands later (host number); strict: look for mask functions that
    cannot be evaluated by position (costs host reads; the self-check sets it).
    """

    positions: Tensor
    tree: Tensor
    lengths: Tensor | None
    past: int
    last_position: int
    strict: bool = False
    calls: int = 0
    unmasked: bool = False
    _visible: Tensor | None = None
    _ready: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def mask(self, function: Callable[..., Tensor], plain: bool) -> Tensor | None:
        """(B, 1, N, M+N) bool, or None where every slot may see everything.

        plain: `function` allows all earlier positions here, so that it need not be asked.
        """
        if plain and self.lengths is None and self.positions.shape[1] == 1:
            self.unmasked = True
            return None
        visible = self._committed_or_ancestor()
        if plain:
            return visible
        rows = self.positions.shape[0]
        queries = self.positions[:, None, :, None]
        committed = torch.arange(self.past, device=queries.device).expand(rows, -1)
        keys = torch.cat([committed, self.positions], dim=1)[:, None, None, :]
        batch = torch.arange(rows, device=queries.device)[:, None, None, None]
        head = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=queries.device)
        if self.strict:
            _require_causal(function, batch, head, queries)
        return visible & function(batch, head, queries, keys)

    def _committed_or_ancestor(self) -> Tensor:
        if self._visible is None:
            rows, slots = self.positions.shape
            visible = torch.ones((rows, 1, slots, self.past + slots), dtype=torch.bool, device=self.positions.device)
            if self.lengths is not None:
                committed = torch.arange(self.past, device=self.lengths.device) < self.lengths[:, None]
                visible[..., : self.past] = committed[:, None, None, :]
            visible[..., self.past :] = self.tree if self.tree.ndim == 2 else self.tree[:, None]
            self._visible = visible
        return self._visible

    def additive(self, mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
        """The mask as SDPA adds it, repeated for the packed groups; made once per pass and kind."""
        ready = self._ready.get(id(mask))
        if ready is None:
            # The mask is kept too: its id must not be given to another one.
            ready = (mask, _additive(mask, groups, dtype))
            self._ready[id(mask)] = ready
        return ready[1]


_local = threading.local()


def current() -> Pass | None:
    """The pass of ours that runs in this thread."""
    running: Pass | None = getattr(_local, "running", None)
    return running


class active:
    """Context in which `current` is the running pass."""

    def __init__(self, running: Pass) -> None:
        self.running = running

    def __enter__(self) -> Pass:
        self.outer = current()
        _local.running = self.running
        return self.running

    def __exit__(self, *_: object) -> None:
        _local.running = self.outer


def use_our_attention(configs: Iterable[Any]) -> None:
    """Name our attention and masks in these configurations (of a model of our own, see `TorchTarget`)."""
    for config in configs:
        if hasattr(config, _SETTING):
            setattr(config, _SETTING, NAME)


def mask_function(
    mask_function: Callable[..., Any] = causal_mask_function,
    *,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """What transformers calls to make a mask: (B, 1, N, M+N) bool or None.

    Raises: UnsupportedModel where the model's pattern is not a function of positions.
    """
    running = current()
    if running is None:
        raise UnsupportedModel(_OUTSIDE)
    if use_vmap:
        raise UnsupportedModel("its attention mask is a custom function that is not defined by positions alone")
    short = local_size is not None and allow_is_causal_skip and running.last_position < local_size
    return running.mask(mask_function, plain=short or mask_function is causal_mask_function)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of (B, Hq, N, d) queries over (B, Hkv, M+N, d) views of the cache; (B, N, Hq, dv).

    The groups of grouped-query attention are packed into the query axis, so that keys and
    values are read where they lie. Soft-capping and sinks take explicit products.
    """
    running = current()
    rows, heads, slots, _ = query.shape
    groups = heads // key.shape[1]
    if position_bias is not None:
        raise UnsupportedModel("its attention adds a position bias (ALiBi or learned), which has no position ids")
    if running is None:
        raise UnsupportedModel(_OUTSIDE)
    running.calls += 1
    if attention_mask is None and not running.unmasked:
        raise UnsupportedModel("it makes no attention mask through transformers' mask functions")
    if softcap is not None or s_aux is not None:
        out = _explicit(query, key, value, attention_mask, scaling, softcap, s_aux)
        return out.transpose(1, 2).contiguous(), None
    if attention_mask is not None:
        attention_mask = running.additive(attention_mask, groups, query.dtype)
    if groups > 1:
        query = query.reshape(rows, key.shape[1], groups * slots, -1)
    if not _reads_views(query.device):
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    if groups > 1:
        out = out.reshape(rows, heads, slots, -1)
    return out.transpose(1, 2).contiguous(), None


def _reads_views(device: torch.device) -> bool:
    """Whether SDPA can be trusted with views of the cache: on MPS it gave wrong values for them from torch 2.8 on
    (issues 163597 and 181133 of PyTorch), so there keys and values are copied.
    """
    return device.type != "mps"


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention that SDPA cannot serve, with a float32 softmax; (B, Hq, N, dv)."""
    rows, heads, slots, size = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    packed = query.reshape(rows, kv_heads, groups * slots, size)
    scores = torch.matmul(packed, key.transpose(-1, -2)).float()
    scores *= size**-0.5 if scaling is None else scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(rows, kv_heads, groups, slots, -1)
    if mask is not None:
        # (B, 1, N, K) against (B, Hkv, G, N, K): the head axis of the mask must be 1.
        mask = mask[:, :, None]
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        # A sink is one more logit per head whose value is zero: it only takes weight away.
        sink = sinks.float().view(1, kv_heads, groups, 1, 1)
        top = torch.maximum(scores.amax(-1, keepdim=True), sink)
        weights = torch.exp(scores - top)
        weights = weights / (weights.sum(-1, keepdim=True) + torch.exp(sink - top))
    weights = weights.to(value.dtype).view(rows, kv_heads, groups * slots, -1)
    return torch.matmul(weights, value).view(rows, heads, slots, -1)


def _additive(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """A bool mask (True: visible) as 0 and -inf, its rows repeated for `groups` packed heads."""
    if mask.dtype == torch.bool and mask.device.type == "cuda":
        return _aligned(mask, groups, dtype)
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask.repeat(1, 1, groups, 1) if groups > 1 else mask


def _aligned(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """The same in memory whose rows begin at multiples of 16 numbers: SDPA on CUDA copies any other in each layer."""
    rows, heads, slots, size = mask.shape
    wide = -(-size // 16) * 16
    out = torch.zeros((rows, heads, groups * slots, wide), dtype=dtype, device=mask.device)[..., :size]
    out.unflatten(2, (groups, slots)).masked_fill_(~mask[:, :, None], float("-inf"))
    return out


def _require_causal(function: Callable[..., Tensor], batch: Tensor, head: Tensor, queries: Tensor) -> None:
    """Refuse functions that look tokens up by slot, or that let a query see a later position."""
    if _indexes_tokens(function):
        raise UnsupportedModel("its attention mask looks tokens up by their place in the sequence, not by position")
    if bool(function(batch, head, queries, queries + 1).any()):
        raise UnsupportedModel("its attention is bidirectional: a token would see later ones")


def _indexes_tokens(function: Callable[..., Any]) -> bool:
    """Whether a tensor over tokens (two axes or more) is closed over by a mask function."""
    for cell in getattr(function, "__closure__", None) or ():
        for held in cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,):
            if isinstance(held, Tensor) and held.ndim >= 2:
                return True
            if callable(held) and _indexes_tokens(held):
                return True
    return False


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask_function)
