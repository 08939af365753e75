"""Tiny random models of every architecture that the installed mlx-lm brings.

The list comes from the package. Arguments are filled in by their names, so that most
architectures need no line of their own; what differs stands in `CHANGES`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import pkgutil
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import models

VOCABULARY = 97
WINDOW = 6
LAYERS = 4
HEAD = 16

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "type": "default"}
_TYPES = ["sliding_attention", "full_attention"] * 2

VALUES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "hidden_dim", "d_model", "model_dim", "n_embd", "block_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups",
                     "swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim", "qk_rope_head_dim",
                     "qk_nope_head_dim", "index_head_dim", "global_head_dim", "kv_channels"), HEAD),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "rotary_dim"), HEAD),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "ff_intermediate_size",
                     "intermediate_size_mlp", "inner_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size",
                     "shared_intermediate_size", "share_expert_dim", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert", "n_group", "topk_group",
                     "decoder_sparse_step", "moe_layer_freq", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps"), 1e-5),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "model_max_length", "block_size"), 256),
    **dict.fromkeys(("rope_theta", "swa_rope_theta", "rotary_emb_base"), 10000.0),
    **dict.fromkeys(("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 0.7),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "norm_topk_prob", "post_norm", "qk_norm", "use_qk_norm",
                     "use_qkv_bias", "use_conv_bias", "conv_bias", "use_expert_bias", "mla_scale_kv_lora",
                     "mla_scale_q_lora", "add_full_attention_sink_bias", "add_swa_attention_sink_bias"), True),
    **dict.fromkeys(("tie_word_embeddings", "use_cla", "use_mixed_mlp_moe", "linear_allow_neg_eigval",
                     "mamba_proj_bias"), False),
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.5,
    "routed_scaling_factor": 1.5,
    "layer_types": _TYPES,
    "mlp_only_layers": [],
    "is_moe_layer": [False, True, True, True],
    "no_rope_layers": [1, 1, 1, 0],
    "hybrid_layer_pattern": [0, 1, 0, 1],
    "sliding_window_layers": [1],
    "sliding_window_pattern": 2,
    "conv_window": 2,
    "index_n_heads": 2,
    "index_topk": 8,
    "query_pre_attn_scalar": 16,
    "rope_parameters": _ROPE,
    "rope_scaling": None,
    "dim_model_base": 32,
    "scale_depth": 1.4,
    "scale_emb": 2.0,
    "dense_attention_every_n_layers": 2,
    "gegelu_limit": 20.0,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_method": "MLA",
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "num_kv_reuse_layers": 2,
    "cla_share_factor": 2,
    "num_nextn_predict_layers": 0,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 8.0,
    "time_step_limit": (0.0, 100.0),
    "time_step_rank": 8,
    "ffn_dim_divisor": 16,
    "ffn_multipliers": [1.0] * LAYERS,
    "num_query_heads": [4] * LAYERS,
    "linear_attn_config": {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "num_heads": 4, "head_dim": HEAD,
                           "short_conv_kernel_size": 4},
    "conv_kernel": 4,
    "state_size": 16,
    "ssm_state_size": 16,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_head_dim": 16,
    "mamba_num_heads": 4,
    "n_groups": 1,
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "conv_L_cache": 3,
    "conv1d_width": 4,
    "logits_soft_cap": 8.0,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": HEAD,
    "linear_value_head_dim": HEAD,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_group_size": 2,
    "group_norm_size": 1,
    "a_low_rank_dim": 8,
    "decay_low_rank_dim": 8,
    "gate_low_rank_dim": 8,
    "v_low_rank_dim": 8,
}  # fmt: skip

_YARN = {"rope_type": "yarn", "type": "yarn", "rope_theta": 10000.0, "factor": 2.0,
         "original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.1}  # fmt: skip
_HYBRID = ["linear_attention", "full_attention"] * 2

CHANGES: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_v2": {"rope_scaling": {**_YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "exaone4": {"sliding_window_pattern": "LG"},
    "gemma3": {"vocab_size": VOCABULARY},
    "gemma4": {"vocab_size": VOCABULARY},
    "gemma4_text": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
    "gemma3n": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "rope_local_base_freq": 10000.0,
                "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "altup_num_inputs": 2, "altup_coef_clip": 120.0,
                "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4, "mamba_d_head": 16,
                         "mamba_n_groups": 1, "mamba_conv_bias": True, "mamba_proj_bias": False},
    "hunyuan": {"rope_scaling": {"alpha": 2.0, "factor": 1.0, "type": "dynamic"}},
    "kimi_k3": {"linear_attn_config": {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "num_heads": 4,
                                       "head_dim": HEAD, "short_conv_kernel_size": 4}, "hidden_act": "situ"},
    "mellum": {"rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}},
    "spark2_5": {"hidden_act": "gelu", "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}},
    "mimo_v2_flash": {"moe_layer_freq": [0, 1, 1, 1], "n_shared_experts": None},
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 128, "short_factor": 1.0, "long_factor": 1.5}},
    "ministral3": {"rope_parameters": _YARN},
    "mistral4": {"rope_parameters": _YARN},
    "nemotron_h": {"hybrid_override_pattern": "M*M-", "layers_block_type": None},
    "nemotron-nas": {"block_configs": [
        {"attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
         "ffn": {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False}}] * LAYERS},
    "olmo_hybrid": {"layer_types": _HYBRID},
    "openelm": {"num_kv_heads": [2] * LAYERS},
    "qwen3_next": {"layer_types": _HYBRID},
    "llama4": {"attention_chunk_size": 64, "interleave_moe_layer_step": 2,
               "num_experts_per_tok": 1},
    "minimax_m3_vl": {"moe_layer_freq": None, "mlp_layer_types": None, "dense_intermediate_size": 96},
    "muse_spark": {"post_norm_eps": 1e-5, "layer_rope_theta": [10000.0, 0.0] * 2, "output_multiplier": 0.7,
                   "moe_hidden_size": 32, "num_shared_experts": 0},
    "plamo": {"n_shared_head": 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
}  # fmt: skip

TEXT = {
    "gemma3": "gemma3_text.ModelArgs",
    "gemma3n": "gemma3n.TextConfig",
    "gemma4": "gemma4_text.ModelArgs",
    "kimi_k25": "deepseek_v3.ModelArgs",
    "kimi_k3": "kimi_k3.TextArgs",
    "kimi_vl": "kimi_vl.TextArgs",
    "lfm2-vl": "lfm2.ModelArgs",
    "llama4": "llama4.TextArgs",
    "minimax_m3_vl": "minimax_m3_vl.TextArgs",
    "mistral3": "llama.ModelArgs",
    "muse_spark": "muse_spark.TextArgs",
    "pixtral": "llama.ModelArgs",
    "qwen2_vl": "qwen2.ModelArgs",
    "qwen3_5": "qwen3_5.TextModelArgs",
    "qwen3_5_moe": "qwen3_5.TextModelArgs",
    "qwen3_vl": "qwen3.ModelArgs",
    "qwen3_vl_moe": "qwen3_moe.ModelArgs",
}
"""Whose arguments the text part of a model of several parts takes."""
MOST_PARAMETERS = 20_000_000


def names() -> list[str]:
    """Modules of mlx-lm that define a model, and those that cannot be imported to find out."""
    out = []
    for info in pkgutil.iter_modules(models.__path__):
        try:
            module = load(info.name)
        except ImportError:
            out.append(info.name)
            continue
        if hasattr(module, "Model"):
            out.append(info.name)
    return out


def load(name: str) -> Any:
    """Import one of mlx-lm's model modules.

    Raises: ImportError, also where the module ends the process for want of a package.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module(f"mlx_lm.models.{name}")
    except SystemExit as error:
        raise ImportError(f"mlx_lm.models.{name} exits on import: a package that it needs is missing") from error


