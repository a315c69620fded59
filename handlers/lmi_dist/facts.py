"""The facts of a model folder: what its config.json says, read once, before the weights.

transformers is imported only for a model that its modules run, and for a file that leaves out what
only transformers knows. A fault of the file is reported in one line that names it and the cause.
"""

from pathlib import Path
from typing import Any

from msgspec import Struct

from handlers.lmi_dist.config_defaults import DEFAULTS
from handlers.lmi_dist.config_file import check_config, check_modules, class_name, unsupported
from handlers.lmi_dist.config_values import read_config
from handlers.lmi_dist.families import Architecture, describe
from handlers.lmi_dist.folder_files import existing_file, read_json
from handlers.lmi_dist.pooling import Pooling
from handlers.lmi_dist.pooling_config import read_pooling
from handlers.lmi_dist.rotary import stable_context_length
from lmi.errors import ModelUnusable, cause_line, shorten

# These are facts of an Architecture too.
_SHARED = (
    "vocab_size",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "is_tied",
)
_DTYPES = ("float16", "bfloat16", "float32", "float64")


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What the engine must know about a model before it reads a weight."""

    path: str
    # The name of the model's class in transformers.
    name: str
    # The dtype of the checkpoint: one of _DTYPES, or None if the file does not say.
    dtype: str | None
    # None if only the modules of transformers can run it.
    architecture: Architecture | None
    # The configuration of transformers, for its modules. None for an architecture of ours.
    config: Any
    vocab_size: int
    context_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    # Whether the head is the table of embeddings.
    is_tied: bool
    # Only an embedding model has one.
    pooling: Pooling | None = None

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """The bytes of cache that one token needs over all layers, with keys and values of
        `itemsize` bytes.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


def read_facts(path: str) -> ModelFacts:
    """Read the facts of the model in a folder. Raises ModelUnusable."""
    file = existing_file(Path(path), "config.json")
    raw = read_json(file)
    if not raw.get("architectures"):
        raise ModelUnusable(
            f"{file}: no architectures, so this is not the configuration of a language model"
        )

    check_config(file, raw)
    architecture = _describe(file, raw)
    pooling = read_pooling(file, raw, architecture)
    if architecture is None:
        return _facts_of_modules(file, raw)

    for rotary in filter(None, architecture.rotaries):
        num_channels = 2 * len(rotary.frequencies)
        if num_channels > architecture.head_dim:
            why = f"heads of {architecture.head_dim} channels cannot rotate {num_channels} of them"
            raise ModelUnusable(f"{file}: {why}")

    return ModelFacts(
        path=path,
        name=class_name(raw["architectures"]),
        dtype=_dtype(file, raw),
        architecture=architecture,
        config=None,
        context_length=architecture.context_length if pooling is None else pooling.max_length,
        pooling=pooling,
        **{name: getattr(architecture, name) for name in _SHARED},
    )


def _describe(file: Path, raw: dict[str, Any]) -> Architecture | None:
    name = class_name(raw["architectures"])
    if name not in DEFAULTS:
        return None

    config = read_config(file, name, raw)
    missing = "model_type"
    try:
        if config is not None:
            return describe(config)
    except AttributeError as error:
        if error.obj is not config:
            raise

        missing = str(error.name)

    return describe(_config_of_transformers(file, f"the default of {missing} is known to"))


def _facts_of_modules(file: Path, raw: dict[str, Any]) -> ModelFacts:
    name = class_name(raw["architectures"])
    check_modules(file, name, raw)
    config = _config_of_transformers(file, f"{name} runs through the modules of")
    for field in ("num_attention_heads", "num_hidden_layers", "max_position_embeddings"):
        value = getattr(config, field, None)
        if not isinstance(value, int) or value < 1:
            raise unsupported(
                file.parent, f"{name} has no {field}: it does not run on attention alone"
            )

    num_heads = config.num_attention_heads
    if getattr(config, "multi_query", False):
        num_kv_heads = 1
    else:
        num_kv_heads = getattr(config, "num_key_value_heads", num_heads)

    return ModelFacts(
        path=str(file.parent),
        name=name,
        dtype=_dtype(file, raw),
        architecture=None,
        config=config,
        vocab_size=config.vocab_size,
        context_length=stable_context_length(config),
        num_layers=config.num_hidden_layers,
        num_kv_heads=num_kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        is_tied=getattr(config, "tie_word_embeddings", False),
    )


def _config_of_transformers(file: Path, why: str) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ModelUnusable(
            f"{file}: {why} transformers, which is not installed: pip install transformers"
        ) from error

    try:
        return AutoConfig.from_pretrained(
            file.parent, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        # transformers raises a different type for each way a file can be wrong.
        raise ModelUnusable(f"{file}: {cause_line(error)}") from error


def _dtype(file: Path, raw: dict[str, Any]) -> str | None:
    name = raw.get("dtype")
    if name is None:
        name = raw.get("torch_dtype")

    if name is not None and name not in _DTYPES:
        raise ModelUnusable(
            f"{file}: dtype must be one of {', '.join(_DTYPES)}, given {shorten(name)}"
        )

    return name
