"""Hands out TCP ports from safe_port_range, which SageMaker sets, to every listener but the
server's own.

Only the libraries of engines, whose ranks meet at a port, and the gateway listen. Without a range
each takes any port.
"""

from collections.abc import Container, Sequence
from dataclasses import replace

from lmi.errors import BadConfiguration, OutOfMemory
from lmi.settings.config import Config, EngineConfig, ServerConfig
from lmi.settings.listeners import GATEWAY_PORT
from lmi.settings.values import Values

RANGE = "safe_port_range"
LEADER_PORT = "option.master_port"


def check_listeners(values: Values) -> None:
    """Refuse a takeover that cannot work, a gateway in front of a server with TLS, and a management
    port that another listener has, that the range does not allow, or that the gateway replaces.
    """
    _check_takeover(values)
    with_gateway = values.final("with_gateway")
    if with_gateway and values.final("ssl_certfile"):
        values.refuse(
            "with_gateway",
            "no port beside ssl_certfile, since the gateway asks the server in plain HTTP",
        )

    key = "management_port"
    port = values.given(key)
    if port is None:
        return

    first, last = values.given(RANGE, (port, port))
    if port in (values.final("port"), with_gateway):
        values.refuse(key, "a port that no other listener has")
    elif not first <= port <= last:
        values.refuse(key, f"a port of {RANGE}, {first}-{last}")
    elif with_gateway and values.final("multi_model"):
        values.refuse(
            key,
            "no such port where the gateway loads and unloads models (with_gateway, multi_model)",
        )


def _check_takeover(values: Values) -> None:
    """Refuse a takeover of what the new server would not have, or not get."""
    if not values.final("takeover"):
        return

    if values.final("multi_model"):
        values.refuse(
            "takeover", "false with multi_model, since the new server would not have the models"
        )
    elif values.final("with_gateway"):
        values.refuse(
            "takeover",
            "false with with_gateway; `lmi gateway` of its own goes on in front of both servers",
        )
    elif values.final("port") == 0:
        values.refuse("takeover", "false where port=0 takes a free one")


def choose_ports(values: Values, variables: Sequence[str], config: EngineConfig) -> EngineConfig:
    """Return the engine's settings with ports for each replica's `variables`. Too few ports, and a
    given port outside of the range, are faults.
    """
    server = ServerConfig(**values.fields("server"))
    if server.safe_port_range is None:
        return config

    environ = {**values.environ, **values.final("option.env")}
    texts = {name: environ[name] for name in variables if name in environ}
    # The leader of several nodes must have a port.
    has_several_nodes = values.given("option.nnodes", "1") != "1"
    if LEADER_PORT in values or has_several_nodes:
        texts[LEADER_PORT] = values.given(LEADER_PORT, "")

    ports = _free_ports(server)
    for name, text in texts.items():
        if text not in map(str, ports):
            allowed = f"a port of {RANGE}, {_range_of(server)}, but not the server's own"
            values.faults.append(f"{name}={text or None}: allowed is {allowed}")

    num_wanted = len(variables) * config.num_engines
    if len(ports) < num_wanted:
        values.refuse(RANGE, f"a range with {num_wanted} ports beside the server's own")

    return replace(config, ports=tuple(ports[:num_wanted]))


def choose_gateway_port(config: Config) -> Config:
    """Return the settings with a gateway's port that the range allows, if there are both.

    The usual port may be replaced, any other must lie in the range. Raises BadConfiguration.
    """
    server = config.server
    port = server.gateway_port
    if port is None or server.safe_port_range is None:
        return config

    ports = _free_ports(server, config.engine.ports)
    if port not in ports and port != GATEWAY_PORT:
        allowed = f"a port of {RANGE}, {_range_of(server)}, that nothing else uses"
        raise BadConfiguration(f"with_gateway={port}: allowed is {allowed}")

    if not ports:
        raise BadConfiguration(
            f"{RANGE}={_range_of(server)}: no port is left for a further listener"
        )

    if port not in ports:
        port = ports[-1]

    return replace(config, server=replace(server, gateway_port=port))


def choose_free_ports(config: Config, used: Container[int]) -> Config:
    """Return the settings of a further model with ports not `used`. Raises OutOfMemory if there
    are too few.
    """
    num_wanted = len(config.engine.ports)
    ports = _free_ports(config.server, used)
    if len(ports) < num_wanted:
        shortage = f"{RANGE}={_range_of(config.server)}: {len(ports)} ports are left"
        raise OutOfMemory(f"{shortage}, and the engines of the model need {num_wanted}")

    return replace(config, engine=replace(config.engine, ports=tuple(ports[:num_wanted])))


def _free_ports(server: ServerConfig, used: Container[int] = ()) -> list[int]:
    """Return the ports of the range, if there is one, that neither the server itself nor another
    listener has.
    """
    first, last = server.safe_port_range or (0, -1)
    ports = range(first, last + 1)
    ports_of_server = (server.port, server.management_port)
    return [port for port in ports if port not in ports_of_server and port not in used]


def _range_of(server: ServerConfig) -> str:
    return "-".join(map(str, server.safe_port_range or ()))
