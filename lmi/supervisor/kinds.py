"""The kinds of the supervisor's children: with which command and environment each starts, and what
its exit codes mean.
"""

import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from lmi.errors import BadConfiguration, ModelUnusable, SecurityRefused, StartError
from lmi.runtime import ENVIRONMENT_NAME, Runtime, ServerRuntime
from lmi.settings.config import Config
from lmi.settings.handler import USER_CODE, announced
from lmi.settings.user import User
from lmi.shared.linux import REPLICA, SUPERVISOR_PID
from lmi.shared.machine import unusable_gpu_files
from lmi.shared.memory_file import MemoryFile
from lmi.shared.state import Block, Phase
from lmi.sources.source import unreadable
from lmi.supervisor.child import ChildKind
from lmi.supervisor.cores import Cores, of_cores, of_threads
from lmi.supervisor.credentials import FD_NAME
from lmi.supervisor.hangs import HangLimits
from lmi.supervisor.memory import of_memory
from lmi.supervisor.restarts import RestartTable

APP = "lmi.server.app:create_app()"
FAILED_NOTICE_S = 2.0
MAX_FRONT_END_DEATHS = 10
FRONT_END_DEATHS_WINDOW_S = 600.0
ENGINE_OOM_SCORE = 500
# The errors that no other start of an engine can mend, by exit code.
ENGINE_ERRORS = {
    error.exit_code: error for error in (BadConfiguration, ModelUnusable, SecurityRefused)
}
# By gunicorn's exit code: 3 if a worker cannot boot, 4 if it cannot load the app.
FRONT_END_ERRORS: dict[int, type[StartError]] = {3: StartError, 4: ModelUnusable}
# Words that a name of a secret has between underscores.
SECRET_WORDS = (
    "TOKEN",
    "SECRET",
    "PASSWORD",
    "PASSWD",
    "PASS",
    "PASSPHRASE",
    "CREDENTIALS?",
    "API_?KEY",
    "ACCESS_KEY",
    "PRIVATE_KEY",
    "AUTH",
    "AUTHORIZATION",
    "COOKIES?",
    "DSN",
    "CONNECTION_STRING",
    "PAT$",
)
# The names, in upper case, of variables that hold secrets.
SECRET_NAMES = (
    rf"(^|_)({'|'.join(SECRET_WORDS)})(_|$)",
    # Any key but a public one.
    r"(?<!^PUBLIC)(?<!_PUBLIC)_KEY$",
    r"_PWD$",
    # An address that may name a user with a password.
    r"^PIP_(EXTRA_)?INDEX_URL$",
    # They may hold a key of the collector.
    r"^OTEL_EXPORTER_OTLP_(\w+_)?HEADERS$",
)
SECRET = re.compile("|".join(SECRET_NAMES))
# Secrets that front ends need: they may hold a key of the collector.
OF_EXPORTER = re.compile(r"OTEL_EXPORTER_OTLP_(TRACES_)?HEADERS")
# In a value: an address that names a user, https://user:password@host.
WITH_PASSWORD = re.compile(r"://[^/?#\s]*@")
# What pip needs of the secrets: its index, and the proxies.
OF_PIP = re.compile("^PIP_|^STANDARD_PIP_ARGS$|_PROXY$", re.IGNORECASE)
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
# Where transformers copies a checkpoint's code, by default below HF_HOME.
CODE_CACHE = "HF_MODULES_CACHE"
# Variables that would change how gunicorn starts.
NOT_FOR_CHILDREN = re.compile(r"GUNICORN_|LISTEN_(FDS|PID)|WEB_CONCURRENCY|NOTIFY_SOCKET")

log = logging.getLogger(__name__)


