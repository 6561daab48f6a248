"""Small table: exceptions to the rules of `penstock.model.small_models`; per model type, its config, class and batch.

`config` sets attributes; `part.attribute` is an attribute of a part. `class` is the class to build. `batch` sets inputs
to a value, or to the result of a function of the `Maker`; None leaves an input out.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SMALL"]

SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 32, 64],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}
DINO = {
    "model_type": "dinov2",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 16,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "reshape_hidden_states": False,
}
LAYERS_OF_FOUR = ["conv", "full_attention", "conv", "full_attention"]

ROPE: dict[str, Any] = {"config": {"rope_parameters": SECTIONS}}
TEXT_ROPE: dict[str, Any] = {"config": {"text_config.rope_parameters": SECTIONS}}
HALF_ROPE: dict[str, Any] = {
    "config": {"rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}
}
DETR: dict[str, Any] = {
    "config": {"backbone_config": RESNET, "decoder_attention_heads": 4, "encoder_attention_heads": 4}
}
DEPTH: dict[str, Any] = {"config": {"backbone_config": DINO, "neck_hidden_sizes": [8, 16, 32, 64]}}
PYRAMID: dict[str, Any] = {"config": {"encoder_in_channels": [16, 32, 64]}}
WAVES: dict[str, Any] = {"batch": {"input_values": lambda maker: maker.wave(1)}}
BANDS_FIRST: dict[str, Any] = {"batch": {"input_features": lambda maker: maker.noise(maker.num_bins, 64)}}
SEVERAL_PICTURES: dict[str, Any] = {"batch": {"pixel_values": lambda maker: maker.pictures(1)}}
FILM: dict[str, Any] = {"batch": {"pixel_values": lambda maker: maker.film()}}
WORDS_ONLY: dict[str, Any] = {
    "batch": {"pixel_values": None, "input_features": None, "image_grid_thw": None, "image_sizes": None}
}
DECODER_WORDS: dict[str, Any] = {"batch": {"decoder_input_ids": lambda maker: maker.words(12)}}
FULL_MASK: dict[str, Any] = {"batch": {"attention_mask": lambda maker: maker.ones(64)}}
TRANSDUCER: dict[str, Any] = {
    "batch": {
        "attention_mask": lambda maker: maker.ones(64),
        "decoder_input_ids": lambda maker: maker.words(5),
        "labels": None,
    }
}
PATCH_LIST: dict[str, Any] = {
    "batch": {
        "pixel_values": lambda maker: maker.noise(16, 768),
        "pixel_attention_mask": lambda maker: maker.ones(16),
        "spatial_shapes": lambda maker: maker.rows(4, 4),
    }
}
FLAT_PATCHES: dict[str, Any] = {
    "batch": {"flattened_patches": lambda maker: maker.noise(16, 770), "attention_mask": lambda maker: maker.ones(16)}
}
TILES: dict[str, Any] = {
    "config": {"image_grid_pinpoints": [[64, 64]]},
    "batch": {"pixel_values": lambda maker: maker.pictures(2), "image_sizes": lambda maker: maker.rows(64, 64)},
}
FORECAST: dict[str, Any] = {
    "config": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 3], "num_time_features": 1},
    "batch": {
        "past_values": lambda maker: maker.noise(11),
        "past_time_features": lambda maker: maker.noise(11, 1),
        "past_observed_mask": lambda maker: maker.ones(11).float(),
        "future_values": lambda maker: maker.noise(4),
        "future_time_features": lambda maker: maker.noise(4, 1),
    },
}
SAM: dict[str, Any] = {
    "config": {"vision_config.num_pos_feats": 32, "prompt_encoder_config.image_embedding_size": 4},
    "batch": {"input_points": lambda maker: maker.noise(1, 2, 2).abs() * 20},
}
QUESTIONS: dict[str, Any] = {
    "config": {"image_token_id": 15},
    "batch": {"qformer_input_ids": lambda maker: maker.words(8), "labels": None},
}

SMALL: dict[str, dict[str, Any]] = {
    "align": {"config": {"projection_dim": 80}},
    "align_vision_model": {
        "config": {"width_coefficient": 0.25, "depth_coefficient": 1.0, "hidden_dim": 320},
    },
    "efficientnet": {"config": {"width_coefficient": 0.25, "depth_coefficient": 1.0, "hidden_dim": 320}},
    "audio-spectrogram-transformer": {
        "config": {"max_length": 64, "num_mel_bins": 32},
        "batch": {"input_values": lambda maker: maker.noise(64, 32)},
    },
    "autoformer": {**FORECAST, "config": {**FORECAST["config"], "moving_average": 3, "label_length": 2}},
    "bit": {"config": {"num_groups": 2}},
    "blip-2": {"config": {"image_token_id": 15}, "batch": {"labels": None}},
    "blip_2_qformer": {"batch": {"query_embeds": lambda maker: maker.noise(12, 64)}},
    "chameleon": {"config": {"vocabulary_map": {"<image>": 15}}, **WORDS_ONLY},
    "clap": {"batch": {"input_features": lambda maker: maker.noise(1, 256, 64)}},
    "clap_audio_model": {
        "config": {"patch_embeds_hidden_size": 16, "hidden_size": 128},
        "batch": {"input_features": lambda maker: maker.noise(1, 256, 64)},
    },
    "clvp": BANDS_FIRST,
    "colmodernvbert": SEVERAL_PICTURES,
    "conditional_detr": DETR,
    "d_fine": PYRAMID,
    "dab-detr": DETR,
    "dac": {"config": {"encoder_hidden_size": 4, "decoder_hidden_size": 64}, **WAVES},
    "dbrx": {"config": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}}},
    "decision_transformer": {
        "batch": {
            "states": lambda maker: maker.noise(6, 17),
            "actions": lambda maker: maker.noise(6, 4),
            "rewards": lambda maker: maker.noise(6, 1),
            "returns_to_go": lambda maker: maker.noise(6, 1),
            "timesteps": lambda maker: maker.integers(100, 6),
            "attention_mask": lambda maker: maker.ones(6),
        }
    },
    "deepseek_v2": {"config": {"num_experts_per_tok": 2}},
    "deformable_detr": {"config": {"backbone_config": {**RESNET, "out_features": ["stage2", "stage3", "stage4"]}}},
    "deimv2": PYRAMID,
    "depth_anything": DEPTH,
    "detr": DETR,
    "dia": {"batch": {"decoder_input_ids": lambda maker: maker.integers(100, 12, 9), "labels": None}},
    "dots1": {"config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}},
    "encodec": WAVES,
    "esm": {"config": {"pad_token_id": 1, "mask_token_id": 4}},
    "flava": {"class": "FlavaModel", "batch": {"return_loss": None}},
    "fsmt": DECODER_WORDS,
    "fuyu": WORDS_ONLY,
    "gemma3n_text": {
        "config": {"intermediate_size": 128, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "laurel_rank": 8}
    },
    "gemma4": WORDS_ONLY,
    "gemma4_unified": WORDS_ONLY,
    "glm46v": TEXT_ROPE,
    "glm4v": TEXT_ROPE,
    "glm4v_moe_text": HALF_ROPE,
    "glm4v_text": ROPE,
    "glm_image_text": ROPE,
    "glm_ocr": TEXT_ROPE,
    "glm_ocr_text": ROPE,
    "glmasr": BANDS_FIRST,
    "glmasr_encoder": BANDS_FIRST,
    "glmga": TEXT_ROPE,
    "gpt_neo": {"config": {"attention_types": [[["global", "local"], 2]]}},
    "groupvit_vision_model": {"config": {"num_group_tokens": [8, 4, 0], "num_output_groups": [8, 4, 0]}},
    "hunyuan_vl_text": ROPE,
    "idefics": {
        "batch": {
            "pixel_values": lambda maker: maker.pictures(1),
            "image_attention_mask": lambda maker: maker.ones(16, 1),
        }
    },
    "idefics2": SEVERAL_PICTURES,
    "idefics3": SEVERAL_PICTURES,
    "informer": FORECAST,
    "instructblip": QUESTIONS,
    "jamba": {
        "config": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    },
    "kosmos-2": {
        "batch": {"image_embeds_position_mask": lambda maker: maker.rows(*[0] * 2, *[1] * 12, *[0] * 2), "labels": None}
    },
    "lasr_ctc": FULL_MASK,
    "layoutlmv3": {"config": {"coordinate_size": 8, "shape_size": 16}},
    "lfm2_moe": {"config": {"layer_types": LAYERS_OF_FOUR}},
    "lfm2_vl": PATCH_LIST,
    "lilt": {"config": {"hidden_size": 96}},
    "llama4_vision_model": {
        "config": {"intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64}
    },
    "llava_next": TILES,
    "llava_next_video": TILES,
    "llava_onevision": TILES,
    "longcat_flash": {"config": {"head_dim": 8}},
    "lxmert": {
        "batch": {"visual_feats": lambda maker: maker.noise(6, 64), "visual_pos": lambda maker: maker.noise(6, 4).abs()}
    },
    "mamba2": {"config": {"num_heads": 8}},
    "marian": DECODER_WORDS,
    "mimi": {"config": {"upsample_groups": 64}, **WAVES},
    "mllama": {
        "batch": {
            "pixel_values": lambda maker: maker.pictures(1, 4),
            "aspect_ratio_ids": lambda maker: maker.ones(1),
            "aspect_ratio_mask": lambda maker: maker.ones(1, 4),
            "cross_attention_mask": lambda maker: maker.ones(16, 1, 4),
        }
    },
    "mllama_vision_model": {"config": {"intermediate_layers_indices": [1, 3], "vision_output_dim": 192}},
    "modernvbert": SEVERAL_PICTURES,
    "musicgen_decoder": {"config": {"num_codebooks": 1}, "batch": {"labels": None}},
    "musicgen_melody_decoder": {"config": {"num_codebooks": 1}, "batch": {"labels": None}},
    "mistral3": {"batch": {"image_sizes": lambda maker: maker.rows(*maker.picture[1:])}},
    "lighton_ocr": {"batch": {"image_sizes": lambda maker: maker.rows(*maker.picture[1:])}},
    "mistral_large4": {"batch": {"image_sizes": lambda maker: maker.rows(*maker.picture[1:])}},
    "nemotron3_5_asr": TRANSDUCER,
    "nemotron_asr_streaming": TRANSDUCER,
    "paddleocr_vl_text": ROPE,
    "parakeet_ctc": FULL_MASK,
    "parakeet_rnnt": TRANSDUCER,
    "parakeet_tdt": TRANSDUCER,
    "patchtsmixer": {
        "class": "PatchTSMixerForPrediction",
        "batch": {"past_values": lambda maker: maker.noise(32, 1), "future_values": lambda maker: maker.noise(16, 1)},
    },
    "patchtst": {
        "class": "PatchTSTForPrediction",
        "config": {"context_length": 32, "patch_length": 4, "patch_stride": 4, "prediction_length": 8},
        "batch": {"past_values": lambda maker: maker.noise(32, 1), "future_values": lambda maker: maker.noise(8, 1)},
    },
    "pe_audio": WAVES,
    "pe_audio_encoder": WAVES,
    "perceiver": {
        "config": {
            "max_position_embeddings": 16,
            "d_latents": 64,
            "num_latents": 8,
            "num_self_attends_per_block": 4,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
        }
    },
    "pix2struct": FLAT_PATCHES,
    "pix2struct_vision_model": {"config": {"patch_embed_hidden_size": 768}, **FLAT_PATCHES},
    "qwen2_audio": {"batch": {"feature_attention_mask": lambda maker: maker.ones(64)}},
    "pop2piano": {
        "batch": {"input_ids": None, "attention_mask": None, "input_features": lambda maker: maker.noise(16, 64)}
    },
    "pp_doclayout_v2": PYRAMID,
    "pp_doclayout_v3": PYRAMID,
    "pp_doclayout_v4": PYRAMID,
    "pp_formulanet": DECODER_WORDS,
    "prompt_depth_anything": DEPTH,
    "qwen2_5_omni_text": ROPE,
    "qwen2_5_omni_thinker": {"config": {"text_config.rope_parameters": SECTIONS}, **WORDS_ONLY},
    "qwen2_5_vl_text": ROPE,
    "qwen2_vl_text": ROPE,
    "qwen3_omni_moe_thinker": WORDS_ONLY,
    "reformer": {
        "config": {
            "axial_pos_shape": [4, 4],
            "axial_pos_embds_dim": [16, 48],
            "attn_layers": ["local", "lsh", "local", "lsh"],
            "num_buckets": 4,
        }
    },
    "rt_detr": PYRAMID,
    "rt_detr_v2": PYRAMID,
    "sam": SAM,
    "sam_hq": SAM,
    "seamless_m4t": DECODER_WORDS,
    "seamless_m4t_v2": DECODER_WORDS,
    "siglip2": PATCH_LIST,
    "siglip2_vision_model": PATCH_LIST,
    "smolvlm": SEVERAL_PICTURES,
    "speech-encoder-decoder": {"batch": {"input_features": None}},
    "speecht5": DECODER_WORDS,
    "splinter": {"class": "SplinterModel"},
    "superpoint": {"config": {"keypoint_decoder_dim": 65}},
    "t5gemma2_text": {"config": {"dropout_rate": 0.0}},
    "t5gemma2_decoder": {"config": {"dropout_rate": 0.0}},
    "table-transformer": DETR,
    "time_series_transformer": FORECAST,
    "timesfm": {"batch": {"past_values": lambda maker: maker.noise(64), "freq": lambda maker: maker.integers(3)}},
    "timesfm2_5": {"batch": {"past_values": lambda maker: maker.noise(64)}},
    "timesformer": FILM,
    "ultravbert": SEVERAL_PICTURES,
    "vipllava": {"config": {"vision_feature_layers": [-1, -2, -3, -2, -1]}},
    "vivit": {"config": {"tubelet_size": [2, 16, 16]}, **FILM},
    "voxtral_realtime": WORDS_ONLY,
    "voxtral_realtime_encoder": BANDS_FIRST,
    "wav2vec2-bert": {"batch": {"input_features": lambda maker: maker.noise(64, 160)}},
    "xclip": FILM,
    "xcodec": WAVES,
    "xmod": {"config": {"default_language": "en_XX"}},
    "zamba2": {
        "config": {
            "hybrid_layer_ids": [1, 3],
            "layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        }
    },
}
