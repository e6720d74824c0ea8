"""What the general way of making a configuration small does not find, by model type."""

from __future__ import annotations

from typing import Any

_AUDIO = "its tokens are rows of several codebooks of sound, not a text's: each step takes one id of every codebook"
_DRAFT = "it drafts for another model, whose keys and values every one of its layers reads; it keeps none of its own"

# Model types of which no model is built or run here, and why.
NOT_RUN: dict[str, str] = {
    "gemma3n": "the class has a vision tower of the package timm in it, which is not among the dependencies; its "
    "language model is the type gemma3n_text",
    "gemma4_assistant": _DRAFT,
    "gemma4_unified_assistant": _DRAFT,
    "musicgen": _AUDIO,
    "musicgen_melody": _AUDIO,
}

_SLIDING_FULL = ["sliding_attention", "full_attention"] * 2
_LINEAR_FULL = ["linear_attention", "full_attention"] * 2
_GEMMA4 = {"layer_types": _SLIDING_FULL, "global_head_dim": 32, "hidden_size_per_layer_input": 8}
_GEMMA4_SHARED = _GEMMA4 | {"num_kv_shared_layers": 2}
_DOTS3 = {
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "head_dim": 24,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 24,
    "swa_v_head_dim": 16,
}
_QWEN4 = {
    "ple_layer_ids": [1],
    "ple_embed_dim": 64,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_HEAD_DIM = {"head_dim": 16}
_SCALE = {"attention_multiplier": 0.25}

# Settings of the language model; `outside` holds settings of the configuration around it.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "cohere2_moe": {"prefix_dense_intermediate_size": 96},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]},
        },
        "layer_types": _SLIDING_FULL,
    },
    "cpmant": {"prompt_types": 4, "prompt_length": 4, "segment_types": 4, "position_bias_num_buckets": 32},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "num_key_value_heads": 1,
        "o_groups": 2,
    },
    # beyond its window, which of two equal tokens is kept is chance
    "doge": {"keep_window_size": 512, "num_experts": 16, "num_experts_per_tok": 4},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": _DOTS3,
    "dots3_note_text": _DOTS3,
    "gemma3n_text": {
        "layer_types": _SLIDING_FULL,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4": _GEMMA4_SHARED,
    "gemma4_text": _GEMMA4_SHARED,
    "gemma4_unified": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": _SCALE | {"layer_types": _LINEAR_FULL},
    "granite": _SCALE,
    "granite_swa": _SCALE,
    "granitemoe": _SCALE,
    "granitemoe_swa": _SCALE,
    "granitemoeshared": _SCALE,
    "hunyuan_v1_dense": _HEAD_DIM,
    "hunyuan_v1_moe": _HEAD_DIM | {"num_experts": 4, "moe_topk": 2},
    "hy_v4": {"indexer_types": ["full", "shared", "full", "shared"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": _SLIDING_FULL},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2, "head_dim": 8},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": _SLIDING_FULL},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "ministral": _HEAD_DIM | {"layer_types": _SLIDING_FULL},
    "mllama": {"cross_attention_layers": [1, 3]},
    "moshi": {"sliding_window": 512},  # as long as its positions: its mask knows no window
    "nemotron": {"num_key_value_heads": 2},
    "qwen2": {"layer_types": _SLIDING_FULL, "use_sliding_window": True, "sliding_window": 16},
    "qwen4_exp": _QWEN4,
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [32, 32],
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": 32,
        "shape_embed_dim": 16,
        "shape_vocab_size": 32,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zaya": {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window": 16},
}
_SEEING = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}

# Settings of other parts, by their model type.
PARTS: dict[str, dict[str, Any]] = {
    "dots3_note_vision_encoder": {"adapter_out_dim": 64, "adapter_in_dim": 64, "mlp_layer_types": ["dense"] * 4},
    "dots3_note_audio_encoder": {"adapter_out_dim": 64, "adapter_input_size": 64},
    "git_vision_model": _SEEING | {"image_size": 32, "patch_size": 16},
    "got_ocr2_vision": _SEEING | {"output_channels": 8, "image_size": 32, "mlp_dim": 32},
    "phi4_multimodal_vision": _SEEING | {"image_size": 32, "crop_size": 32, "num_hidden_layers": 2},
    "phi4_multimodal_audio": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_blocks": 2,
        "num_attention_heads": 2,
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 8,
    },
    "blt_local_encoder": {"hidden_size": 64, "num_hidden_layers": 1, "hidden_size_global": 64},
    "blt_local_decoder": {"hidden_size": 64, "num_hidden_layers": 2, "hidden_size_global": 64},
    "blt_global_transformer": {"hidden_size": 64, "num_hidden_layers": 2},
    "blt_patcher": {"hidden_size": 64, "num_hidden_layers": 1},
}
