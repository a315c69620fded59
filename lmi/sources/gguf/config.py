"""Makes the content of config.json from the metadata of a GGUF file.

The names are those of transformers. For a value that a file leaves out, this module takes the
default of llama.cpp. Sources: `src/llama-model.cpp` of llama.cpp, which reads these keys, and
`convert_hf_to_gguf.py`, which writes them.
"""

import struct
from collections.abc import Callable
from typing import Any

from lmi.shared.gguf_file import GgufModel
from lmi.sources.gguf.values import GgufValues

Config = dict[str, Any]

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
ROPE_FREQUENCIES = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
MAX_FACTORS = 4096
# The largest of these families divide by the width of the model's heads, not by that of their keys.
LAYERS_OF_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}


def config_of(model: GgufModel) -> Config:
    """Return the content of config.json. Raises ModelUnusable for a model that is not read here."""
    values = GgufValues(model)
    family = FAMILIES.get(values.architecture)
    if family is None:
        names = ", ".join(FAMILIES)
        raise values.fault("general.architecture", f"one of {names}", values.architecture)

    if values.whole(".expert_count", 0, least=0):
        raise values.refusal("models with experts are not read from GGUF")

    if not values.switch(".attention.causal", True) or values.whole(".pooling_type", 0, least=0):
        raise values.refusal("embedding models are not read from GGUF")

    return family(values, model)


def _decoder(values: GgufValues, model: GgufModel) -> Config:
    """Return what every family has."""
    hidden_size = values.whole(".embedding_length")
    num_heads = values.whole(".attention.head_count")
    if EMBEDDING not in model.tensors or len(model.tensors[EMBEDDING].shape) != 2:
        raise values.refusal(f"it has no tensor {EMBEDDING} of two dimensions")

    return {
        "vocab_size": model.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": values.whole(".block_count"),
        "num_attention_heads": num_heads,
        "max_position_embeddings": values.whole(".context_length"),
        "intermediate_size": values.whole(".feed_forward_length"),
        "tie_word_embeddings": HEAD not in model.tensors,
    }


