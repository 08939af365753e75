"""What portadraft refuses of mlx-lm 0.32, and why: the name, and words that the reason holds.

Exact on purpose: a model that starts to work, or stops, changes this table.
"""

_STATE = "ArraysCache"

REFUSED = {
    **dict.fromkeys(
        (
            "baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "falcon_h1", "granitemoehybrid",
            "jamba", "kimi_k3", "kimi_linear", "lfm2", "lfm2-vl", "lfm2_moe", "longcat_flash_ngram", "mamba", "mamba2",
            "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5", "qwen3_5_moe", "qwen3_next",
            "recurrent_gemma", "rwkv7",
        ),
        _STATE,
    ),
    "bitnet": "No Metal back-end",
    "deepseek_v41": "its cache is a LayerCache",
    "gpt2": "differs from plain passes",
    "gpt_bigcode": "differs from plain passes",
    "llama4": "ChunkedKVCache",
    "muse_spark": "No Metal back-end",
    "plamo3": "differs from plain passes",
    "phi3small": "a trial pass failed",
    "talkie": "no module that could be its LM head",
}  # fmt: skip

UNBUILT = {
    "olmo": "needs the package ai2-olmo, which is not installed",
    "prism_hadamard_qwen35": "is a format of packed weights for qwen3_5, not built from sizes",
}
