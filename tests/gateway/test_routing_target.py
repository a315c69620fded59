"""Which destination of an inference router serves a request, and the reason that its client is
told.
"""

from __future__ import annotations

from collections import Counter

import pytest

from lmi.gateway.errors import AwsError, invalid, model_error, unavailable
from lmi.gateway.routing_target import Destination, RoutingTarget, is_refusal

HOME = Destination(arn="home", endpoint="home", is_local=True, num_ready=1)
SECOND = Destination(arn="second", endpoint="second", is_local=True, num_ready=3)
WEST = Destination(arn="west", endpoint="west", num_ready=1)
EAST = Destination(arn="east", endpoint="east", num_ready=1)
GONE = Destination(arn="gone", is_local=True)


def target(*destinations: Destination) -> RoutingTarget:
    return RoutingTarget(name="llm", region="home", destinations=destinations)


def names(*destinations: Destination) -> list[str]:
    return [destination.arn for destination in target(*destinations).in_order()]


def test_destinations_of_the_routers_region_come_first_and_those_that_do_not_serve_never() -> None:
    assert names(WEST, GONE, HOME) == ["home", "west"]
    assert names(GONE) == []


def test_destinations_of_a_region_share_requests_by_their_instances() -> None:
    shares = Counter(names(HOME, SECOND)[0] for _ in range(4000))
    assert 2800 < shares["second"] < 3200


@pytest.mark.parametrize(
    ("served", "tried", "destinations", "reason"),
    [
        (HOME, [], [HOME, WEST], "local-preferred"),
        (SECOND, [HOME], [HOME, SECOND], "local-preferred"),
        (WEST, [HOME], [HOME, WEST, EAST], "failover"),
        (WEST, [], [GONE, WEST, EAST], "capacity-available"),
        (EAST, [WEST], [WEST, EAST], "capacity-available"),
        (WEST, [], [GONE, WEST], "only-healthy"),
    ],
)
def test_each_choice_has_its_reason(
    served: Destination, tried: list[Destination], destinations: list[Destination], reason: str
) -> None:
    assert target(*destinations).reason(served, tried) == reason


@pytest.mark.parametrize(
    ("error", "is_sent_elsewhere"),
    [
        (unavailable("no container is ready"), True),
        (AwsError("ThrottlingException", 429, "too many"), True),
        (model_error(503, "full", "home", "eu"), True),
        (model_error(429, "full", "home", "eu"), True),
        (model_error(0, "timed out", "home", "eu"), False),
        (model_error(424, "bad inputs", "home", "eu"), False),
        (model_error(500, "failed", "home", "eu"), False),
        (invalid("no such endpoint"), False),
    ],
)
def test_only_a_refusal_is_sent_elsewhere(error: AwsError, is_sent_elsewhere: bool) -> None:
    assert is_refusal(error) == is_sent_elsewhere


def test_a_target_that_nobody_serves_says_what_is_missing() -> None:
    component = Destination(arn="copies", endpoint="home", component="copies")
    assert target(component).not_served().kind == "ModelNotReadyException"
    assert target(component, GONE).not_served().kind == "ServiceUnavailable"
