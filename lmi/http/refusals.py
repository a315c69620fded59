"""Refusals: requests that this server does not take, and the headers that tell a proxy whether
another server may take them at once.

The two that begin with `x-envoy` are for Envoy. At the first it sends this request to no other
server; at the second it sends no more requests to this server until a health check succeeds.
"""

from collections.abc import Mapping

from lmi.errors import Draining, LmiError, Overloaded

REFUSAL = "X-Lmi-Refusal"
# The further headers of an error, by its class.
OF_REFUSALS: Mapping[type[LmiError], Mapping[str, str]] = {
    Overloaded: {REFUSAL: Overloaded.label, "x-envoy-overloaded": "true"},
    Draining: {REFUSAL: Draining.label, "x-envoy-immediate-health-check-fail": "true"},
}


class Refusal(Exception):
    """A request that breaks a rule of HTTP or a limit, so that no application sees it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def refusal_headers(error: LmiError) -> dict[str, str]:
    """Return when a client may try again, if that can help, and why this server does not take its
    request now.
    """
    if error.retry_after_s is None:
        return {}

    headers = {"Retry-After": str(error.retry_after_s)}
    for error_class, further_headers in OF_REFUSALS.items():
        if isinstance(error, error_class):
            headers.update(further_headers)
            break

    return headers
