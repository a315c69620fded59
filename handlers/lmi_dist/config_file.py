"""config.json, read without the engine's libraries: which models cannot run here, and the values of
families we know.

Values get the names that transformers gives them today, whatever the age of the file. `DEFAULTS`
has what files leave out, and a test compares it with the classes of transformers. What is not known
here may run.
"""

import re
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from lmi.errors import ModelUnusable, shorten
from lmi.settings.handler import folder_of
from lmi.shared.model_files import read_bounded

# The names of their classes end so.
DECODERS = ("ForCausalLM", "LMHeadModel")
KEEPS_ITS_OWN = "has an attention of its own, which does not let lmi-dist keep its keys and values"
INSTALL_TORCH = "scripts/install torch, or pip install '.[torch]', in a clone of lmi"
RUN_HERE = (
    "option.rolling_batch=vllm runs more; lmi-dist runs Llama, Qwen 2 and 3, Mistral, "
    "Gemma 1 to 3, GPT-2, OPT, Phi, Phi-3 and other decoders of text that transformers knows "
    "and that only attend to keys and values"
)
# Types whose layers keep their past in a state of their own.
RECURRENT = frozenset(
    {
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    }
)
# Types whose attention no function of ours can take over: transformers chooses among classes of
# their own.
OWN_ATTENTION = frozenset({"falcon", "gpt_neo", "gptj"})
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# These files of transformers have the name of each type in quotes.
MAPPINGS = (
    "auto_mappings.py",
    "configuration_auto.py",
)
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
_GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
# A part that is null is as large as its whole.
_WHOLES = {
    "num_key_value_heads": "num_attention_heads",
    "word_embed_proj_dim": "hidden_size",
}
_KEPT_NULLS = {
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_key_value_heads",
}


def _is_number(value: Any, over: float = 0.0) -> bool:
    return type(value) in (int, float) and over < value < 1e30


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are(kind: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, list) and all(map(kind, value))


class _Rule(NamedTuple):
    """What a value must be, in words, and what tells whether it is."""

    text: str
    allows: Callable[[Any], bool]


_COUNT = _Rule(
    "a whole number of at least 1", lambda value: type(value) is int and 1 <= value < 1 << 31
)
_POSITIVE = _Rule("a number over 0", _is_number)
_OVER_ONE = _Rule("a number over 1", lambda value: _is_number(value, 1.0))
_NOT_NEGATIVE = _Rule("a number of at least 0", lambda value: value == 0 or _is_number(value))
_FLAG = _Rule("true or false", lambda value: isinstance(value, bool))
_TEXT = _Rule("a text", _is_text)
_TEXTS = _Rule("a list of texts", partial(_are, _is_text))
_NUMBERS = _Rule("a list of numbers over 0", partial(_are, _is_number))
_OBJECT = _Rule("an object", lambda value: isinstance(value, dict))

