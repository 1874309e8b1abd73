"""Tiny random-weight reference models (transformers 5.24, CPU, eager).

usage: python recipes.py [name ...]     -> runs a 7-token forward for each recipe
import: build(name, seed=0, dtype=torch.float32, randomize=True) -> eval() model on CPU
"""

# pyright: reportArgumentType=false, reportCallIssue=false
import sys

import torch
import transformers as T

V = 131  # prime vocabulary: never divides by the TP size
COMMON = dict(vocab_size=V, pad_token_id=None, bos_token_id=1, eos_token_id=2, initializer_range=0.2)


def llama():  # 6 q / 3 kv heads; hidden % heads must be 0 (validator); head_dim 16 != 60/6
    return T.LlamaForCausalLM, T.LlamaConfig(
        **COMMON,
        hidden_size=60,
        intermediate_size=77,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    )


def llama3_scaled():  # legacy layout: rope_theta + rope_scaling, tied, all biases on
    return T.LlamaForCausalLM, T.LlamaConfig(
        **COMMON,
        hidden_size=60,
        intermediate_size=77,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=500000.0,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    )  # 64: wavelengths fall in all three bands


def mistral():  # window 4 on EVERY layer; 9 q / 3 kv
    return T.MistralForCausalLM, T.MistralConfig(
        **COMMON,
        hidden_size=52,
        intermediate_size=77,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        sliding_window=4,
    )


def qwen2():  # qkv bias always on, o_proj bias off; layer 1 sliding; head_dim is an accepted extra field
    return T.Qwen2ForCausalLM, T.Qwen2Config(
        **COMMON,
        hidden_size=54,
        intermediate_size=77,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        tie_word_embeddings=True,
    )


def qwen3():
    return T.Qwen3ForCausalLM, T.Qwen3Config(
        **COMMON,
        hidden_size=52,
        intermediate_size=77,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=2,
        attention_bias=True,
    )


_Q35 = dict(
    hidden_size=52,
    intermediate_size=77,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=24,
    attention_bias=False,
    max_position_embeddings=256,
    linear_num_key_heads=3,
    linear_num_value_heads=6,
    linear_key_head_dim=12,
    linear_value_head_dim=20,
    linear_conv_kernel_dim=4,
    layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    rope_parameters=dict(
        rope_type="default",
        rope_theta=10000.0,
        partial_rotary_factor=0.5,
        mrope_section=[2, 2, 2],
        mrope_interleaved=True,
    ),
)


def qwen3_5():  # partial rotary 12 of 24 dims; 3 k-heads / 6 v-heads in the delta net
    return T.Qwen3_5ForCausalLM, T.Qwen3_5TextConfig(**COMMON, **_Q35)


def qwen3_5_vl():  # wrapper: checkpoint prefix model.language_model.
    return T.Qwen3_5ForConditionalGeneration, T.Qwen3_5Config(
        text_config=dict(**COMMON, **_Q35),
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=7,
        vision_end_token_id=8,
        vision_config=dict(
            depth=1,
            hidden_size=16,
            intermediate_size=16,
            num_heads=2,
            out_hidden_size=52,
            num_position_embeddings=16,
            patch_size=4,
        ),
    )


_G3 = dict(
    hidden_size=60,
    intermediate_size=77,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=16,
    query_pre_attn_scalar=10,
    sliding_window=4,
    layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    max_position_embeddings=256,
    final_logit_softcapping=5.0,
    rope_parameters=dict(
        sliding_attention=dict(rope_type="default", rope_theta=10000.0),
        full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
    ),
)


def gemma3():  # hidden % heads must be 0 (validator); text-only class of gemma3_text
    return T.Gemma3ForCausalLM, T.Gemma3TextConfig(**COMMON, **_G3)


def gemma3_vl():  # wrapper
    return T.Gemma3ForConditionalGeneration, T.Gemma3Config(
        text_config=dict(model_type="gemma3_text", **COMMON, **_G3),
        image_token_index=5,
        boi_token_index=6,
        eoi_token_index=7,
        mm_tokens_per_image=4,
        vision_config=dict(
            model_type="siglip_vision_model",
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
        ),
    )