def _rotated(values: GgufValues, model: GgufModel, **facts: Any) -> Config:
    """Return what every family has whose queries and keys are rotated, and whose norms divide by
    the root of the mean square.

    `facts` are added as they are.
    """
    config = _decoder(values, model)
    num_heads = config["num_attention_heads"]
    width_of_heads = max(1, config["hidden_size"] // num_heads)
    head_dim = values.whole(".attention.key_length", width_of_heads)
    if values.whole(".attention.value_length", head_dim) != head_dim:
        raise values.refusal("heads whose values are wider or narrower than keys are not read")

    config |= {
        "num_key_value_heads": values.whole(".attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": values.number(".attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": values.number(".rope.freq_base", 10_000.0),
    }

    num_channels = values.whole(".rope.dimension_count", head_dim)
    if num_channels != head_dim:
        config["partial_rotary_factor"] = num_channels / head_dim

    scaling = _rope_scaling(values, config["max_position_embeddings"])
    if scaling:
        config["rope_scaling"] = scaling

    return config | facts


def _rope_scaling(values: GgufValues, context_length: int) -> Config | None:
    """Return what makes rotations slower, by a rule that the metadata names, or None."""
    kind = values.text(".rope.scaling.type", "none")
    if kind == "none" or kind == "longrope":
        return None

    factor = values.number(".rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}

    if kind != "yarn":
        raise values.fault(".rope.scaling.type", "none, linear, yarn or longrope", kind)

    if values.number(".rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise values.refusal("rope.scaling.yarn_ext_factor is read only where it is 1")

    scaling: Config = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": values.whole(
            ".rope.scaling.original_context_length", context_length
        ),
    }
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if f".rope.scaling.{key}" in values:
            scaling[name] = values.number(f".rope.scaling.{key}")

    return scaling


def _factors(values: GgufValues, model: GgufModel, name: str) -> list[float]:
    """Return the numbers of a small tensor, by which the wavelength of each pair of channels
    grows.
    """
    tensor = model.tensors[name]
    num_factors = tensor.shape[-1]
    if tensor.type.name != "F32" or tensor.shape != (num_factors,) or num_factors > MAX_FACTORS:
        raise values.refusal(f"tensor {name} must be F32 with one dimension, up to {MAX_FACTORS}")

    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        data = file.read(tensor.num_bytes)

    if len(data) < tensor.num_bytes:
        raise values.refusal(f"it ends within tensor {name}")

    return list(struct.unpack(f"<{num_factors}f", data))


def _llama(values: GgufValues, model: GgufModel) -> Config:
    """Return the configuration of a Llama, or of a Mistral, whose files say that it is a Llama.

    The scaling of Llama 3 is a tensor of factors.
    """
    config = _rotated(
        values,
        model,
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_act="silu",
        attention_bias="blk.0.attn_q.bias" in model.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in model.tensors,
    )
    if ROPE_FREQUENCIES not in model.tensors:
        return config

    if "rope_scaling" in config:
        raise values.refusal(f"it has both {ROPE_FREQUENCIES} and rope.scaling.type")

    factors = _factors(values, model, ROPE_FREQUENCIES)
    config["rope_scaling"] = {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
    }
    config["original_max_position_embeddings"] = config["max_position_embeddings"]
    return config


def _qwen2(values: GgufValues, model: GgufModel) -> Config:
    facts = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"}
    return _rotated(values, model, **facts)


def _qwen3(values: GgufValues, model: GgufModel) -> Config:
    facts = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
    return _rotated(values, model, **facts)


def _gemma(values: GgufValues, model: GgufModel) -> Config:
    return _rotated(
        values,
        model,
        architectures=["GemmaForCausalLM"],
        model_type="gemma",
        hidden_act="gelu_pytorch_tanh",
    )


def _with_windows(values: GgufValues, model: GgufModel, pattern: int) -> Config:
    """Return what Gemma 2 and 3 share: of `pattern` layers in turn only the last sees all
    positions.
    """
    config = _rotated(values, model, hidden_activation="gelu_pytorch_tanh")
    num_layers = config["num_hidden_layers"]

    key = ".attention.sliding_window_pattern"
    if isinstance(values.metadata.get(values.key(key)), list):
        kinds = {True: "sliding_attention", False: "full_attention"}
        config["layer_types"] = [kinds[is_windowed] for is_windowed in values.switches(key)]
    else:
        config["sliding_window_pattern"] = values.whole(key, pattern)

    is_largest = num_layers == LAYERS_OF_LARGEST_GEMMA[values.architecture]
    width_of_heads = max(1, config["hidden_size"] // config["num_attention_heads"])
    config["query_pre_attn_scalar"] = width_of_heads if is_largest else config["head_dim"]
    return config


def _gemma2(values: GgufValues, model: GgufModel) -> Config:
    return _with_windows(values, model, pattern=2) | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": values.whole(".attention.sliding_window", 4096),
        "attn_logit_softcapping": values.number(".attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.number(".final_logit_softcapping", 30.0),
    }


def _gemma3(values: GgufValues, model: GgufModel) -> Config:
    config = _with_windows(values, model, pattern=6) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": values.whole(".attention.sliding_window"),
        "rope_local_base_freq": values.number(".rope.freq_base_swa", 10_000.0),
        "use_bidirectional_attention": False,
    }
    if ".final_logit_softcapping" in values:
        config["final_logit_softcapping"] = values.number(".final_logit_softcapping")

    return config


def _phi2(values: GgufValues, model: GgufModel) -> Config:
    config = _rotated(
        values, model, architectures=["PhiForCausalLM"], model_type="phi", hidden_act="gelu_new"
    )
    config["layer_norm_eps"] = values.number(".attention.layer_norm_epsilon", 1e-5)
    config.setdefault("partial_rotary_factor", 1.0)
    return config


def _phi3(values: GgufValues, model: GgufModel) -> Config:
    """Return the configuration of a Phi-3 or Phi-4.

    The window of Phi-3 counts here as its maker counts it, unlike in llama.cpp.
    """
    config = _rotated(
        values, model, architectures=["Phi3ForCausalLM"], model_type="phi3", hidden_act="silu"
    )
    config["sliding_window"] = values.whole(".attention.sliding_window", 0, least=0) or None
    length = values.whole(
        ".rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    config["original_max_position_embeddings"] = length

    if SHORT_FACTORS in model.tensors and LONG_FACTORS in model.tensors:
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": _factors(values, model, SHORT_FACTORS),
            "long_factor": _factors(values, model, LONG_FACTORS),
            "attention_factor": values.number(".rope.scaling.attn_factor", 1.0),
        }

    return config


def _gpt2(values: GgufValues, model: GgufModel) -> Config:
    config = _decoder(values, model)
    return config | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_inner": config["intermediate_size"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": values.number(".attention.layer_norm_epsilon", 1e-5),
    }


FAMILIES: dict[str, Callable[[GgufValues, GgufModel], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi2": _phi2,
    "phi3": _phi3,
    "gpt2": _gpt2,
}
