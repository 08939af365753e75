"""Where a drafter's parameters start, and how large the steps of each are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from portadraft.core.recurrent import RecurrentConfig
from portadraft.training.features import Features


def initial(config: RecurrentConfig, seed: int) -> dict[str, Tensor]:
    """Small random parameters; residual blocks start near the identity."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in config.shapes().items():
        if len(shape) == 1:
            out[name] = torch.zeros(shape)
        else:
            out[name] = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
            if name.startswith("lm_head.") and ".linear." in name:
                out[name] *= 0.5
    return out


def column_scales(config: RecurrentConfig, sources: Sequence[Features], sample: int = 4096) -> dict[str, Tensor]:
    """Smaller steps (and a smaller start) for the weights that read a feature which varies much.

    A few of a language model's features are ten times the others; Adam's steps are equal for
    every weight, so those few would shake the drafter's outputs. Matrices that read [s, h]:
    every residual block and the projection while the inner size is 2D, else the input projection.
    """
    source = max(sources, key=lambda f: len(f.tokens))
    seen = source.sample(sample).float()
    spread = seen[torch.isfinite(seen).all(-1)].std(0).nan_to_num(1.0)
    columns = torch.cat([torch.ones(config.hidden_size), 1.0 / spread.clamp(min=1.0)])
    if config.inner_size != 2 * config.hidden_size:
        return {"input_proj.weight": columns}
    names = [f"lm_head.{i}.linear.weight" for i in range(config.blocks)]
    names.append("project.weight" if config.tied_head else f"lm_head.{config.blocks}.weight")
    return dict.fromkeys(names, columns)
