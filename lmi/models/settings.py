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
from lmi.settings.given import COMMAND_LINE, FILE, Given
from lmi.settings.handler import Handler, announced
from lmi.settings.kinds import local_path
from lmi.settings.other_names import OF_CODE, is_of_other_image
from lmi.settings.ports import RANGE
from lmi.settings.properties import read
from lmi.settings.resolve import Resolved, resolve
from lmi.settings.secure_mode import CONTROLS_KEY, SWITCH
from lmi.settings.served_folder import find_folder
from lmi.settings.start import StartInputs
from lmi.settings.strangers import ALLOWED
from lmi.settings.table import MODEL, find, is_of_server
from lmi.shared import machine
from lmi.shared.gguf_file import read_model
from lmi.shared.machine import MB, Machine
from lmi.shared.model_files import facts
from lmi.sources.gguf.find import opened_file
from lmi.sources.source import GGUF, GgufSource, parse, unreadable

NAMING = frozenset(
    ("load_models", "option.model_name", "option.served_model_name", "option.model_alias")
)
# The memory of an engine's process with its libraries.
PROCESS_BYTES = 300 * MB
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")
# The bytes of a number, by dtype.
WEIGHT_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
}
# Weights in memory are larger than their files, because some are copied or laid out anew.
LARGER = 1.2
# An engine that has no record.
UNKNOWN = Handler(load="")
# Those of the KV cache, where no option bounds it.
USUAL_SEQUENCES = 64
USUAL_LENGTH = 2048


def resolve_model(
    name: str, url: str, server: ServerConfig, environ: Mapping[str, str]
) -> Resolved:
    """Return the settings of the model in the folder `url`, or in this GGUF file, with a note about
    options that do not count there.

    Their `request` names a GGUF file that a process must open first. Raises BadConfiguration,
    SecurityRefused or ModelUnusable with the cause, also for what lies outside of model_store.
    """
    path = local_path(url)
    start = _start_inputs(path, server, environ)
    properties = start.properties
    resolved = resolve(start)
    if resolved.request is not None:
        _check_source(resolved.request.sources[0].source, properties.name, server.model_store)
        return resolved

    model = resolved.config.model
    _check_files(model.path, server)

    sources = tuple(dict.fromkeys((path.rstrip("/"), *model.sources)))
    model = replace(model, name=name, aliases=(), sources=sources)
    config = replace(resolved.config, server=server, model=model)
    notes = resolved.notes
    ignored = ", ".join(key for key in properties.entries if not _is_of_model(key))
    if ignored:
        note = f"{properties.name}: {ignored}: no effect in the file of one of several models"
        notes = (*notes, note)

    return replace(resolved, config=config, notes=notes)


def _start_inputs(path: str, server: ServerConfig, environ: Mapping[str, str]) -> StartInputs:
    """Return what decides about the settings of the model at a path."""
    flags: dict[str, str] = {}
    for key, text in server.model_flags.items():
        if _is_of_model(key) and key != MODEL:
            flags[key] = text

    flags |= _of_server(server)
    # Of the names of other images the log tells at the start, and what names code for one model
    # ends it.
    unread = {name for name in environ if is_of_other_image(name) or name in OF_CODE}
    environ = {name: text for name, text in environ.items() if name not in unread}
    start = StartInputs(machine=Machine.here(environ), environ=environ, flags=flags, counts=_counts)

    if path.endswith(GGUF):
        file = checked_file(path, server.model_store)
        return replace(start, cwd=file.parent, flags={**flags, MODEL: str(file)})

    folder = find_folder(str(checked_folder(path, server.model_store)), Path(path))
    assert folder is not None
    properties = read(folder / "serving.properties")
    return replace(start, folder=folder, cwd=folder, untrusted=[folder], properties=properties)


def _check_files(path: str, server: ServerConfig) -> None:
    """Raise ModelUnusable for a model outside of model_store, or one that the user of the engines
    cannot read.
    """
    gguf_file = opened_file(Path(path))
    if gguf_file is None:
        checked_folder(path, server.model_store)
    else:
        checked_file(str(gguf_file), server.model_store)

    if server.user is not None:
        unread = unreadable(Path(path))
        if unread is not None:
            raise ModelUnusable(f"{unread}: option.user={server.user} cannot read it")


def _check_source(text: str, properties_name: str, store: str) -> None:
    """Raise ModelUnusable for a source that must be fetched, or a GGUF file outside of `store`."""
    source = parse(text)
    if not isinstance(source, GgufSource):
        raise ModelUnusable(
            f"{properties_name} names {text}: nothing is downloaded for one of several models"
        )

    checked_file(str(source.file), store)


def checked_folder(url: str, store: str) -> Path:
    """Return the folder that `url` names. Raises ModelUnusable unless it is absolute and lies below
    `store`.
    """
    path = _checked_path(url, store)
    if not path.is_dir():
        reason = "is not a folder" if path.exists() else "does not exist"
        raise ModelUnusable(f"url {url}: {reason}")

    return path