def arguments(kind: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a dataclass of mlx-lm's, by name."""
    values = {f.name: VALUES[f.name] for f in dataclasses.fields(kind) if f.name in VALUES}
    return {**values, **changes}


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model; weights are so large that attention decides what it says."""
    module = load(name)
    given = {"model_type": name, **CHANGES.get(name, {}), **changes}
    if "num_hidden_layers" in changes:
        given.setdefault("layer_types", _TYPES[: changes["num_hidden_layers"]])
    if name in TEXT:
        owner, _, kind = TEXT[name].partition(".")
        own = {**CHANGES.get(owner, {}), "model_type": owner, **(given if owner == name else {})}
        text = arguments(getattr(load(owner), kind), own)
        given = {**{k: v for k, v in given.items() if k in ("model_type", "vocab_size")}, "text_config": text}
        kinds = {f.name for f in dataclasses.fields(module.ModelArgs)}
        model = module.Model(module.ModelArgs.from_dict({k: v for k, v in given.items() if k in kinds}))
    else:
        model = module.Model(module.ModelArgs.from_dict(arguments(module.ModelArgs, given)))
    size = sum(p.size for _, p in tree_flatten(model.parameters()))
    if size > MOST_PARAMETERS:
        raise ValueError(f"{name}: {size} parameters; a size is missing in VALUES or CHANGES")
    return randomized(model, seed)


def randomized(model: Any, seed: int = 0) -> Any:
    key = mx.random.key(seed)
    weights = []
    for name, p in tree_flatten(model.parameters()):
        key, use = mx.random.split(key)
        if not mx.issubdtype(p.dtype, mx.floating):
            weights.append((name, p))
            continue
        noise = mx.random.normal(p.shape, key=use)
        weights.append((name, noise * (1.5 / p.shape[-1] ** 0.5) if p.ndim > 1 else p.astype(mx.float32) + 0.1 * noise))
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model
