"""LoRA adapters: those that every engine of a model should have, and the files of each, without a
look into weights.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lmi.errors import InvalidParameter, ModelUnusable, SecurityRefused
from lmi.runtime import Runtime
from lmi.settings.kinds import is_true
from lmi.shared.desired_state import Entry, Folder, State, check_name, key

if TYPE_CHECKING:
    from lmi.settings.steps import Resolution

# The header and the name in the query that name the adapter of a request.
HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
QUERY = "adapter"
# An adapter's own code.
SCRIPT = "model.py"
NOT_RUN = f"{SCRIPT} in the adapter's folder runs with option.adapter_code=true alone"
# Beside the model or serving.properties, with one folder for each adapter, named after it.
FOLDER = "adapters"
OPTION = "option.enable_lora"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
MAX_CONFIG_BYTES = 1 << 20


class Adapter(Entry, frozen=True, kw_only=True):
    """A LoRA adapter that every engine should have.

    `path` is the local folder of its files, and `src` the source that was named. A static one lies
    beside the model. `stamp` tells an entry from those that its name had before.
    """

    path: str
    stamp: int = msgspec.field(default_factory=time.monotonic_ns)
    src: str = ""
    preload: bool = True
    is_pinned: bool = False
    is_static: bool = False


def adapters_of(runtime: Runtime) -> Folder[Adapter]:
    """Return the folder of the model's adapters that should be loaded."""
    return Folder(runtime.path / "adapters" / key(runtime.config.model.name), Adapter)


def register_beside(runtime: Runtime) -> None:
    """Register the adapters that lie beside the model, so that every engine loads them before it is
    ready.
    """
    folder = adapters_of(runtime)
    model = runtime.config.model
    for name, path in model.adapters.items():
        # The path as the model's author knows it.
        src = "/".join(Path(path).parts[-2:])
        entry = Adapter(name=name, path=path, src=src, is_static=True, state=State.READY)
        folder.add(entry)


def is_enabled(options: Mapping[str, str]) -> bool:
    """Return whether the options of an engine ask for adapters."""
    return is_true(options.get(OPTION.removeprefix("option."), ""))


def choose_adapters(resolution: Resolution) -> None:
    """Choose the adapters beside the model or serving.properties, or warn that they are not
    loaded.
    """
    from lmi.settings import secure_mode
    from lmi.settings.config import ModelConfig, ServerConfig

    values = resolution.values
    resolution.adapters = {}
    parents = (resolution.start.folder, resolution.path)
    places = dict.fromkeys(parent.resolve() / FOLDER for parent in parents if parent)
    paths = [path for place in places if place.is_dir() for path in sorted(place.iterdir())]
    folders = [path for path in paths if path.is_dir() and not path.name.startswith(".")]
    if not folders or resolution.is_user_code:
        return

    unused = resolution.chosen_engine.handler.unused
    if not is_enabled(resolution.engine_options) or OPTION in unused:
        values.warn(
            f"the adapters in {folders[0].parent} are not loaded: {OPTION}=true loads them, on an "
            "engine that has adapters"
        )
        return

    server = ServerConfig(**values.fields("server"))
    for folder in folders:
        secure_mode.check_adapter(server, folder, folder.parent.parent)
        check_files(folder, allow_pickle=values.final("option.allow_pickle"))
        _check_code(resolution, folder)

    aliases = values.final("option.model_alias")
    model = ModelConfig(path="", name=values.final("option.model_name"), aliases=aliases)
    resolution.adapters = _by_name(folders, model.names)


def _check_code(resolution: Resolution, folder: Path) -> None:
    """Raise ModelUnusable for an adapter whose own code does not run: without it its answers are
    others.
    """
    runs = resolution.code is not None and resolution.code.runs_adapters
    if (folder / SCRIPT).exists() and not runs:
        raise ModelUnusable(f"{folder}: {NOT_RUN}")


def _by_name(folders: Iterable[Path], names_of_model: Container[str]) -> dict[str, str]:
    """Return the folders by their names. Raises ModelUnusable for a name that is not allowed, that
    the model has, or that another adapter has.
    """
    adapters: dict[str, str] = {}
    for folder in folders:
        try:
            check_name(folder.name)
        except InvalidParameter as error:
            raise ModelUnusable(f"{folder}: the folder's {error}") from None

        name = folder.name
        if name in names_of_model or name in adapters:
            owner = adapters.get(name, "the model")
            raise ModelUnusable(
                f"{folder}: an adapter has a name of its own, and {owner} has this one"
            )

        adapters[name] = str(folder)

    return adapters


def check_files(folder: Path, *, allow_pickle: bool) -> None:
    """Raise ModelUnusable unless a folder has the files of an adapter, SecurityRefused if its
    weights are pickled.
    """
    file = folder / CONFIG
    text = b"{}"
    try:
        has_config = file.is_file()
        has_weights = (folder / WEIGHTS).is_file()
        has_pickle = (folder / PICKLED).is_file()
        if has_config:
            with open(file, "rb") as reader:
                text = reader.read(MAX_CONFIG_BYTES + 1)

        if len(text) > MAX_CONFIG_BYTES:
            raise ModelUnusable(
                f"{file}: over {MAX_CONFIG_BYTES} bytes, which no adapter's configuration has"
            )

        msgspec.json.decode(text, type=dict)
    except OSError as error:
        raise ModelUnusable(f"{error.filename}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelUnusable(f"{file}: {error}") from None

    if not has_config or not (has_weights or has_pickle):
        missing = WEIGHTS if has_config else CONFIG
        raise ModelUnusable(f"{folder}: an adapter's folder has an {missing}")

    if not has_weights and not allow_pickle:
        advice = f"save it as {WEIGHTS}, or set option.allow_pickle=true"
        raise SecurityRefused(f"{folder / PICKLED} is a pickle, which can run code: {advice}")
