"""Processes that are forked to be killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch


def forked(work: Callable[[], Any]) -> int:
    """The wait status of a process that does some work."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            work()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
    return os.waitpid(child, 0)[1]
