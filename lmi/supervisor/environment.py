"""Makes the environment of each child process."""

import re
from collections.abc import Mapping

from lmi.settings.config import Config, EngineConfig
from lmi.settings.handler import USER_CODE, Handler, announced

SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASS|PASSPHRASE|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY|AUTH"
    r"|AUTHORIZATION|COOKIES?|DSN|CONNECTION_STRING|PAT$)(_|$)|(?<!^PUBLIC)(?<!_PUBLIC)_KEY$|_PWD$|^PIP_(EXTRA_)?INDEX_URL$"
    r"|^OTEL_EXPORTER_OTLP_(\w+_)?HEADERS$"
)
OF_EXPORTER = re.compile(r"OTEL_EXPORTER_OTLP_(TRACES_)?HEADERS")  # which may hold a key of the collector
WITH_PASSWORD = re.compile(r"://[^/?#\s]*@")  # in a value: an address that names who asks, https://user:password@host
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
    handler = announced().get(config.engine.handler, USER_CODE)
    ports = _ports(config.engine, handler, environ, slot)
    installed = with_installed(config, environ) if config.engine.trust_remote_code else {}
    return {**ports, **handler.environment(config.engine, environ, slot, folder), **given, **installed}


def with_installed(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that put what was installed first on the path of a process, or none if nothing was."""
    if config.requirements is None:
        return {}
    return {"PYTHONPATH": ":".join(filter(None, (config.requirements.folder, environ.get("PYTHONPATH"))))}


def _ports(engine: EngineConfig, handler: Handler, environ: Mapping[str, str], slot: int) -> dict[str, str]:
    """Return the variables of the ports on which this engine may listen. A variable that is set keeps its value."""
    names = handler.port_variables
    ports = engine.ports[slot * len(names) : (slot + 1) * len(names)]
    return {name: str(port) for name, port in zip(names, ports, strict=False) if name not in environ}
