"""Prompts for tests on a real model."""

from __future__ import annotations

import json
import os
from pathlib import Path

from portadraft.bench.demo import prompts as demo_prompts


def questions(count: int) -> list[str]:
    """First turns of the MT-Bench question file named by PORTADRAFT_MT_BENCH (JSONL with `turns`), spread over
    the file, or the demo's prompts where that is not set.
    """
    path = os.environ.get("PORTADRAFT_MT_BENCH")
    if path:
        lines = Path(path).read_text("utf-8").splitlines()
        every = max(1, len(lines) // count)
        return [json.loads(line)["turns"][0] for line in lines[::every][:count]]
    return [p["prompt"] for p in demo_prompts()][:count]
