"""The settings of one of several models, and the memory that it needs.

Options of the server and names of the model have no effect in its file: the server has settings of
its own, and whoever loads the model names it. Its file is a stranger's (`settings/strangers.py`).
In secure mode its whole folder is searched.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmi.errors import ModelUnusable
from lmi.settings.config import Config, EngineConfig, ServerConfig
from lmi.settings.handler import Handler, announced
from lmi.settings.kinds import local_path
from lmi.settings.model_choice import MODEL, facts, find_folder
from lmi.settings.other_names import is_of_other_image
from lmi.settings.ports import RANGE
from lmi.settings.properties import read
from lmi.settings.resolve import Resolved, resolve
from lmi.settings.secure_mode import CONTROLS_KEY, SWITCH
from lmi.settings.strangers import ALLOWED
from lmi.settings.values import COMMAND_LINE, FILE, Given, find, is_of_server
from lmi.shared import machine
from lmi.shared.machine import MB
from lmi.sources.source import unreadable

NAMING = frozenset(
    ("load_models", "option.model_name", "option.served_model_name", "option.model_alias")
)
PROCESS_BYTES = 300 * MB  # of an engine's process with its libraries
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")
WEIGHT_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
}  # of a number, by dtype
LARGER = (
    1.2  # weights in memory are larger than their files, because some are copied or laid out anew
)
UNKNOWN = Handler(load="")  # an engine that has no record
# of the KV cache, where no option bounds it
USUAL_SEQUENCES = 64
USUAL_LENGTH = 2048


def resolve_model(
    name: str, url: str, server: ServerConfig, environ: Mapping[str, str]
) -> Resolved:
    """Return the settings of the model in the folder `url`, with a note about options that do not
    count there.

    Raises BadConfiguration, SecurityRefused or ModelUnusable with the cause, also for a folder
    outside of model_store.
    """
    path = local_path(url)
    folder = find_folder(str(checked_folder(path, server.model_store)), Path(path))
    assert folder is not None
    file = folder / "serving.properties"
    properties = read(file)
    flags = {
        key: text for key, text in server.model_flags.items() if _is_of_model(key) and key != MODEL
    }
    flags |= _of_server(server)
    environ = {
        name: text for name, text in environ.items() if not is_of_other_image(name)
    }  # told at the start
    resolved = resolve(
        properties, environ, flags, folder=folder, cwd=folder, untrusted=[folder], counts=_counts
    )
    model = resolved.config.model
    if resolved.request is not None:
        source = resolved.request.sources[0].source
        raise ModelUnusable(
            f"{file} names {source}: nothing is downloaded for one of several models"
        )

    checked_folder(model.path, server.model_store)
    if server.user is not None and (unread := unreadable(Path(model.path))) is not None:
        raise ModelUnusable(f"{unread}: option.user={server.user} cannot read it")

    sources = tuple(dict.fromkeys((path.rstrip("/"), *model.sources)))
    model = replace(model, name=name, aliases=(), sources=sources)
    config = replace(resolved.config, server=server, model=model)
    ignored = ", ".join(key for key in properties.entries if not _is_of_model(key))
    note = f"{properties.name}: {ignored}: no effect in the file of one of several models"
    return replace(resolved, config=config, notes=(*resolved.notes, *[note] * bool(ignored)))


def checked_folder(url: str, store: str) -> Path:
    """Return the folder that `url` names. Raises ModelUnusable unless it is absolute and lies below
    `store`.
    """
    path = Path(url)
    top = Path(store).resolve()
    if "\0" in url or not path.is_absolute():
        raise ModelUnusable(f"url must be an absolute folder below model_store, given {url!r}")

    plain = Path(os.path.normpath(path))
    resolved = path.resolve()
    is_below = plain.is_relative_to(top) or plain.is_relative_to(
        os.path.normpath(Path(store).absolute())
    )
    if not is_below or top not in resolved.parents:
        raise ModelUnusable(f"url must be a folder below model_store, {url} leads elsewhere")

    if not resolved.is_dir():
        raise ModelUnusable(
            f"url {url}: {'is not a folder' if resolved.exists() else 'does not exist'}"
        )

    return resolved


def _is_of_model(key: str) -> bool:
    option = find(key)
    return not is_of_server(key) and (option.key if option else key) not in NAMING


def _counts(given: Given) -> bool:
    """Return whether a value counts here. Variables name no model, and `_of_server` has what the
    server says.
    """
    layer = given.rank[0]
    return layer == COMMAND_LINE or (
        _is_of_model(given.key) and (layer == FILE or given.key != MODEL)
    )


def _of_server(server: ServerConfig) -> dict[str, str]:
    """Return the server's settings that decide about a model's files and ports, as the command line
    gives them.
    """
    given = {"download_dir": server.download_dir} if server.download_dir else {}
    if server.download_hosts:
        given["download_hosts"] = ",".join(server.download_hosts)

    given["model_store"] = server.model_store
    if server.allow_model_options:
        given[ALLOWED] = ",".join(server.allow_model_options)

    if server.secure_mode:
        given |= {SWITCH: "true", CONTROLS_KEY: ",".join(server.security_controls)}

    if server.safe_port_range is not None:
        first, last = server.safe_port_range
        given |= {"port": str(server.port), RANGE: f"{first}-{last}"}

    return given


def need_bytes(config: Config) -> int:
    """Return what all replicas of a model need: `required_memory_mb`, or an estimate, on GPUs of
    the processes only.
    """
    if config.model.required_memory_mb is not None:
        return config.model.required_memory_mb * MB

    engine = config.engine
    if engine.device_ids:
        return engine.num_engines * PROCESS_BYTES

    folder = Path(config.model.path)
    known = facts(folder)
    stored = str(known.get("torch_dtype", known.get("dtype")))
    of_weights, of_cache = announced().get(engine.handler, UNKNOWN).dtypes(engine, stored)
    widening = (
        1.0 if engine.quantize else max(1.0, _number_bytes(of_weights) / _number_bytes(stored))
    )
    stored_bytes = sum(
        file.stat().st_size for pattern in WEIGHT_FILES for file in folder.glob(pattern)
    )
    weights = int(LARGER * stored_bytes * widening)
    return engine.num_engines * (
        weights + _cache_bytes(engine, known, _number_bytes(of_cache)) + PROCESS_BYTES
    )


def _number_bytes(dtype: str) -> int:
    """Return the size of a number. One of an unknown dtype, such as `auto`, has that of float32,
    which none exceeds.
    """
    return WEIGHT_BYTES.get(dtype, 4)


def _cache_bytes(engine: EngineConfig, known: Mapping[str, Any], number_bytes: int) -> int:
    """Return the size of the KV cache: what the options say, else room for the usual requests,
    within a quarter.
    """
    num_heads = _count(known, "num_attention_heads")
    head_dim = _count(known, "head_dim") or _count(known, "hidden_size") // max(1, num_heads)
    num_kept = _count(known, "num_key_value_heads") or num_heads
    token_bytes = 2 * _count(known, "num_hidden_layers") * num_kept * head_dim * number_bytes
    if engine.max_kv_cache_tokens is not None:
        return engine.max_kv_cache_tokens * token_bytes

    longest = engine.max_sequence_length or _count(known, "max_position_embeddings") or USUAL_LENGTH
    num_tokens = (engine.max_num_sequences or USUAL_SEQUENCES) * min(longest, USUAL_LENGTH)
    return min(num_tokens * token_bytes, machine.memory_bytes() // 4)


def _count(known: Mapping[str, Any], name: str) -> int:
    value = known.get(name)
    return value if isinstance(value, int) and value > 0 else 0
