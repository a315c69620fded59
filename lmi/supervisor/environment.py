"""Makes the environment of each child process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmi.settings.config import Config, EngineConfig
from lmi.settings.handler import USER_CODE, Handler, announced
from lmi.settings.machine import num_ranks_here
from lmi.shared import linux
from lmi.shared.cores import Cores

SMALL_MODEL_BYTES = 64 << 20  # weights that nearly fit a cache gain nothing from the last core
SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASS|PASSPHRASE|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY|AUTH"
    r"|AUTHORIZATION|COOKIES?|DSN|CONNECTION_STRING|PAT$)(_|$)|(?<!^PUBLIC)(?<!_PUBLIC)_KEY$|_PWD$|^PIP_(EXTRA_)?INDEX_URL$"
    r"|^OTEL_EXPORTER_OTLP_(\w+_)?HEADERS$"
)
OF_EXPORTER = re.compile(r"OTEL_EXPORTER_OTLP_(TRACES_)?HEADERS")  # which may hold a key of the collector
WITH_PASSWORD = re.compile(r"://[^/?#\s]*@")  # in a value: an address that names who asks, https://user:password@host
NOTHING_BESIDE_CODE = {"PYTHONDONTWRITEBYTECODE": "1"}  # a model's folder is never written to
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
NOT_FOR_CHILDREN = re.compile(r"GUNICORN_|LISTEN_(FDS|PID)|WEB_CONCURRENCY|NOTIFY_SOCKET")


def of_child(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that would change how gunicorn starts.

    gunicorn uses setproctitle if an engine's library has installed it. SPT_NOENV keeps setproctitle from overwriting
    the environment that /proc shows.
    """
    return {name: value for name, value in environ.items() if not NOT_FOR_CHILDREN.match(name)} | {"SPT_NOENV": "1"}


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for every process but those that fetch models, install packages or speak for AWS."""
    return {
        name: value
        for name, value in environ.items()
        if not SECRET.search(name.upper()) and not WITH_PASSWORD.search(value)
    }


def of_server(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that front ends and engines inherit: without secrets, and no library asks a hub."""
    return without_secrets(environ) | OFFLINE


def of_front_end(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of front ends, which send traces and so have the headers for their collector."""
    return of_server(environ) | {name: value for name, value in environ.items() if OF_EXPORTER.fullmatch(name)}


def of_engine(config: Config, environ: Mapping[str, str], slot: int, folder: str = "") -> dict[str, str]:
    """Return the variables of the engine in this slot, beside those that it inherits. Libraries read them at import.

    `folder` is for sockets. The supervisor removes it when the server ends.
    """
    given = config.engine.environ
    environ = {**environ, **given}
    threads = of_threads(config, environ)
    handler = announced().get(config.engine.handler, USER_CODE)
    ports = _ports(config.engine, handler, environ, slot)
    installed = _with_installed(config, environ) if config.engine.trust_remote_code else {}
    return {**threads, **ports, **handler.environment(config.engine, environ, slot, folder), **given, **installed}


def of_user_code(config: Config, environ: Mapping[str, str], slot: int) -> dict[str, str]:
    """Return the environment of a process that runs user code. It has no secrets except those of option.env.

    What its requirements.txt names comes first on its path. If user code is the model, each process sees only its GPUs.
    """
    inherited = without_secrets(environ) | config.engine.environ
    inherited |= _with_installed(config, inherited) | NOTHING_BESIDE_CODE
    if not config.is_user_code:
        return inherited
    num_each = len(config.engine.device_ids) // config.engine.num_engines
    gpus = config.engine.device_ids[slot * num_each : (slot + 1) * num_each]
    return inherited | of_threads(config, inherited) | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def _with_installed(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that put what was installed first on the path of a process, or none if nothing was."""
    if config.requirements is None:
        return {}
    return {"PYTHONPATH": ":".join(filter(None, (config.requirements.folder, environ.get("PYTHONPATH"))))}


def _ports(engine: EngineConfig, handler: Handler, environ: Mapping[str, str], slot: int) -> dict[str, str]:
    """Return the variables of the ports on which this engine may listen. A variable that is set keeps its value."""
    names = handler.port_variables
    ports = engine.ports[slot * len(names) : (slot + 1) * len(names)]
    return {name: str(port) for name, port in zip(names, ports, strict=False) if name not in environ}


def of_threads(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that set how many threads an engine's kernels use, and how long these spin.

    Threads that spin while they wait take the cores that a front end needs, so they spin only briefly. The numbers were
    measured on two cores beside one busy process.
    """
    threads = {"GOMP_SPINCOUNT": environ.get("GOMP_SPINCOUNT", "1000")}
    if config.engine.num_threads is not None or "OMP_NUM_THREADS" not in environ:
        threads["OMP_NUM_THREADS"] = str(num_engine_threads(config.engine, config.model.path, linux.num_usable_cores()))
    return threads


def divided_cores(config: Config, environ: Mapping[str, str], cores: Sequence[int]) -> Cores | None:
    """Return which of the cores each process gets, or None if all processes share all cores.

    An engine with several ranks is not bound, because its library binds the ranks. No engine is bound if the operator
    arranges the threads with OMP_NUM_THREADS, in the environment or in option.env.
    """
    engine = config.engine
    is_arranged = "OMP_NUM_THREADS" in {**environ, **engine.environ} and engine.num_threads is None
    if not engine.bind_cores or engine.device_ids or config.is_user_code or _num_local_ranks(engine) > 1 or is_arranged:
        return None
    num_threads = num_engine_threads(engine, config.model.path, len(cores))
    return Cores.divide(cores, engine.num_engines, num_threads, config.server.frontend_workers)


def num_engine_threads(engine: EngineConfig, model_path: str, num_cores: int) -> int:
    """Return option.num_threads, or each rank's share of the cores, less one core in all for a small model.

    A small model loses more time waiting for one more thread than the thread saves.
    """
    if engine.num_threads is not None:
        return engine.num_threads
    weights = [file for pattern in ("*.safetensors", "*.bin") for file in Path(model_path).glob(pattern)]
    if sum(file.stat().st_size for file in weights) <= SMALL_MODEL_BYTES:
        num_cores -= 1  # the front end needs it more
    return max(1, num_cores // (engine.num_engines * _num_local_ranks(engine)))


def _num_local_ranks(engine: EngineConfig) -> int:
    return num_ranks_here(engine.tensor_parallel_degree, engine.options.get("nnodes", ""))
