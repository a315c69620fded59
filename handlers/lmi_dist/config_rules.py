"""What the values of config.json must be like."""

import re
from collections.abc import Callable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lmi.errors import ModelUnusable, shorten
from lmi.settings.handler import folder_of

ROPE_TYPES = frozenset({"default", "dynamic", "linear", "llama3", "longrope", "yarn"})
ACTIVATIONS = frozenset({"silu", "swish", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh"})
# Files of transformers whose tables have what its modules know besides.
ROPE_TABLE = "modeling_rope_utils.py"
ACTIVATION_TABLE = "activations.py"
_KEY_OF_TABLE = re.compile(r'^    "(\w+)": ', re.MULTILINE)
# Values that may be null.
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


def checked_values(file: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are there, each of which follows its rule. Raises ModelUnusable."""
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if value is None and name not in _KEPT_NULLS:
            continue

        rule = _RULE_OF.get(name)
        if rule is not None and value is not None and not rule.allows(value):
            raise ModelUnusable(f"{file}: {name} must be {rule.text}, given {shorten(value)}")

        checked[name] = value

    return checked


def check_known(file: Path, field: str, value: str, values: Set[str], table: str) -> None:
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
