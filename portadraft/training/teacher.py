"""The model that a drafter is trained for, loaded, and what about it decides which drafters can be trained."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import cached_property

from portadraft import models
from portadraft.backends.torch import make_target
from portadraft.backends.torch.loading import Loaded, load_model
from portadraft.core.target import Target
from portadraft.drafters.checkpoint import Checkpoint, Identity
from portadraft.errors import IncompatibleDrafter, InvalidArgument
from portadraft.identity import tokenizer_fingerprint
from portadraft.text import TextCodec
from portadraft.training.config import TrainConfig


@dataclass(frozen=True)
class Teacher:
    """A model, its codec, and whom a drafter for it belongs to."""

    loaded: Loaded
    target: Target
    codec: TextCodec
    identity: Identity

    @cached_property
    def always(self) -> set[int]:
        """Special and end tokens, which the drafter predicts whatever its vocabulary."""
        ids = {*self.codec.end_tokens, *map(int, getattr(self.codec.tokenizer, "all_special_ids", ()))}
        return {i for i in ids if 0 <= i < self.identity.vocabulary_size}

    @property
    def parameters(self) -> int:
        """How many the model has."""
        return sum(p.numel() for p in self.loaded.model.parameters())

    def check_start(self, start: Checkpoint, name: str) -> None:
        """Raises: IncompatibleDrafter where a drafter to begin with, of that name, is another model's."""
        was, now = start.identity, self.identity
        if (was.vocabulary_size, was.hidden_size) != (now.vocabulary_size, now.hidden_size) or (
            was.tokenizer and was.tokenizer != now.tokenizer
        ):
            raise IncompatibleDrafter(
                f"init={name!r}: made for {was.name or 'another model'} ({was.vocabulary_size} tokens, "
                f"hidden size {was.hidden_size}), but the model has {now.vocabulary_size} and {now.hidden_size}"
                + (", or another tokenizer" if was.hidden_size == now.hidden_size else "")
                + "; start from a drafter of this model, or from none"
            )

    def check_sizes(self, config: TrainConfig) -> None:
        """Sizes of the draft vocabulary, before hours go into text. Raises: InvalidArgument."""
        least, most = max(1, len(self.always)), self.identity.vocabulary_size
        for name in ("draft_vocabulary", "ship_vocabulary"):
            size = getattr(config, name)
            if size is not None and not least <= size <= most:
                raise InvalidArgument(
                    f"{name}={size}: expected {least} to {most}, the model's special and end tokens and its whole "
                    "vocabulary"
                )


def load_teacher(model: str, dtype: str = "auto", device: str = "auto") -> Teacher:
    """Load a model to train for. Raises: ModelNotFound and what loading raises."""
    _keep_freed_memory()
    source = models.resolve(model)
    loaded = load_model(source, dtype=dtype, device=device)
    codec = TextCodec(loaded.tokenizer, loaded.generation_config, template=source.template)
    target = make_target(loaded.model)
    identity = Identity(
        vocabulary_size=target.facts.vocabulary_size,
        hidden_size=target.facts.hidden_size,
        name=source.label,
        tokenizer=tokenizer_fingerprint(loaded.tokenizer),
        weights_id=target.facts.weights_id,
    )
    return Teacher(loaded, target, codec, identity)


def _keep_freed_memory() -> None:
    """Ask glibc to keep freed blocks: the page faults of large temporaries cost up to half the time."""
    if sys.platform != "linux":
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block of its own mapping
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass  # another C library; only speed is lost
