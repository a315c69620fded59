"""AWS's SageMaker API in front of containers. This file is all of the gateway that a supervisor
loads.
"""

WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def local_url(host: str, port: int, scheme: str = "http") -> str:
    """Return the URL at which this machine reaches what listens on `host`."""
    name = WILDCARDS.get(host, host)
    if ":" in name:
        name = f"[{name}]"

    return f"{scheme}://{name}:{port}"


def argv(
    port: int, server_host: str, server_port: int, log_level: str, log_format: str
) -> list[str]:
    """Return the words after `lmi` for a gateway on this machine, in front of a server, for any
    endpoint name.
    """
    container = local_url(server_host, server_port)
    log = ["--log-level", log_level, "--log-format", log_format]
    return ["gateway", "--port", str(port), "--endpoint", container, *log]
