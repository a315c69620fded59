"""The values of config.json for the families we know, by the names that transformers gives them
today, whatever the age of the file.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from handlers.lmi_dist.config_defaults import DEFAULTS
from handlers.lmi_dist.config_rules import (
    ACTIVATION_TABLE,
    ACTIVATIONS,
    check_known,
    checked_values,
)
from handlers.lmi_dist.rope_parameters import RopeReader
from lmi.errors import ModelUnusable

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


def read_config(file: Path, name: str, raw: Mapping[str, Any]) -> SimpleNamespace | None:
    """The values of `file`, whose JSON is `raw`, for a class of DEFAULTS.

    None: only transformers knows this type.
    """
    defaults = DEFAULTS[name]
    if raw.get("model_type") != defaults["model_type"] or raw.get("per_layer_config"):
        return None

    checked = checked_values(file, raw)
    for field in ("hidden_act", "hidden_activation", "activation_function"):
        if field in checked:
            check_known(file, field, checked[field], ACTIVATIONS, ACTIVATION_TABLE)

    if name == "GPT2LMHeadModel":
        _add_common_names(checked)

    values = defaults | checked
    for part, whole in _WHOLES.items():
        is_null = part in values and values[part] is None
        if is_null and whole in values:
            values[part] = values[whole]

    if "use_sliding_window" in defaults and not values["use_sliding_window"]:
        values["sliding_window"] = None

    if "num_hidden_layers" in values:
        _set_layer_types(file, defaults, values)

    if "rope_theta" in defaults:
        values["rope_parameters"] = RopeReader(file, name, values).read()

    _check_shapes(file, values)
    return SimpleNamespace(**values)


def _add_common_names(values: dict[str, Any]) -> None:
    """Add the values of GPT-2 by the names that the other families have."""
    for gpt2_name, name in _GPT2_NAMES.items():
        if gpt2_name in values:
            values.setdefault(name, values[gpt2_name])


def _set_layer_types(file: Path, defaults: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Say of each layer whether it sees all positions, as older files say it of all layers."""
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
        _check_factors(file, rope, head_dim)


def _check_factors(file: Path, rope: Mapping[str, Any], head_dim: int) -> None:
    """Check that longrope has a factor for each pair of the numbers that it turns."""
    num_pairs = (int(head_dim * rope.get("partial_rotary_factor", 1.0)) + 1) // 2
    num_factors = len(rope["short_factor"])
    if num_factors != num_pairs:
        raise ModelUnusable(
            f"{file}: short_factor must have {num_pairs} entries, given {num_factors}"
        )
