"""Models that the caller has loaded with transformers or mlx-lm."""

from __future__ import annotations

from typing import Any, NamedTuple

from portadraft import backends
from portadraft.core.target import Target
from portadraft.errors import InvalidArgument


class Loaded(NamedTuple):
    """As the backends' `load_target` gives it, with a name for people and the backend's name."""

    target: Target
    tokenizer: Any
    generation_config: Any
    device: tuple[str, str]
    dtype: tuple[str, str]
    label: str
    backend: str


def from_loaded(model: Any, tokenizer: Any, *, backend: str, device: str, dtype: str, check: bool) -> Loaded:
    """A target around a loaded model, which is not changed and keeps its device and type.

    Raises: InvalidArgument for something that is no model, a missing tokenizer, or a wish that would move it;
    UnsupportedModel where the self-check fails.
    """
    name = _library(model)
    if name is None:
        raise InvalidArgument(
            f"model={model!r:.60} ({type(model).__name__}): expected a name, a path, or a causal language model of "
            "transformers or mlx-lm"
        )
    if backend not in ("auto", name):
        raise InvalidArgument(f"backend={backend!r}: the model that was passed runs on {name!r}; leave it out")
    for argument, value in (("device", device), ("dtype", dtype)):
        if value != "auto":
            raise InvalidArgument(
                f"{argument}={value!r}: a loaded model stays as it is; move it first, and leave this out"
            )
    if tokenizer is None:
        raise InvalidArgument("tokenizer=None: expected the model's tokenizer beside a model that is loaded already")
    if type(tokenizer).__module__.startswith("mlx_lm."):  # it wraps the tokenizer of transformers
        tokenizer = tokenizer._tokenizer
    target: Target = backends.get(name).load().make_target(model, check=check)
    why = "the model's own"
    label = str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)
    return Loaded(
        target,
        tokenizer,
        getattr(model, "generation_config", None),
        (target.ops.device, why),
        (target.facts.dtype, why),
        label,
        name,
    )


def _library(model: Any) -> str | None:
    """Which backend serves objects of this class."""
    for base in type(model).__mro__:
        root = base.__module__.partition(".")[0]
        if root in ("torch", "mlx"):
            return root
    return None
