"""Every backend as it is, and as it computes where a device has no float64."""

from __future__ import annotations

from typing import Any

import pytest

from portadraft import backends
from portadraft.core.picking import pick_on_device


def in_float32(ops: Any) -> Any:
    """The same arrays, but choices are computed as on Apple's GPUs: no float64, and nothing looked at by the host."""
    members = {"wide": "float32", "pick": pick_on_device, "host": False}
    return type(f"{type(ops).__name__}InFloat32", (type(ops),), members)()


def on_a_device(ops: Any) -> Any:
    """The same arrays in float64, but nothing looked at by the host."""
    return type(f"{type(ops).__name__}OnADevice", (type(ops),), {"pick": pick_on_device, "host": False})()


FORMS = {"": lambda ops: ops, " on a device": on_a_device, " in float32": in_float32}


@pytest.fixture(scope="session", params=[name + form for name in sorted(backends.REGISTRY) for form in FORMS])
def forms(request: pytest.FixtureRequest) -> Any:
    """An `Ops` of each backend in each of the forms that draws are computed in."""
    name, _, form = request.param.partition(" ")
    missing = backends.REGISTRY[name].missing()
    if missing:
        pytest.skip(f"{name}: {', '.join(missing)} not installed")
    return FORMS[form and f" {form}"](backends.make_ops(name))
