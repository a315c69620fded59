"""Secure mode: what comes with a model is trusted no more than a request.

The operator names controls, of which each refuses some files and some options. Options that are not
known to be safe, and paths out of safe folders, are refused in any case. Names and meanings are
those of djl-serving, but an unknown control is refused here.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lmi.errors import SecurityRefused
from lmi.settings.config import ServerConfig
from lmi.settings.given import Given
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
# All that SageMaker puts into a container: models, channels, code.
PLATFORM_ROOT = Path("/opt/ml")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Safe options that are not in the table.
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
CONTROLS = ("DISALLOW_REQUIREMENTS_TXT", SCRIPTS, PICKLES, REMOTE_CODE, TEMPLATES)
# A control refuses the options whose `refused_by` names it. Those of BESIDE also refuse a file of
# the model's folder itself.
BESIDE = {"DISALLOW_REQUIREMENTS_TXT": REQUIREMENTS, SCRIPTS: "model.py"}


def _has_template(file: Path) -> bool:
    """Return whether a file has a chat template, or may have one."""
    if file.name != "tokenizer_config.json":
        return file.name in ("chat_template.jinja", "chat_template.json")

    try:
        content = json.loads(read_bounded(file))
    except (OSError, ValueError, RecursionError):
        # Another reader may find a template in it.
        return True

    return isinstance(content, dict) and content.get("chat_template") is not None


# Controls that refuse the files of a kind, at any depth of a folder that is not trusted.
WITHIN: dict[str, Callable[[Path], bool]] = {
    PICKLES: lambda file: file.suffix.lower() in PICKLE_SUFFIXES,
    TEMPLATES: _has_template,
}


def check(resolution: Resolution) -> None:
    """Raise SecurityRefused with one line for each option, path and file of a server that secure
    mode refuses.
    """
    values = resolution.values
    if not values.final(SWITCH):
        return

    controls, channels = _controls_and_channels(values)
    refusals = [
        *_refused_options(values, controls),
        *_refused_paths(resolution),
        *_refused_code(resolution, controls),
        *_refused_files(resolution, controls, channels),
    ]
    _refuse_if_any(list(dict.fromkeys(refusals)))


def check_operator(resolution: Resolution) -> None:
    """Raise SecurityRefused if the operator's settings of secure mode are at fault."""
    if resolution.values.final(SWITCH):
        _controls_and_channels(resolution.values)


def _controls_and_channels(values: Values) -> tuple[tuple[str, ...], list[Path]]:
    """Return the controls, and the channels: the folders that are searched.

    Raises SecurityRefused if one is unknown or missing, or if serving.properties gives an option
    that is for the operator alone.
    """
    refusals: list[str] = []
    for option in OPTIONS:
        if option.is_for_operator and option.key in values:
            entry = values.how_given(option.key)
            if entry.is_from_file:
                refusals.append(
                    f"{entry.place}: in secure mode only the environment or the command line may "
                    "give it"
                )

    _refuse_if_any(refusals)
    controls: tuple[str, ...] = values.final(CONTROLS_KEY)
    known_controls = ", ".join(CONTROLS)
    if not controls:
        switch = values.how_given(SWITCH).assignment
        _refuse_if_any(
            [f"{switch}: SAGEMAKER_SECURITY_CONTROLS is missing; controls are {known_controls}"]
        )

    place = values.how_given(CONTROLS_KEY).place
    for control in controls:
        if control not in CONTROLS:
            refusals.append(f"{place}: unknown control {control}; controls are {known_controls}")

    _refuse_if_any(refusals)
    channels = [Path(text) for text in values.final(CHANNELS)]
    for channel in channels:
        if not channel.is_dir():
            refusals.append(f"{values.how_given(CHANNELS).place}: {channel} is not a folder")

    _refuse_if_any(refusals)
    return controls, channels


def check_adapter(
    server: ServerConfig, folder: Path, model: Path, *, is_fetched: bool = False
) -> None:
    """Raise SecurityRefused if secure mode refuses the adapter in `folder` for the model in the
    folder `model`.

    A fetched one lies where the fetch process has put it, so only its files are checked.
    """
    if not server.secure_mode:
        return

    controls = server.security_controls
    roots = [PLATFORM_ROOT, model]
    if server.download_dir:
        roots.append(Path(server.download_dir))

    if not is_fetched and not _is_below(folder, roots):
        _refuse_if_any([f"{folder}: {_outside_message(folder)}"])

    _refuse_if_any([*_refused_beside(folder, controls), *_refused_within(folder, controls)])


