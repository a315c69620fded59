"""What the headers of a request say of its client: who it is, how long it waits, how urgent its
request is.
"""

import math

from lmi.apis.base.readers import priority
from lmi.errors import InvalidParameter
from lmi.http.exchange import TIMEOUT, TIMEOUT_MS, Exchange


def client_of(exchange: Exchange, adapter: str | None) -> str:
    """Return whose part of the engine a request takes."""
    if exchange.client:
        return exchange.client

    if adapter:
        return f"adapter {adapter}"

    address = exchange.scope.get("client")
    return str(address[0]) if address else ""


def client_timeout_s(exchange: Exchange) -> float:
    """Return the seconds that the client waits for its answer, from the request's arrival. Raises
    InvalidParameter.
    """
    limits = (
        (TIMEOUT, exchange.headers.get(TIMEOUT), 1.0),
        (TIMEOUT_MS, exchange.headers.get(TIMEOUT_MS), 0.001),
        ("timeout in Custom-Attributes", exchange.attribute("timeout"), 1.0),
    )
    shortest_s = math.inf
    for name, text, unit_s in limits:
        if text is None:
            continue

        try:
            number = float(text)
        except ValueError:
            number = math.nan

        if not 0 < number < math.inf:
            raise InvalidParameter(name, "a number over 0", text)

        shortest_s = min(shortest_s, number * unit_s)

    return shortest_s


def client_priority(exchange: Exchange) -> float | None:
    """Return how urgent all of the body is, as Custom-Attributes say it in vLLM's numbers. Raises
    InvalidParameter.
    """
    text = exchange.attribute("priority")
    if text is None:
        return None

    name = "priority in Custom-Attributes"
    try:
        return priority(name, int(text))
    except ValueError:
        raise InvalidParameter(name, "a whole number", text) from None
