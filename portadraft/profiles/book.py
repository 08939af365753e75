"""The profiles of one loaded model: places are read once, and a look-up is remembered, so that a call pays next to
nothing for it and a step nothing.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from portadraft.drafters.select import Selected
from portadraft.errors import InvalidArgument, PortadraftError
from portadraft.profiles.catalog import Place, check_named, places
from portadraft.profiles.following import ProfileShapes, profile_policy
from portadraft.profiles.ids import drafter_identity, model_identity
from portadraft.profiles.lookup import Found, find_in
from portadraft.profiles.machine import this_machine, this_software
from portadraft.profiles.nearness import Query, context_class, temperature_class
from portadraft.profiles.schema import Profile
from portadraft.profiles.tables import stored_acceptance

MOST_REMEMBERED = 256


class Book:
    """Look-ups for one target on this machine. May be used from several threads.

    profiles: where to look, as `portadraft.profiles.catalog.places` takes it ("auto", "none", a profile or its file,
    a store). name: the model's, for published figures. tokenizer: its fingerprint.

    Raises: CorruptFile, OSError where `profiles` names a file that cannot be read; InvalidArgument where it names
    nothing that is there.
    """

    def __init__(
        self, target: Any, name: str = "", tokenizer: str = "", profiles: str | Path | Profile = "auto"
    ) -> None:
        self._target, self._name, self._tokenizer = target, name, tokenizer
        self._profiles = profiles
        self._guard = threading.Lock()
        self._query: Query | None = None
        self._places: list[Place] | None = None
        self._known: dict[tuple[object, ...], Found] = {}
        if check_named(profiles):
            self._places = places(profiles)  # what was named is read at once, so that a mistake is found at once

    def query(self, selected: Selected, *, temperature: float = 0.0, context: int = 0) -> Query:
        """What is looked for on behalf of a call."""
        if self._query is None:
            ops = self._target.ops
            self._query = Query(
                machine=this_machine(ops.name, ops.device),
                software=this_software(ops.name),
                model=model_identity(self._target, self._name, self._tokenizer),
                drafter=drafter_identity(None),
                dtype=self._target.facts.dtype,
            )
        drafter = drafter_identity(selected.drafter, selected.name)
        return replace(self._query, drafter=drafter, temperature=temperature, context=context)

    def find(self, selected: Selected, *, temperature: float = 0.0, context: int = 0) -> Found:
        """The nearest profile for a drafter, a temperature and about so many tokens before the answer."""
        key = (
            selected.name,
            getattr(selected.drafter, "id", ""),
            temperature_class(temperature),
            context_class(context),
        )
        with self._guard:
            if key not in self._known:
                if len(self._known) >= MOST_REMEMBERED:
                    self._known.clear()
                self._known[key] = self._look(selected, temperature, context)
            return self._known[key]

    def _look(self, selected: Selected, temperature: float, context: int) -> Found:
        """Whatever is wrong with stores, profiles or this machine's description is said, and is no reason to stop."""
        try:
            if self._places is None:
                self._places = places(self._profiles)
            query = self.query(selected, temperature=temperature, context=context)
            return _servable(find_in(query, self._places, stored_acceptance), selected)
        except (PortadraftError, OSError, ValueError) as error:  # pydantic's are among the last
            return Found("none", None, differences=(f"the look-up failed: {' '.join(str(error).split())[:300]}",))

    def policy(
        self, selected: Selected, rows: int, *, temperature: float = 0.0, context: int = 0
    ) -> tuple[ProfileShapes | None, Found]:
        """The policy of the nearest profile for up to `rows` rows; None where there is no profile."""
        found = self.find(selected, temperature=temperature, context=context)
        return None if found.profile is None else profile_policy(found.profile, rows), found


def _servable(found: Found, selected: Selected) -> Found:
    """A profile with a shape that the drafter refuses (more candidates than it has tokens) is a miss."""
    if found.profile is None or selected.drafter is None:
        return found
    try:
        for choice in found.profile.batches:
            if choice.shape is not None:
                selected.drafter.candidates(choice.shape.beam())
    except InvalidArgument as error:
        return replace(found, step="none", profile=None, differences=(f"it does not fit the drafter: {error}",))
    return found
