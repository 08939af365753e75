"""A model of a few words, with a tokenizer and a chat template, and what a corpus is built with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from portadraft.backends.torch import make_target
from portadraft.text import TextCodec
from portadraft.training.corpus import Corpus, CorpusRequest, build_corpus
from portadraft.training.progress import Progress

V, D = 64, 16
UNKNOWN, END, BEGIN_TURN, END_TURN = 0, 1, 2, 3
TEMPLATE = (
    "{% for m in messages %}<turn> {{ m['role'] }} {{ m['content'] }} <stop> {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant {% endif %}"
)
ROLES = ("user", "assistant", "system")


def word(i: int) -> str:
    """Of an id from 7 on."""
    return f"w{i}"


def tokenizer(template: bool = True) -> Any:
    words = {"<unk>": UNKNOWN, "</s>": END, "<turn>": BEGIN_TURN, "<stop>": END_TURN}
    words |= {role: 4 + i for i, role in enumerate(ROLES)} | {word(i): i for i in range(7, V)}
    inner = Tokenizer(models.WordLevel(words, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    out = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=["<turn>", "<stop>"] if template else [],
    )  # fmt: skip
    if template:
        out.chat_template = TEMPLATE
    return out


def language_model(context: int = 256) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.6, tie_word_embeddings=True, max_position_embeddings=context,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def codec(template: bool = True) -> TextCodec:
    return TextCodec(tokenizer(template))


def build(
    folder: Path,
    *,
    model: Any = None,
    template: bool = True,
    shard: tuple[int, int] = (0, 1),
    barrier: Callable[[], None] = lambda: None,
    **request: Any,
) -> Corpus:
    """A corpus of the small model; `request` as in CorpusRequest."""
    model = model or language_model()
    given: dict[str, Any] = {"max_answer": 12, "max_length": 64, "batch": 4, "steps": 3} | request
    return build_corpus(
        make_target(model, check=False), model, codec(template), CorpusRequest(**given), folder, Progress(False),
        shard, barrier,
    )  # fmt: skip


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
