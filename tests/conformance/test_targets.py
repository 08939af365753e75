"""Every target does what `Target` says: numpy's own, and small llamas in torch and mlx."""

from typing import Any

import pytest

from portadraft import backends
from portadraft.core.target import Target
from portadraft.testing import TargetConformance


def _numpy(**sizes: Any) -> Target:
    target: Target = backends.get("numpy").load().make_target(3, **sizes)
    return target


def _torch(device: str = "cpu", **changes: Any) -> Target:
    missing = backends.REGISTRY["torch"].missing()
    if missing:
        pytest.skip(f"torch: {', '.join(missing)} not installed")
    import torch
    import transformers

    present = {"cpu": True, "mps": torch.backends.mps.is_available(), "xpu": torch.xpu.is_available()}
    if not present.get(device, torch.cuda.is_available()):
        pytest.skip(f"{device}: no such device that torch can use")
    # A llama with a window is a mistral.
    windowed = "sliding_window" in changes
    kind = transformers.MistralConfig if windowed else transformers.LlamaConfig
    config = kind(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        **changes,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(device)
    target: Target = backends.get("torch").load().make_target(model)
    return target


def _static(target: Any) -> Target:
    """The same model with passes of static shapes, captured on a tape as CUDA would capture them."""
    from portadraft.backends.torch.cache import RowCache
    from portadraft.backends.torch.graphs import Graphs
    from portadraft.backends.torch.target import TorchTarget
    from tests.torch_backend.tape import Tape

    class CommitsAsOnCuda(RowCache):
        one_by_one = property(lambda self: False)  # type: ignore[assignment]

    static = TorchTarget(target.model, graphs=Graphs(Tape()))
    static.cache.__class__ = CommitsAsOnCuda
    return static


def _mlx(**changes: Any) -> Target:
    missing = backends.REGISTRY["mlx"].missing()
    if missing:
        pytest.skip(f"mlx: {', '.join(missing)} not installed")
    pytest.importorskip("mlx.core", reason="mlx is installed but does not import", exc_type=ImportError)
    from tests.mlx_backend import tiny

    target: Target = backends.get("mlx").load().make_target(tiny.build("llama", num_hidden_layers=2, **changes))
    return target


_TARGETS = {
    "numpy": lambda: _numpy(),
    "numpy-tied-limited-chunked": lambda: _numpy(tied=True, context_limit=64, chunk=3),
    "torch": lambda: _torch(),
    "torch-tied": lambda: _torch(tie_word_embeddings=True),
    "torch-sliding": lambda: _torch(sliding_window=6),
    "torch-static": lambda: _static(_torch()),
    "mlx": lambda: _mlx(tie_word_embeddings=False),
    "mlx-tied": lambda: _mlx(tie_word_embeddings=True),
    "torch-cuda": lambda: _torch("cuda"),
    "torch-mps": lambda: _torch("mps"),
    "torch-xpu": lambda: _torch("xpu"),
}


def test_every_backend_has_a_target_here() -> None:
    assert {name.split("-")[0] for name in _TARGETS} == set(backends.REGISTRY)


@pytest.fixture(scope="module", params=list(_TARGETS))
def target(request: pytest.FixtureRequest) -> Target:
    return _TARGETS[request.param]()


class TestTarget(TargetConformance):
    pass
