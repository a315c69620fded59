"""Hands out TCP ports from safe_port_range, which SageMaker sets, to every listener but the server's own.

Only the libraries of engines, whose ranks meet at a port, and the gateway listen. Without a range each takes any port.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from lmi.errors import BadConfiguration, OutOfMemory
from lmi.settings.config import Config, EngineConfig
from lmi.settings.engine_choice import ChosenEngine
from lmi.settings.server_config import GATEWAY_PORT
from lmi.settings.values import Values

RANGE, LEADER_PORT = "safe_port_range", "option.master_port"


def choose_ports(values: Values, engine: ChosenEngine, config: EngineConfig) -> EngineConfig:
    """Return the engine's settings with ports for its replicas.

    A given port outside of the range is a fault, and so are too few ports.
    """
    given_range: tuple[int, int] | None = values.given(RANGE)
    if given_range is None:
        return config
    ports = _ports(given_range, values.final("port"), values.final("management_port"))
    allowed = f"a port of {RANGE}, {given_range[0]}-{given_range[1]}, but not the server's own"
    environ = {**values.environ, **values.final("option.env")}
    asked = {name: environ[name] for name in engine.handler.port_variables if name in environ}
    if LEADER_PORT in values or values.given("option.nnodes", "1") != "1":  # the leader of several nodes must have one
        asked[LEADER_PORT] = values.given(LEADER_PORT, "")
    for name, text in asked.items():
        if text not in map(str, ports):
            values.faults.append(f"{name}={text or None}: allowed is {allowed}")
    num_wanted = len(engine.handler.port_variables) * config.num_engines
    if len(ports) < num_wanted:
        values.refuse(RANGE, f"a range with {num_wanted} ports beside the server's own")
    return replace(config, ports=tuple(ports[:num_wanted]))


def check_management_port(values: Values) -> None:
    """Refuse a management port that another listener has, or that the range does not allow."""
    port, key = values.given("management_port"), "management_port"
    given_range: tuple[int, int] | None = values.given(RANGE)
    if port is None:
        return
    if port in (values.final("port"), values.final("with_gateway")):
        values.refuse(key, "a port that no other listener has")
    elif given_range is not None and not given_range[0] <= port <= given_range[1]:
        values.refuse(key, f"a port of {RANGE}, {given_range[0]}-{given_range[1]}")
    elif values.final("multi_model") and values.final("with_gateway") is not None:
        values.refuse(key, "no such port where the gateway loads and unloads models (with_gateway, multi_model)")


def choose_gateway_port(config: Config) -> Config:
    """Return the settings with a gateway's port that the range allows, if there are both.

    The usual port may be replaced, any other must lie in the range. Raises BadConfiguration.
    """
    given, given_range = config.server.gateway_port, config.server.safe_port_range
    if given is None or given_range is None:
        return config
    left = [
        port
        for port in _ports(given_range, config.server.port, config.server.management_port)
        if port not in config.engine.ports
    ]
    if given in left:
        return config
    if given != GATEWAY_PORT:
        allowed = f"a port of {RANGE}, {given_range[0]}-{given_range[1]}, that nothing else uses"
        raise BadConfiguration(f"with_gateway={given}: allowed is {allowed}")
    if not left:
        raise BadConfiguration(f"{RANGE}={given_range[0]}-{given_range[1]}: no port is left for a further listener")
    return replace(config, server=replace(config.server, gateway_port=left[-1]))


def choose_free_ports(config: Config, taken: Container[int]) -> Config:
    """Return the settings of one of several models with ports that are not `taken` by the others.

    Raises OutOfMemory if the range has too few left.
    """
    given_range, num_wanted = config.server.safe_port_range, len(config.engine.ports)
    if given_range is None or not num_wanted:
        return config
    left = [
        port for port in _ports(given_range, config.server.port, config.server.management_port) if port not in taken
    ]
    if len(left) < num_wanted:
        said = f"{RANGE}={given_range[0]}-{given_range[1]}: {len(left)} ports are left"
        raise OutOfMemory(f"{said}, and the engines of the model need {num_wanted}")
    return replace(config, engine=replace(config.engine, ports=tuple(left[:num_wanted])))


def _ports(given_range: tuple[int, int], *of_server: int | None) -> list[int]:
    """Return the ports of the range but the server's own."""
    return [port for port in range(given_range[0], given_range[1] + 1) if port not in of_server]
