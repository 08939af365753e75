"""One forward pass of an unmodified Hugging Face model, through our cache and our attention.

The model's own forward runs on a copy of its modules (on the same weights); its features are
what its LM head reads, caught by a hook that lives for the length of the call. This module
does not know rows, prompts or trees' verdicts: see `target`.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor

from portadraft.backends.torch.attention import Pass, active, use_our_attention
from portadraft.backends.torch.cache import ProbeCache, RowCache
from portadraft.backends.torch.limits import RotaryLimit, rotary_limit
from portadraft.core.types import Verified
from portadraft.errors import UnsupportedModel


class Forward:
    """The model as a function of tokens, positions and a tree, with the cache that it fills.

    own: our copy of the modules; cache: what passes fill; limit: of the rotary scheme, or None;
    vocabulary_size, hidden_size, dtype: of what a pass returns. strict: check mask functions on
    the way (slow).
    Raises: UnsupportedModel where the model cannot run so.
    """

    def __init__(self, model: Any, *, strict: bool = False) -> None:
        self.device: torch.device = model.device
        self.strict = strict
        self.own = _own_copy(model)
        self.head = self.own.get_output_embeddings()
        if self.head is None:
            raise UnsupportedModel("it names no output embeddings (LM head)")
        parameters = inspect.signature(model.forward).parameters
        names = [n for n in ("cache", "past_key_values") if n in parameters]
        if not names:
            raise UnsupportedModel("its forward takes no key-value cache (a recurrent model?)")
        if "position_ids" not in parameters:
            raise UnsupportedModel("its forward takes no position_ids (ALiBi, or learned positions by cache length)")
        self._cache_name = names[0]
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.limit: RotaryLimit | None = rotary_limit(self.own)
        self._probe(int(model.config.get_text_config().num_hidden_layers))

    def _probe(self, layers: int) -> None:
        """One pass over two tokens: what the layers store, and whether our attention is used at all."""
        probe = ProbeCache(layers)
        self.cache: RowCache = probe
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        positions = torch.arange(2, device=self.device)[None]
        try:
            verified, running = self.run(slice(0, 1), tokens, positions, causal(2, self.device), None, 0, 1)
        except (UnsupportedModel, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnsupportedModel(f"a trial pass failed with {type(error).__name__}: {error}") from error
        if not probe.updates:
            raise UnsupportedModel("its forward stores no keys and values in the cache (a recurrent model?)")
        if running.calls < probe.updates:
            raise UnsupportedModel(
                f"its attention does not go through transformers' attention interface "
                f"({running.calls} of {probe.updates} layers did)"
            )
        self.vocabulary_size = int(verified.logits.shape[-1])
        self.hidden_size = int(verified.hidden.shape[-1])
        self.dtype: torch.dtype = verified.hidden.dtype
        self.cache = RowCache(probe.shapes())

    def run(
        self,
        rows: slice,
        tokens: Tensor,
        positions: Tensor,
        tree: Tensor,
        lengths: Tensor | None,
        past: int,
        far: int,
        last_only: bool = False,
    ) -> tuple[Verified, Pass]:
        """One forward pass over `rows` of the cache, which writes its slots at `past`.

        tokens, positions: (B, N) int64; tree, lengths: see `Pass`; far: no position is greater.
        Host numbers are `rows`, `past` and `far` alone: with these fixed it may be captured.
        """
        if self.limit is not None:
            self.limit.before_pass()
        running = Pass(positions, tree, lengths, past, far, self.strict)
        self.cache.begin(rows, past, tokens.shape[1])
        read: list[Tensor] = []

        def catch(_: Any, args: tuple[Any, ...]) -> None:
            read.append(args[0])

        hook = self.head.register_forward_pre_hook(catch)
        try:
            with torch.inference_mode(), active(running):
                out = self.own(
                    input_ids=tokens,
                    position_ids=positions,
                    use_cache=True,
                    **{self._cache_name: self.cache},
                    **(self._keep_last if last_only else {}),
                )
        finally:
            hook.remove()
        if len(read) != 1:
            raise UnsupportedModel(f"its forward reads the LM head {len(read)} times, expected once")
        return Verified(out.logits, read[0]), running


def causal(size: int, device: torch.device) -> Tensor:
    """(size, size) bool: each place sees itself and the earlier ones."""
    places = torch.arange(size, dtype=torch.int32, device=device)
    return places <= places[:, None]


def _own_copy(model: Any) -> Any:
    """The model's modules and configurations once more, on the same weights, with our attention.

    So nothing of the caller's model changes, not even while a pass of ours runs in another thread.
    Modules that are replaced in the caller's model later are not seen.
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    own = copy.deepcopy(model, shared)
    use_our_attention(m.config for m in own.modules() if hasattr(m, "config"))
    return own
