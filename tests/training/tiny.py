"""A target small enough to be run by hand: a random recurrent network whose greedy texts are recorded features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from portadraft.core.recurrent import RecurrentConfig
from portadraft.training.features import Features
from portadraft.training.loop import FitConfig, fit
from portadraft.training.loss import LossConfig

V, D = 48, 16
ARCHITECTURE = RecurrentConfig(D, D, 2 * D, 1, V)


class World:
    """Texts of the network, every fifth held out, with its tables."""

    def __init__(self, texts: int = 60, length: int = 30, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.table = torch.from_numpy(rng.standard_normal((V, D)).astype(np.float32))
        self.head = torch.from_numpy(rng.standard_normal((V, D)).astype(np.float32))
        a, b = (0.6 * rng.standard_normal((D, D)).astype(np.float32) for _ in range(2))
        tokens, hidden = [], []
        for _ in range(texts):
            h, token = np.zeros(D, np.float32), int(rng.integers(V))
            for _ in range(length):
                h = np.tanh(self.table[token].numpy() @ a + 0.5 * h @ b)
                tokens.append(token)
                hidden.append(h)
                token = int((self.head.numpy() @ h).argmax())
        bits = torch.from_numpy(np.array(hidden)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        offsets = np.arange(texts + 1, dtype=np.int64) * length
        documents = np.array([(0, 1, 0, int(d % 5 == 0)) for d in range(texts)], np.int32)
        self.features = Features(bits, np.array(tokens, np.int32), offsets, documents)

    def fit(self, settings: FitConfig | None = None, **options: Any) -> Any:
        """A run on the texts, or on options' own `sources`."""
        sources = options.pop("sources", [self.features])
        held_out = options.pop("held_out", self.features.recordings())
        return fit(
            ARCHITECTURE, self.table, self.head, np.arange(V, dtype=np.int32), sources, held_out,
            settings or settings_for(), **options,
        )  # fmt: skip


def settings_for(**changes: Any) -> FitConfig:
    """A short run of 40 updates or so, with drop-out and steps left to chance: all that draws random numbers."""
    given: dict[str, Any] = {
        "epochs": 3, "positions": 96, "segment": 8, "rate": 3e-3, "average": 0.95, "evaluations": 4, "patience": None,
        "loss": LossConfig(steps=3),
    }  # fmt: skip
    return FitConfig(**(given | changes))


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether parameters are the same, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def model_folder(place: Path, **changes: Any) -> Path:
    """A tiny Hugging Face llama with a tokenizer of words w2 … w47, as a folder."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = transformers.LlamaConfig(
        **{
            "vocab_size": V, "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.6, "tie_word_embeddings": True,
            "max_position_embeddings": 256,
        } | changes
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    words = {"<unk>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, V)}
    tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    model.save_pretrained(place)
    wrapped.save_pretrained(place)
    return place


def prompts_file(path: Path, count: int = 60, seed: int = 2) -> Path:
    """JSONL of prompts of five words each."""
    rng = np.random.default_rng(seed)
    rows = [{"prompt": " ".join(f"w{i}" for i in rng.integers(2, V, 5))} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