def _refused_options(values: Values, controls: Collection[str]) -> Iterator[str]:
    """Yield a line for each option that is not safe, or that a control refuses."""
    for key, winner in values.picked.items():
        if not _is_safe(key, winner.value):
            yield f"{winner.given.place}: secure mode does not allow this option"

    for control in controls:
        for option in sorted(OPTIONS, key=lambda option: option.key):
            value = values.given(option.key, option.default)
            is_harmless = value == option.default or option.harmless(value)
            if option.refused_by == control and not is_harmless:
                yield f"{values.how_given(option.key).assignment}: refused by {control}"


def _refused_paths(resolution: Resolution) -> Iterator[str]:
    """Yield a line for each option that names a path out of the safe folders."""
    values = resolution.values
    served_folder = resolution.start.folder
    cwd = resolution.start.cwd
    bases = [*user_code_folders(values), served_folder or cwd, cwd]
    roots = [PLATFORM_ROOT, Path(values.final("download_dir")), *_folders_of_strangers(resolution)]
    if served_folder is not None:
        roots.append(served_folder)

    for path, option in paths_outside(values, bases, roots):
        yield f"{option.place}: {_outside_message(path)}"


def _refused_code(resolution: Resolution, controls: Collection[str]) -> Iterator[str]:
    """Yield a line for each file of the model's code that the controls refuse."""
    code_folders = user_code_folders(resolution.values)
    for folder in dict.fromkeys(path.resolve() for path in code_folders):
        yield from _refused_beside(folder, controls)

    code = resolution.code
    if code is not None and code.standards_folder and SCRIPTS in controls:
        yield f"{code.path}: refused by {SCRIPTS}"


def _refused_files(
    resolution: Resolution, controls: Collection[str], channels: list[Path]
) -> Iterator[str]:
    """Yield a line for each file that the controls refuse in the channels, in fetched folders and
    in those of strangers.
    """
    searched_folders = channels
    if not searched_folders:
        # Then the folders that may hold code of the model are searched. The current one belongs to
        # the model only if it is served.
        cwd = resolution.start.cwd
        served_folder = resolution.start.folder
        code_folders = user_code_folders(resolution.values)
        searched_folders = [path for path in code_folders if path == served_folder or path != cwd]

    for folder in dict.fromkeys((*searched_folders, *_folders_of_strangers(resolution))):
        yield from _refused_within(folder, controls)


def _folders_of_strangers(resolution: Resolution) -> tuple[Path, ...]:
    return (*resolution.fetched.values(), *resolution.start.untrusted)


def _is_safe(key: str, value: Any) -> bool:
    """Return whether secure mode allows an option, whatever the controls are."""
    if key == LOAD_FORMAT:
        return value in SAFE_LOAD_FORMATS

    if not key.startswith("option.") or key in SAFE_OPTIONS:
        return True

    option = find(key)
    return option is not None and option.is_safe


def paths_outside(
    values: Values, bases: list[Path], roots: list[Path]
) -> Iterator[tuple[Path, Given]]:
    """Yield each path outside of `roots` that an option names, with the value that names it. It may
    be relative to any of `bases`. A text that is no path here, such as a hub's model, is left out.
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


def _outside_message(path: Path) -> str:
    """Return the fault of a path out of the safe folders."""
    return f"{path.resolve()} is outside of the model's folder, {PLATFORM_ROOT} and download_dir"


def _refused_beside(folder: Path, controls: Collection[str]) -> list[str]:
    """Return a line for each file of a folder itself that the controls refuse."""
    refusals: list[str] = []
    for control in controls:
        if control not in BESIDE:
            continue

        file = folder / BESIDE[control]
        if os.path.lexists(file):
            refusals.append(f"{file}: refused by {control}")

    return refusals


def _refused_within(folder: Path, controls: Collection[str]) -> Iterator[str]:
    """Yield a line for each file of a folder, at any depth, that the controls refuse."""
    controls_of_files = [control for control in controls if control in WITHIN]
    if not controls_of_files:
        return

    files = list(_files(folder))
    for control in controls_of_files:
        for file in files:
            if WITHIN[control](file):
                yield f"{file}: refused by {control}"


def _files(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder, also through links. Raises SecurityRefused for a folder that
    cannot be read.
    """
    visited = set()
    for parent, folders, files in os.walk(folder, onerror=_unreadable, followlinks=True):
        real_folder = os.path.realpath(parent)
        # A link may lead back.
        if real_folder in visited:
            folders.clear()
            continue

        visited.add(real_folder)
        yield from (Path(parent, file) for file in sorted(files))


def _unreadable(error: OSError) -> NoReturn:
    raise SecurityRefused(f"{error.filename}: cannot be searched in secure mode: {error.strerror}")


def _refuse_if_any(refusals: list[str]) -> None:
    """Raise SecurityRefused with these lines, if there are any."""
    if refusals:
        raise SecurityRefused("\n".join(refusals))
