"""Chooses the instance of a variant that answers a request, by the variant's RoutingStrategy."""

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
# The prefix length and concurrency threshold of KV_AWARE, whose variant gives neither.
KV_PREFIX_LENGTH = 4096
KV_THRESHOLD = 32
# The members that PREFIX_AWARE needs.
LIMITS = ("PrefixLength", "ConcurrencyThreshold")

log = logging.getLogger(__name__)


class Busy(Protocol):
    """An instance that may be chosen."""

    # How many requests it answers now.
    num_requests: int


B = TypeVar("B", bound=Busy)


class Strategy(Protocol):
    """A rule by which one of several instances is chosen."""

    def choose(self, ready: Mapping[int, B], prefix: RequestPrefix | None) -> B:
        """Return one of the ready instances, of which there is at least one, by their numbers.

        `prefix` is the beginning of the request, if it is known.
        """


class LeastOutstanding:
    """Chooses the instance with the fewest requests."""

    def choose(self, ready: Mapping[int, B], prefix: RequestPrefix | None) -> B:
        return min(ready.values(), key=lambda instance: instance.num_requests)


class AtRandom:
    """Chooses any instance."""

    def choose(self, ready: Mapping[int, B], prefix: RequestPrefix | None) -> B:
        return random.choice(list(ready.values()))


@dataclass(frozen=True)
class PrefixAware:
    """Chooses the same instance for requests with the same prefix, as long as it has fewer than
    `max_concurrent` requests, and then the next one in the order of that prefix.

    The order is by rendezvous hashing: an instance that comes or goes moves only its own share of
    the prefixes. If all are full, or a request has no prefix, the one with the fewest requests is
    chosen.
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
    """Return the numbers of instances in the order of a prefix with this digest."""

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
    """Raise AwsError for a RoutingConfig that contradicts itself. Its values were checked before by
    botocore's model.
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
