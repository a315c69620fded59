"""What is chosen where nobody said it: the folder, the model, the engine, the number of replicas.

Looks at the machine and at folders, never into weights, and imports no engine: importing torch takes seconds and
belongs to the engine's process. Folders and names are chosen as LMI's `serve` does.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lmi.errors import BadConfiguration, ModelUnusable, shorten
from lmi.settings.model_urls import local_path

PLATFORM_FOLDER = Path("/opt/ml/model")
DEMO = "demo"
EMBEDDED = "lmi-dist"
VLLM = "vllm"
NO_ROLLING_BATCH = "disable"  # the dynamic-batch schema, over any engine
USER_CODE = "python"  # user code is the model
LIBRARIES = {VLLM: "vllm", "trtllm": "tensorrt_llm"}  # what the handlers of this package need beside it
NEURON = "Neuron devices are not served here"
NOT_HERE = {  # engines of the reference
    "trtllm": "there is no handler for TensorRT-LLM here yet",
    "deepspeed": "DeepSpeed is not served here",
    "neuronx": NEURON,
    "tnx": NEURON,
    "transformers-neuronx": NEURON,
    "optimum": NEURON,
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to run on."""

    num_cores: int
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Machine:
        return cls(_num_cores(), _visible_gpus(environ))


def find_folder(asked: str | None, cwd: Path, platform_folder: Path = PLATFORM_FOLDER) -> Path | None:
    """The folder to serve: the one asked for, SageMaker's, the current one; None: no folder, so the demo.

    A folder that holds nothing but one other folder stands for that one, since archives are often packed so.
    """
    if asked is not None:
        folder = cwd / local_path(asked)
        if asked == DEMO and not folder.exists():
            return demo_folder()
        if not folder.is_dir():
            problem = "is not a folder" if folder.exists() else "does not exist"
            hint = "; downloading a model is not built yet" if re.match(r"[a-z0-9]+://", asked) else ""
            if re.fullmatch(r"[\w.-]+/[\w.-]+", asked):
                hint = "; downloading a model from a hub is not built yet"
            raise ModelUnusable(f"{asked}: {problem}{hint}")
    elif platform_folder.is_dir() and any(platform_folder.iterdir()):
        folder = platform_folder
    elif any((cwd / name).is_file() for name in ("serving.properties", "config.json")):
        folder = cwd
    else:
        return None
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else folder


def find_model(model_id: str | None, folder: Path | None, cwd: Path) -> tuple[Path, str]:
    """The model's local folder and its name in URLs. Raises ModelUnusable with the reason."""
    path = _model_path(model_id, folder, cwd)
    if not (path / "config.json").is_file():
        raise ModelUnusable(f"{path}: {_what_is_there(path)}; a model's folder has a config.json")
    name = DEMO if path == demo_folder() else model_name(Path(model_id).name if model_id else path.name)
    return path, name


def find_user_code_model(model_id: str | None, folder: Path | None, cwd: Path) -> tuple[Path, str]:
    """The same for a model that is code of its own: it may have no file beside that, or load it from anywhere."""
    path = user_code_folders(model_id, folder, cwd)[0]
    return path, model_name(Path(model_id).name if model_id else path.name)


def user_code_folders(model_id: str | None, folder: Path | None, cwd: Path) -> list[Path]:
    """Where code of the model's own may lie: beside the model, beside serving.properties."""
    try:
        path = _model_path(model_id, folder, cwd)
    except ModelUnusable:
        path = folder or cwd
    return [path] if folder is None or folder == path else [path, folder]


