"""Says from config.json alone which models the embedded engine cannot run, without importing the engine's libraries.

What it does not know may run: transformers and the loaded model decide then.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from handlers.lmi_dist.config_file import DEFAULTS
from lmi.errors import ModelUnusable, shorten
from lmi.settings.handler import folder_of

DECODERS = ("ForCausalLM", "LMHeadModel")  # how the names of their classes end
KEEPS_ITS_OWN = "has an attention of its own, which does not let lmi-dist keep its keys and values"
INSTALL_TORCH = "scripts/install torch, or pip install '.[torch]', in a clone of lmi"
RUN_HERE = (
    "lmi-dist runs Llama, Qwen 2 and 3, Mistral, Gemma 1 to 3, GPT-2, OPT, Phi, Phi-3 and other decoders of text that "
    "transformers knows and that only attend to keys and values; vLLM runs more (option.rolling_batch=vllm)"
)
# Types whose layers keep their past in a state of their own.
RECURRENT = frozenset(
    "bamba falcon_h1 falcon_mamba jamba kimi_linear lfm2 lfm2_moe mamba mamba2 nemotron_h olmo_hybrid qwen3_next "
    "recurrent_gemma rwkv xlstm zamba zamba2".split()
)
# Types whose attention no function of ours can take over: transformers chooses among classes of their own.
OWN_ATTENTION = frozenset({"falcon", "gpt_neo", "gptj"})
MAPPINGS = ("auto_mappings.py", "configuration_auto.py")  # of transformers, with the name of each type in quotes


def check(folder: Path) -> None:
    """Raise ModelUnusable if the model in `folder` is known not to run. A file that cannot be read may run."""
    file = folder / "config.json"
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        check_config(file, msgspec.json.decode(file.read_bytes(), type=dict[str, Any]))


def check_config(file: Path, config: Mapping[str, Any]) -> None:
    name, model_type = class_name(config.get("architectures")), config.get("model_type")
    if name and not name.endswith(DECODERS):
        what = "is an encoder and a decoder" if config.get("is_encoder_decoder") else "is not a decoder of text"
        raise unsupported(file, f"{name} {what}")
    if not isinstance(model_type, str):
        return
    if model_type in RECURRENT:
        raise unsupported(file, f"{name or model_type} does not run on attention alone")
    if model_type in OWN_ATTENTION:
        raise unsupported(file, f"{name or model_type} {KEEPS_ITS_OWN}")
    if (known := _types_text()) and f'"{model_type}"' not in known:
        raise unsupported(file, f"transformers {_version()} knows no model_type {shorten(model_type)}, a newer one may")
    if name and name not in DEFAULTS:
        check_extra(file, f"{name} runs through the modules of transformers")


def class_name(architectures: object) -> str:
    """Return the first class that a configuration names, or ""."""
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    return first if isinstance(first, str) else ""


def unsupported(place: object, why: str) -> ModelUnusable:
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
    files = [folder / "models" / "auto" / name for name in MAPPINGS]
    return "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


def _version() -> str:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""
