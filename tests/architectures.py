"""Every architecture that docs/models.md lists, tiny, and what becomes of it.

Each is built from its own configuration class in transformers with every weight random, norms and
biases too. `rest` is what `score.candidates=all` must leave out, `linear` what even the default
must: the patterns that the refusal itself names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from models import _randomise
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

VOCAB = 97


@dataclass(frozen=True)
class Architecture:
    """One row of the table in docs/models.md."""

    title: str
    model_type: str
    settings: dict[str, Any]
    note: str = ""
    rest: tuple[str, ...] = ()
    linear: tuple[str, ...] = ()
    whole: bool = field(default=False)
    """Loaded as the multimodal model that it is."""

    def spec(self, kind: str) -> str:
        """`score.candidates` that works: the default, or `all`, without what has no rule."""
        left_out = self.linear if kind == "block_linear" else (*self.linear, *self.rest)
        return ",".join([kind, *(f"!{pattern}" for pattern in left_out)])

    def build(self, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any) -> Any:
        """The model with random weights, in eval mode."""
        config = CONFIG_MAPPING[self.model_type](**{**self.settings, **overrides})
        kind = AutoModelForImageTextToText if self.whole else AutoModelForCausalLM
        with torch.random.fork_rng():
            model = kind.from_config(config)
        model.to(dtype)
        _randomise(model, seed)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)).roll(seed))
        return model.eval()


_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_HEADS = {**_BASE, "head_dim": 8}
_WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = {**_HEADS, **_WINDOWS, "query_pre_attn_scalar": 8, "pad_token_id": 0}
_PER_LAYER = {
    **_GEMMA,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
}
_GEMMA4 = {**_PER_LAYER, "global_head_dim": 8}
_OLD_GPT = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_LATENT = {
    **_BASE,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_DELTA = {
    **_HEADS,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SPARSE = {"num_experts_per_tok": 2, "experts_implementation": "eager"}  # fast ones: no float64
_EXPERTS = {**_SPARSE, "num_experts": 4, "moe_intermediate_size": 16}
_TEXT_ONLY = "text decoder only; the vision tower is kept as it is"
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
    }
}
_QWEN_TOKENS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_LINEAR_ATTENTION = tuple(
    f"model.layers.*.linear_attn.{name}" for name in ("dt_bias", "A_log", "conv1d.weight")
)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("Llama 2, 3", "llama", {**_BASE, "tie_word_embeddings": False}),
    "llama_tied_bias": Architecture(
        "Llama, tied head, biases",
        "llama",
        {**_BASE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "gemma": Architecture("Gemma", "gemma", {**_HEADS, "pad_token_id": 0}),
    "gemma2": Architecture("Gemma-2", "gemma2", _GEMMA, "soft-capped logits"),
    "gemma3_text": Architecture("Gemma-3 text", "gemma3_text", _GEMMA),
    "gemma3": Architecture(
        "Gemma-3 multimodal",
        "gemma3",
        {
            "text_config": _GEMMA,
            "vision_config": {**_VISION, "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
            "image_token_index": 90,
            "boi_token_index": 91,
            "eoi_token_index": 92,
        },
        _TEXT_ONLY,
        whole=True,
    ),
    "gemma3n_text": Architecture(
        "Gemma-3n text",
        "gemma3n_text",
        {
            **_PER_LAYER,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
        rest=("model.layers.*.altup.correct_output_scale",),
    ),
    "gemma4_text": Architecture("Gemma-4 text", "gemma4_text", _GEMMA4),
    "gemma4": Architecture(
        "Gemma-4 multimodal",
        "gemma4",
        {
            "text_config": _GEMMA4,
            "vision_config": {**_VISION, "num_key_value_heads": 2, "head_dim": 8},
            "audio_config": None,
            "boi_token_id": 93,
            "eoi_token_id": 94,
            "image_token_id": 90,
            "audio_token_id": 91,
            "video_token_id": 92,
        },
        _TEXT_ONLY,
        whole=True,
    ),
    "qwen2": Architecture("Qwen-2, 2.5", "qwen2", _BASE),
    "qwen2_5_vl": Architecture(
        "Qwen-2.5-VL",
        "qwen2_5_vl",
        {"text_config": {**_BASE, **_MROPE}, "vision_config": _QWEN_VISION, **_QWEN_TOKENS},
        _TEXT_ONLY,
        whole=True,
    ),
    "qwen3_vl": Architecture(
        "Qwen-3-VL",
        "qwen3_vl",
        {
            "text_config": {**_HEADS, **_MROPE},
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
            **_QWEN_TOKENS,
        },
        _TEXT_ONLY,
        whole=True,
    ),
    "qwen3": Architecture("Qwen-3", "qwen3", {**_HEADS, "tie_word_embeddings": True}),
    "qwen3_5_text": Architecture(
        "Qwen-3.5 text (hybrid)",
        "qwen3_5_text",
        _DELTA,
        "linear-attention layers",
        rest=_LINEAR_ATTENTION,
    ),
    "qwen3_5": Architecture(
        "Qwen-3.5 multimodal (hybrid)",
        "qwen3_5",
        {
            "text_config": _DELTA,
            "vision_config": _QWEN_VISION,
            **_QWEN_TOKENS,
        },
        _TEXT_ONLY,
        rest=tuple(n.replace("model.", "model.language_model.", 1) for n in _LINEAR_ATTENTION),
        whole=True,
    ),
    "qwen3_next": Architecture(
        "Qwen-3-Next (hybrid)",
        "qwen3_next",
        {
            **_DELTA,
            **_EXPERTS,
            "mlp_only_layers": [0],
            "shared_expert_intermediate_size": 24,
        },
        "linear-attention layers; a shared expert",
        rest=_LINEAR_ATTENTION,
    ),
    "gpt2": Architecture("GPT-2", "gpt2", _OLD_GPT, "Conv1D weights are [in, out]"),
    "gpt_neo": Architecture(
        "GPT-Neo",
        "gpt_neo",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 3,
            "max_position_embeddings": 64,
            "bos_token_id": None,
            "eos_token_id": 1,
        },
    ),
    "gptj": Architecture("GPT-J", "gptj", {**_OLD_GPT, "rotary_dim": 4}),
    "gpt_neox": Architecture("GPT-NeoX, Pythia", "gpt_neox", _BASE, "fused query_key_value"),
    "gpt_bigcode": Architecture("StarCoder (GPT-BigCode)", "gpt_bigcode", _OLD_GPT, "fused c_attn"),
    "phi": Architecture("Phi-1, 2", "phi", _BASE),
    "phi3": Architecture(
        "Phi-3, 4", "phi3", {**_BASE, "sliding_window": 3}, "fused qkv_proj and gate_up_proj"
    ),
    "mistral": Architecture("Mistral", "mistral", {**_BASE, "sliding_window": 3}),
    "mistral3": Architecture(
        "Mistral-Small-3.1 multimodal",
        "mistral3",
        {
            "text_config": {**_HEADS, "model_type": "mistral"},
            "vision_config": {
                **_VISION,
                "model_type": "pixtral",
                "head_dim": 8,
                "image_size": 28,
                "patch_size": 14,
            },
            "image_token_index": 90,
        },
        _TEXT_ONLY,
        whole=True,
    ),
    "ministral3": Architecture("Ministral-3", "ministral3", _HEADS),
    "olmo": Architecture("OLMo", "olmo", _BASE),
    "olmo2": Architecture("OLMo-2", "olmo2", _BASE),
    "olmo3": Architecture("OLMo-3", "olmo3", {**_BASE, **_WINDOWS}),
    "smollm3": Architecture("SmolLM3", "smollm3", {**_BASE, "no_rope_layers": [1, 0]}),
    "granite": Architecture(
        "Granite",
        "granite",
        {
            **_BASE,
            "logits_scaling": 3.0,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.4,
        },
        "scaled logits",
    ),
    "falcon": Architecture("Falcon (rotary)", "falcon", {**_BASE, "bias": False}),
    "falcon_alibi": Architecture(
        "Falcon (ALiBi)",
        "falcon",
        {**_BASE, "multi_query": False, "bias": True, "parallel_attn": False, "alibi": True},
    ),
    "starcoder2": Architecture("StarCoder2", "starcoder2", {**_BASE, "sliding_window": 3}),
    "cohere": Architecture(
        "Cohere Command-R", "cohere", {**_BASE, "pad_token_id": 0}, "scaled logits"
    ),
    "cohere2": Architecture(
        "Cohere Command-R7B, A",
        "cohere2",
        {**_HEADS, **_WINDOWS, "pad_token_id": 0},
        "scaled logits",
    ),
    "stablelm": Architecture(
        "StableLM", "stablelm", {**_BASE, "use_qkv_bias": True, "qk_layernorm": True}
    ),
    "glm": Architecture("GLM-4 (2024)", "glm", _HEADS, "fused gate_up_proj"),
    "glm4": Architecture("GLM-4-0414", "glm4", _HEADS, "fused gate_up_proj"),
    "nemotron": Architecture("Nemotron", "nemotron", _HEADS),
    "exaone4": Architecture("EXAONE-4", "exaone4", {**_BASE, **_WINDOWS}),
    "ernie4_5": Architecture("ERNIE-4.5", "ernie4_5", _HEADS),
    "seed_oss": Architecture("Seed-OSS", "seed_oss", _HEADS),
    "hunyuan": Architecture("Hunyuan dense", "hunyuan_v1_dense", _HEADS),
    "apertus": Architecture(
        "Apertus",
        "apertus",
        {**_BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        rest=("model.layers.*.mlp.act_fn.alpha_n", "model.layers.*.mlp.act_fn.alpha_p"),
    ),
    "nanochat": Architecture("nanochat", "nanochat", _BASE, "soft-capped logits"),
    "bloom": Architecture(
        "BLOOM",
        "bloom",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "ALiBi; fused query_key_value",
    ),
    "mpt": Architecture(
        "MPT",
        "mpt",
        {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        "ALiBi; fused Wqkv",
    ),
    "lfm2": Architecture(
        "LFM2 (hybrid)",
        "lfm2",
        {
            **_BASE,
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 3,
            "block_multiple_of": 8,
        },
        "convolution layers",
        rest=("model.layers.*.conv.conv.weight",),
    ),
    "mamba2": Architecture(
        "Mamba-2",
        "mamba2",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
        "state-space layers",
        rest=tuple(
            f"backbone.layers.*.mixer.{name}"
            for name in ("dt_bias", "A_log", "D", "conv1d.weight", "conv1d.bias")
        ),
    ),
    "falcon_h1": Architecture(
        "Falcon-H1 (hybrid)",
        "falcon_h1",
        {
            **_HEADS,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "lm_head_multiplier": 0.5,
        },
        "state-space layers; scaled logits",
        rest=tuple(
            f"model.layers.*.mamba.{name}"
            for name in ("dt_bias", "A_log", "D", "conv1d.weight", "conv1d.bias")
        ),
    ),
    "opt": Architecture(
        "OPT",
        "opt",
        {**_BASE, "ffn_dim": 40, "word_embed_proj_dim": 32, "pad_token_id": 1},
        "the MLP sees all examples as one list of tokens",
        rest=("model.decoder.embed_positions.weight",),
    ),
    "mixtral": Architecture("Mixtral", "mixtral", {**_BASE, **_SPARSE, "num_local_experts": 4}),
    "qwen2_moe": Architecture(
        "Qwen-2-MoE",
        "qwen2_moe",
        {**_BASE, **_EXPERTS, "shared_expert_intermediate_size": 24},
        "a shared expert with a gate",
    ),
    "qwen3_moe": Architecture("Qwen-3-MoE", "qwen3_moe", {**_HEADS, **_EXPERTS}),
    "olmoe": Architecture("OLMoE", "olmoe", {**_BASE, **_EXPERTS}),
    "deepseek_v3": Architecture(
        "DeepSeek-V3",
        "deepseek_v3",
        {
            **_LATENT,
            **_SPARSE,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
        },
        "shared experts; routing by groups with a correction, in fp32",
    ),
    "gpt_oss": Architecture(
        "gpt-oss",
        "gpt_oss",
        {
            **_HEADS,
            **_WINDOWS,
            **_SPARSE,
            "num_local_experts": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "expert weights are [expert, in, out], with biases",
        rest=("model.layers.*.self_attn.sinks",),
    ),
    "dbrx": Architecture(
        "DBRX",
        "dbrx",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
            "bos_token_id": None,
            "eos_token_id": 1,
        },
        "its experts are stored in a way of their own and are no candidates",
        linear=tuple(f"transformer.blocks.*.ffn.experts.mlp.{name}" for name in ("w1", "v1", "w2")),
    ),
}


def table() -> str:
    """The table of docs/models.md."""
    lines = [
        "| Model | `model_type` | Default candidates | Notes |",
        "|---|---|---|---|",
    ]
    for one in ARCHITECTURES.values():
        default = "as it comes" if not one.linear else "`block_linear`, less the weights refused"
        lines.append(f"| {one.title} | `{one.model_type}` | {default} | {one.note} |")
    return "\n".join(lines) + "\n"
