"""Write down which operators PyTorch's MPS backend serves, from the operator table that a wheel of torch carries.

    pip download torch==2.8.0 --no-deps --only-binary=:all: --platform macosx_11_0_arm64 --python-version 3.11
    python scripts/mps_operators.py tests/data/mps_operators.json torch-2.8.0-cp311-none-macosx_11_0_arm64.whl

Without a wheel the table is the installed torch's. Every wheel has the one that its dispatcher is generated
from, on every platform (`torchgen/packaged/ATen/native/native_functions.yaml`), so no Mac is needed: the wheel
is read as an archive and not installed. Kept are

- kernels: operators with a kernel under the dispatch key MPS, of their own or, for a structured
  operator, of the variant that it delegates to;
- composite: operators written in terms of others for every backend (CompositeExplicitAutograd
  and its kin). Whoever checks a program must look at what they call, too.

Left out are operators that torch takes apart before a backend is asked (CompositeImplicitAutograd,
unless MPS has a kernel of its own), and those that other backends alone have.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

INSIDE = "torchgen/packaged/ATen/native/native_functions.yaml"
_COMPOSITE = {"CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"}


def table() -> Path:
    """The operator table of the installed torch."""
    import torchgen

    return Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"


def keys(entry: dict[str, Any]) -> set[str]:
    """The dispatch keys that an entry names."""
    return {key.strip() for group in entry.get("dispatch", {}) for key in group.split(",")}


def sort_out(entries: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Names of operators with an MPS kernel, and of composite ones."""
    by_name = {entry["func"].partition("(")[0]: entry for entry in entries}
    kernels, composite = set(), set()
    for name, entry in by_name.items():
        found = keys(entry) | keys(by_name.get(entry.get("structured_delegate", ""), {}))
        if "MPS" in found:
            kernels.add(name)
        elif found & _COMPOSITE:
            composite.add(name)
        # Variants that are generated (out=, functional) call the original.
        composite.update(variant.strip() for variant in entry.get("autogen", "").split(",") if variant.strip())
    return sorted(kernels), sorted(composite - kernels)


def in_wheel(wheel: Path) -> tuple[bytes, str]:
    """The operator table in a wheel, and the version of torch that the wheel's name gives."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(INSIDE), wheel.name.split("-")[1].partition("+")[0]


def main(out: Path, wheel: Path | None = None) -> None:
    import yaml

    if wheel is None:
        import torch

        text, version = table().read_bytes(), torch.__version__.partition("+")[0]
    else:
        text, version = in_wheel(wheel)
    kernels, composite = sort_out(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    document = {
        "made_by": "scripts/mps_operators.py",
        "torch": version,
        "source": INSIDE,
        "source_sha256": hashlib.sha256(text).hexdigest(),
        "kernels": kernels,
        "composite": composite,
    }
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{out}: torch {document['torch']}, {len(kernels)} with an MPS kernel, {len(composite)} composite")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
