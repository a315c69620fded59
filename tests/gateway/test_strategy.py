"""Which instance a request goes to: by its load, by chance, or by how its body begins."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from lmi.gateway.control.strategy import PrefixAware, check_routing, strategy_of
from lmi.gateway.errors import AwsError
from lmi.gateway.request_prefix import RequestPrefix

LENGTH = 1024
AWARE = PrefixAware(LENGTH, 2)


@dataclass
class Place:
    """An instance that has so many requests."""

    number: int
    num_requests: int = 0


def places(num: int) -> dict[int, Place]:
    return {number: Place(number) for number in range(num)}


def prefix(number: int) -> RequestPrefix:
    return RequestPrefix(b"a prompt %d" % number)


def chat(*contents: Any, **members: Any) -> RequestPrefix:
    messages = [{"role": "user", "content": content} for content in contents]
    return RequestPrefix(json.dumps({"messages": messages, **members}).encode(), is_chat=True)


def test_bodies_that_begin_alike_go_to_one_instance() -> None:
    ready = places(4)
    chosen = set()
    for ending in (b"", b"x", b"y" * 9999):
        body = b"p" * LENGTH + ending
        chosen.add(AWARE.choose(ready, RequestPrefix(body)).number)

    assert len(chosen) == 1
    shares = Counter(AWARE.choose(ready, prefix(number)).number for number in range(1000))
    assert set(shares) == {0, 1, 2, 3} and min(shares.values()) > 180


def test_an_instance_with_as_many_requests_as_the_threshold_gets_no_further_one() -> None:
    ready = places(3)
    order = []
    for _ in range(6):
        place = AWARE.choose(ready, prefix(1))
        place.num_requests += 1
        order.append(place.number)

    first, second, third = order[0], order[2], order[4]
    assert order == [first, first, second, second, third, third]
    assert {first, second, third} == {0, 1, 2}

    # All have reached it: then the one with the fewest.
    ready[second].num_requests = 5
    ready[first].num_requests = 4
    ready[third].num_requests = 3
    assert AWARE.choose(ready, prefix(1)).number == third


def test_a_further_instance_moves_only_its_share_of_the_beginnings() -> None:
    before = [AWARE.choose(places(4), prefix(number)).number for number in range(1000)]
    after = [AWARE.choose(places(5), prefix(number)).number for number in range(1000)]
    moved = [new for old, new in zip(before, after, strict=True) if new != old]

    assert set(moved) == {4} and 100 < len(moved) < 300


def test_requests_of_one_beginning_and_several_identifiers_are_told_apart() -> None:
    digests = set()
    for identifier in ("", "team-a", "team-b"):
        digests.add(RequestPrefix(b"system", identifier).digest(LENGTH))

    assert len(digests) == 3
    assert RequestPrefix(b"ab", "c").digest(LENGTH) != RequestPrefix(b"a", "bc").digest(LENGTH)


def test_a_chat_counts_by_the_characters_of_its_messages_and_its_cache_key() -> None:
    text = "Grüße " * LENGTH
    digest = chat(text).digest(LENGTH)

    assert chat(text + "more", temperature=0.5, model="any").digest(LENGTH) == digest
    assert chat(text[:50], text[50:]).digest(LENGTH) == digest

    parts = [{"type": "image_url", "image_url": {"url": "a"}}, {"type": "text", "text": text}]
    assert chat(parts).digest(LENGTH) == digest
    assert chat("another" + text).digest(LENGTH) != digest
    assert chat(text, prompt_cache_key="tenant").digest(LENGTH) != digest


def test_bytes_of_a_body_count_with_the_order_of_its_keys() -> None:
    prompt = "p" * LENGTH
    parameters = {"max_new_tokens": 5}
    first = json.dumps({"inputs": prompt, "parameters": parameters}).encode()
    changed = json.dumps({"inputs": prompt, "parameters": {"max_new_tokens": 6}}).encode()
    reordered = json.dumps({"parameters": parameters, "inputs": prompt}).encode()
    digest = RequestPrefix(first).digest(LENGTH)
    assert RequestPrefix(changed).digest(LENGTH) == digest
    assert RequestPrefix(reordered).digest(LENGTH) != digest


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"messages": 1}',
        b'{"messages": [null]}',
        b'{"messages": [{"content": [1]}]}',
        b'{"messages": [], "prompt_cache_key": {}}',
        b'{"messages": [{"content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"messages": ' + b'[{"content": ' * 50_000,
    ],
)
def test_a_chat_that_cannot_be_read_counts_as_its_bytes(body: bytes) -> None:
    as_chat = RequestPrefix(body, is_chat=True)
    assert as_chat.digest(LENGTH) == RequestPrefix(body).digest(LENGTH)


@pytest.mark.parametrize(
    ("routing", "rule"),
    [
        ({"RoutingStrategy": "PREFIX_AWARE"}, "needs PrefixAwareRoutingConfig.PrefixLength"),
        (
            {
                "RoutingStrategy": "PREFIX_AWARE",
                "PrefixAwareRoutingConfig": {"PrefixLength": 1024},
            },
            "needs PrefixAwareRoutingConfig.ConcurrencyThreshold",
        ),
        (
            {"RoutingStrategy": "KV_AWARE", "PrefixAwareRoutingConfig": {"PrefixLength": 1024}},
            "goes with RoutingStrategy PREFIX_AWARE only, given KV_AWARE",
        ),
    ],
)
def test_a_strategy_without_its_limits_or_with_anothers_is_refused(
    routing: dict[str, Any], rule: str
) -> None:
    with pytest.raises(AwsError, match=rule):
        check_routing({"VariantName": "a", "RoutingConfig": routing})


def test_every_strategy_chooses_the_only_instance_and_some_instance_of_many() -> None:
    limits = {"PrefixLength": LENGTH, "ConcurrencyThreshold": 1}
    routings: list[dict[str, Any]] = [
        {},
        {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
        {"RoutingStrategy": "RANDOM"},
        {"RoutingStrategy": "PREFIX_AWARE", "PrefixAwareRoutingConfig": limits},
        {"RoutingStrategy": "KV_AWARE"},
    ]

    for routing in routings:
        strategy = strategy_of({"RoutingConfig": routing})
        only = Place(0, 9)

        assert strategy.choose({0: only}, prefix(1)) is only
        assert strategy.choose(places(3), None).number in (0, 1, 2)
