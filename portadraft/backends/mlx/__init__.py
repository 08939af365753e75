"""The mlx backend: Metal on Apple machines, CUDA or CPUs on Linux; models come from mlx-lm."""

from __future__ import annotations

from typing import Any

from portadraft.backends.mlx.ops import MlxOps


def make_ops() -> MlxOps:
    """An `Ops` on mlx's default device."""
    return MlxOps()


def make_target(model: Any, *, check: bool = True, limit: int | None = None) -> Any:
    """An mlx-lm model as a target.

    check: prove on a small random clone that trees are verified exactly (once per architecture and
    version; the outcome is kept). limit: the context limit in tokens; None asks the model.

    Raises: UnsupportedModel with the reason.
    """
    from portadraft.backends.mlx import identity
    from portadraft.backends.mlx.selfcheck import require_supported
    from portadraft.backends.mlx.target import MlxTarget, model_type

    target = MlxTarget(model, limit=limit)
    if check:
        require_supported(model)
    ids = (identity.architecture_id(model, target.facts.dtype, model_type(model)), identity.weights_id(model))
    return target.named(*ids)


def load_target(source: Any, *, dtype: str = "auto", device: str = "auto", check: bool = True) -> Any:
    """Load a model from the hub, a folder or a GGUF file as a target (see `entry`)."""
    from portadraft.backends.mlx import entry

    return entry.load_target(source, dtype=dtype, device=device, check=check)


__all__ = ["MlxOps", "load_target", "make_ops", "make_target"]
