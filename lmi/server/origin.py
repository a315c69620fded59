"""Whose request it is, how long its client waits, and how urgent it is: what the queue before an engine has to know.

Clients share the engine. A client is whoever the gateway in front says, if the operator trusts it, else the holder of a
key, else an adapter, else the address of the connection.
"""

from __future__ import annotations

import math

from lmi.apis.base.readers import priority
from lmi.errors import InvalidParameter
from lmi.http.exchange import TIMEOUT, TIMEOUT_MS, Exchange


def client_of(exchange: Exchange, adapter: str | None) -> str:
    """Return whose part of the engine a request takes."""
    address = exchange.scope.get("client")
    return exchange.client or (f"adapter {adapter}" if adapter else str(address[0]) if address else "")


def client_timeout_s(exchange: Exchange) -> float:
    """Return the seconds that the client waits for its answer, from the request's arrival. Raises InvalidParameter."""
    return min(
        _seconds(TIMEOUT, exchange.headers.get(TIMEOUT), 1.0),
        _seconds(TIMEOUT_MS, exchange.headers.get(TIMEOUT_MS), 0.001),
        _seconds("timeout in Custom-Attributes", exchange.attribute("timeout"), 1.0),
    )


def client_priority(exchange: Exchange) -> float | None:
    """Return how urgent all of the body is, as Custom-Attributes say it in vLLM's numbers. Raises InvalidParameter."""
    given, name = exchange.attribute("priority"), "priority in Custom-Attributes"
    if given is None:
        return None
    try:
        return priority(name, int(given))
    except ValueError:
        raise InvalidParameter(name, "a whole number", given) from None


def _seconds(name: str, text: str | None, unit_s: float) -> float:
    if text is None:
        return math.inf
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidParameter(name, "a number over 0", text)
    return number * unit_s
