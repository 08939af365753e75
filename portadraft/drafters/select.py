"""Which drafter a model gets: what was asked for, or what belongs to its weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import platformdirs

from portadraft.core.drafter import Drafter
from portadraft.core.target import Target
from portadraft.drafters.checkpoint import Checkpoint, Identity, read_checkpoint, read_identity
from portadraft.drafters.lookup import PromptLookup
from portadraft.drafters.redrafter import ReDrafter
from portadraft.drafters.together import Together
from portadraft.errors import IncompatibleDrafter, InvalidArgument, ModelNotFound, PortadraftError, WeightsMismatch
from portadraft.identity import same_weights

LOOKUP_LENGTH = 8
"""Tokens of a lookup's draft beside a trained drafter's; the node budget decides how many are verified."""
NAMES = ("auto", "none", "lookup", "redrafter", "redrafter+lookup")


@dataclass(frozen=True)
class Selected:
    """A drafter bound to a target, what it is called, and why it was taken. `drafter` None decodes plainly."""

    drafter: Drafter | None
    name: str
    reason: str


def folders() -> Iterator[Path]:
    """Where trained drafters are looked for: the user's own folder, then those shipped with the package."""
    places = (
        platformdirs.user_data_path("portadraft") / "drafters",
        Path(str(resources.files("portadraft.drafters").joinpath("pretrained"))),
    )
    for place in places:
        if place.is_dir():
            yield from sorted(p for p in place.iterdir() if (p / "config.json").is_file())


def find(target: Target) -> Path | None:
    """The first trained drafter that was made for exactly these weights."""
    for folder in folders():
        try:
            identity = read_identity(folder)
        except PortadraftError as error:
            warnings.warn(f"{folder} is passed over: {error}", stacklevel=2)
            continue
        if identity.weights_id and same_weights(identity.weights_id, target.facts.weights_id):
            return folder
    return None


def select(drafter: str | Path | Drafter | None, target: Target, tokenizer: str) -> Selected:
    """Make the drafter that was asked for.

    drafter: one of NAMES, a checkpoint's folder, a `Drafter`, or None. tokenizer: the
    fingerprint of the target's tokenizer (`portadraft.identity.tokenizer_fingerprint`).

    Raises: InvalidArgument, ModelNotFound, CorruptFile, IncompatibleDrafter.
    Warns: WeightsMismatch, where a checkpoint was made for other weights of the same sizes.
    """
    if drafter is None or drafter == "none":
        return Selected(None, "none", "plain decoding was asked for")
    if isinstance(drafter, (str, Path)) and str(drafter):
        return _named(drafter, target, tokenizer)
    if isinstance(drafter, Drafter):
        return Selected(drafter, drafter.name, "passed by the caller")
    raise InvalidArgument(
        f"drafter={drafter!r:.80}: expected one of {', '.join(NAMES)}, a checkpoint's folder, or a Drafter"
    )


def _named(drafter: str | Path, target: Target, tokenizer: str) -> Selected:
    lookup = PromptLookup(target.ops)
    if drafter == "lookup":
        return Selected(lookup, lookup.name, "asked for")
    if drafter in ("auto", "redrafter", "redrafter+lookup"):
        folder = find(target)
        if folder is None:
            if drafter != "auto":
                raise ModelNotFound(
                    f"drafter={drafter!r}: no trained drafter for these weights in "
                    f"{platformdirs.user_data_path('portadraft') / 'drafters'} or in the package; train one with "
                    "`portadraft train`, pass its folder, or use drafter='lookup'"
                )
            return Selected(lookup, lookup.name, "no trained drafter for these weights was found; lookup needs none")
        trained = from_checkpoint(read_checkpoint(folder), folder, target, tokenizer)
        if drafter == "redrafter":
            return Selected(trained, trained.name, f"asked for; {folder.name} was trained for these weights")
        # A match in the text is often good for more tokens than a beam is long.
        both = Together(target.ops, [trained, PromptLookup(target.ops, length=LOOKUP_LENGTH)])
        why = (
            "asked for"
            if drafter != "auto"
            else f"{folder.name} was trained for these weights; lookup beside it is free"
        )
        return Selected(both, both.name, why)
    folder = Path(drafter).expanduser()
    if not folder.is_dir():
        raise ModelNotFound(
            f"drafter={str(drafter)!r}: neither one of {', '.join(NAMES)} nor a folder; expected a folder with "
            "config.json and model.safetensors"
        )
    trained = from_checkpoint(read_checkpoint(folder), folder, target, tokenizer)
    return Selected(trained, trained.name, f"from {folder}")


def from_checkpoint(checkpoint: Checkpoint, folder: Any, target: Target, tokenizer: str) -> ReDrafter:
    """Bind a checkpoint to a target.

    Raises: IncompatibleDrafter for another tokenizer or size. Warns: WeightsMismatch.
    """
    made_for: Identity = checkpoint.identity
    if made_for.tokenizer and tokenizer and made_for.tokenizer != tokenizer:
        raise IncompatibleDrafter(
            f"drafter={str(folder)!r}: made for another tokenizer ({made_for.name or 'unnamed model'}); its token ids "
            "mean other texts here; use the drafter of this model or train one with `portadraft train`"
        )
    facts = target.facts
    if (made_for.vocabulary_size, made_for.hidden_size) != (facts.vocabulary_size, facts.hidden_size):
        raise IncompatibleDrafter(
            f"drafter={str(folder)!r}: made for a model of {made_for.vocabulary_size} tokens and hidden size "
            f"{made_for.hidden_size} ({made_for.name or 'unnamed'}), but this one has {facts.vocabulary_size} and "
            f"{facts.hidden_size}; use the drafter of this model or train one with `portadraft train`"
        )
    bound = ReDrafter(target, checkpoint.config, checkpoint.params, checkpoint.draft_vocabulary)
    if made_for.weights_id and not same_weights(made_for.weights_id, target.facts.weights_id):
        warnings.warn(
            f"drafter={str(folder)!r}: trained on other weights ({made_for.name or 'unnamed model'}); the output stays "
            "exact, but it may guess badly and slow decoding down",
            WeightsMismatch,
            stacklevel=3,
        )
    return bound
