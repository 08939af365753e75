"""Every drafter of the registry does what `Drafter` says, on the numpy target and on the other backends'."""

import pytest

from portadraft import backends
from portadraft.core.target import Target
from portadraft.drafters import REGISTRY, OracleDrafter, PromptLookup, Together
from portadraft.testing import DrafterConformance, random_redrafter


def _oracle(target, answers):
    return OracleDrafter(target.ops, answers, target.facts.vocabulary_size, 0.7, seed=1)


_MAKERS = {
    "lookup": lambda target, answers: PromptLookup(target.ops),
    "lookup-short": lambda target, answers: PromptLookup(target.ops, longest=1, shortest=1),
    "oracle": _oracle,
    "redrafter": lambda target, answers: random_redrafter(target, 1),
    "redrafter-untied-embedding": lambda target, answers: random_redrafter(
        target, 2, tied=False, inner_size=24, first_state="embedding"
    ),
    "redrafter-draft-vocabulary": lambda target, answers: random_redrafter(
        target, 3, draft_vocabulary=list(range(1, 40, 2))
    ),
    "together": lambda target, answers: Together(
        target.ops, [random_redrafter(target, 1), PromptLookup(target.ops), _oracle(target, answers)]
    ),
    "together-of-one": lambda target, answers: Together(target.ops, [PromptLookup(target.ops)]),
}


def test_every_drafter_is_here() -> None:
    assert {name.split("-")[0] for name in _MAKERS} == set(REGISTRY)


@pytest.fixture(scope="module")
def torch_target():
    missing = backends.REGISTRY["torch"].missing()
    if missing:
        pytest.skip(f"torch: {', '.join(missing)} not installed")
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    return backends.get("torch").load().make_target(transformers.LlamaForCausalLM(config).eval())


@pytest.fixture(scope="module")
def mlx_target():
    missing = backends.REGISTRY["mlx"].missing()
    if missing:
        pytest.skip(f"mlx: {', '.join(missing)} not installed")
    pytest.importorskip("mlx.core", reason="mlx is installed but does not import", exc_type=ImportError)
    from tests.mlx_backend import tiny

    return backends.get("mlx").load().make_target(tiny.build("llama", num_hidden_layers=2), check=False)


@pytest.fixture
def target(request: pytest.FixtureRequest, case: tuple[str, str]) -> Target:
    if case[0] != "numpy":
        return request.getfixturevalue(f"{case[0]}_target")
    return backends.get("numpy").load().make_target(3)


# Everything on numpy; on the others what differs there.
_CASES = [("numpy", name) for name in _MAKERS] + [
    (backend, name)
    for backend in sorted(set(backends.REGISTRY) - {"numpy"})
    for name in ("redrafter-draft-vocabulary", "together")
]


@pytest.fixture(params=_CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


class TestDrafter(DrafterConformance):
    @pytest.fixture
    def make(self, case: tuple[str, str]):
        return _MAKERS[case[1]]