_G4 = dict(
    hidden_size=52,
    intermediate_size=77,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=16,
    global_head_dim=24,
    sliding_window=4,
    layer_types=[
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ],
    max_position_embeddings=256,
    final_logit_softcapping=5.0,
    hidden_size_per_layer_input=10,
    vocab_size_per_layer_input=V,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
)


def gemma4_e():  # "E2B/E4B" style: PLE + KV sharing + double-wide MLP
    return T.Gemma4ForCausalLM, T.Gemma4TextConfig(**COMMON, **_G4)


def gemma4_keqv():  # "31B dense" style: k_eq_v with its own global kv-head count, no PLE, no sharing
    return T.Gemma4ForCausalLM, T.Gemma4TextConfig(
        **COMMON,
        **{**_G4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False},
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
    )


def gemma4_vl():  # wrapper without towers
    return T.Gemma4ForConditionalGeneration, T.Gemma4Config(
        text_config=dict(model_type="gemma4_text", **{**COMMON, "pad_token_id": 0}, **_G4),  # wrapper needs a pad id
        vision_config=None,
        audio_config=None,
        image_token_id=5,
        video_token_id=6,
        audio_token_id=7,
        boi_token_id=8,
        eoi_token_id=9,
        boa_token_id=10,
        eoa_token_index=11,
    )


def ernie4_5():
    return T.Ernie4_5ForCausalLM, T.Ernie4_5Config(
        **COMMON,
        hidden_size=52,
        intermediate_size=77,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        use_bias=True,
        tie_word_embeddings=True,
    )


def hunyuan():  # head_dim is mandatory; alpha -> static NTK
    return T.HunYuanDenseV1ForCausalLM, T.HunYuanDenseV1Config(
        **COMMON,
        eod_token_id=3,
        hidden_size=52,
        intermediate_size=77,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        rope_scaling=dict(
            type="dynamic", alpha=1000.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0
        ),
    )


# ---------------------------------------------------------------- second wave
def qwen3_moe():
    return T.Qwen3MoeForCausalLM, T.Qwen3MoeConfig(
        **COMMON,
        hidden_size=52,
        intermediate_size=77,
        moe_intermediate_size=21,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    )


def mixtral():
    return T.MixtralForCausalLM, T.MixtralConfig(
        **COMMON,
        hidden_size=52,
        intermediate_size=21,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        num_local_experts=5,
        num_experts_per_tok=2,
    )


def gpt_oss():
    return T.GptOssForCausalLM, T.GptOssConfig(
        **COMMON,
        hidden_size=52,
        intermediate_size=21,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=4,
        rope_parameters=dict(
            rope_type="yarn",
            factor=8.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=32,
            rope_theta=150000.0,
        ),
    )


def olmo2():
    return T.Olmo2ForCausalLM, T.Olmo2Config(
        **COMMON,
        hidden_size=52,
        intermediate_size=77,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
    )


def olmo3():
    return T.Olmo3ForCausalLM, T.Olmo3Config(
        **COMMON,
        hidden_size=52,
        intermediate_size=77,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        sliding_window=4,
        rope_theta=500000.0,
        rope_scaling=dict(
            rope_type="yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            attention_factor=1.2079441541679836,
            beta_fast=32,
            beta_slow=1,
        ),
    )


def phi3():  # longrope; rotary dims 12 of 16 -> factor lists of length 6; hidden/heads is used by the validator
    return T.Phi3ForCausalLM, T.Phi3Config(
        **COMMON,
        hidden_size=96,
        intermediate_size=77,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=256,
        original_max_position_embeddings=32,
        partial_rotary_factor=0.75,
        rope_theta=10000.0,
        rope_scaling=dict(
            type="longrope", short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5], long_factor=[1, 2.0, 3.0, 4.0, 5.0, 6.0]
        ),
    )


def glm4():
    return T.Glm4ForCausalLM, T.Glm4Config(
        **COMMON,
        hidden_size=52,
        intermediate_size=77,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        partial_rotary_factor=0.5,
    )


