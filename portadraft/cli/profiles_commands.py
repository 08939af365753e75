"""What the commands of `portadraft profiles` do. Results to standard output; everything else to standard error."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from portadraft.cli.guard import complain
from portadraft.cli.writing import writing, writing_own
from portadraft.core.sampling import Sampling
from portadraft.errors import CorruptFile, InvalidArgument, PortadraftError
from portadraft.profiles.catalog import Place, places
from portadraft.profiles.folder import Folder
from portadraft.profiles.home import config_path, store_url, user_folder
from portadraft.profiles.indexing import push as push_documents
from portadraft.profiles.mirror import Mirror
from portadraft.profiles.nearness import Summary, named
from portadraft.profiles.pooling import merge as merge_profiles
from portadraft.profiles.reading import parse, read
from portadraft.profiles.schema import MOST_CONTEXT, Profile, as_document
from portadraft.profiles.stores import open_store


def list_(store: str | None, as_json: bool) -> None:
    if store is not None:
        _existing(store)
    found = places(store or "auto")  # as `generate` would see them, so an old copy of the fleet store is renewed
    problems = [f"{place.label}: {place.note}" for place in found if place.broken]
    if as_json:
        for text in problems:
            complain(f"warning: {text}")
        rows = [
            {"id": identity, "place": place.label, **summary.model_dump(mode="json")}
            for place in found
            for identity, summary in place.entries.items()
        ]
        notes = {place.label: place.note for place in found if place.note}
        print(json.dumps({"profiles": rows, "notes": notes, "warnings": problems}))
        return
    for place in found:
        _table(place)


def _table(place: Place) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not place.entries:
        note = f" ({place.note})" if place.note else ""
        console.print(f"[bold]{escape(place.label)}[/bold]: no profiles{escape(note)}", soft_wrap=True)
        return
    table = Table(title=escape(place.label + (f" ({place.note})" if place.note else "")), title_justify="left")
    table.add_column("id", no_wrap=True)
    for column in ("device", "model", "drafter", "what"):
        table.add_column(column, overflow="fold")
    table.add_column("made", no_wrap=True)
    for identity, summary in sorted(place.entries.items(), key=lambda item: item[1].created, reverse=True):
        device, model, drafter, dtype, temperature, _, made, origin = _row(summary)
        what = f"{origin}, {dtype}" + ("" if temperature == "0" else f", temperature {temperature}")
        table.add_row(identity[:8], *map(escape, (device, model, drafter, what, made)))
    console.print(table)


def _row(summary: Summary) -> tuple[str, ...]:
    machine = summary.machine
    memory = f", {machine.memory_gb} GB" if machine.memory_gb else ""
    versions = ", ".join(f"{name} {version}" for name, version in summary.software.versions.items())
    return (
        f"{named(machine)}{memory}",
        summary.model.name or summary.model.architecture_id,
        summary.drafter.name,
        summary.conditions.dtype,
        f"{summary.conditions.temperature:g}",
        versions or summary.software.backend,
        f"{summary.created:%Y-%m-%d}",
        summary.origin + (", busy" if summary.disturbed else ""),
    )


def show(identity: str, as_json: bool) -> None:
    profile = _one(identity)
    if as_json:
        print(json.dumps(as_document(profile)))
        return
    print(describe(profile))


def describe(profile: Profile) -> str:
    """A profile for people."""
    summary = Summary.of(profile)
    device, model, drafter, dtype, temperature, versions, made, origin = _row(summary)
    lines = [
        f"profile {profile.id}",
        f"{origin} {made}: {model} with {drafter}, {dtype}, temperature {temperature}, context "
        f"{profile.conditions.context}, for {profile.conditions.objective}",
        f"on {device} ({versions})",
    ]
    lines += [f"source: {profile.source}"] if profile.source else []
    for choice in profile.batches:
        speed = "" if choice.tokens_per_s is None else f", {choice.tokens_per_s:.1f} tokens/s"
        plain = "" if choice.plain_tokens_per_s is None else f" (plain {choice.plain_tokens_per_s:.1f})"
        gain = "" if choice.speedup is None else f", {choice.speedup:.2f}x"
        lines.append(f"batch {choice.batch_size}: {choice.shape or 'plain decoding'}{speed}{plain}{gain}")
    if profile.recommended_batch_size:
        lines.append(f"recommended batch size: {profile.recommended_batch_size}")
    submitters = len({sample.submitter for sample in profile.samples})
    if profile.samples:
        lines.append(f"{len(profile.samples)} samples of {submitters} submitter{'s' if submitters > 1 else ''}")
    return "\n".join(lines)


def explain(load: dict[str, Any], *, temperature: float, context: int, as_json: bool) -> None:
    import portadraft
    from portadraft.cli.generate import drafter_name

    Sampling(temperature=temperature)
    if context > MOST_CONTEXT:
        raise InvalidArgument(f"context={context}: expected at most {MOST_CONTEXT} tokens")
    where = str(load.pop("profiles"))
    load["drafter"] = drafter_name(load["drafter"])
    model = portadraft.load(load.pop("model"), profiles=where, **load)
    book = model.profiles
    selected = model.selected
    query = book.query(selected, temperature=temperature, context=context)
    found = book.find(selected, temperature=temperature, context=context)
    asked = {
        "machine": query.machine.model_dump(),
        "software": query.software.model_dump(),
        "model": query.model.model_dump(),
        "drafter": query.drafter.model_dump(),
        "dtype": query.dtype,
        "temperature": temperature,
        "context": context,
    }
    if as_json:
        batches = [] if found.profile is None else as_document(found.profile)["batches"]
        print(json.dumps({"looked_for": asked, **found.as_dict(), "reason": found.reason, "batches": batches}))
        return
    machine, software = query.machine, query.software
    memory = f", {machine.memory_gb} GB" if machine.memory_gb else ""
    versions = ", ".join(f"{name} {version}" for name, version in software.versions.items())
    print(f"looked for: {named(machine)}{memory}")
    print(f"            portadraft {software.portadraft}, {versions}")
    print(f"            {query.model.name}, architecture {query.model.architecture_id}, {query.dtype}")
    print(f"            drafter {query.drafter.name}; temperature {temperature:g}, context {context}")
    for one in found.looked:
        note = f" ({one.note})" if one.note else ""
        print(f"looked in:  {one.place}{note}: {_count(one.profiles)}, nearest: {one.best}")
        if one.why:
            print(f"            they are {'; '.join(one.why)}")
    if store_url(None) is None and where == "auto":
        print(f"            no fleet store is configured (--store, $PORTADRAFT_PROFILES, or {config_path()})")
    print(f"used:       {found.reason}")
    if found.profile is not None:
        print(describe(found.profile))
    elif selected.drafter is None:
        print("            without a drafter it is decoded plainly, and no profile is needed")
    else:
        print("            the default shape is used; `portadraft tune` measures this machine")


def push(ids: Sequence[str], store: str | None, as_json: bool) -> None:
    url = _store(store)
    documents = [profile.to_bytes() for profile in _of_user(ids)]
    with writing(f"store={url!r}", "a folder or URL that can be written to"):
        pushed = push_documents(open_store(url), documents, note=complain)
    if as_json:
        print(json.dumps({"store": url, "pushed": pushed}))
    else:
        print(f"{_count(len(pushed))} in {url}")


def pull(store: str | None, as_json: bool) -> None:
    url = _existing(_store(store))
    synced = Mirror(url).sync(warn=lambda text: complain(f"warning: {text}"))
    if as_json:
        print(json.dumps({"store": url, **vars(synced)}))
    else:
        print(
            f"{_count(synced.total)} in {url}: {len(synced.fetched)} new here, {len(synced.removed)} gone, "
            f"{len(synced.refused)} refused"
        )


def merge(files: Sequence[Path], out: Path | None, store: str | None, as_json: bool) -> None:
    if store is not None:
        _existing(store)
    if files:
        profiles = [read(path) for path in files]
    else:
        found = [place for place in places(store or "auto", refresh=False) if place.folder is not None]
        loaded = (place.load(identity) for place in found for identity in place.entries)
        profiles = [profile for profile in loaded if profile is not None]
    merged = merge_profiles(profiles)
    folder = Folder(out) if out is not None else user_folder()
    with writing_own() if out is None else writing(f"out={str(out)!r}", "a folder that can be written to"):
        ids = [folder.put(profile.to_bytes()) for profile in merged]
    if as_json:
        print(json.dumps({"read": len(profiles), "folder": str(folder.path), "merged": ids}))
    else:
        print(f"{_count(len(profiles))} pooled to {len(ids)} in {folder.path}")


def export(ids: Sequence[str], out: Path, as_json: bool) -> None:
    profiles = _of_user(ids)
    with writing(f"out={str(out)!r}", "a folder that can be written to"):
        written = [Folder(out).put(profile.to_bytes()) for profile in profiles]
    if as_json:
        print(json.dumps({"folder": str(out), "exported": written}))
    else:
        print(f"{_count(len(written))} written to {out}")


def import_(files: Sequence[Path], as_json: bool) -> None:
    profiles = [read(path) for path in files]  # all of them first, so that a broken one changes nothing
    with writing_own():
        ids = list(dict.fromkeys(user_folder().put(profile.to_bytes()) for profile in profiles))
    if as_json:
        print(json.dumps({"folder": str(user_folder().path), "imported": ids}))
    else:
        print(f"{_count(len(ids))} taken into {user_folder().path}")


def validate(files: Sequence[Path], as_json: bool) -> bool:
    rows: list[dict[str, Any]] = []
    for path in files:
        try:
            profile = read(path)
            rows.append({"file": str(path), "valid": True, "id": profile.id, "problem": None})
        except (PortadraftError, OSError) as error:
            rows.append({"file": str(path), "valid": False, "id": None, "problem": str(error)})
    if as_json:
        print(json.dumps({"files": rows}))
    else:
        for row in rows:
            print(f"{row['file']}: a profile, id {row['id'][:12]}" if row["valid"] else row["problem"])
    return all(row["valid"] for row in rows)


def _store(flag: str | None) -> str:
    found = store_url(flag)
    if found is None:
        raise InvalidArgument(
            f'store: none is configured; pass --store, set PORTADRAFT_PROFILES, or write [profiles] store = "URL" to '
            f"{config_path()}"
        )
    return _lasting(found[0])


def _lasting(url: str) -> str:
    """Raises: InvalidArgument for a store in this process's memory."""
    if url.lower().startswith("memory:"):
        raise InvalidArgument(
            f"store={url!r}: it ends with this process, so nobody else can read it; expected a folder, or a URL such "
            "as s3://bucket/profiles"
        )
    return url


