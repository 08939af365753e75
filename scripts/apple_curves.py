"""Make the cost curves of Apple's devices from the timings that Apple published with its reference code.

    python scripts/apple_curves.py tests/data/apple_recordings.json > portadraft/tuner/curves.json

The fixture holds those timings as numbers: per device and data type, plain milliseconds a token, and for each
(W, L) the steps and the milliseconds of each run for 200 tokens of Vicuna-7B.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from portadraft.tuner.recorded import fit_steps

SLOTS = (1, 2, 4, 8, 12, 13, 15, 16, 17, 20, 24, 32, 48, 64)


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    curves = []
    for device in document["devices"]:
        # Of repeated timings the quicker counts: nothing makes a machine too fast.
        costs = fit_steps({(w, n): min(ms) / steps for w, n, steps, ms in device["cells"]})
        name = f"{device['device']}-vicuna-7b-{device['dtype']}"
        late = [n for n in SLOTS if costs.last is not None and n > costs.last]
        ms = [costs.base + costs.per_row * n + (costs.jump if n in late else 0.0) for n in SLOTS]
        curves.append(
            {
                "name": name,
                "origin": document["origin"],
                "dtype": device["dtype"],
                "batch": 1,
                "context": 66,
                "check": {"slots": list(SLOTS), "ms": [round(device["plain_ms"], 2), *(round(x, 2) for x in ms[1:])]},
                "draft": {"per_length_ms": round(costs.per_length, 3)},
            }
        )
    json.dump({"curves": curves}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
