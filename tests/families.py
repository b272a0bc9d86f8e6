"""Every model family that is served, tiny: from its own configuration, with random weights, without a download."""

import torch
import transformers as hf

VOCABULARY = 300
WINDOW = 12  # shorter than most prompts of the tests

_HEADS = {"num_hidden_layers": 3, "num_attention_heads": 6}
_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 48, **_HEADS, **_ENDS}
_MODERN = {**_SIZES, "intermediate_size": 64}
_GROUPED = {**_MODERN, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 3, "n_head": 6, **_ENDS}
_OPT = {**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 48, "max_position_embeddings": 256}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MIXED = ["sliding_attention", "sliding_attention", "full_attention"]

FAMILIES = {
    "gpt2": lambda: hf.GPT2Config(**_GPT2),
    "gpt2, two layers of full width": lambda: hf.GPT2Config(**{**_GPT2, "n_embd": 768, "n_layer": 2, "n_head": 12}),
    "bloom": lambda: hf.BloomConfig(**{**_SIZES, "n_layer": 3, "n_head": 6}),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**_MODERN),
    "opt": lambda: hf.OPTConfig(**_OPT),
    "opt, projected, norms behind": lambda: hf.OPTConfig(
        **{**_OPT, "word_embed_proj_dim": 24, "do_layer_norm_before": False}
    ),
    "gpt-bigcode, multi-query": lambda: hf.GPTBigCodeConfig(**_GPT2),
    "gpt-bigcode, multi-head": lambda: hf.GPTBigCodeConfig(**_GPT2, multi_query=False),
    "mpt": lambda: hf.MptConfig(vocab_size=VOCABULARY, d_model=48, n_layers=3, n_heads=6, **_ENDS),
    "falcon, rotary": lambda: hf.FalconConfig(**_SIZES),
    "falcon, alibi": lambda: hf.FalconConfig(**_SIZES, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "falcon, grouped": lambda: hf.FalconConfig(**_SIZES, num_kv_heads=2, new_decoder_architecture=True),
    "llama": lambda: hf.LlamaConfig(**_GROUPED),
    "mistral, window": lambda: hf.MistralConfig(**_GROUPED, sliding_window=WINDOW),
    "mixtral, window": lambda: hf.MixtralConfig(**_GROUPED, **_EXPERTS, sliding_window=WINDOW),
    "qwen2": lambda: hf.Qwen2Config(**_GROUPED),
    "qwen2, some windows": lambda: hf.Qwen2Config(
        **_GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: hf.Qwen3Config(**_GROUPED, head_dim=8),
    "gemma2, some windows": lambda: hf.Gemma2Config(**_GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    "gemma3, some windows": lambda: hf.Gemma3TextConfig(**_GEMMA, layer_types=_MIXED),
    "gemma3, soft-capped": lambda: hf.Gemma3TextConfig(
        **_GEMMA, layer_types=_MIXED, attn_logit_softcapping=2.0, final_logit_softcapping=5.0
    ),
    "phi3, window": lambda: hf.Phi3Config(**_GROUPED, sliding_window=WINDOW),
    "olmo2": lambda: hf.Olmo2Config(**_GROUPED),
    "granite": lambda: hf.GraniteConfig(**_GROUPED),
    "cohere": lambda: hf.CohereConfig(**_GROUPED),
    "stablelm": lambda: hf.StableLmConfig(**_GROUPED),
    "smollm3": lambda: hf.SmolLM3Config(**_GROUPED, no_rope_layers=[1, 1, 0]),
    "smollm3, some windows": lambda: hf.SmolLM3Config(
        **_GROUPED, no_rope_layers=[1, 1, 0], use_sliding_window=True, sliding_window=WINDOW, layer_types=_MIXED
    ),
    "deepseek-v3, values narrower than keys": lambda: hf.DeepseekV3Config(
        **_MODERN, num_key_value_heads=6, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
        moe_intermediate_size=32, first_k_dense_replace=1,
    ),
}  # fmt: skip
WINDOWED = [family for family in FAMILIES if "window" in family or family == "gemma3, soft-capped"]


def build(config: hf.PreTrainedConfig, **options) -> hf.PreTrainedModel:
    """The float32 model of a configuration, with the same weights every time.

    They are larger than a fresh model's, so that logits differ by more than rounding does. The embeddings are less so:
    where they are the output layer, too, a model would only repeat its last token.
    """
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(2 if parameter is model.get_input_embeddings().weight else 12)
    return model