def checked_file(url: str, store: str) -> Path:
    """Return the GGUF file that `url` names, as it names it. Raises ModelUnusable unless it is
    absolute and lies below `store`, also after its links.
    """
    if not _checked_path(url, store).is_file():
        raise ModelUnusable(f"url {url}: does not exist, or is no file")

    return Path(url)


def _checked_path(url: str, store: str) -> Path:
    path = Path(url)
    top = Path(store).resolve()
    if "\0" in url or not path.is_absolute():
        raise ModelUnusable(f"url must be an absolute folder below model_store, given {url!r}")

    plain = Path(os.path.normpath(path))
    plain_top = os.path.normpath(Path(store).absolute())
    resolved = path.resolve()
    is_below = plain.is_relative_to(top) or plain.is_relative_to(plain_top)
    if not is_below or top not in resolved.parents:
        raise ModelUnusable(f"url must be a folder below model_store, {url} leads elsewhere")

    return resolved


def _is_of_model(key: str) -> bool:
    option = find(key)
    return not is_of_server(key) and (option.key if option else key) not in NAMING


def _counts(value: Given) -> bool:
    """Return whether a value counts here. Variables name no model, and `_of_server` has what the
    server says.
    """
    layer = value.rank.layer
    if layer == COMMAND_LINE:
        return True

    return _is_of_model(value.key) and (layer == FILE or value.key != MODEL)


def _of_server(server: ServerConfig) -> dict[str, str]:
    """Return the server's settings that decide about a model's files and ports, as the command line
    gives them.
    """
    options = dict[str, str]()
    if server.download_dir:
        options["download_dir"] = server.download_dir

    if server.download_hosts:
        options["download_hosts"] = ",".join(server.download_hosts)

    options["model_store"] = server.model_store
    if server.allow_model_options:
        options[ALLOWED] = ",".join(server.allow_model_options)

    if server.secure_mode:
        options[SWITCH] = "true"
        options[CONTROLS_KEY] = ",".join(server.security_controls)

    if server.safe_port_range is not None:
        first, last = server.safe_port_range
        options["port"] = str(server.port)
        options[RANGE] = f"{first}-{last}"

    return options


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
    model = facts(folder)
    stored_dtype = str(model.get("torch_dtype", model.get("dtype")))
    handler = announced().get(engine.handler, UNKNOWN)
    weight_dtype, cache_dtype = handler.dtypes(engine, stored_dtype)

    gguf_file = opened_file(folder)
    if gguf_file is not None:
        number_bytes = 1 if engine.quantize else _number_bytes(weight_dtype)
        weights_bytes = int(LARGER * read_model(gguf_file).num_numbers * number_bytes)
    else:
        widening = 1.0
        if not engine.quantize:
            widening = max(1.0, _number_bytes(weight_dtype) / _number_bytes(stored_dtype))

        weights_bytes = int(LARGER * _stored_bytes(folder) * widening)

    cache_bytes = _cache_bytes(engine, model, _number_bytes(cache_dtype))
    return engine.num_engines * (weights_bytes + cache_bytes + PROCESS_BYTES)


def _stored_bytes(folder: Path) -> int:
    """Return the size of all files of weights in a folder."""
    num_bytes = 0
    for pattern in WEIGHT_FILES:
        for file in folder.glob(pattern):
            num_bytes += file.stat().st_size

    return num_bytes


def _number_bytes(dtype: str) -> int:
    """Return the size of a number. One of an unknown dtype, such as `auto`, has that of float32,
    which none exceeds.
    """
    return WEIGHT_BYTES.get(dtype, 4)


def _cache_bytes(engine: EngineConfig, model: Mapping[str, Any], number_bytes: int) -> int:
    """Return the size of the KV cache: what the options say, else room for the usual requests,
    within a quarter.
    """
    num_heads = _count(model, "num_attention_heads")
    head_dim = _count(model, "head_dim") or _count(model, "hidden_size") // max(1, num_heads)
    num_kv_heads = _count(model, "num_key_value_heads") or num_heads
    num_layers = _count(model, "num_hidden_layers")
    # Each layer keeps a key and a value.
    token_bytes = 2 * num_layers * num_kv_heads * head_dim * number_bytes
    if engine.max_kv_cache_tokens is not None:
        return engine.max_kv_cache_tokens * token_bytes

    max_length = engine.max_sequence_length or _count(model, "max_position_embeddings")
    length = min(max_length or USUAL_LENGTH, USUAL_LENGTH)
    num_sequences = engine.max_num_sequences or USUAL_SEQUENCES
    return min(num_sequences * length * token_bytes, machine.memory_bytes() // 4)


def _count(model: Mapping[str, Any], name: str) -> int:
    """Return a number of config.json, or 0 where it is missing."""
    value = model.get(name)
    return value if isinstance(value, int) and value > 0 else 0
