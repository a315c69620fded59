"""How a checkpoint pools the states of its tokens into an embedding, by the files of
sentence-transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handlers.lmi_dist.config_defaults import DEFAULTS
from handlers.lmi_dist.config_file import class_name, unsupported
from handlers.lmi_dist.families import Architecture
from handlers.lmi_dist.folder_files import read_json
from handlers.lmi_dist.pooling import Pooling
from lmi.errors import ModelUnusable, shorten
from lmi.executor import Embeddings

# The modes of Pooling, and whether each needs the states of all tokens.
MODES = {
    "mean": True,
    "lasttoken": False,
}
# The names of modes begin so in older files.
FLAG = "pooling_mode_"


def read_pooling(
    file: Path, config: Mapping[str, Any], architecture: Architecture | None
) -> Pooling | None:
    """The pooling of the checkpoint with this config.json, or None if it generates text.

    It gives embeddings if it has the modules of sentence-transformers (modules.json, and
    config.json in the folder of Pooling), or if its class has no head, as MistralModel: then of the
    last token, normalised, as in vLLM. Raises ModelUnusable for an embedding model that cannot run
    here, as one without an architecture of ours.
    """
    folder = file.parent
    name = class_name(config["architectures"])
    is_headless = name in DEFAULTS and config["architectures"][0] != name
    modules: dict[str, Path] = {}
    for module in _read(folder / "modules.json", list) or ():
        modules[_kind(module)] = folder / str(module.get("path", ""))

    if "Pooling" not in modules and not is_headless:
        return None

    if architecture is None or architecture.names.keys() & {"norm", "project_out"} != {"norm"}:
        raise unsupported(file, f"lmi-dist makes no embeddings with this form of {name}")

    for kind in modules.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise unsupported(
            folder / "modules.json", f"lmi-dist does not know the module {shorten(kind)}"
        )

    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise unsupported(file, "its tokens attend to later ones, which lmi-dist does not let them")

    mode = "lasttoken"
    if "Pooling" in modules:
        mode = _mode(modules["Pooling"] / "config.json")

    size = architecture.hidden_size
    sizes = config.get("matryoshka_dimensions") or ()
    is_matryoshka = bool(sizes or config.get("is_matryoshka"))
    if not _are_sizes(sizes, size):
        raise ModelUnusable(f"{file}: matryoshka_dimensions must be a list of numbers up to {size}")

    max_length = architecture.context_length
    options = _read(folder / "sentence_bert_config.json", dict) or {}
    longest = options.get("max_seq_length")
    if type(longest) is int and longest > 0:
        max_length = min(max_length, longest)

    return Pooling(
        is_mean=MODES[mode],
        is_normalised="Normalize" in modules or "Pooling" not in modules,
        embeddings=Embeddings(size, tuple(sizes) if is_matryoshka else None),
        max_length=max_length,
    )


def _are_sizes(values: Any, largest: int) -> bool:
    if not isinstance(values, list | tuple):
        return False

    return all(type(value) is int and 0 < value <= largest for value in values)


def _kind(module: Any) -> str:
    if not isinstance(module, dict):
        return ""

    return str(module.get("type", "")).rpartition(".")[2]


def _mode(file: Path) -> str:
    """The word of a Pooling's only mode, of MODES. Raises ModelUnusable for others."""
    config = _read(file, dict) or {}
    modes: list[str] = []
    for name, value in config.items():
        if name.startswith(FLAG) and value:
            modes.append(name.removeprefix(FLAG).removesuffix("_tokens"))

    if not modes:
        modes = [str(config.get("pooling_mode", "mean"))]

    if len(modes) > 1 or modes[0] not in MODES:
        raise unsupported(
            file, f"lmi-dist pools by {' or '.join(MODES)}, not by {' and '.join(modes)}"
        )

    return modes[0]


def _read(file: Path, kind: type) -> Any:
    if not file.is_file():
        return None

    return read_json(file, kind)
