"""What newer config files say in other places than mlx-lm's models look for it.

transformers 5 keeps all that belongs to rotary positions in `rope_parameters`, for each kind of layer if need be, and
which layers have a window in `layer_types`. Where mlx-lm does not find the older names it takes defaults, silently: the
text would be another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from portadraft.errors import UnsupportedModel

_NAMES = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
}
_BY_PATTERN = ("gemma3_text", "cohere2")
"""Models of mlx-lm that take a period in place of a list of layers."""


def older_names(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    """What to add to a config so that mlx-lm reads what transformers does.

    Raises: UnsupportedModel for layers that mlx-lm's names cannot say.
    """
    return {**_rotary(config), **_windows(config, label)}


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        return {}
    whole = parameters.get("full_attention", parameters)
    local = parameters.get("sliding_attention")
    found: dict[str, Any] = {}
    if isinstance(whole, dict):
        found = {older: whole[name] for name, olders in _NAMES.items() if name in whole for older in olders}
        if whole.get("rope_type", "default") != "default":
            found["rope_scaling"] = whole
    if isinstance(local, dict) and "rope_theta" in local:
        found["rope_local_base_freq"] = local["rope_theta"]
    return {name: value for name, value in found.items() if config.get(name) is None}


def _windows(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    layers = config.get("layer_types")
    if config.get("model_type") not in _BY_PATTERN or not isinstance(layers, list):
        return {}
    if "full_attention" not in layers:
        return {}
    period = layers.index("full_attention") + 1
    if any((kind == "full_attention") != ((place + 1) % period == 0) for place, kind in enumerate(layers)):
        raise UnsupportedModel(
            f"model={label!r}: its layers with a window do not repeat ({', '.join(map(str, layers))}), which "
            "mlx-lm cannot say; use backend='torch'"
        )
    return {"sliding_window_pattern": period}
