"""`portadraft profiles`: what tuning found, and how it is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from portadraft.cli.guard import complain, guarded

app = typer.Typer(help="Profiles: what tuning found for a machine, and sharing it with a fleet.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Store = Annotated[
    str | None,
    typer.Option(help="The fleet store: a folder or URL; else PORTADRAFT_PROFILES or the configuration file."),
]
Ids = Annotated[list[str] | None, typer.Argument(help="Profiles of your folder by id or its beginning; all if none.")]
Files = Annotated[list[Path], typer.Argument(help="Profile files.")]


@app.command("list")
@guarded
def list_(store: Store = None, as_json: AsJson = False) -> None:
    """What there is: in your folder, in the fleet store's copy, in the package."""
    from portadraft.cli import profiles_commands as commands

    commands.list_(store, as_json)


@app.command()
@guarded
def show(
    identity: Annotated[str, typer.Argument(help="An id or its beginning, or a file.")], as_json: AsJson = False
) -> None:
    """One profile: its machine, and what it chose at each batch size."""
    from portadraft.cli import profiles_commands as commands

    commands.show(identity, as_json)


@app.command()
@guarded
def explain(
    model: Annotated[str, typer.Option("--model", "-m", help="As in `portadraft generate`.")] = "smollm2-135m",
    drafter: Annotated[str, typer.Option(help="As in `portadraft generate`.")] = "auto",
    backend: Annotated[str, typer.Option(help="As in `portadraft generate`.")] = "auto",
    device: Annotated[str, typer.Option(help="As in `portadraft generate`.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As in `portadraft generate`.")] = "auto",
    temperature: Annotated[float, typer.Option(help="Of the call.")] = 0.0,
    context: Annotated[int, typer.Option(min=0, help="Tokens of the prompt, about.")] = 0,
    profiles: Annotated[
        str, typer.Option(help="auto, none, a profile's file, or a store instead of the fleet's.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """What `generate` would use here: what was looked for, where, what was found, and which step of the fallback."""
    from portadraft.cli import profiles_commands as commands

    commands.explain(
        {
            "model": model,
            "drafter": drafter,
            "backend": backend,
            "device": device,
            "dtype": dtype,
            "profiles": profiles,
        },
        temperature=temperature,
        context=context,
        as_json=as_json,
    )


@app.command()
@guarded
def push(ids: Ids = None, store: Store = None, as_json: AsJson = False) -> None:
    """Add profiles of your folder to the fleet store."""
    from portadraft.cli import profiles_commands as commands

    commands.push(ids or [], store, as_json)


@app.command()
@guarded
def pull(store: Store = None, as_json: AsJson = False) -> None:
    """Bring the copy of the fleet store up to date, now."""
    from portadraft.cli import profiles_commands as commands

    commands.pull(store, as_json)


@app.command()
@guarded
def merge(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Profile files; your folder and the store if none.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for the pooled profiles; yours if left out.")] = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Pool profiles of equal machines by their raw samples."""
    from portadraft.cli import profiles_commands as commands

    commands.merge(files or [], out, store, as_json)


@app.command()
@guarded
def export(
    ids: Ids = None,
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("."),
    as_json: AsJson = False,
) -> None:
    """Write profiles of your folder as files, such as for a folder in git."""
    from portadraft.cli import profiles_commands as commands

    commands.export(ids or [], out, as_json)


@app.command("import")
@guarded
def import_(files: Files, as_json: AsJson = False) -> None:
    """Take profile files into your folder, each validated first."""
    from portadraft.cli import profiles_commands as commands

    commands.import_(files, as_json)


@app.command()
@guarded
def validate(files: Files, as_json: AsJson = False) -> None:
    """Say whether files are profiles; exit status 2 if one is not."""
    from portadraft.cli import profiles_commands as commands

    if not commands.validate(files, as_json):
        complain("error: not all of these files are profiles")
        raise typer.Exit(2)