def engine(runtime: Runtime, cores: Cores | None = None, held_bytes: int = 0) -> ChildKind:
    """Return the kind of the engines of a model. `cores` are those that they are bound to,
    `held_bytes` is the memory that front ends have already.

    Raises BadConfiguration if their user cannot read the model.
    """
    config = runtime.config
    folder = str(runtime.path)
    handler = announced().get(config.engine.handler, USER_CODE)
    user = user_of_engine(config)
    if user is not None:
        check_files(user, Path(config.model.path))

    # It is read once, for the engines that are started again too.
    memory = of_memory(config, held_bytes=held_bytes)

    def environ(slot: int) -> dict[str, str]:
        cores_of_slot = cores.engines[slot] if cores else ()
        inherited = environ_of_server(environ_of(runtime.path, user))
        return {
            **inherited,
            **of_cores(cores_of_slot),
            **of_threads(config, os.environ),
            **memory,
            REPLICA: str(slot),
            **environ_of_engine(config, os.environ, slot, folder, user),
        }

    return worker(
        config,
        user=user,
        title="engine {slot}",
        module="lmi.engine.worker",
        words=["--load-with", handler.load],
        output_logger="libraries",
        environ=environ,
        limits=HangLimits.of(config.engine),
    )


def user_of_engine(config: Config) -> User | None:
    """Return the user that the engines of a model run as, or None for that of the supervisor.

    `option.user` does not count, and a warning says why, if that user may not open the GPUs, or if
    a cluster has the ranks: an engine can reach those only as the user of the cluster.
    """
    user = config.server.user
    engine = config.engine
    if user is None:
        return None

    unusable: list[Path] = []
    if engine.device_ids:
        with user.acting():
            unusable = unusable_gpu_files()

    if unusable:
        log.warning("engines run as root, since option.user=%s may not open %s", user, unusable[0])
        return None

    # One of several models cannot ask for a cluster.
    if config.server.multi_model:
        return user

    cluster_options = announced().get(engine.handler, USER_CODE).on_cluster
    for key, text in cluster_options.items():
        if engine.options.get(key.removeprefix("option.")) == text:
            log.warning(
                "engines run as root, since %s=%s: their ranks are processes of the cluster",
                key,
                text,
            )
            return None

    return user


def check_files(user: User, folder: Path) -> None:
    """Raise BadConfiguration for a file of a model that the user cannot read."""
    with user.acting():
        file = unreadable(folder)

    if file is not None:
        raise BadConfiguration(f"option.user={user}: that user cannot read {file}")


def worker(
    config: Config,
    title: str,
    module: str,
    output_logger: str,
    environ: Callable[[int], Mapping[str, str]],
    limits: HangLimits,
    words: Sequence[str] = (),
    user: User | None = None,
) -> ChildKind:
    """Return the kind of a process that front ends talk to over a socket: an engine, or user code.
    `words` follow the slot in its command.
    """

    def fatal(code: int, reason: str) -> StartError | None:
        error = ENGINE_ERRORS.get(code)
        return None if error is None else error(reason)

    engine = config.engine
    return ChildKind(
        title=title,
        argv=lambda slot: [sys.executable, "-P", "-m", module, "--slot", str(slot), *words],
        environ=environ,
        output_logger=output_logger,
        oom_score=ENGINE_OOM_SCORE,
        become=user.become if user else None,
        limits=limits,
        restarts=lambda: RestartTable(engine.retry_threshold, engine.retry_window_s),
        fatal=fatal,
        lost_label="engine_lost",
        lost_notice_s=FAILED_NOTICE_S,
    )


def front_end(
    runtime: ServerRuntime,
    block: Block,
    listeners: Sequence[socket.socket],
    cores: Callable[[], Sequence[int]],
    credentials: MemoryFile | None = None,
) -> ChildKind:
    """Return the kind of the gunicorn master, which starts and restarts its workers.

    If it dies, its workers finish their requests. `cores` returns the cores that it is bound to
    when it starts; none: it may use all.
    """
    user = runtime.config.user
    fds = [listener.fileno() for listener in listeners]
    variables = {}
    inherited_fds = fds
    if credentials is not None:
        variables[FD_NAME] = str(credentials.fd)
        inherited_fds = [*fds, credentials.fd]

    command = [sys.executable, "-P", "-m", "gunicorn", "-c", "python:lmi.server.gunicorn"]
    for fd in fds:
        command += ["-b", f"fd://{fd}"]

    command.append(APP)

    def fatal(code: int, reason: str) -> StartError | None:
        """Return why no front end can start while the server loads, or None if another start may
        succeed.
        """
        if code not in FRONT_END_ERRORS or block.supervisor.phase != Phase.LOADING:
            return None

        try:
            message = runtime.front_end_failure().read_text()
        except OSError:
            message = "the front end could not start, see the log above"

        return FRONT_END_ERRORS[code](message)

    def restarts() -> RestartTable:
        return RestartTable(MAX_FRONT_END_DEATHS, FRONT_END_DEATHS_WINDOW_S, first_delay_s=0.05)

    def environ(slot: int) -> dict[str, str]:
        inherited = environ_of_front_end(environ_of(runtime.path, user))
        return inherited | of_cores(cores()) | variables

    return ChildKind(
        title="front end",
        argv=lambda slot: command,
        environ=environ,
        become=user.become if user else None,
        inherited_fds=tuple(inherited_fds),
        # Gunicorn imports from its working directory, and a model folder is not trusted.
        folder=str(runtime.path),
        restarts=restarts,
        fatal=fatal,
        lost_label="front_end_lost",
        serves_clients=True,
    )


