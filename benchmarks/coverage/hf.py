"""The transformers models of this benchmark, by group, and a list of all that can be built small.

Each name is a model type of transformers 5.22. `penstock.model.small_models.named_models.load` builds it with random
weights.
"""


def names(text: str) -> list[str]:
    return text.split()


GROUPS: dict[str, list[str]] = {
    "decoder": names("""
        gpt2 gpt-sw3 gpt_neo gpt_neox gpt_neox_japanese gptj gpt_bigcode codegen openai-gpt ctrl llama mistral
        ministral qwen2 qwen3 gemma gemma2 gemma3_text gemma3n_text phi phi3 falcon bloom mpt opt xglm biogpt
        stablelm starcoder2 olmo olmo2 olmo3 cohere cohere2 glm glm4 granite helium nemotron persimmon smollm3
        exaone4 arcee apertus diffllama modernbert-decoder bitnet doge vaultgemma nanochat seed_oss ernie4_5
        cpmant xlnet bert-generation
    """),
    "mixture of experts": names("""
        mixtral qwen2_moe qwen3_moe olmoe deepseek_v2 deepseek_v3 dbrx gpt_oss granitemoe granitemoeshared phimoe
        jetmoe llama4_text glm4_moe ernie4_5_moe hunyuan_v1_moe minimax flex_olmo afmoe longcat_flash
        switch_transformers nllb-moe
    """),
    "state space": names("""
        mamba mamba2 falcon_mamba jamba bamba falcon_h1 zamba2 recurrent_gemma rwkv xlstm nemotron_h
        granitemoehybrid lfm2 lfm2_moe qwen3_next kimi_linear
    """),
    "encoder": names("""
        bert albert roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl camembert distilbert electra deberta
        deberta-v2 mpnet modernbert eurobert fnet funnel longformer big_bird nystromformer yoso convbert
        mobilebert squeezebert roformer rembert megatron-bert ernie esm ibert data2vec-text mra luke tapas xmod
        xlm flaubert canine perceiver nomic_bert layoutlm lilt markuplm bros
    """),
    "encoder-decoder": names("""
        t5 mt5 umt5 longt5 bart mbart pegasus pegasus_x bigbird_pegasus led blenderbot blenderbot-small marian
        m2m_100 plbart mvp prophetnet fsmt t5gemma encoder-decoder udop
    """),
    "vision": names("""
        vit deit beit data2vec-vision swin swinv2 convnext convnextv2 resnet regnet bit dinov2
        dinov2_with_registers dinov3_vit cvt levit poolformer pvt pvt_v2 segformer mobilenet_v1 mobilenet_v2
        mobilevit mobilevitv2 efficientnet focalnet hiera vit_mae vit_msn imagegpt swiftformer dpt glpn
        depth_anything yolos conditional_detr deformable_detr table-transformer ijepa textnet videomae
        timesformer vivit sam
    """),
    "audio": names("""
        whisper wav2vec2 wav2vec2-bert wav2vec2-conformer hubert wavlm unispeech unispeech-sat sew sew-d
        data2vec-audio audio-spectrogram-transformer speech_to_text speecht5 seamless_m4t moonshine parakeet_ctc
        encodec clap
    """),
    "several senses": names("""
        clip chinese_clip altclip align aimv2 siglip siglip2 metaclip_2 clipseg groupvit flava xclip
        vision-text-dual-encoder owlvit blip blip-2 bridgetower vilt visual_bert lxmert git kosmos-2
        vision-encoder-decoder speech-encoder-decoder llava llava_next vipllava idefics2 idefics3 smolvlm
        qwen2_vl qwen2_5_vl qwen3_vl glm4v internvl gemma3 aya_vision mllama florence2 instructblip
    """),
    "other": names("""
        autoformer informer time_series_transformer patchtst patchtsmixer timesfm decision_transformer
    """),
}

