"""Where models come from: names, files, the local cache. Nothing here imports torch or transformers."""

from __future__ import annotations

from portadraft.models.names import SHORT_NAMES, ModelSource, ShortName, gguf_path, resolve

__all__ = ["SHORT_NAMES", "ModelSource", "ShortName", "gguf_path", "resolve"]
