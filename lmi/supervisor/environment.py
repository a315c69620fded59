"""The environment of each child process. Nothing here reads or changes the environment of the supervisor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from lmi.settings.config import Config, EngineConfig
from lmi.settings.handler import USER_CODE, announced
from lmi.settings.machine import num_ranks_here
from lmi.shared import processes

SMALL_MODEL_BYTES = 64 << 20  # weights that nearly fit a cache gain nothing from the last core
SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY)(_|$)")
NOT_FOR_CHILDREN = re.compile(r"GUNICORN_|LISTEN_(FDS|PID)|WEB_CONCURRENCY|NOTIFY_SOCKET")


def of_child(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables that would change how gunicorn starts.

    gunicorn uses setproctitle where an engine's library has installed it. SPT_NOENV keeps it from overwriting what
    /proc says of a process.
    """
    return {name: value for name, value in environ.items() if not NOT_FOR_CHILDREN.match(name)} | {"SPT_NOENV": "1"}


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that reads requests or runs code of others."""
    return {name: value for name, value in environ.items() if not SECRET.search(name.upper())}


def of_engine(config: Config, environ: Mapping[str, str], slot: int, folder: str = "") -> dict[str, str]:
    """The variables of the engine in this slot, beside those that it inherits. Libraries read them once, at import.

    `folder` is for sockets; the supervisor removes it when the server ends.
    """
    given = config.engine.environ
    environ = {**environ, **given}
    threads = of_threads(config, environ)
    handler = announced().get(config.engine.handler, USER_CODE)
    return {**threads, **handler.environment(config.engine, environ, slot, folder), **given}


def of_user_code(config: Config, environ: Mapping[str, str], slot: int) -> dict[str, str]:
    """The environment of a process that runs user code: no secrets but those of option.env.

    Where user code is the model, each process sees only its GPUs.
    """
    inherited = without_secrets(environ) | config.engine.environ
    if not config.is_user_code:
        return inherited
    num_each = len(config.engine.device_ids) // config.engine.num_engines
    gpus = config.engine.device_ids[slot * num_each : (slot + 1) * num_each]
    return inherited | of_threads(config, inherited) | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def of_threads(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """How many threads an engine's kernels use, and how long these spin.

    Threads that spin while they wait take the cores that a front end needs, so they spin shortly. The numbers were
    measured on two cores beside one busy process.
    """
    threads = {"GOMP_SPINCOUNT": environ.get("GOMP_SPINCOUNT", "1000")}
    if config.engine.num_threads is not None or "OMP_NUM_THREADS" not in environ:
        threads["OMP_NUM_THREADS"] = str(num_engine_threads(config.engine, config.model.path))
    return threads


def num_engine_threads(engine: EngineConfig, model_path: str) -> int:
    """All cores, but one less for a small model: waiting for one more thread costs it more than the core brings."""
    if engine.num_threads is not None:
        return engine.num_threads
    cores = processes.num_usable_cores()
    if _weight_bytes(model_path) <= SMALL_MODEL_BYTES:
        cores -= 1  # the front end needs it more
    return max(1, cores // (engine.num_engines * _num_local_ranks(engine)))


def _num_local_ranks(engine: EngineConfig) -> int:
    return num_ranks_here(engine.tensor_parallel_degree, engine.options.get("nnodes", ""))


def _weight_bytes(model_path: str) -> int:
    folder = Path(model_path)
    return sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
