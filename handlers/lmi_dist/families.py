"""The families of decoders: for each a table of tensor names, and what differs from the others.

The names in the table say which parts a layer has: a family with `q_norm` normalises its queries,
one with `gate_up` has gate and `up` in one tensor. A model that `describe` does not know runs
through `hf_fallback`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from handlers.lmi_dist.config_file import class_name
from handlers.lmi_dist.rotary import Rotary, rotaries_of, stable_context_length

# The path of each part of a decoder in a checkpoint; {} is the number of the layer.
Names = Mapping[str, str]


def _without(names: Names, *parts: str) -> dict[str, str]:
    """Return the names of all parts but these."""
    return {part: path for part, path in names.items() if part not in parts}


_LLAMA: Names = {
    "embedding": "model.embed_tokens",
    "head": "lm_head",
    "norm": "model.norm",
    "input_norm": "model.layers.{}.input_layernorm",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "o": "model.layers.{}.self_attn.o_proj",
    "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
}
_HEAD_NORMS: Names = {
    "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm",
}
_SANDWICH_NORMS: Names = {
    "post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
    "post_mlp_norm": "model.layers.{}.post_feedforward_layernorm",
}
_GEMMA2: Names = {**_LLAMA, **_SANDWICH_NORMS}
_GEMMA3: Names = {**_GEMMA2, **_HEAD_NORMS}
_QWEN3: Names = {**_LLAMA, **_HEAD_NORMS}
_PHI3: Names = _without(_LLAMA, "q", "k", "v", "gate", "up") | {
    "qkv": "model.layers.{}.self_attn.qkv_proj",
    "gate_up": "model.layers.{}.mlp.gate_up_proj",
}
_PHI: Names = _without(_LLAMA, "mlp_norm", "gate") | {
    "norm": "model.final_layernorm",
    "o": "model.layers.{}.self_attn.dense",
    "up": "model.layers.{}.mlp.fc1",
    "down": "model.layers.{}.mlp.fc2",
}
_GPT2: Names = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "head": "lm_head",
    "norm": "transformer.ln_f",
    "input_norm": "transformer.h.{}.ln_1",
    "qkv": "transformer.h.{}.attn.c_attn",
    "o": "transformer.h.{}.attn.c_proj",
    "mlp_norm": "transformer.h.{}.ln_2",
    "up": "transformer.h.{}.mlp.c_fc",
    "down": "transformer.h.{}.mlp.c_proj",
}
_OPT: Names = {
    "embedding": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "head": "lm_head",
    "norm": "model.decoder.final_layer_norm",
    "input_norm": "model.decoder.layers.{}.self_attn_layer_norm",
    "q": "model.decoder.layers.{}.self_attn.q_proj",
    "k": "model.decoder.layers.{}.self_attn.k_proj",
    "v": "model.decoder.layers.{}.self_attn.v_proj",
    "o": "model.decoder.layers.{}.self_attn.out_proj",
    "mlp_norm": "model.decoder.layers.{}.final_layer_norm",
    "up": "model.decoder.layers.{}.fc1",
    "down": "model.decoder.layers.{}.fc2",
}

# The activations of `Linear`, by their names in config.json.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


# The types of a layer in config.json.
_FULL = "full_attention"
_SLIDING = "sliding_attention"


class Architecture(Struct, frozen=True, kw_only=True):
    """What a program needs to know of a model beside its weights."""

    names: Names
    vocab_size: int
    context_length: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # The factor of the products of query and key.
    scale: float
    # One of the values of _ACTIVATIONS.
    activation: str
    norm_eps: float
    # By layer. None: queries and keys are not rotated.
    rotaries: tuple[Rotary | None, ...]
    # By layer: how many positions back a query sees, itself included. None: all.
    windows: tuple[int | None, ...]
    # The parts that have a bias, of those that are linears. Norms of kind "layer" always have one.
    biases: frozenset[str] = frozenset()
    # The kind of norms: "rms" or "layer".
    norm: str = "rms"
    # What is added to the weights of norms. Gemma keeps them as differences from 1.
    norm_offset: float = 0.0
    # The factor of the embeddings.
    embedding_scale: float = 1.0
    # The width of the tables where they are projected to and from the hidden size; else 0.
    embedding_size: int = 0
    # The row of position 0 in the table of positions.
    position_offset: int = 0
    # The cap of attention scores.
    softcap: float | None = None
    # The cap of logits.
    final_softcap: float | None = None
    # Whether the head is the embedding.
    is_tied: bool = False
    # Whether attention and feed-forward read the same input and are added together.
    is_parallel: bool = False
    # Whether norms follow the residual sum instead of preceding the block.
    is_post_norm: bool = False
    # Whether the weights of linears are stored (num_in, num_out).
    is_transposed: bool = False


def describe(config: Any) -> Architecture | None:
    """Return the Architecture of a configuration of transformers, or None if only transformers'
    modules can run it.
    """
    family = _FAMILIES.get(class_name(config.architectures))
    if family is None:
        return None

    return family(config)


def _decoder(config: Any, **facts: Any) -> Architecture:
    """Return an Architecture with the values that all families read alike, and with `facts`.

    It has no rotations and no windows unless `facts` has some.
    """
    head_dim = _head_dim(config)
    num_layers = config.num_hidden_layers
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": stable_context_length(config),
        "hidden_size": config.hidden_size,
        "num_layers": num_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_attention_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "rotaries": (None,) * num_layers,
        "windows": (None,) * num_layers,
        "is_tied": config.tie_word_embeddings,
    }

    return Architecture(**(common | facts))


def _head_dim(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        return int(head_dim)

    return int(config.hidden_size // config.num_attention_heads)


def _llama(config: Any, *, activation: str | None = None, **changes: Any) -> Architecture | None:
    """Return the Architecture of Llama, with the `changes` of another family, or None if a part of
    it is not known here.

    `activation`: its name in config.json, where another field than Llama's has it.
    """
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        layer_types = [_FULL] * config.num_hidden_layers

    if activation is None:
        activation = getattr(config, "hidden_act", "")

    known_activation = _ACTIVATIONS.get(activation)
    rotaries = rotaries_of(config, layer_types, _head_dim(config))
    if known_activation is None or rotaries is None:
        return None

    if not set(layer_types) <= {_FULL, _SLIDING}:
        return None

    windows: list[int | None] = []
    for layer_type in layer_types:
        has_window = layer_type == _SLIDING
        windows.append(getattr(config, "sliding_window", None) if has_window else None)

    biases = set[str]()
    if getattr(config, "attention_bias", False):
        biases |= {"q", "k", "v", "o"}

    if getattr(config, "mlp_bias", False):
        biases |= {"gate", "up", "down"}

    facts: dict[str, Any] = {
        "names": _LLAMA,
        "intermediate_size": config.intermediate_size,
        "num_kv_heads": config.num_key_value_heads,
        "activation": known_activation,
        "norm_eps": getattr(config, "rms_norm_eps", 1e-5),
        "rotaries": rotaries,
        "windows": tuple(windows),
        "biases": frozenset(biases),
    }
    return _decoder(config, **(facts | changes))


def _windowed(config: Any, **changes: Any) -> Architecture | None:
    """Return the Architecture of a Llama with the window in every layer."""
    windows = (config.sliding_window,) * config.num_hidden_layers
    return _llama(config, windows=windows, **changes)


def _qwen2(config: Any) -> Architecture | None:
    return _llama(config, biases=frozenset({"q", "k", "v"}))


def _qwen3(config: Any) -> Architecture | None:
    return _llama(config, names=_QWEN3)


def _gemma(config: Any, **changes: Any) -> Architecture | None:
    if getattr(config, "use_bidirectional_attention", None):
        return None

    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation == "gelu":
        # The first checkpoints say gelu and mean its tanh form, as transformers does.
        activation = "gelu_pytorch_tanh"

    return _llama(
        config,
        activation=activation,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
        **changes,
    )


def _gemma2(config: Any, names: Names = _GEMMA2) -> Architecture | None:
    return _gemma(
        config,
        names=names,
        scale=config.query_pre_attn_scalar**-0.5,
        softcap=config.attn_logit_softcapping,
        final_softcap=config.final_logit_softcapping,
    )


def _gemma3(config: Any) -> Architecture | None:
    return _gemma2(config, names=_GEMMA3)


def _phi(config: Any) -> Architecture | None:
    if config.qk_layernorm:
        return None

    return _llama(
        config,
        names=_PHI,
        norm="layer",
        norm_eps=config.layer_norm_eps,
        biases=frozenset({"q", "k", "v", "o", "up", "down", "head"}),
        is_parallel=True,
    )


def _phi3(config: Any) -> Architecture | None:
    return _windowed(config, names=_PHI3)


def _gpt2(config: Any) -> Architecture | None:
    activation = _ACTIVATIONS.get(config.activation_function)
    if activation is None:
        return None

    if config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights:
        return None

    return _decoder(
        config,
        norm="layer",
        names=_GPT2,
        intermediate_size=config.n_inner or 4 * config.hidden_size,
        activation=activation,
        norm_eps=config.layer_norm_epsilon,
        biases=frozenset({"qkv", "o", "up", "down"}),
        is_transposed=True,
    )


def _opt(config: Any) -> Architecture | None:
    activation = _ACTIVATIONS.get(config.activation_function)
    if activation is None or not config.enable_bias or not config.layer_norm_elementwise_affine:
        return None

    names = dict(_OPT)
    if not config.do_layer_norm_before or config._remove_final_layer_norm:
        del names["norm"]

    if config.word_embed_proj_dim != config.hidden_size:
        names |= {
            "project_in": "model.decoder.project_in",
            "project_out": "model.decoder.project_out",
        }

    return _decoder(
        config,
        norm="layer",
        names=names,
        intermediate_size=config.ffn_dim,
        activation=activation,
        norm_eps=1e-5,
        biases=frozenset({"q", "k", "v", "o", "up", "down"}),
        position_offset=2,
        embedding_size=config.word_embed_proj_dim,
        is_post_norm=not config.do_layer_norm_before,
    )


_FAMILIES: dict[str, Callable[[Any], Architecture | None]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _windowed,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "PhiForCausalLM": _phi,
    "Phi3ForCausalLM": _phi3,
    "GPT2LMHeadModel": _gpt2,
    "OPTForCausalLM": _opt,
}
