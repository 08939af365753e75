"""What a target says, from what its LM head reads: most models' logits are the head's product itself,
some scale it (Cohere, Granite), some squeeze it (Gemma 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from portadraft.errors import UnsupportedModel


@dataclass(frozen=True)
class Said:
    """logits = cap · tanh(scale · z / cap), or scale · z without a cap; z = head · h + bias."""

    scale: float = 1.0
    cap: float | None = None

    @property
    def plain(self) -> bool:
        return self.scale == 1.0 and self.cap is None

    def __call__(self, z: Tensor) -> Tensor:
        """The logits from the head's product, of any shape."""
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.cap is None else torch.tanh(z / self.cap) * self.cap


def said_by(model: Any) -> Said:
    """How a Hugging Face model gets from its head's product to its logits: measured by one short pass.

    The configurations call it by a dozen names, so nothing but the cap is taken from there.

    Raises: UnsupportedModel where it is neither a scale nor a cap.
    """
    head = model.get_output_embeddings()
    caught: list[Tensor] = []
    hook = head.register_forward_hook(lambda _, __, out: caught.append(out))
    ids = torch.arange(1, 9, device=model.device)[None] % head.weight.shape[0]
    try:
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    if len(caught) != 1 or caught[0].shape != logits.shape:
        raise UnsupportedModel(f"{type(model).__name__}: its logits are not the product of its LM head")
    z, logits = caught[0].double().cpu(), logits.double().cpu()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    linear = logits
    if cap is not None:
        cap = float(cap)
        linear = torch.atanh((logits / cap).clamp(-0.95, 0.95)) * cap
    inside = torch.ones_like(z, dtype=torch.bool) if cap is None else logits.abs() < 0.9 * cap
    scale = float((linear * z)[inside].sum() / (z * z)[inside].sum().clamp(min=1e-12))
    if abs(scale - 1.0) < 4e-3:  # bfloat16 rounds products to eight bits
        scale = 1.0
    said = Said(scale, cap)
    spread = float(logits.std())
    # A rounding of bfloat16 in the product, and one in what follows it.
    rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(head.weight.dtype, 1e-4)
    if float((said(z) - logits).abs().max()) > rounding * max(float(logits.abs().max()), spread):
        raise UnsupportedModel(
            f"{type(model).__name__}: its logits are neither a multiple of its LM head's product nor soft-capped, so "
            "what it says cannot be computed from recorded features"
        )
    return said
