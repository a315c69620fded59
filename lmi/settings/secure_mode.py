"""Secure mode: what a model brings along is trusted no more than a request.

The operator names controls, each of which refuses some files and some options. What is not known to
be safe is refused by secure mode itself. Names and meanings are those of djl-serving, but an
unknown control is refused here.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lmi.errors import SecurityRefused
from lmi.settings.config import ServerConfig
from lmi.settings.given import FILE, Given
from lmi.settings.kinds import local_path
from lmi.settings.model_choice import user_code_folders
from lmi.settings.option import PICKLES, REMOTE_CODE, SCRIPTS, TEMPLATES
from lmi.settings.steps import Resolution
from lmi.settings.table import DRAFT, OPTIONS, find
from lmi.settings.values import Values
from lmi.shared.model_files import read_bounded
from lmi.user_code.settings import REQUIREMENTS

SWITCH = "secure_mode"
CONTROLS_KEY = "security_controls"
CHANNELS = "untrusted_channels"
PLATFORM_FOLDER = Path("/opt/ml")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Options that no field is and that are safe.
SAFE_OPTIONS = frozenset(
    (
        "option.gpu_memory_utilization",
        "option.enforce_eager",
        "option.enable_lora",
        "option.max_loras",
        "option.max_lora_rank",
        "option.max_cpu_loras",
        "option.lora_extra_vocab_size",
        "option.kv_cache_dtype",
        "option.enable_chunked_prefill",
        "option.disable_sliding_window",
        "option.swap_space",
        "option.cpu_offload_gb",
        "option.seed",
        "option.speculative_draft_model",
        "option.speculative_length",
        "option.draft_model_tp_size",
        "option.nnodes",
        "option.node_rank",
        "option.master_addr",
        "option.master_port",
        "option.max_input_len",
        "option.tokens_per_block",
        "option.kv_cache_free_gpu_mem_fraction",
        "option.batch_scheduler_policy",
        "option.guided_decoding_backend",
        "option.disable_any_whitespace",
        "option.free_gpu_memory_fraction",
        "option.host_cache_size",
        "option.use_cuda_graph",
    )
)
LOAD_FORMAT = "option.load_format"
SAFE_LOAD_FORMATS = ("auto", "safetensors")


def _has_template(file: Path) -> bool:
    if file.name != "tokenizer_config.json":
        return file.name in ("chat_template.jinja", "chat_template.json")

    try:
        content = json.loads(read_bounded(file))
    except (OSError, ValueError, RecursionError):
        # Another reader may find a template in it.
        return True

    return isinstance(content, dict) and content.get("chat_template") is not None


CONTROLS = ("DISALLOW_REQUIREMENTS_TXT", SCRIPTS, PICKLES, REMOTE_CODE, TEMPLATES)
# What each refuses: options whose `refused_by` names it, a file in the model's folder itself, and
# files at any depth of a folder that is not trusted.
BESIDE = {"DISALLOW_REQUIREMENTS_TXT": REQUIREMENTS, SCRIPTS: "model.py"}
WITHIN: dict[str, Callable[[Path], bool]] = {
    PICKLES: lambda file: file.suffix.lower() in PICKLE_SUFFIXES,
    TEMPLATES: _has_template,
}


def check(resolution: Resolution) -> None:
    """Raise SecurityRefused with one line for each option, path and file of a server that secure
    mode refuses.

    If no channel is named, the folders that may hold scripts of the model are the channels.
    """
    values = resolution.values
    if not values.final(SWITCH):
        return

    names, channels = _controls_and_channels(values)
    folders = user_code_folders(values)
    folder = resolution.start.folder
    cwd = resolution.start.cwd
    fetched = (*resolution.fetched.values(), *resolution.start.untrusted)
    roots = [PLATFORM_FOLDER, Path(values.final("download_dir"))]
    if folder:
        roots.append(folder)

    roots += fetched
    refused = list(_refused_options(values, names))
    for path, option in paths_outside(values, [*folders, folder or cwd, cwd], roots):
        refused.append(f"{option.place}: {_leaves(path)}")

    for place in dict.fromkeys(path.resolve() for path in folders):
        refused += _refused_beside(place, names)

    code = resolution.code
    if code is not None and code.standards_folder and SCRIPTS in names:
        refused.append(f"{code.path}: refused by {SCRIPTS}")

    # The current folder is the model's only if it is served.
    channels = channels or [path for path in folders if path == folder or path != cwd]
    for untrusted in dict.fromkeys((*channels, *fetched)):
        refused += _refused_within(untrusted, names)

    _raise(list(dict.fromkeys(refused)))


def check_operator(resolution: Resolution) -> None:
    """Raise SecurityRefused if a control or a channel of secure mode is unknown or missing."""
    if resolution.values.final(SWITCH):
        _controls_and_channels(resolution.values)


def _controls_and_channels(values: Values) -> tuple[tuple[str, ...], list[Path]]:
    """Return controls and channels. Raises SecurityRefused if one is unknown or missing."""
    refused: list[str] = []
    for option in OPTIONS:
        if option.is_for_operator and option.key in values:
            entry = values.how_given(option.key)
            if entry.rank[0] == FILE:
                refused.append(
                    f"{entry.place}: in secure mode only the environment or the command line may "
                    "give it"
                )

    _raise(refused)
    names: tuple[str, ...] = values.final(CONTROLS_KEY)
    controls = ", ".join(CONTROLS)
    if not names:
        switch = values.how_given(SWITCH).said
        _raise([f"{switch}: SAGEMAKER_SECURITY_CONTROLS is missing; controls are {controls}"])

    place = values.how_given(CONTROLS_KEY).place
    unknown = [name for name in names if name not in CONTROLS]
    _raise([f"{place}: unknown control {name}; controls are {controls}" for name in unknown])

    channels = [Path(text) for text in values.final(CHANNELS)]
    for channel in channels:
        if not channel.is_dir():
            refused.append(f"{values.how_given(CHANNELS).place}: {channel} is not a folder")

    _raise(refused)
    return names, channels


def check_adapter(
    server: ServerConfig, folder: Path, model: Path, *, is_fetched: bool = False
) -> None:
    """Raise SecurityRefused if secure mode refuses the adapter in `folder` for the model in the
    folder `model`.

    A fetched one lies where the fetch process put it, so only its files are checked.
    """
    if not server.secure_mode:
        return

    names = server.security_controls
    roots = [PLATFORM_FOLDER, model, *map(Path, filter(None, [server.download_dir]))]
    if not is_fetched and not _is_below(folder, roots):
        _raise([f"{folder}: {_leaves(folder)}"])

    _raise([*_refused_beside(folder, names), *_refused_within(folder, names)])


def _refused_options(values: Values, names: Collection[str]) -> Iterator[str]:
    for key, winner in values.picked.items():
        if not _is_safe(key, winner.value):
            yield f"{winner.given.place}: secure mode does not allow this option"

    for name in names:
        for option in sorted(OPTIONS, key=lambda option: option.key):
            value = values.given(option.key, option.default)
            if option.refused_by == name and value != option.default and not option.harmless(value):
                yield f"{values.how_given(option.key).said}: refused by {name}"


def _is_safe(key: str, value: Any) -> bool:
    if key == LOAD_FORMAT:
        return value in SAFE_LOAD_FORMATS

    if not key.startswith("option.") or key in SAFE_OPTIONS:
        return True

    option = find(key)
    return option is not None and option.is_safe


def paths_outside(
    values: Values, bases: list[Path], roots: list[Path]
) -> Iterator[tuple[Path, Given]]:
    """Yield each path outside of `roots` that an option names, with what names it. `bases` are what
    it is relative to.

    A text that is no path here, such as the name of a model of a hub, is left out.
    """
    keys = [option.key for option in OPTIONS if option.is_path]
    for key in (*keys, DRAFT):
        option = find(key)
        is_word = option is not None and values.given(key) in option.kind.words
        if key not in values or is_word:
            continue

        text = local_path(str(values.given(key)))
        paths: list[Path] = []
        # What is too long for a path may mean a model of a hub.
        with suppress(OSError):
            paths = _paths_of(text, bases)

        outside = [path for path in paths if not _is_below(path, roots)]
        if outside:
            yield outside[0], values.how_given(key)


def _paths_of(text: str, bases: list[Path]) -> list[Path]:
    """Return the places that a path means, or none where the text is no path."""
    paths = [base / text for base in bases if (base / text).exists()]
    if not paths and text.startswith("/"):
        return [Path(text)]

    return paths


def _is_below(path: Path, roots: list[Path]) -> bool:
    return any(path.resolve().is_relative_to(root.resolve()) for root in roots)


def _leaves(path: Path) -> str:
    return f"{path.resolve()} is outside of the model's folder, {PLATFORM_FOLDER} and download_dir"


def _refused_beside(folder: Path, names: Collection[str]) -> list[str]:
    refused: list[str] = []
    for name in names:
        file = folder / BESIDE[name] if name in BESIDE else None
        if file is not None and os.path.lexists(file):
            refused.append(f"{file}: refused by {name}")

    return refused


def _refused_within(folder: Path, names: Collection[str]) -> Iterator[str]:
    for name in names:
        if name not in WITHIN:
            continue

        for file in _files(folder):
            if WITHIN[name](file):
                yield f"{file}: refused by {name}"


def _files(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder, through links too. Raises SecurityRefused for a folder that
    cannot be read.
    """
    real_folders = set()
    for parent, folders, files in os.walk(folder, onerror=_unreadable, followlinks=True):
        real_folder = os.path.realpath(parent)
        if real_folder in real_folders:
            folders.clear()
            continue

        real_folders.add(real_folder)
        yield from (Path(parent, file) for file in sorted(files))


def _unreadable(error: OSError) -> NoReturn:
    raise SecurityRefused(f"{error.filename}: cannot be searched in secure mode: {error.strerror}")


def _raise(refused: list[str]) -> None:
    if refused:
        raise SecurityRefused("\n".join(refused))
