"""What a child process of the supervisor finds in its environment. Nothing here reads or changes our own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from lmi import processes
from lmi.config import Config, EngineConfig

SMALL_MODEL_BYTES = 64 << 20  # weights that nearly fit a cache gain nothing from the last core
SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY)(_|$)")
NOT_FOR_CHILDREN = re.compile(r"GUNICORN_|LISTEN_(FDS|PID)|WEB_CONCURRENCY|NOTIFY_SOCKET")


def of_child(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the words that would change how gunicorn starts."""
    return {name: value for name, value in environ.items() if not NOT_FOR_CHILDREN.match(name)}


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that meets strangers."""
    return {name: value for name, value in environ.items() if not SECRET.search(name.upper())}


def of_threads(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Threads of an engine's kernels; set before torch is imported, which reads them once.

    Threads that spin while they wait ruin a machine they share with a front end, so they spin shortly. Source of the
    numbers: measurements on two cores beside one busy process.
    """
    threads = {"GOMP_SPINCOUNT": environ.get("GOMP_SPINCOUNT", "1000")}
    if config.engine.num_threads is not None or "OMP_NUM_THREADS" not in environ:
        threads["OMP_NUM_THREADS"] = str(num_engine_threads(config.engine, config.model.path))
    return threads


def num_engine_threads(engine: EngineConfig, model_path: str) -> int:
    if engine.num_threads is not None:
        return engine.num_threads
    cores = processes.num_usable_cores()
    if _weight_bytes(model_path) <= SMALL_MODEL_BYTES:
        cores -= 1  # the front end needs it more
    return max(1, cores // engine.num_engines)


def _weight_bytes(model_path: str) -> int:
    folder = Path(model_path)
    return sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