# left out: types without their own model, types that need more packages or seconds per step, and reformer (own seeds)
ALL = names("""
    EvollaModel afmoe aimv2 aimv2_text_model aimv2_vision_model albert align align_text_model align_vision_model
    altclip altclip_text_model altclip_vision_model apertus arcee aria_text audio-spectrogram-transformer
    audioflamingo3 audioflamingo3_encoder autoformer axk1 axk2 aya_vision bailing_hybrid bamba bart beam beit
    bert bert-generation big_bird bigbird_pegasus biogpt bit bitnet blenderbot blenderbot-small blip blip-2
    blip_2_vision_model blip_vision_model bloom blt blt_patcher bridgetower bridgetower_text_model bros
    camembert canary canary_decoder canine chameleon chinese_clip chinese_clip_text_model
    chinese_clip_vision_model clap clap_audio_model clap_text_model clip clip_text_model clip_vision_model
    clipseg clipseg_text_model clipseg_vision_model clvp_decoder codegen cohere cohere2 cohere2_moe
    cohere2_vision cohere_asr cohere_compass_vision conditional_detr convbert convnext convnextv2 cosmos3_edge
    cosmos3_edge_text cosmos3_edge_vision cosmos3_omni cpmant csm_depth_decoder_model ctrl cvt cwm dab-detr dac
    data2vec-audio data2vec-text data2vec-vision dbrx deberta deberta-v2 decision_transformer
    deepseek_ocr2_sam_vision_model deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl deformable_detr
    deit depth_anything dia dia_encoder diffllama dinov2 dinov2_with_registers dinov3_convnext dinov3_vit
    distilbert doge donut-swin dpr dpt efficientnet electra embedding_gemma2_text emu3_text_model encodec
    encoder-decoder ernie ernie4_5 ernie4_5_moe ernie4_5_vl_moe_vision esm esmc eurobert evolla exaone4
    exaone4_5 exaone4_5_vision exaone_moe falcon falcon_h1 falcon_mamba flaubert flava flava_image_model
    flava_text_model flex_olmo flint florence2 fnet focalnet fsmt funnel fuyu gemma gemma2 gemma3 gemma3_text
    gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text git git_vision_model glm glm4 glm46v
    glm4_moe glm4_moe_lite glm4v glm4v_moe glm4v_moe_text glm4v_moe_vision glm4v_text glm4v_vision
    glm5_next_vision glm_image_text glm_image_vision glm_moe_dsa glm_ocr glm_ocr_text glm_ocr_vision glmasr
    glmasr_encoder glmga glpn got_ocr2 got_ocr2_vision gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox
    gpt_neox_japanese gpt_oss gptj granite granite4_vision_text granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared groupvit groupvit_text_model groupvit_vision_model gte helium hgnet_v2
    hiera higgs_audio_v2 hrm_text hubert hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hunyuan_vl_text
    hunyuan_vl_vision hy_v3 hy_v4 hyperclovax hyperclovax_vision_v2 ibert idefics idefics2 idefics2_vision
    idefics3 idefics3_vision ijepa imagegpt informer inkling_text instructblip instructblip_qformer
    instructblip_vision_model instructblipvideo_qformer internvl internvl_vision jais2 jamba janus
    janus_vision_model jetmoe jina_embeddings_v3 kimi_linear kolibri1 kosmos-2 kosmos-2.5 kosmos_2_5_text_model
    kosmos_2_text_model kosmos_2_vision_model laguna lasr_ctc lasr_encoder layoutlm layoutlmv3 led levit lfm2
    lfm2_moe lfm2_vl lighton_ocr lilt llama llama4 llama4_text llama4_vision_model llava llava_next
    llava_next_video llava_onevision longcat_flash longformer longt5 luke lw_detr_vit lxmert m2m_100 mamba
    mamba2 marian markuplm maskformer-swin mbart megatron-bert mellum metaclip_2 metaclip_2_text_model
    metaclip_2_vision_model mgp-str mimi mimo_v2_flash minicpm3 minicpm_ocr minicpmv4_6 minicpmv4_7 minimax
    minimax_m2 minimax_m3_vl minimax_m3_vl_text minimax_m3_vl_vision ministral ministral3 mistral mistral3
    mistral4 mistral_large4 mistral_large4_text mixtral mlcd mlcd_vision_model mllama mllama_text_model
    mobilebert mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 modernbert modernbert-decoder modernvbert
    molmo2_text moonshine moonshine_streaming_encoder moshi moss_transcribe_diarize_audio mpnet mpt mra mt5
    muse_glimmer_text muse_glimmer_vision muse_spark_text muse_spark_vision musicgen_decoder
    musicgen_melody_decoder mvp nanochat nemotron nemotron3_5_asr nemotron3_5_transcribe_asr_audio
    nemotron3_5_transcribe_audio nemotron3_diarization nemotron3_diarization_audio nemotron_asr_streaming
    nemotron_asr_streaming_encoder nemotron_h nllb-moe nomic_bert nystromformer olmo olmo2 olmo3 olmo_hybrid
    olmoe openai-gpt openai_privacy_filter opt ovis2 ovis2_vision owlv2 owlv2_text_model owlv2_vision_model
    owlvit owlvit_text_model owlvit_vision_model paddleocr_vl_text parakeet_ctc parakeet_encoder parakeet_rnnt
    parakeet_tdt patchtsmixer patchtst pe_audio pe_audio_encoder pegasus pegasus_x perceiver persimmon phi phi3
    phi4_multimodal phi4_multimodal_vision phimoe pixio pixtral plbart poolformer pop2piano pp_chart2table
    pp_formulanet pp_formulanet_vision pp_lcnet pp_lcnet_v3 prompt_depth_anything prophetnet pvt pvt_v2
    qianfan_ocr qianfan_ocr_vision qwen2 qwen2_5_omni_text qwen2_5_omni_vision_encoder qwen2_5_vl
    qwen2_5_vl_text qwen2_5_vl_vision qwen2_audio_encoder qwen2_moe qwen2_vl qwen2_vl_text qwen2_vl_vision qwen3
    qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_moe_vision qwen3_5_text qwen3_5_vision qwen3_moe qwen3_next
    qwen3_omni_moe_text qwen3_omni_moe_vision_encoder qwen3_vl qwen3_vl_moe qwen3_vl_moe_text
    qwen3_vl_moe_vision qwen3_vl_text qwen3_vl_vision qwen4_exp_vision radio recurrent_gemma regnet rembert
    resnet rf_detr rf_detr_dinov2 roberta roberta-prelayernorm roc_bert roformer rt_detr_resnet rwkv sam sam3
    sam3_lite_text sam3_lite_text_text_model sam3_vision_model sam3_vit_model sam_hq sam_hq_vision_model
    sam_vision_model seamless_m4t seamless_m4t_v2 seed_oss segformer sew sew-d shieldgemma2 siglip siglip2
    siglip2_text_model siglip2_vision_model siglip_text_model siglip_vision_model slanext slanext_vision smollm3
    smolvlm smolvlm_vision solar_open speech-encoder-decoder speech_to_text speecht5 splinter squeezebert
    stablelm starcoder2 step3p5_vision superpoint swiftformer swin swin2sr swinv2 switch_transformers t5 t5gemma
    t5gemma2 t5gemma2_encoder t5gemma2_text table-transformer tapas textnet time_series_transformer timesfm
    timesfm2_5 timesformer tipsv2 tipsv2_text_model tipsv2_vision_model trocr udop ultrabert ultravbert umt5
    unispeech unispeech-sat unlimited_ocr_sam_vision_model unlimited_ocr_text uvdoc_backbone vaultgemma
    video_llava videomae videoprism videoprism_text_model videoprism_vision_model vilt vipllava
    vision-encoder-decoder vision-text-dual-encoder visual_bert vit vit_mae vit_msn vitdet vitpose
    vitpose_backbone vivit vjepa2 voxtral_encoder voxtral_realtime_encoder wav2vec2 wav2vec2-bert
    wav2vec2-conformer wavlm whisper xclip xclip_text_model xclip_vision_model xglm xlm xlm-roberta
    xlm-roberta-xl xlnet xlstm xmod yolos yoso youtu zamba2 zaya
""")
