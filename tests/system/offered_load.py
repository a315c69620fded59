"""The load of `scripts/benchmarks/overload` on a server of tests, and what became of it."""

from __future__ import annotations

import random
from collections.abc import Iterator

from lmi.client.bench.figures import quantile
from scripts.benchmarks.overload import client, records
from scripts.benchmarks.overload.client import Phase, User
from scripts.benchmarks.overload.door import Ask, Door, Target
from scripts.benchmarks.overload.records import Outcome, Record, of
from tests.served import Server

BESIDE_S = 10.0
DRAW = random.Random(0)


def target(server: Server) -> Target:
    return Target("127.0.0.1", server.port, "/ping", "demo")


def asks(
    door: Door, tenant: str, num_tokens: int, num_prompts: int = 1, num_choices: int = 1
) -> Iterator[Ask]:
    while True:
        yield door.ask(tenant, num_tokens, DRAW, num_prompts, num_choices)


def keep(server: Server, door: Door, users: list[User], seconds: float) -> Phase:
    return client.run(target(server), door, lambda clients: clients.keep(users, seconds))


def alone_and_beside(server: Server) -> tuple[list[Record], list[Record]]:
    """A light client's requests alone, and all beside two hogs, each of which has four requests of
    512 sequences.
    """
    door = Door("openai", "demo", {"x-llm-d-inference-fairness-id": "{tenant}"})
    light = asks(door, "light", 8)
    alone = keep(server, door, [User(light, pause_s=0.1)], 3.0).records
    hogs = [User(asks(door, hog, 200, 128, 4)) for hog in ("hog 1", "hog 2") for _ in range(4)]
    beside = keep(server, door, [*hogs, User(light, 1.0, 0.1)], BESIDE_S).records

    assert len(of(alone, Outcome.WHOLE)) >= 3 and len(of(beside, Outcome.WHOLE)) >= 3
    assert sum(record.num_tokens for record in beside if record.tenant != "light") > 64 * 8, (
        "the hogs are served too"
    )

    return alone, beside


def wait_s(found: list[Record]) -> float:
    return quantile(records.waits_s(found, "light")[0], 0.5)


def step_s(beside: list[Record], num_places: int) -> float:
    """Of a full batch, each of whose sequences got a token."""
    num_hog_tokens = sum(record.num_tokens for record in beside if record.tenant != "light")
    return BESIDE_S * num_places / num_hog_tokens
