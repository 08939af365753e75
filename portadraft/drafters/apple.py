"""Apple's published layout of a recurrent drafter, which TensorRT-LLM's ReDrafter converter takes.

config.json has model_type "recurrent_drafting_drafter". There the state stands behind the hidden
state, [h, s], and here before it, [s, h]: reading and writing swap the two halves wherever a matrix
touches them, which loses nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from portadraft.core.recurrent import RecurrentConfig
from portadraft.drafters.checkpoint_files import CONFIG, WEIGHTS, NumpyParameters, check_shapes, integer, read_tensors
from portadraft.errors import IncompatibleDrafter

APPLE_TYPE = "recurrent_drafting_drafter"


def read_layout(folder: Path, document: dict[str, Any]) -> tuple[RecurrentConfig, NumpyParameters]:
    """Architecture and parameters, in our order. Raises: IncompatibleDrafter, CorruptFile, ModelNotFound."""
    if not document.get("rnn", False):
        raise IncompatibleDrafter(
            f"{folder / CONFIG}: rnn=false: its state is a sum of embeddings, which portadraft cannot run; "
            "expected a drafter with rnn=true"
        )
    hidden = integer(folder, document, "hidden_size")
    vocabulary = integer(folder, document, "vocab_size")
    config = RecurrentConfig(
        hidden_size=hidden,
        embedding_size=hidden,
        inner_size=integer(folder, document, "exit_dim"),
        blocks=integer(folder, document, "num_draft_layers"),
        vocabulary_size=vocabulary,
        tied_head=False,
    )
    # Older checkpoints spell some names in the plural.
    renamed = {"lm_heads.": "lm_head.", "input_projs.": "input_proj."}
    tensors = {}
    for name, value in read_tensors(folder).items():
        for old, new in renamed.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        tensors[name] = value
    check_shapes(folder / WEIGHTS, config, tensors)
    return config, swap_halves(config, tensors)


def obstacles(config: RecurrentConfig, target_vocabulary: int, mapped: bool) -> list[str]:
    """Why the layout cannot express a drafter; empty where it can. mapped: its ids are not the target's."""
    reasons = []
    if config.tied_head:
        reasons.append("its head is the target's own, and the layout wants one of the drafter's")
    if mapped or config.vocabulary_size != target_vocabulary:
        reasons.append(
            f"it predicts {config.vocabulary_size} of {target_vocabulary} tokens, and the layout has no map between ids"
        )
    if config.first_state != "recurrence":
        reasons.append(f"first_state={config.first_state!r}, and the layout computes the first state by the recurrence")
    if config.embedding_size != config.hidden_size:
        reasons.append(f"embedding_size={config.embedding_size} differs from hidden_size={config.hidden_size}")
    return reasons


def document_for(config: RecurrentConfig) -> dict[str, Any]:
    """The layout's config.json."""
    return {
        "model_type": APPLE_TYPE,
        "architectures": ["Drafter"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocabulary_size,
        "exit_dim": config.inner_size,
        "num_draft_layers": config.blocks,
        "rnn": True,
    }


def swap_halves(config: RecurrentConfig, params: NumpyParameters) -> dict[str, NDArray[Any]]:
    """The same drafter with [s, h] and [h, s] exchanged; its own inverse."""
    d, out = config.hidden_size, dict(params)

    def columns(x: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([x[:, d:], x[:, :d]], axis=1)

    def rows(x: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([x[d:], x[:d]], axis=0)

    if config.inner_size != 2 * d:
        out["input_proj.weight"] = columns(out["input_proj.weight"])
        return out
    # Without a projection the residual blocks work on the pair itself, and so does what follows them.
    for i in range(config.blocks):
        name = f"lm_head.{i}.linear"
        out[f"{name}.weight"] = rows(columns(out[f"{name}.weight"]))
        out[f"{name}.bias"] = rows(out[f"{name}.bias"])
    last = "project.weight" if config.tied_head else f"lm_head.{config.blocks}.weight"
    out[last] = columns(out[last])
    return out
