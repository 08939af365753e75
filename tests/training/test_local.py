"""Local targets: what the target would say next at every position, against a decode loop at each position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from portadraft.training.features import Document
from portadraft.training.local import NOTHING, Continuer, LocalFeatures, branches_of, record_local
from portadraft.training.recording import features_of
from portadraft.training.said import Said, said_by
from tests.torch_backend.families import FAMILIES, VOCABULARY

STEPS, LENGTH = 4, 26


def by_decoding(model: Any, ids: list[int], steps: int) -> tuple[list[int], Any]:
    """The target's next steps + 1 tokens after some ids, one plain pass for each, and their features."""
    ids, features = list(ids), []
    for _ in range(steps + 1):
        given = torch.tensor([ids])
        with torch.no_grad():
            ids.append(int(model(input_ids=given, use_cache=False).logits[0, -1].argmax()))
        features.append(features_of(model, given, torch.ones_like(given))[0, -1])
    return ids[-steps - 1 :], torch.stack(features)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "mistral-sliding", "gpt-oss", "phi3-longrope"])
def test_every_position_is_continued_as_by_a_decode_loop(family: str) -> None:
    """Windows are shorter than the text, so a slot in the wrong place would be seen."""
    model = FAMILIES[family]().eval()
    continuer = Continuer(model, STEPS, (), said_by(model))
    length = min(LENGTH, continuer.longest or LENGTH)
    ids = np.random.default_rng(0).integers(3, VOCABULARY, length).tolist()
    tokens, hidden = continuer.continuations(ids, first=2)
    assert tokens.shape == (length - 2, STEPS + 1)
    assert continuer.passes <= 2 * STEPS
    wrong = 0
    for p, i in enumerate(range(2, length)):
        expected, features = by_decoding(model, ids[: i + 1], STEPS)
        assert tokens[p].tolist() == expected
        torch.testing.assert_close(hidden[p], features, rtol=1e-3, atol=1e-3)
        # Negative control: the neighbour's continuation is another one.
        wrong += tokens[p - 1].tolist() == expected
    assert wrong < LENGTH // 4


def test_a_slot_that_sees_its_neighbours_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the slots of all positions visible, the continuations change."""
    from portadraft.training import local

    model = FAMILIES["llama"]().eval()
    ids = np.random.default_rng(0).integers(3, VOCABULARY, LENGTH).tolist()
    right, _ = Continuer(model, STEPS, ()).continuations(ids)
    eye = torch.eye
    monkeypatch.setattr(local.torch, "eye", lambda n, **options: torch.ones_like(eye(n, **options)))
    mixed, _ = Continuer(model, STEPS, ()).continuations(ids)
    assert torch.equal(right[:, 0], mixed[:, 0])  # the text's own pass
    assert not torch.equal(right[:, 2:], mixed[:, 2:])


def test_nothing_is_said_after_an_end_token() -> None:
    model = FAMILIES["llama"]().eval()
    ids = np.random.default_rng(1).integers(3, VOCABULARY, LENGTH).tolist()
    free, _ = Continuer(model, STEPS, ()).continuations(ids)
    end = int(free[5, 1])
    tokens, _ = Continuer(model, STEPS, (end,)).continuations(ids)
    stopped = 0
    for a, b in zip(free.tolist(), tokens.tolist(), strict=True):
        n = a.index(end) + 1 if end in a else len(a)
        assert b == a[:n] + [NOTHING] * (len(a) - n)
        stopped += n < len(a)
    assert stopped


def test_blocks_read_labels_and_distributions_of_each_step() -> None:
    """Root, labels and distributions of a position, against the model's own logits."""
    model = FAMILIES["llama"]().eval()
    rng = np.random.default_rng(2)
    documents = [Document(rng.integers(3, VOCABULARY, n).tolist(), start, 0, "text") for n, start in ((12, 0), (9, 4))]
    continuer = Continuer(model, STEPS, ())
    branches, bits = record_local(continuer, documents, [[0], [1]])
    sizes = [len(branches_of(d)) for d in documents]
    assert sizes == [11, 5] and bits.shape[0] == sum(sizes) * (STEPS + 1)
    offsets = np.cumsum([0, *sizes])
    features = LocalFeatures(bits, branches, offsets, np.array([(0, 0, 1, 0), (4, 0, 1, 0)], np.int32), Said())
    head = model.get_output_embeddings().weight.detach()
    segments = features.segments(4, held_out=False)
    assert (segments[:, 1] - segments[:, 0]).sum() == sum(sizes)
    assert features.count("text") == sum(sizes)
    block = features.block(segments, STEPS, head, np.arange(VOCABULARY))
    p = 0
    for document in documents:
        for i in branches_of(document):
            expected, hidden = by_decoding(model, document.tokens[: i + 1], STEPS)
            assert block.tokens[p].tolist() == block.draft[p].tolist() == expected
            torch.testing.assert_close(block.hidden[p], hidden[0], rtol=2e-2, atol=2e-2)
            for t in range(1, STEPS + 1):
                said = block.soft[block.rows[p, t - 1]]
                torch.testing.assert_close(said, torch.softmax(head @ hidden[t], -1), rtol=0.2, atol=0.05)
                assert int(said.argmax()) == int(block.choice[block.rows[p, t - 1]])
            p += 1
    assert p == len(block.hidden)
