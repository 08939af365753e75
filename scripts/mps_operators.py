"""Write down which operators PyTorch's MPS backend serves, from the operator table in an installed torch.

    python scripts/mps_operators.py tests/data/mps_operators.json

Every wheel of torch carries the table that its dispatcher is generated from, on every platform
(`torchgen/packaged/ATen/native/native_functions.yaml`), so no Mac is needed. Kept are

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
from pathlib import Path
from typing import Any

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


def main(out: Path) -> None:
    import torch
    import yaml

    text = table().read_bytes()
    kernels, composite = sort_out(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    document = {
        "made_by": "scripts/mps_operators.py",
        "torch": torch.__version__.partition("+")[0],
        "source": "torchgen/packaged/ATen/native/native_functions.yaml",
        "source_sha256": hashlib.sha256(text).hexdigest(),
        "kernels": kernels,
        "composite": composite,
    }
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{out}: torch {document['torch']}, {len(kernels)} with an MPS kernel, {len(composite)} composite")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
