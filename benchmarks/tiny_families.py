"""Random models of many families, small enough that all of them run on a CPU in minutes; their norms, biases and sinks are random, too."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from common.target.adapters import auto_class

VOCABULARY = 96
NUMBERS: dict[str, Any] = dict(
    vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY,
    hidden_size=32, d_model=32, n_embd=32, num_hidden_layers=6, n_layer=6,
    num_attention_heads=4, n_head=4, num_key_value_heads=2, head_dim=8, global_head_dim=8, num_global_key_value_heads=2,
    intermediate_size=48, attn_intermediate_size=48, mlp_intermediate_size=48, intermediate_size_mlp=48, ffn_hidden_size=48,
    max_position_embeddings=256, n_positions=256, initializer_range=0.2, sliding_window=8, attention_chunk_size=8, chunk_size=16,
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1,
    shared_expert_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_expand=2, mamba_dt_rank=4,
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, hidden_size_per_layer_input=8,
)  # fmt: skip
"""What is small, by the name that families give it."""
TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 1}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 3}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [2, 4]},
    "cohere": {"logit_scale": 0.25},
    "cwm": {"bos_token_id": 0, "pad_token_id": 0},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma2": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3, "laurel_rank": 8},
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "gemma4": {"pad_token_id": 0},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 8.0, "residual_multiplier": 0.5},
    "granitemoehybrid": LINEAR,
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "minicpm3": {"num_key_value_heads": 4},
    "qwen2_5_vl": MROPE,
    "qwen2_vl": MROPE,
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
    "smollm3": {"no_rope_layers": [1, 0, 1, 1, 0, 1]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 3, "mamba_headdim": 16, "n_mamba_heads": 4, "mamba_ngroups": 1},
}
TOWER: dict[str, Any] = dict(
    depth=1, num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_heads=2, num_attention_heads=2, head_dim=16, embed_dim=32,
    out_hidden_size=32, image_size=28, patch_size=14, fullatt_block_indexes=[0], deepstack_visual_indexes=[0],
)  # fmt: skip
"""The same of towers for pictures."""

TEXT = (
    "afmoe", "apertus", "arcee", "bamba", "bitnet", "bloom", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3",
    "diffllama", "doge", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon_h1", "flex_olmo", "gemma", "gemma2",
    "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "granite",
    "granite_swa", "granitemoe", "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "jamba",
    "lfm2", "lfm2_moe", "llama", "llama4_text", "mamba", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "ministral",
    "mistral", "mixtral", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi",
    "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss",
    "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "zamba2",
)  # fmt: skip
MULTIMODAL = (
    "gemma3", "gemma4", "internvl", "llama4", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl",
    "qwen3_vl_moe",
)  # fmt: skip


def config_of(family: str) -> PreTrainedConfig:
    """A small config of a family, by its `model_type`."""
    kind: Any = CONFIG_MAPPING[family]
    usual = kind()
    text = usual.get_text_config(decoder=True)
    asked = {name: value for name, value in NUMBERS.items() if _has(text, name)} | TOKENS | CHANGES.get(family, {})
    if text is usual:
        return kind(**asked)
    small = type(text)(**CHANGES.get(text.model_type, {}) | asked)
    towers = {name: getattr(usual, name, None) for name in usual.sub_configs if name != "text_config"}
    shrunk = {
        name: type(tower)(**{key: value for key, value in TOWER.items() if _has(tower, key)}) for name, tower in towers.items() if tower
    }
    return kind(text_config=small.to_dict(), **shrunk)


def _has(config: PreTrainedConfig, name: str) -> bool:
    try:
        return hasattr(config, name) and not (name == "sliding_window" and config.sliding_window is None)
    except RuntimeError:  # a number that differs from layer to layer
        return False


def write_model(family: str, folder: Path) -> None:
    """Save a random model of a family."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = config_of(family)
        model = auto_class(config).from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.2 * torch.randn(parameter.shape)
        model.save_pretrained(folder)