def model_name(text: str) -> str:
    """`text` with everything replaced that a URL's path segment or a log line would trip over."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip("._-")[:128] or "model"


def demo_folder() -> Path:
    spec = importlib.util.find_spec("handlers")  # the top package only: no import of an engine
    if spec is None or not spec.submodule_search_locations:
        raise ModelUnusable("the package handlers is not installed, so there is no demo model")
    return Path(spec.submodule_search_locations[0]) / "lmi_dist" / "demo"


def choose_handler(asked: str, machine: Machine, installed: frozenset[str] | None = None) -> tuple[str, str]:
    """The handler and the reason for it. Raises BadConfiguration with what is allowed."""
    installed = installed_handlers() if installed is None else installed
    word = asked.lower()
    if word in ("auto", NO_ROLLING_BATCH):
        if not machine.gpus:
            return EMBEDDED, "no GPU is visible"
        if VLLM not in installed:
            return EMBEDDED, "vllm is not installed"
        return VLLM, "vllm is installed and a GPU is visible"
    if word == "scheduler":
        return EMBEDDED, "scheduler is served by lmi-dist"
    if word in installed:
        return word, "asked for"
    reason = ""
    if word in LIBRARIES and word in announced_handlers():
        reason = f" ({word}: the library {LIBRARIES[word]} is not installed)"
    elif word in NOT_HERE:
        reason = f"; auto chooses {EMBEDDED} or vllm ({word}: {NOT_HERE[word]})"
    raise BadConfiguration(", ".join(["auto", NO_ROLLING_BATCH, "scheduler", *sorted(installed)]) + reason)


def announced_handlers() -> frozenset[str]:
    return frozenset(entry.name for entry in importlib.metadata.entry_points(group="lmi.handlers")) | {EMBEDDED}


def installed_handlers() -> frozenset[str]:
    """Handlers that are announced and whose library is there."""
    is_missing = {name for name, library in LIBRARIES.items() if _folder_of(library) is None}
    return announced_handlers() - is_missing


def vllm_arguments() -> frozenset[str]:
    """The names of vLLM's engine arguments, read from its source text without running it; none where it is not there.

    `model` is ours to say.
    """
    folder = _folder_of("vllm")
    file = folder / "engine" / "arg_utils.py" if folder else None
    if file is None or not file.is_file():
        return frozenset()
    classes = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    fields = [
        field.target.id
        for node in classes
        if node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
    return frozenset(name for name in fields if not name.startswith("_")) - {"model"}


def num_engines(num_gpus: int, gpus_each: int, low: int | None, high: int | None) -> int:
    """Replicas: as many as fit, at least `low`, at most `high`. Raises BadConfiguration where they do not fit.

    Without GPUs one replica fits by default, since it uses all cores.
    """
    if low is not None and high is not None and low > high:
        raise BadConfiguration(f"minWorkers={low}, maxWorkers={high}: allowed is a minWorkers of at most maxWorkers")
    if num_gpus == 0:
        return max(low or 1, min(1, high or 1))
    fit = num_gpus // gpus_each
    if fit < (low or 1):
        raise BadConfiguration(
            f"{low or 1} replicas of {gpus_each} GPUs each do not fit: allowed are {num_gpus} GPUs in all"
        )
    return min(fit, high or fit)


def num_ranks_here(num_ranks: int, nodes: str) -> int:
    """Ranks of one engine on this machine, of those that it has on all; `nodes`: option.nnodes as it was given."""
    return max(1, num_ranks // max(1, int(nodes) if nodes.isdecimal() else 1))


def _folder_of(library: str) -> Path | None:
    """Where a top package lies, found without importing it; None where it is not installed."""
    try:
        spec = importlib.util.find_spec(library)
    except ValueError:  # imported by hand, without a spec
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _model_path(model_id: str | None, folder: Path | None, cwd: Path) -> Path:
    if model_id is None:
        return folder or demo_folder()
    model_id = local_path(model_id)
    for base in (folder or cwd, cwd):
        if (base / model_id).is_dir():
            return base / model_id
    if model_id == DEMO:
        return demo_folder()
    if re.match(r"[a-z0-9]+://", model_id):
        raise ModelUnusable(f"{shorten(model_id)}: downloading a model is not built yet, give a local folder")
    raise ModelUnusable(
        f"{shorten(model_id)}: no such folder in {folder or cwd}; downloading a model from a hub is not built yet"
    )


def _what_is_there(path: Path) -> str:
    if not path.is_dir():
        return "does not exist"
    names = sorted(entry.name for entry in path.iterdir())
    return f"holds {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else "is empty"


def _num_cores() -> int:
    """Cores that this process may use, a container's quota counted in."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    present = sorted((path.name[6:] for path in Path("/dev").glob("nvidia[0-9]*")), key=int)
    if not present or not (Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia").exists()):
        return ()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(str(number) for number in range(len(present)))
    names = [name.strip() for name in visible.split(",")]
    invalid = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return tuple(names[:invalid])  # as CUDA does: the first invalid name ends the list
