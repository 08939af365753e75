"""Let transformers read a GGUF file's header once.

Its loader parses the header anew for the config, the weights and the tokenizer, and builds the table
of tensor names once per module: two thirds of the time that a small model takes. Within
`read_gguf_once` both are remembered; the functions are pure, so others who call them in the
meantime get what they always get.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.RLock()
_PURE = ("GGUFReader", "get_tensor_name_map")


@contextmanager
def read_gguf_once() -> Iterator[None]:
    """Within it, gguf's reader and its name table are made once per argument. Does nothing without gguf."""
    try:
        import gguf
    except ImportError:  # whoever reads the file says what to install
        yield
        return
    with _lock:
        originals: dict[str, Any] = {name: getattr(gguf, name) for name in _PURE if hasattr(gguf, name)}
        try:
            for name, original in originals.items():
                setattr(gguf, name, functools.cache(original))
            yield
        finally:
            for name, original in originals.items():
                setattr(gguf, name, original)
