"""Loading Hugging Face tokenizers, for every backend whose models come with one.

Reading a tokenizer out of a GGUF file takes seconds (4.4 s for SmolLM2's 49,152 tokens); its converted
form is kept in the cache (0.3 s from there).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from portadraft.backends.quiet import quiet_transformers
from portadraft.errors import CorruptFile, MissingDependency, ModelNotFound
from portadraft.models import cache

_KIND = "tokenizers"
_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "merges.txt")
_NO_TOKENIZER = (
    "model={folder!r}: no tokenizer beside the weights; expected tokenizer.json or tokenizer.model; "
    "copy it from the model's origin"
)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder.

    Raises: ModelNotFound where there is none; CorruptFile where its files cannot be read;
    MissingDependency where it needs a package that is not installed.
    """
    from transformers import AutoTokenizer

    # Looked for first: without any file some classes make an empty tokenizer and say nothing.
    if not any(path.is_file() for pattern in _FILES for path in folder.glob(pattern)):
        raise ModelNotFound(_NO_TOKENIZER.format(folder=str(folder)))
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except ImportError as error:
        raise MissingDependency(f"the tokenizer of {folder} needs a package that is not installed: {error}") from error
    except Exception as error:  # transformers and tokenizers raise bare Exceptions for damaged files
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise ModelNotFound(_NO_TOKENIZER.format(folder=str(folder))) from error
        raise CorruptFile(
            f"the tokenizer in {folder} cannot be read ({_first_line(error)}); download its files again"
        ) from error


def load_gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file, from the cache where it was converted before.

    Raises: CorruptFile where the file holds none that can be read; MissingDependency without `gguf`.
    """
    import transformers

    key = f"{cache.file_identity(path)}-{transformers.__version__}"
    entry = cache.lookup(_KIND, key)
    if entry is not None:
        try:
            return load_tokenizer(entry)
        except (CorruptFile, ModelNotFound):
            cache.drop(_KIND, key)
    try:
        with quiet_transformers():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                str(path.parent), gguf_file=path.name, trust_remote_code=False
            )
    except ImportError as error:
        raise MissingDependency(
            f"reading {path.name} needs a package that is not installed ({_first_line(error)}); "
            "install it with: pip install 'portadraft[torch,gguf]'"
        ) from error
    except Exception as error:
        raise CorruptFile(
            f"model file {path}: its tokenizer cannot be read ({_first_line(error)}); download the file again, or use "
            "the model's Hugging Face folder"
        ) from error
    with quiet_transformers():
        entry = cache.store(_KIND, key, lambda folder: tokenizer.save_pretrained(str(folder)))
    return tokenizer if entry is None else load_tokenizer(entry)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
