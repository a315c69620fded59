"""Which instance of a variant answers a request: the RoutingStrategy of its RoutingConfig."""

import hashlib
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from lmi.gateway.control.service_model import Members, invalid
from lmi.gateway.request_prefix import RequestPrefix

RANDOM = "RANDOM"
PREFIX_AWARE = "PREFIX_AWARE"
KV_AWARE = "KV_AWARE"
# Of KV_AWARE, which names neither.
KV_PREFIX_LENGTH = 4096
KV_THRESHOLD = 32
LIMITS = ("PrefixLength", "ConcurrencyThreshold")

log = logging.getLogger(__name__)


class Busy(Protocol):
    """What answers requests."""

    num_requests: int


B = TypeVar("B", bound=Busy)


class Strategy(Protocol):
    """A rule by which one of several instances is chosen."""

    def choose(self, ready: Mapping[int, B], prefix: RequestPrefix | None) -> B:
        """Return one of the instances, which are at least one and have their numbers as keys."""


class LeastOutstanding:
    """The instance with the fewest requests."""

    def choose(self, ready: Mapping[int, B], prefix: RequestPrefix | None) -> B:
        return min(ready.values(), key=lambda instance: instance.num_requests)


class AtRandom:
    """Any instance."""

    def choose(self, ready: Mapping[int, B], prefix: RequestPrefix | None) -> B:
        return random.choice(list(ready.values()))


@dataclass(frozen=True)
class PrefixAware:
    """The same instance for requests that begin alike, as long as it has fewer than
    `max_concurrent` requests; then the next one in an order that the beginning has.

    The order is by rendezvous hashing, so that an instance which comes or goes moves only its own
    share of the beginnings.
    """

    prefix_length: int
    max_concurrent: int

    def choose(self, ready: Mapping[int, B], prefix: RequestPrefix | None) -> B:
        if prefix is not None and len(ready) > 1:
            digest = prefix.digest(self.prefix_length)
            for number in _in_order(digest, ready):
                if ready[number].num_requests < self.max_concurrent:
                    return ready[number]

        return LeastOutstanding().choose(ready, prefix)


def _in_order(digest: bytes, ready: Mapping[int, object]) -> list[int]:
    """Return the numbers of instances in the order in which a beginning prefers them."""

    def rank(number: int) -> bytes:
        return hashlib.blake2b(digest + number.to_bytes(4), digest_size=8).digest()

    return sorted(ready, key=rank)


def strategy_of(variant: Members) -> Strategy:
    """Return the strategy of a variant whose members were checked."""
    routing = variant.get("RoutingConfig") or {}
    kind = routing.get("RoutingStrategy")
    if kind == PREFIX_AWARE:
        limits = routing["PrefixAwareRoutingConfig"]
        return PrefixAware(limits["PrefixLength"], limits["ConcurrencyThreshold"])

    if kind == KV_AWARE:
        return PrefixAware(KV_PREFIX_LENGTH, KV_THRESHOLD)

    return AtRandom() if kind == RANDOM else LeastOutstanding()


def check_routing(variant: Members) -> None:
    """Raise AwsError for a RoutingConfig that contradicts itself, whose values botocore's model
    allows.
    """
    routing = variant.get("RoutingConfig") or {}
    kind = routing.get("RoutingStrategy")
    limits = routing.get("PrefixAwareRoutingConfig")
    if kind != PREFIX_AWARE and limits is not None:
        raise invalid(
            f"PrefixAwareRoutingConfig goes with RoutingStrategy {PREFIX_AWARE} only, given {kind}."
        )

    if kind == KV_AWARE:
        log.warning(
            "variant %s is KV_AWARE: no instance is asked what it has cached, requests go by their "
            "first %d bytes, as with PREFIX_AWARE",
            variant["VariantName"],
            KV_PREFIX_LENGTH,
        )

    for member in LIMITS:
        if kind == PREFIX_AWARE and (limits or {}).get(member) is None:
            raise invalid(
                f"RoutingStrategy {PREFIX_AWARE} needs PrefixAwareRoutingConfig.{member}, which "
                f"variant {variant['VariantName']} has not."
            )