def environ_of(folder: Path, user: User | None = None) -> dict[str, str]:
    """Return the environment that every child gets. `folder` is the runtime folder of the server or
    of the model.
    """
    environ = environ_of_child(os.environ)
    if user is not None:
        environ |= user.environ

    return environ | {ENVIRONMENT_NAME: str(folder), SUPERVISOR_PID: str(os.getpid())}


def environ_of_child(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that would change how gunicorn starts.

    gunicorn uses setproctitle if an engine's library has installed it. SPT_NOENV keeps setproctitle
    from overwriting the environment that /proc shows.
    """
    inherited = {name: value for name, value in environ.items() if not NOT_FOR_CHILDREN.match(name)}
    return inherited | {"SPT_NOENV": "1"}


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for every process but those that fetch models, install packages or
    speak for AWS.
    """
    return {
        name: value
        for name, value in environ.items()
        if not SECRET.search(name.upper()) and not WITH_PASSWORD.search(value)
    }


def environ_of_pip(environ: Mapping[str, str], user: User) -> dict[str, str]:
    """Return the environment in which pip installs packages as the user. Of the secrets it has only
    those of the index.

    The others are kept from it, because a package that is built runs code, and other processes of
    the user can read its environment.
    """
    variables_of_pip = {name: value for name, value in environ.items() if OF_PIP.search(name)}
    return without_secrets(environ) | user.environ | variables_of_pip


def environ_of_server(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that front ends and engines inherit: it has no secrets, and keeps
    libraries from asking a hub.
    """
    return without_secrets(environ) | OFFLINE


def environ_of_front_end(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of front ends. It has the headers for the collector of the traces that
    they send.
    """
    headers = {name: value for name, value in environ.items() if OF_EXPORTER.fullmatch(name)}
    return environ_of_server(environ) | headers


def environ_of_engine(
    config: Config,
    environ: Mapping[str, str],
    slot: int,
    folder: str = "",
    user: User | None = None,
) -> dict[str, str]:
    """Return the variables of the engine in this slot, beside those that it inherits. They are set
    before it starts, because libraries read them at import.

    `folder` is for sockets, and for what `user` cannot write elsewhere. The supervisor removes it
    when the server ends.
    """
    configured = config.engine.environ
    of_user = user.environ if user else {}
    environ = {**environ, **of_user, **configured}
    handler = announced().get(config.engine.handler, USER_CODE)
    variables = dict[str, str]()

    # A port variable that is set keeps its value.
    names = handler.port_variables
    first = slot * len(names)
    ports = config.engine.ports[first : first + len(names)]
    for name, port in zip(names, ports, strict=False):
        if name not in environ:
            variables[name] = str(port)

    installed = dict[str, str]()
    if config.engine.trust_remote_code:
        installed = with_installed(config, environ)
        if user and CODE_CACHE not in environ:
            variables[CODE_CACHE] = os.path.join(folder, "modules")

    # The handler looks which folders the engine can write.
    with user.acting() if user else nullcontext():
        variables |= handler.environment(config.engine, environ, slot, folder)

    return {**variables, **configured, **installed}


def with_installed(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that lets a process find the packages that were installed before all
    others, or none if nothing was installed.
    """
    if config.requirements is None:
        return {}

    folders = [config.requirements.folder]
    path = environ.get("PYTHONPATH")
    if path:
        folders.append(path)

    return {"PYTHONPATH": ":".join(folders)}
