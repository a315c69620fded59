"""The gateway as a child of the supervisor, in front of its server."""

import os
import secrets
import sys

from lmi.errors import BadConfiguration, PortUnavailable, StartError
from lmi.gateway import argv
from lmi.runtime import ServerRuntime
from lmi.settings.annexes import digest
from lmi.shared.files import write_whole
from lmi.supervisor.child import Child, ChildKind
from lmi.supervisor.kinds import FRONT_END_DEATHS_WINDOW_S, MAX_FRONT_END_DEATHS, environ_of_child
from lmi.supervisor.restarts import RestartTable


def gateways(runtime: ServerRuntime, port: int) -> list[Child]:
    """Return the gateway of the server on `port`, or nothing if the server has none.

    The gateway gets a key of its own, whose digest is written where front ends look for it.
    """
    config = runtime.config
    user = config.user
    gateway_port = config.gateway_port
    if gateway_port is None:
        return []

    key = secrets.token_urlsafe(32)
    write_whole(runtime.gateway_key(), digest(key).encode())
    words = argv(
        gateway_port,
        server_host=config.host,
        server_port=port,
        log_level=config.log_level,
        log_format=config.log_format,
        async_queue=config.async_queue,
    )
    variables = (user.environ if user else {}) | {"LMI_API_KEY": key}

    def fatal(code: int, reason: str) -> StartError | None:
        if code == PortUnavailable.exit_code:
            return PortUnavailable(
                f"the gateway cannot listen on port {gateway_port} (with_gateway)"
            )

        if code == BadConfiguration.exit_code:
            return BadConfiguration("the gateway cannot start, see the log above")

        return None

    kind = ChildKind(
        title="gateway",
        argv=lambda slot: [sys.executable, "-P", "-m", "lmi", *words],
        # Other children lose the variables with secrets, but the gateway uses S3.
        environ=lambda slot: environ_of_child(os.environ) | variables,
        become=user.become if user else None,
        restarts=lambda: RestartTable(MAX_FRONT_END_DEATHS, FRONT_END_DEATHS_WINDOW_S),
        fatal=fatal,
        lost_label="gateway_lost",
    )
    return [Child(kind)]