def granite():
    return T.GraniteForCausalLM, T.GraniteConfig(
        **COMMON,
        hidden_size=52,
        intermediate_size=77,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        embedding_multiplier=12.0,
        attention_multiplier=0.11,
        residual_multiplier=0.22,
        logits_scaling=8.0,
    )


def deepseek_v3():
    return T.DeepseekV3ForCausalLM, T.DeepseekV3Config(
        **COMMON,
        hidden_size=52,
        intermediate_size=77,
        moe_intermediate_size=21,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=20,
        kv_lora_rank=24,
        qk_rope_head_dim=12,
        qk_nope_head_dim=12,
        v_head_dim=10,
        n_routed_experts=6,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=3,
        topk_group=2,
        first_k_dense_replace=1,
        max_position_embeddings=256,
        num_nextn_predict_layers=0,
        rope_theta=10000.0,
        rope_scaling=dict(
            type="yarn",
            factor=8.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            beta_fast=32,
            beta_slow=1,
            original_max_position_embeddings=128,
        ),
    )


FIRST = [
    llama,
    llama3_scaled,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_vl,
    gemma3,
    gemma3_vl,
    gemma4_e,
    gemma4_keqv,
    gemma4_vl,
    ernie4_5,
    hunyuan,
]
SECOND = [qwen3_moe, mixtral, gpt_oss, olmo2, olmo3, phi3, glm4, granite, deepseek_v3]
RECIPES = {f.__name__: f for f in FIRST + SECOND}


@torch.no_grad()
def randomize_(model, seed=0):
    """Give every parameter that transformers initialises to a constant (norm weights, biases, dt_bias, layer_scalar,
    e_score_correction_bias) a random value, else a test cannot notice that it is ignored."""
    g = torch.Generator().manual_seed(seed)
    for n, p in list(model.named_parameters()) + [
        (n, b) for n, b in model.named_buffers() if n.endswith(("layer_scalar", "e_score_correction_bias"))
    ]:
        if (p.dim() <= 1 or n.endswith("_bias")) and not n.endswith(
            ("A_log", "sinks")
        ):  # gpt_oss expert biases are 2-D
            p.add_(torch.randn(p.shape, generator=g).to(p) * 0.3)


def build(name, seed=0, dtype=torch.float32, randomize=True):
    cls, cfg = RECIPES[name]()
    torch.manual_seed(seed)
    if "moe" in name or name in ("mixtral", "gpt_oss", "deepseek_v3"):
        cfg._experts_implementation = "eager"  # default "grouped_mm" wants 16-byte strides -> odd sizes crash
    m = cls._from_config(cfg, attn_implementation="eager", dtype=dtype).eval()
    if randomize:
        randomize_(m, seed)
    return m


@torch.no_grad()
def run(name, n=7):
    m = build(name)
    torch.manual_seed(1)
    ids = torch.randint(12, V, (1, n))
    out = m(input_ids=ids, use_cache=False).logits
    # incremental decode must agree with the full forward
    o1 = m(input_ids=ids[:, :-2], use_cache=True)
    cache = o1.cache if "cache" in o1 else o1.past_key_values
    inc = [o1.logits]
    for i in (n - 2, n - 1):
        o1 = m(input_ids=ids[:, i : i + 1], cache=cache, use_cache=True)
        inc.append(o1.logits)
    d = (torch.cat(inc, 1) - out).abs().max().item()
    return m, out, d


if __name__ == "__main__":
    names = sys.argv[1:] or list(RECIPES)
    for n in names:
        try:
            m, out, d = run(n)
            print(
                f"OK   {n:14s} logits {tuple(out.shape)} std {out.std():.3f} finite {bool(out.isfinite().all())} "
                f"cache-vs-full maxdiff {d:.2e}  params {sum(p.numel() for p in m.parameters())}"
            )
        except Exception as e:
            import traceback

            traceback.print_exc()
            print(f"FAIL {n:14s} {type(e).__name__}: {str(e)[:300]}")
