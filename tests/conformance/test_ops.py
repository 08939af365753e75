"""Every backend of the registry does what `Ops` says."""

import numpy as np
import pytest

from portadraft import backends
from portadraft.core.ops import Ops
from portadraft.errors import InvalidArgument, MissingDependency
from portadraft.testing import OpsConformance


def _require(name: str) -> None:
    missing = backends.REGISTRY[name].missing()
    if missing:
        pytest.skip(f"{name}: {', '.join(missing)} not installed")
    if name == "mlx":
        pytest.importorskip("mlx.core", reason="mlx is installed but does not import", exc_type=ImportError)


@pytest.fixture(scope="session", params=sorted(backends.REGISTRY))
def ops(request: pytest.FixtureRequest) -> Ops:
    _require(request.param)
    return backends.make_ops(request.param)


class TestOps(OpsConformance):
    def test_the_registry_names_it(self, ops: Ops) -> None:
        assert ops.name in backends.REGISTRY


class TestTorchDevices(OpsConformance):
    """Every kind of accelerator that torch serves; AMD's (ROCm) goes by the name cuda."""

    @pytest.fixture(
        params=[pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("mps", marks=pytest.mark.mps), "xpu"]
    )
    def ops(self, request: pytest.FixtureRequest) -> Ops:
        _require("torch")
        if request.param == "xpu":
            import torch

            if not torch.xpu.is_available():
                pytest.skip("xpu: no Intel GPU that torch can use")
        return backends.make_ops("torch", device=request.param)


def test_unknown_backend() -> None:
    with pytest.raises(InvalidArgument, match=r"backend='tensorbow': expected one of .*numpy"):
        backends.make_ops("tensorbow")


def test_missing_package_names_the_install_line() -> None:
    absent = backends.Backend("absent", "portadraft.backends.absent", ("no_such_package",), "torch")
    assert absent.missing() == ["no_such_package"]
    with pytest.raises(MissingDependency, match=r"no_such_package.*pip install 'portadraft\[torch\]'"):
        absent.load()


def test_the_suite_can_fail() -> None:
    """A wrong argmax (the last of equals) is noticed."""
    reference = backends.make_ops("numpy")

    class LastOfEquals(type(reference)):
        def argmax(self, x, axis):
            return (x.shape[axis] - 1 - np.argmax(np.flip(x, axis), axis)).astype(np.int32)

    with pytest.raises(AssertionError):
        OpsConformance().test_argmax_takes_the_first_of_equals(LastOfEquals(), 7)