_RULE_OF = {
    "vocab_size": _COUNT,
    "hidden_size": _COUNT,
    "intermediate_size": _COUNT,
    "num_hidden_layers": _COUNT,
    "num_attention_heads": _COUNT,
    "num_key_value_heads": _COUNT,
    "head_dim": _COUNT,
    "max_position_embeddings": _COUNT,
    "original_max_position_embeddings": _COUNT,
    "n_embd": _COUNT,
    "n_head": _COUNT,
    "n_inner": _COUNT,
    "n_layer": _COUNT,
    "n_positions": _COUNT,
    "ffn_dim": _COUNT,
    "word_embed_proj_dim": _COUNT,
    "sliding_window": _COUNT,
    "sliding_window_pattern": _COUNT,
    "rms_norm_eps": _POSITIVE,
    "layer_norm_eps": _POSITIVE,
    "layer_norm_epsilon": _POSITIVE,
    "query_pre_attn_scalar": _POSITIVE,
    "attn_logit_softcapping": _POSITIVE,
    "final_logit_softcapping": _POSITIVE,
    "partial_rotary_factor": _POSITIVE,
    "factor": _POSITIVE,
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "rope_theta": _OVER_ONE,
    "rope_local_base_freq": _OVER_ONE,
    "attention_factor": _NOT_NEGATIVE,
    "beta_fast": _NOT_NEGATIVE,
    "beta_slow": _NOT_NEGATIVE,
    "mscale": _NOT_NEGATIVE,
    "mscale_all_dim": _NOT_NEGATIVE,
    "max_window_layers": _NOT_NEGATIVE,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "tie_word_embeddings": _FLAG,
    "use_sliding_window": _FLAG,
    "use_bidirectional_attention": _FLAG,
    "qk_layernorm": _FLAG,
    "scale_attn_weights": _FLAG,
    "scale_attn_by_inverse_layer_idx": _FLAG,
    "do_layer_norm_before": _FLAG,
    "enable_bias": _FLAG,
    "layer_norm_elementwise_affine": _FLAG,
    "_remove_final_layer_norm": _FLAG,
    "truncate": _FLAG,
    "hidden_act": _TEXT,
    "hidden_activation": _TEXT,
    "activation_function": _TEXT,
    "rope_type": _TEXT,
    "type": _TEXT,
    "layer_types": _TEXTS,
    "short_factor": _NUMBERS,
    "long_factor": _NUMBERS,
    "rope_parameters": _OBJECT,
    "rope_scaling": _OBJECT,
    "full_attention": _OBJECT,
    "sliding_attention": _OBJECT,
}
ROPE_TYPES = frozenset({"default", "dynamic", "linear", "llama3", "longrope", "yarn"})
ACTIVATIONS = frozenset({"silu", "swish", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh"})
# Files of transformers whose tables have what its modules know besides.
ROPE_TABLE = "modeling_rope_utils.py"
ACTIVATION_TABLE = "activations.py"
_KEY_OF_TABLE = re.compile(r'^    "(\w+)": ', re.MULTILINE)
_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


def check(folder: Path) -> None:
    """Raise ModelUnusable if the model in `folder` is known not to run.

    A file that cannot be read may run.
    """
    file = folder / "config.json"
    with suppress(OSError, ValueError, RecursionError):
        config = msgspec.json.decode(read_bounded(file), type=dict[str, Any])
        check_config(file, config)


def check_config(file: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelUnusable if a configuration says that the model does not run here."""
    name = class_name(config.get("architectures"))
    model_type = config.get("model_type")
    if name and not name.endswith(DECODERS):
        if config.get("is_encoder_decoder"):
            raise unsupported(file, f"{name} is an encoder and a decoder")

        raise unsupported(file, f"{name} is not a decoder of text")

    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        method = shorten(quantization.get("quant_method"))
        raise ModelUnusable(
            f"{file}: its weights are quantised already (quantization_config: {method}), "
            "which lmi-dist does not read; option.rolling_batch=vllm does"
        )

    if not isinstance(model_type, str):
        return

    if model_type in RECURRENT:
        raise unsupported(file, f"{name or model_type} does not run on attention alone")

    if model_type in OWN_ATTENTION:
        raise unsupported(file, f"{name or model_type} {KEEPS_ITS_OWN}")

    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        unknown = set(filter(_is_text, layer_types)) - LAYER_TYPES
        if unknown:
            why = f"{name or model_type} has layers of another kind, {min(unknown)}"
            raise unsupported(file, why)

    types_text = _types_text()
    if types_text and f'"{model_type}"' not in types_text:
        why = (
            f"transformers {version('transformers')} knows no model_type {shorten(model_type)}, "
            "a newer one may"
        )
        raise unsupported(file, why)

    if name and name not in DEFAULTS:
        check_extra(file, f"{name} runs through the modules of transformers")


def class_name(architectures: object) -> str:
    """Return the first class that a configuration names, with its head, or ""."""
    if not isinstance(architectures, list) or not architectures:
        return ""

    first = architectures[0]
    if not isinstance(first, str):
        return ""

    return HEADLESS.get(first, first)


def unsupported(place: object, why: str) -> ModelUnusable:
    """Return the error for a model that does not run here, with what does."""
    return ModelUnusable(f"{place}: {why}; {RUN_HERE}")


def check_extra(place: object, why: str) -> None:
    """Raise ModelUnusable if torch is not installed; `why` says what it is needed for."""
    if folder_of("torch") is None:
        raise ModelUnusable(f"{place}: {why}, and torch is not installed: {INSTALL_TORCH}")


def _types_text() -> str:
    """Return the source text of transformers that names every type, or "" if it is not there."""
    folder = folder_of("transformers")
    if folder is None or not (folder / "models" / "auto" / MAPPINGS[-1]).is_file():
        return ""

    texts: list[str] = []
    for name in MAPPINGS:
        file = folder / "models" / "auto" / name
        if file.is_file():
            texts.append(file.read_text(encoding="utf-8"))

    return "".join(texts)


def _check_known(file: Path, field: str, value: str, values: Set[str], table: str) -> None:
    """Raise ModelUnusable unless our programs or the modules of transformers know the value of a
    field.

    `values` are those of our programs, and `table` is the file of transformers with its own.
    """
    if value in values:
        return

    folder = folder_of("transformers")
    if folder is not None and (folder / table).is_file():
        text = (folder / table).read_text(encoding="utf-8")
        values = values | set(_KEY_OF_TABLE.findall(text))

    if value not in values:
        names = ", ".join(sorted(values))
        raise ModelUnusable(f"{file}: {field} {shorten(value)} is not known, only {names}")


def read_config(file: Path, name: str, raw: Mapping[str, Any]) -> SimpleNamespace | None:
    """The values of `file`, whose JSON is `raw`, for a class of DEFAULTS.

    None: only transformers knows this type.
    """
    defaults = DEFAULTS[name]
    if raw.get("model_type") != defaults["model_type"] or raw.get("per_layer_config"):
        return None

    checked = _checked(file, raw)
    for field in ("hidden_act", "hidden_activation", "activation_function"):
        if field in checked:
            _check_known(file, field, checked[field], ACTIVATIONS, ACTIVATION_TABLE)

    if name == "GPT2LMHeadModel":
        for gpt2_name, field in _GPT2_NAMES.items():
            if gpt2_name in checked:
                checked.setdefault(field, checked[gpt2_name])

    values = defaults | checked
    for part, whole in _WHOLES.items():
        if values.get(part, "") is None and whole in values:
            values[part] = values[whole]

    if "use_sliding_window" in defaults and not values["use_sliding_window"]:
        values["sliding_window"] = None

    if "num_hidden_layers" in values:
        _set_layer_types(file, defaults, values)

    if "rope_theta" in defaults:
        values["rope_parameters"] = _rope_parameters(file, name, values)

    _check_shapes(file, values)
    return SimpleNamespace(**values)


def _checked(file: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are given, each of which follows its rule."""
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if value is None and name not in _KEPT_NULLS:
            continue

        rule = _RULE_OF.get(name)
        if rule is not None and value is not None and not rule.allows(value):
            raise ModelUnusable(f"{file}: {name} must be {rule.text}, given {shorten(value)}")

        checked[name] = value

    return checked


def _set_layer_types(file: Path, defaults: Mapping[str, Any], values: dict[str, Any]) -> None:
    num_layers = values["num_hidden_layers"]
    if "layer_types" in values:
        num_types = len(values["layer_types"])
        if num_types != num_layers:
            raise ModelUnusable(
                f"{file}: layer_types has {num_types} entries, num_hidden_layers is {num_layers}"
            )

        return

    if "sliding_window_pattern" in defaults:
        pattern = values["sliding_window_pattern"]
        is_full = [index % pattern == pattern - 1 for index in range(num_layers)]
    elif "max_window_layers" in defaults:
        num_full = num_layers if values["sliding_window"] is None else values["max_window_layers"]
        is_full = [index < num_full for index in range(num_layers)]
    else:
        return

    layer_types: list[str] = []
    for is_full_layer in is_full:
        layer_types.append("full_attention" if is_full_layer else "sliding_attention")

    values["layer_types"] = layer_types


def _rope_parameters(file: Path, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of rotary embeddings in one object, or in one for each type of layer."""
    scaling = values.get("rope_scaling")
    parameters = _checked(file, values.get("rope_parameters", {}))
    thetas = dict.fromkeys(values.get("layer_types", ()), values["rope_theta"])
    if name == "Gemma3ForCausalLM":
        thetas = {
            "full_attention": values["rope_theta"],
            "sliding_attention": values["rope_local_base_freq"],
        }
        parameters = {kind: parameters.get(kind) or {"rope_type": "default"} for kind in thetas}
        parameters["full_attention"] = parameters["full_attention"] | (scaling or {})
    elif scaling:
        parameters = _checked(file, scaling)

    by_type: dict[str, Any] = {}
    for kind, theta in thetas.items():
        if kind in parameters:
            by_type[kind] = _standard(file, name, values, parameters[kind], theta)

    return by_type or _standard(file, name, values, parameters, values["rope_theta"])


def _standard(
    file: Path, name: str, values: Mapping[str, Any], parameters: Mapping[str, Any], theta: float
) -> dict[str, Any]:
    checked = _checked(file, parameters)
    kind = checked.get("rope_type", checked.get("type", "default"))
    if name == "Phi3ForCausalLM" and kind in ("su", "yarn"):
        # These are its older names of longrope.
        kind = "longrope"

    _check_known(file, "rope_type", kind, ROPE_TYPES, ROPE_TABLE)
    for needed in _ROPE_NEEDS.get(kind, ()):
        if needed not in checked:
            raise ModelUnusable(f"{file}: rope_parameters of type {kind} have no {needed}")

    if kind == "llama3" and checked["high_freq_factor"] <= checked["low_freq_factor"]:
        raise ModelUnusable(f"{file}: high_freq_factor must be over low_freq_factor")

    standard: dict[str, Any] = {"rope_theta": theta}
    if "partial_rotary_factor" in values:
        standard["partial_rotary_factor"] = values["partial_rotary_factor"]

    return standard | checked | {"rope_type": kind}


def _check_shapes(file: Path, values: Mapping[str, Any]) -> None:
    hidden_size = values.get("hidden_size")
    num_heads = values.get("num_attention_heads")
    if hidden_size is None or num_heads is None:
        return

    num_kv_heads = values.get("num_key_value_heads", num_heads)
    if values.get("head_dim") is None and hidden_size % num_heads:
        raise ModelUnusable(
            f"{file}: the hidden size ({hidden_size}) is not a multiple "
            f"of the number of attention heads ({num_heads})"
        )

    if num_heads % num_kv_heads:
        raise ModelUnusable(
            f"{file}: num_attention_heads ({num_heads}) is not a multiple "
            f"of num_key_value_heads ({num_kv_heads})"
        )

    rope = values.get("rope_parameters", {})
    if rope.get("rope_type") == "longrope":
        head_dim = values.get("head_dim") or hidden_size // num_heads
        num_pairs = (int(head_dim * rope.get("partial_rotary_factor", 1.0)) + 1) // 2
        num_factors = len(rope["short_factor"])
        if num_factors != num_pairs:
            raise ModelUnusable(
                f"{file}: short_factor must have {num_pairs} entries, given {num_factors}"
            )
