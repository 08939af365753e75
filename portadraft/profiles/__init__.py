"""What tuning found, per machine, and how it is shared (docs/profiles.md). Importing this loads nothing else.

from portadraft import profiles
profile = profiles.read(path)                 # validated as untrusted input
profiles.save(profile)                        # into the user's folder; returns its id
machine = profiles.this_machine("torch", "cuda:0")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portadraft.profiles.device import canonical_name
    from portadraft.profiles.home import save, submitter, tuning_lock
    from portadraft.profiles.ids import drafter_identity, model_identity
    from portadraft.profiles.machine import this_machine, this_software
    from portadraft.profiles.reading import parse, read
    from portadraft.profiles.schema import Profile

__all__ = [
    "Profile",
    "canonical_name",
    "drafter_identity",
    "model_identity",
    "parse",
    "read",
    "save",
    "submitter",
    "this_machine",
    "this_software",
    "tuning_lock",
]

_LAZY = {
    "Profile": "schema",
    "canonical_name": "device",
    "drafter_identity": "ids",
    "model_identity": "ids",
    "parse": "reading",
    "read": "reading",
    "save": "home",
    "submitter": "home",
    "this_machine": "machine",
    "this_software": "machine",
    "tuning_lock": "home",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
