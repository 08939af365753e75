"""Keep transformers' progress bars and notices out of our users' terminals."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_inside = 0
_restore: list[Callable[[], None]] = []


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within it, transformers logs errors only and draws no progress bars; the settings are restored after.

    It is for loading. The settings are the process's: another thread that loads at the same
    time is quiet too, and the last to leave restores them.
    """
    global _inside
    with _lock:
        if _inside == 0:
            _restore.append(_silence())
        _inside += 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _restore.pop()()


def _silence() -> Callable[[], None]:
    """Switch off; returns what switches on again."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf = sys.modules.get("transformers.modeling_gguf_pytorch_utils")  # draws its bar past that switch
    bar = getattr(gguf, "tqdm", None)
    if gguf is not None and bar is not None:
        gguf.__dict__["tqdm"] = _without_bar

    def restore() -> None:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if gguf is not None and bar is not None:
            gguf.__dict__["tqdm"] = bar

    return restore


def _without_bar(items: Any, *_: Any, **__: Any) -> Any:
    return items
