"""Lists, kept prefixes, log-probabilities and threads on the mlx backend: what torch says of the same folder."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed", exc_type=ImportError)
mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
pytest.importorskip("torch", reason="the torch extra is not installed")

import portadraft
from portadraft import Model
from portadraft.compat.transformers import wrap
from tests.test_api import PROMPT, save_model

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_model(path, max_position_embeddings=600)
    return path


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Model]:
    return {name: portadraft.load(folder, backend=name, dtype="float32", device="cpu") for name in ("mlx", "torch")}


def test_lists_seeds_and_log_probabilities_as_on_torch(models: dict[str, Model]) -> None:
    prompts = [[5 + (7 * i + j) % 300 for j in range(1 + 9 * i)] for i in range(6)]
    options: dict[str, Any] = {
        "max_tokens": 10, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3, "logprobs": 2,
        "batch_size": 3,
    }  # fmt: skip
    got = models["mlx"].generate(prompts, **options)
    expected = models["torch"].generate(prompts, **options)
    assert [g.ids for g in got] == [e.ids for e in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        assert [x.logprob for x in one.logprobs] == pytest.approx([x.logprob for x in other.logprobs], abs=1e-3)
        assert [[i for i, _ in x.top] for x in one.logprobs] == [[i for i, _ in x.top] for x in other.logprobs]


def test_a_chat_reuses_what_it_knows(models: dict[str, Model]) -> None:
    chats = {name: model.chat("Be brief.", max_tokens=12) for name, model in models.items()}
    for text in ("Hello there", "And then?"):
        answers = {name: chat.send(text) for name, chat in chats.items()}
        assert answers["mlx"].text == answers["torch"].text
        assert answers["mlx"].stats.reused_tokens == answers["torch"].stats.reused_tokens
    assert answers["mlx"].stats.reused_tokens > 0


def test_two_threads_and_plain_mlx_lm_beside_them(models: dict[str, Model], folder: Path) -> None:
    model = models["mlx"]
    theirs, _ = mlx_lm.load(str(folder))
    prompt = mx.array([5, 9, 17, 30])

    def plain() -> list[int]:
        from mlx_lm.generate import generate_step

        return [int(token) for token, _ in generate_step(prompt, theirs, max_tokens=24)]

    def ours(seed: int) -> list[Any]:
        return [model.generate(f"{PROMPT} {n}", max_tokens=16, temperature=0.7, seed=seed).ids for n in range(2)]

    jobs: dict[str, Any] = {"plain": plain, "first": lambda: ours(1), "second": lambda: ours(2)}
    alone = {name: job() for name, job in jobs.items()}
    together: dict[str, Any] = {}

    def run(name: str) -> None:
        try:
            together[name] = [jobs[name]() for _ in range(2)]
        except BaseException as error:
            together[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in jobs:
        assert together[name] == [alone[name]] * 2


def test_a_model_that_mlx_lm_loaded(models: dict[str, Model], folder: Path) -> None:
    theirs, tokenizer = mlx_lm.load(str(folder))
    model = portadraft.load(theirs, tokenizer=tokenizer)
    assert model.chosen["backend"].value == "mlx"
    assert model.generate(PROMPT, max_tokens=12).ids == models["mlx"].generate(PROMPT, max_tokens=12).ids


def test_tensors_in_and_out_need_torch_and_no_torch_model(models: dict[str, Model]) -> None:
    import torch

    ids = torch.tensor([[5, 9, 17]])
    got = {name: wrap(model).generate(ids, max_new_tokens=8) for name, model in models.items()}
    assert torch.equal(got["mlx"], got["torch"])
