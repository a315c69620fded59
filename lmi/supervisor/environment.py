"""What a child process of the supervisor finds in its environment. Nothing here reads or changes our own."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmi.settings import choices
from lmi.settings.choices import VLLM
from lmi.settings.config import Config, EngineConfig
from lmi.shared import processes

SMALL_MODEL_BYTES = 64 << 20  # weights that nearly fit a cache gain nothing from the last core
MAX_SOCKET_FOLDER_BYTES = 107 - 37  # a socket's path, less the name that vLLM gives it
SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY)(_|$)")
NOT_FOR_CHILDREN = re.compile(r"GUNICORN_|LISTEN_(FDS|PID)|WEB_CONCURRENCY|NOTIFY_SOCKET")


def of_child(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the words that would change how gunicorn starts.

    gunicorn takes setproctitle where it is (vLLM brings it), which would write over what /proc says of a process.
    """
    return {name: value for name, value in environ.items() if not NOT_FOR_CHILDREN.match(name)} | {"SPT_NOENV": "1"}


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that meets strangers."""
    return {name: value for name, value in environ.items() if not SECRET.search(name.upper())}


def of_engine(config: Config, environ: Mapping[str, str], slot: int, folder: str = "") -> dict[str, str]:
    """What the engine in this slot gets beside what it inherits; libraries read it once, at their import.

    `folder` is for sockets and goes with the server.
    """
    given = config.engine.environ
    environ = {**environ, **given}
    threads = of_threads(config, environ)
    of_library = of_vllm(config, environ, slot, folder) if config.engine.handler == VLLM else {}
    return threads | of_library | given


def of_user_code(config: Config, environ: Mapping[str, str], slot: int) -> dict[str, str]:
    """What a process gets that runs code of the model's own: no secrets but those of option.env, and where it is the
    model, its own GPUs."""
    inherited = without_secrets(environ) | config.engine.environ
    if not config.is_user_code:
        return inherited
    num_each = len(config.engine.device_ids) // config.engine.num_engines
    gpus = config.engine.device_ids[slot * num_each : (slot + 1) * num_each]
    return inherited | of_threads(config, inherited) | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def of_threads(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Threads of an engine's kernels.

    Threads that spin while they wait ruin a machine they share with a front end, so they spin shortly. Source of the
    numbers: measurements on two cores beside one busy process.
    """
    threads = {"GOMP_SPINCOUNT": environ.get("GOMP_SPINCOUNT", "1000")}
    if config.engine.num_threads is not None or "OMP_NUM_THREADS" not in environ:
        threads["OMP_NUM_THREADS"] = str(num_engine_threads(config.engine, config.model.path))
    return threads


def of_vllm(config: Config, environ: Mapping[str, str], slot: int, folder: str = "") -> dict[str, str]:
    """vLLM's own variables: nothing is sent or fetched, sockets go with the server, each rank on a CPU has its cores.

    What the operator has set stays as it is.
    """
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(config.engine.model_loading_timeout_s)),
    }
    if 0 < len(os.fsencode(folder)) <= MAX_SOCKET_FOLDER_BYTES:
        wanted["VLLM_RPC_BASE_PATH"] = folder
    if config.engine.tensor_parallel_degree > 1 and not config.engine.device_ids:
        groups = rank_cores(config.engine, slot, sorted(os.sched_getaffinity(0)))
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, cores)) for cores in groups)
    return {name: value for name, value in wanted.items() if name not in environ}


def rank_cores(engine: EngineConfig, slot: int, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """The cores of each tensor parallel rank that this machine runs of the engine in this slot.

    The ranks of all engines share the cores in equal groups; more ranks than cores take them in turn.
    """
    num_ranks = _num_local_ranks(engine)
    size = max(1, len(cores) // (num_ranks * engine.num_engines))
    used = min(size, engine.num_threads or size)
    starts = [rank * size % len(cores) for rank in range(slot * num_ranks, (slot + 1) * num_ranks)]
    return [tuple(cores[start : start + used]) for start in starts]


def num_engine_threads(engine: EngineConfig, model_path: str) -> int:
    """All cores but one for a small model: threads that wait for each other cost it more than the last core gives."""
    if engine.num_threads is not None:
        return engine.num_threads
    cores = processes.num_usable_cores()
    if _weight_bytes(model_path) <= SMALL_MODEL_BYTES:
        cores -= 1  # the front end needs it more
    return max(1, cores // (engine.num_engines * _num_local_ranks(engine)))


def _num_local_ranks(engine: EngineConfig) -> int:
    return choices.num_ranks_here(engine.tensor_parallel_degree, engine.options.get("nnodes", ""))


def _weight_bytes(model_path: str) -> int:
    folder = Path(model_path)
    return sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
