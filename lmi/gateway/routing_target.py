"""A routing target of an inference router: which of its destinations serves a request, and why.

Source: botocore's model of the SageMaker Inference Router Runtime, 2026-01-01, whose texts say what
each reason means.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from lmi.gateway.errors import AwsError, unavailable
from lmi.gateway.stores import AnswerRoots

# The first destination, and another where that one refuses.
MAX_ATTEMPTS = 2
# Statuses of a container, and of the gateway, with which nothing of a request was begun.
REFUSALS = frozenset((429, 503))
LOCAL_PREFERRED = "local-preferred"
CAPACITY_AVAILABLE = "capacity-available"
ONLY_HEALTHY = "only-healthy"
FAILOVER = "failover"


@dataclass(frozen=True, kw_only=True)
class Destination:
    """An endpoint, or a component of one, that may serve the requests of a router."""

    arn: str
    # Names, "" for what this gateway does not have.
    endpoint: str = ""
    component: str = ""
    # Whether it is in the region of the router.
    is_local: bool = False
    # How many instances or copies serve, 0 for one that cannot be sent anything.
    num_ready: int = 0


@dataclass(frozen=True, kw_only=True)
class RoutingTarget:
    """What callers name, and the destinations that serve it.

    It is asynchronous if `answers` says where answers go.
    """

    name: str
    region: str
    destinations: tuple[Destination, ...]
    answers: AnswerRoots | None = None

    def in_order(self) -> list[Destination]:
        """Return the destinations that serve, in the order in which they are tried."""
        return in_order(self.destinations)

    def reason(self, destination: Destination, tried: Iterable[Destination]) -> str:
        """Return why a destination has served, after those that were tried before it."""
        if destination.is_local:
            return LOCAL_PREFERRED

        if any(former.is_local for former in tried):
            return FAILOVER

        num_elsewhere = 0
        for other in self.destinations:
            if other.num_ready and not other.is_local:
                num_elsewhere += 1

        return CAPACITY_AVAILABLE if num_elsewhere > 1 else ONLY_HEALTHY

    def not_served(self) -> AwsError:
        """Return what a client gets while no destination serves."""
        if all(destination.component for destination in self.destinations):
            message = (
                f"No inference component of routing target {self.name} has a copy that serves."
            )
            return AwsError("ModelNotReadyException", 429, message)

        return unavailable(f"No destination of routing target {self.name} could serve the request.")


def in_order(destinations: Iterable[Destination]) -> list[Destination]:
    """Return the destinations that serve: those of the router's region first, then the others.

    Of these and of those each comes first as often as its share of their instances is.
    """

    def rank(destination: Destination) -> tuple[bool, float]:
        # Of exponential times with these rates the shortest is drawn by the share of its rate.
        return not destination.is_local, random.expovariate(destination.num_ready)

    serving = [destination for destination in destinations if destination.num_ready]
    return sorted(serving, key=rank)


def is_refusal(error: AwsError) -> bool:
    """Whether a destination has refused a request without an answer of its model, so that another
    may serve it.
    """
    return error.status in REFUSALS or error.members.get("OriginalStatusCode") in REFUSALS
