"""The draft vocabulary: chosen for a corpus, and cut afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from portadraft.backends.torch import make_target
from portadraft.core.recurrent import RecurrentConfig
from portadraft.drafters.checkpoint import Checkpoint, Identity, read_checkpoint, write_checkpoint
from portadraft.errors import InvalidArgument
from portadraft.training import vocabulary
from portadraft.training.initial import initial

from .small import BEGIN_TURN, END, END_TURN, D, V, build, language_model, word, write

ALWAYS = (END, BEGIN_TURN, END_TURN)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("vocabulary")
    rng = np.random.default_rng(0)
    rows = [{"prompt": " ".join(word(i) for i in rng.integers(7, V, 4))} for _ in range(40)]
    return build(folder / "c", data=[write(folder / "p.jsonl", rows)])


def test_a_corpus_chooses_and_reports_what_is_covered(corpus: Any) -> None:
    target = make_target(language_model(), check=False)
    covered = []
    for size in (10, 30, V):
        chosen = corpus.choose_vocabulary(target, size, ALWAYS)
        assert len(chosen) == size and set(ALWAYS) <= set(chosen.tolist())
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        covered.append(corpus.facts["coverage_held_out"])
        inside = [t in set(chosen.tolist()) for r in corpus.recordings() for t in r.tokens.tolist()]
        assert covered[-1] == pytest.approx(np.mean(inside), abs=1e-4)
    assert covered == sorted(covered) and covered[0] < covered[-1] == 1.0
    with pytest.raises(InvalidArgument, match=rf"draft_vocabulary={V + 1}: expected 3 to {V}"):
        corpus.choose_vocabulary(target, V + 1, ALWAYS)


def checkpoint(tied: bool, chosen: Any) -> Checkpoint:
    config = RecurrentConfig(D, D, 2 * D, 1, len(chosen), tied_head=tied)
    params = {k: v.numpy() for k, v in initial(config, 0).items()}
    return Checkpoint(config, params, Identity(V, D), chosen if len(chosen) < V else None, {"note": "kept"})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [30, V])
def test_a_drafter_is_cut_to_the_tokens_worth_most(tmp_path: Path, corpus: Any, tied: bool, size: int) -> None:
    target = make_target(language_model(), check=False)
    chosen = corpus.choose_vocabulary(target, size, ALWAYS)
    before = checkpoint(tied, chosen)
    counted = vocabulary.counts(corpus.sources, V)
    mean = vocabulary.mean_prediction(corpus.sources, target.head_rows())
    kept = vocabulary.choose(counted, mean, 12, ALWAYS, among=before.draft_vocabulary, name="ship_vocabulary")
    assert set(kept.tolist()) <= set(chosen.tolist()) and set(ALWAYS) <= set(kept.tolist())
    after = vocabulary.cut(before, kept)
    write_checkpoint(tmp_path / "cut", after)
    loaded = read_checkpoint(tmp_path / "cut")
    assert loaded.config.vocabulary_size == 12 and loaded.training["note"] == "kept"
    assert loaded.draft_vocabulary is not None and loaded.draft_vocabulary.tolist() == kept.tolist()
    if not tied:
        name = "lm_head.1.weight"
        rows = [chosen.tolist().index(t) for t in kept.tolist()]
        np.testing.assert_allclose(loaded.params[name], before.params[name][rows], rtol=1e-3, atol=1e-6)  # float16
    with pytest.raises(InvalidArgument, match=r"ship_vocabulary=.*: expected 3 to"):
        vocabulary.choose(counted, mean, size + 1, ALWAYS, among=chosen, name="ship_vocabulary")


def test_only_tokens_that_are_predicted_can_be_kept() -> None:
    chosen = np.arange(0, 40, 2, dtype=np.int32)
    before = checkpoint(True, chosen)
    for kept in ([1, 2], [2, 2], [4, 2], [], [60]):
        with pytest.raises(InvalidArgument, match="ascending ids out of the 20 tokens"):
            vocabulary.cut(before, np.array(kept, np.int32))
