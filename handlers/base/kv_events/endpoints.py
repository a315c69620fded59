"""Where the sockets of each replica are."""

import os

import msgspec

from lmi.errors import BadConfiguration
from lmi.settings.annexes import KvEventsConfig
from lmi.shared.linux import REPLICA

KEY = "option.kv_events_config"


def replica_here() -> int:
    """Return which replica of a server this process is, 0 outside of a server."""
    return int(os.environ.get(REPLICA, "0"))


def of_replica(config: KvEventsConfig, replica: int, num_replicas: int) -> KvEventsConfig:
    """Return the configuration with the sockets of one replica: those that are bound have its own
    port or name.

    Raises BadConfiguration if two replicas would bind one port.
    """
    endpoint = config.endpoint
    replay = config.replay_endpoint
    if replay is not None and is_bound(endpoint):
        events_port = _port(endpoint)
        replay_port = _port(replay)
        if events_port and replay_port and abs(events_port - replay_port) < num_replicas:
            apart = f"ports of endpoint and replay_endpoint that lie at least {num_replicas} apart"
            raise BadConfiguration(
                f"{KEY}: each replica has ports of its own, so allowed are {apart}"
            )

    if is_bound(endpoint):
        endpoint = _endpoint_of(endpoint, replica)

    if replay is not None:
        replay = _endpoint_of(replay, replica)

    return msgspec.structs.replace(config, endpoint=endpoint, replay_endpoint=replay)


def is_bound(endpoint: str) -> bool:
    """Return whether the socket of events listens there. As at vLLM, it connects to any other
    address.
    """
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _endpoint_of(endpoint: str, replica: int) -> str:
    port = _port(endpoint)
    if not replica or port == 0:
        return endpoint

    if port is None:
        return f"{endpoint}_dp{replica}"

    return f"{endpoint.rpartition(':')[0]}:{port + replica}"


def _port(endpoint: str) -> int | None:
    """Return the port of a TCP endpoint, 0 where the kernel chooses it."""
    if not endpoint.startswith("tcp://"):
        return None

    return int(endpoint.rpartition(":")[2])