def _existing(url: str) -> str:
    """Raises: InvalidArgument for a folder that is not there, which only `push` makes."""
    opened = None if url.lower() in ("none", "off") else open_store(_lasting(url))
    if isinstance(opened, Folder) and not opened.path.is_dir():
        raise InvalidArgument(
            f"store={url!r}: {'not a folder' if opened.path.exists() else 'no such folder'}; expected a folder or URL "
            "that `portadraft profiles push` has written to"
        )
    return url


def _of_user(ids: Sequence[str]) -> list[Profile]:
    folder = user_folder()
    chosen = list(dict.fromkeys(_resolve(one, folder.ids()) for one in ids)) if ids else folder.ids()
    out = []
    for identity in chosen:
        try:
            out.append(parse(folder.get(identity), f"{folder.url}/{identity}.json"))
        except CorruptFile as error:
            if ids:
                raise
            complain(f"warning: a profile is passed over: {error}")
    if not out:
        raise InvalidArgument(f"{folder.path}: it holds no profiles; make one with `portadraft tune`")
    return out


def _resolve(text: str, ids: Sequence[str]) -> str:
    found = sorted({identity for identity in ids if len(text) >= 4 and identity.startswith(text.lower())})
    if len(found) != 1:
        what = "several profiles begin so" if found else "no such profile"
        raise InvalidArgument(
            f"id={text!r:.80}: {what}; expected an id of `portadraft profiles list`, or its beginning"
        )
    return found[0]


def _one(text: str) -> Profile:
    if os.path.lexists(text) or text.lower().endswith(".json"):
        return read(Path(text))
    found = places(refresh=False)
    identity = _resolve(text, [identity for place in found for identity in place.entries])
    for place in found:
        if identity in place.entries and (profile := place.load(identity)) is not None:
            return profile
    raise CorruptFile(f"id={text!r:.80}: the profile cannot be read; see the warning above")


def _count(number: int) -> str:
    return "1 profile" if number == 1 else f"{number} profiles"
