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
    port: int,
    server_host: str,
    server_port: int,
    log_level: str,
    log_format: str,
    async_queue: str | None,
) -> list[str]:
    """Return the words after `lmi` for a gateway on this machine, in front of a server, for any
    endpoint name. `async_queue`: the folder of accepted asynchronous requests, if they are kept.
    """
    container = local_url(server_host, server_port)
    words = ["gateway", "--port", str(port), "--endpoint", container]
    words += ["--log-level", log_level, "--log-format", log_format]
    if async_queue is not None:
        words += ["--async-queue", async_queue]

    return words
