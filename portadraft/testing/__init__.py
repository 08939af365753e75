"""Conformance suites for backends, targets and drafters, and small helpers for tests.

Derive from a suite, give it the fixture that it asks for, and pytest runs all its tests:

    class TestMyOps(OpsConformance):
        @pytest.fixture
        def ops(self):
            return MyOps()

Needs pytest, which is no dependency of portadraft.
"""

from portadraft.testing.drafters import DrafterConformance
from portadraft.testing.helpers import (
    Tree,
    decode,
    pack_tree,
    random_redrafter,
    random_tree,
    verdict_for,
)
from portadraft.testing.ops import OpsConformance
from portadraft.testing.targets import TargetConformance

__all__ = [
    "DrafterConformance",
    "OpsConformance",
    "TargetConformance",
    "Tree",
    "decode",
    "pack_tree",
    "random_redrafter",
    "random_tree",
    "verdict_for",
]
