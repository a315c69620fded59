"""Which models cannot run here, by their config.json, read without the engine's libraries.

What is not known here may run.
"""

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from handlers.lmi_dist.config_defaults import DEFAULTS, HEADLESS
from handlers.lmi_dist.quantised.scheme import read_scheme, refused
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
    if name and not name.endswith(DECODERS):
        if config.get("is_encoder_decoder"):
            raise unsupported(file, f"{name} is an encoder and a decoder")

        raise unsupported(file, f"{name} is not a decoder of text")

    read_scheme(file, config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return

    _check_layers(file, name or model_type, model_type, config.get("layer_types"))
    _check_type(file, model_type)
    if name and name not in DEFAULTS:
        check_modules(file, name, config)


def check_modules(file: Path, name: str, config: Mapping[str, Any]) -> None:
    """Raise ModelUnusable if the modules of transformers cannot run a model of this class here."""
    if read_scheme(file, config) is not None:
        raise refused(file, f"of {name}, which runs through the modules of transformers")

    check_extra(file, f"{name} runs through the modules of transformers")


def _check_layers(file: Path, name: str, model_type: str, layer_types: object) -> None:
    """Raise ModelUnusable if a layer keeps more than keys and values. `name` is for the message."""
    if model_type in RECURRENT:
        raise unsupported(file, f"{name} does not run on attention alone")

    if model_type in OWN_ATTENTION:
        raise unsupported(file, f"{name} {KEEPS_ITS_OWN}")

    if isinstance(layer_types, list):
        texts = {layer_type for layer_type in layer_types if isinstance(layer_type, str)}
        unknown = texts - LAYER_TYPES
        if unknown:
            raise unsupported(file, f"{name} has layers of another kind, {min(unknown)}")


def _check_type(file: Path, model_type: str) -> None:
    """Raise ModelUnusable if the installed transformers is older than a type of models."""
    types_text = _types_text()
    if types_text and f'"{model_type}"' not in types_text:
        why = (
            f"transformers {version('transformers')} knows no model_type {shorten(model_type)}, "
            "a newer one may"
        )
        raise unsupported(file, why)


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
