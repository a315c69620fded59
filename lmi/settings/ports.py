"""Steps of the settings that choose TCP ports in safe_port_range, which SageMaker sets, for every
listener but the server's own.

The other listeners are the libraries of engines, whose ranks meet at a port, and the gateway.
Without a range each of them takes any port.
"""

from collections.abc import Collection
from dataclasses import replace

from lmi.errors import BadConfiguration, OutOfMemory
from lmi.settings.config import Config
from lmi.settings.listeners import GATEWAY_PORT
from lmi.settings.steps import Resolution
from lmi.settings.values import Values

RANGE = "safe_port_range"
GATEWAY = "with_gateway"
ASYNC_QUEUE = "async_queue"
LEADER_PORT = "option.master_port"


def check_listeners(resolution: Resolution) -> None:
    """Refuse a gateway in front of a server with TLS. Refuse a management port that another
    listener has, that is out of the range, or that would be beside a gateway of several models.
    """
    values = resolution.values
    gateway_port = values.final(GATEWAY)
    if values.final(ASYNC_QUEUE) and not gateway_port:
        values.note(f"{ASYNC_QUEUE}: has no effect without {GATEWAY}")

    if gateway_port and values.final("ssl_certfile"):
        values.refuse(
            GATEWAY,
            "no port beside ssl_certfile, since the gateway asks the server in plain HTTP",
        )

    key = "management_port"
    port = values.given(key)
    if port is None:
        return

    first, last = values.given(RANGE, (port, port))
    if port in (values.final("port"), gateway_port):
        values.refuse(key, "a port that no other listener has")
    elif not first <= port <= last:
        values.refuse(key, f"a port of {RANGE}, {first}-{last}")
    elif gateway_port and values.final("multi_model"):
        values.refuse(
            key,
            "no such port where the gateway loads and unloads models (with_gateway, multi_model)",
        )


def choose_ports(resolution: Resolution) -> None:
    """Choose a port of each replica for each variable of its engine that names one. Too few ports
    are a fault, and so is a given port outside of the range.
    """
    values = resolution.values
    port_range = values.final(RANGE)
    if port_range is None:
        return

    texts = _texts_of_ports(resolution)
    ports = _free_ports(port_range, _ports_of_server(values))
    free_texts = [str(port) for port in ports]
    for name, text in texts.items():
        if text not in free_texts:
            allowed = f"a port of {RANGE}, {_text_of(port_range)}, but not the server's own"
            values.fail(f"{name}={text or None}: allowed is {allowed}")

    # A port that somebody named has its listener.
    resolution.given_ports = tuple(port for port in ports if str(port) in texts.values())
    ports = [port for port in ports if port not in resolution.given_ports]
    num_needed = len(resolution.chosen_engine.handler.port_variables) * resolution.num_engines
    if len(ports) < num_needed:
        values.refuse(
            RANGE, f"a range with {num_needed} ports beside the server's own and given ones"
        )

    resolution.ports = tuple(ports[:num_needed])


def choose_gateway_port(resolution: Resolution) -> None:
    """Choose the gateway's port, in the range if there is one.

    The usual port is replaced by one of the range. Any other port must lie in it. Raises
    BadConfiguration.
    """
    values = resolution.values
    port = values.final(GATEWAY)
    port_range = values.final(RANGE)
    resolution.gateway_port = port
    if port is None or port_range is None:
        return

    used = {*_ports_of_server(values), *resolution.ports, *resolution.given_ports}
    ports = _free_ports(port_range, used)
    if port not in ports and port != GATEWAY_PORT:
        allowed = f"a port of {RANGE}, {_text_of(port_range)}, that nothing else uses"
        raise BadConfiguration(f"{GATEWAY}={port}: allowed is {allowed}")

    if not ports:
        raise BadConfiguration(
            f"{RANGE}={_text_of(port_range)}: no port is left for a further listener"
        )

    if port not in ports:
        resolution.gateway_port = ports[-1]


def choose_free_ports(config: Config, used: Collection[int]) -> Config:
    """Return the settings of a further model with ports that are not `used` by other models. Raises
    OutOfMemory if too few are left.
    """
    server = config.server
    num_needed = len(config.engine.ports)
    ports = _free_ports(server.safe_port_range, {server.port, server.management_port, *used})
    if len(ports) < num_needed:
        shortage = f"{RANGE}={_text_of(server.safe_port_range)}: {len(ports)} ports are left"
        raise OutOfMemory(f"{shortage}, and the engines of the model need {num_needed}")

    return replace(config, engine=replace(config.engine, ports=tuple(ports[:num_needed])))


def _texts_of_ports(resolution: Resolution) -> dict[str, str]:
    """Return what somebody gave as ports of an engine, by the variable or option, as it is
    written.
    """
    values = resolution.values
    environ = {**values.start.environ, **values.final("option.env")}
    variables = resolution.chosen_engine.handler.port_variables
    texts = {name: environ[name] for name in variables if name in environ}

    # The leader of several nodes must have a port.
    has_several_nodes = values.given("option.nnodes", "1") != "1"
    if LEADER_PORT in values or has_several_nodes:
        texts[LEADER_PORT] = values.given(LEADER_PORT, "")

    return texts


def _ports_of_server(values: Values) -> set[int | None]:
    """Return the ports of the server itself. None stands for one that it has not."""
    return {values.final("port"), values.final("management_port")}


def _free_ports(port_range: tuple[int, int] | None, used: Collection[int | None]) -> list[int]:
    """Return the ports of the range that are not `used`, or none without a range."""
    if port_range is None:
        return []

    first, last = port_range
    return [port for port in range(first, last + 1) if port not in used]


def _text_of(port_range: tuple[int, int] | None) -> str:
    """Return a range as it is written, FIRST-LAST."""
    return "-".join(map(str, port_range or ()))
