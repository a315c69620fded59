"""What config.json may leave out, by the class of the model.

A test compares it with the classes of transformers.
"""

from typing import Any

_ROPE: dict[str, Any] = {"rope_theta": 10_000.0, "tie_word_embeddings": False}
_LLAMA = dict(_ROPE, hidden_act="silu", rms_norm_eps=1e-6)
_QWEN2 = dict(_LLAMA, use_sliding_window=False, sliding_window=4096, max_window_layers=28)
_GEMMA = dict(
    _ROPE, rms_norm_eps=1e-6, tie_word_embeddings=True, head_dim=256, attention_bias=False
)
_GEMMA2 = dict(
    _GEMMA,
    model_type="gemma2",
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    sliding_window=4096,
    sliding_window_pattern=2,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    use_bidirectional_attention=None,
)
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": dict(
        _LLAMA,
        model_type="llama",
        num_key_value_heads=None,
        head_dim=None,
        attention_bias=False,
        mlp_bias=False,
    ),
    "MistralForCausalLM": dict(_LLAMA, model_type="mistral", head_dim=None, sliding_window=4096),
    "Qwen2ForCausalLM": dict(_QWEN2, model_type="qwen2"),
    "Qwen3ForCausalLM": dict(_QWEN2, model_type="qwen3", head_dim=128, attention_bias=False),
    "GemmaForCausalLM": dict(
        _GEMMA, model_type="gemma", hidden_act="gelu_pytorch_tanh", use_bidirectional_attention=None
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": dict(
        _GEMMA2,
        model_type="gemma3_text",
        # Of layers that see all positions.
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        sliding_window_pattern=6,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        use_bidirectional_attention=False,
    ),
    "PhiForCausalLM": dict(
        _ROPE,
        model_type="phi",
        hidden_act="gelu_new",
        layer_norm_eps=1e-5,
        num_key_value_heads=None,
        partial_rotary_factor=0.5,
        qk_layernorm=False,
    ),
    "Phi3ForCausalLM": dict(
        _LLAMA,
        model_type="phi3",
        rms_norm_eps=1e-5,
        num_key_value_heads=None,
        sliding_window=None,
        original_max_position_embeddings=4096,
    ),
    "GPT2LMHeadModel": {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_inner": None,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
    "OPTForCausalLM": {
        "model_type": "opt",
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "word_embed_proj_dim": None,
        "_remove_final_layer_norm": False,
        "tie_word_embeddings": True,
    },
}
HEADLESS = {
    name.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model"): name for name in DEFAULTS
}
"""The classes of DEFAULTS by their names without a head, as embedding models have them."""
