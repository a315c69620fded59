"""Whole servers with more load than they can carry. What is compared is measured in one run, on any machine."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from lmi.client.bench.figures import quantile
from lmi.settings.model_choice import demo_folder
from scripts.benchmarks.overload import client, records
from scripts.benchmarks.overload.client import Phase, User
from scripts.benchmarks.overload.door import Ask, Door
from scripts.benchmarks.overload.parts import Plan, Run, step_s
from scripts.benchmarks.overload.records import Outcome, of
from scripts.benchmarks.overload.target import Target
from tests.served import Server, serve

KEYS = tuple(f"key-number-{number}" for number in range(10))
BEARER = {"Authorization": "Bearer {tenant}"}
PACE = ("option.rolling_batch=echo", "option.echo_step_ms=60", "option.echo_max_num_sequences=16", "frontend_workers=1")
DRAW = random.Random(0)


@pytest.fixture(scope="module")
def paced() -> Iterator[Server]:
    """266 tokens a second at most, which takes a fraction of a core, and ten keys."""
    with serve(demo_folder(), *PACE, f"option.api_key={','.join(KEYS)}", "option.model_name=demo") as server:
        yield server


def target(server: Server) -> Target:
    return Target("127.0.0.1", server.port, "/ping", "demo")


def asks(door: Door, tenant: str, num_tokens: int, num_prompts: int = 1, num_choices: int = 1) -> Iterator[Ask]:
    while True:
        yield door.ask(tenant, num_tokens, DRAW, num_prompts, num_choices)


def keep(server: Server, door: Door, users: list[User], seconds: float) -> Phase:
    return client.run(target(server), door, lambda clients: clients.keep(users, seconds))


def test_at_twice_the_capacity_most_of_it_is_whole_answers_and_the_rest_is_refused_in_time(paced: Server) -> None:
    plan = Plan(seconds=8.0, patience_s=3.0, capacity_s=2.5, num_users=32, num_tokens=16)
    door = Door("openai", "demo", {"Authorization": f"Bearer {KEYS[0]}"})
    found = Run(target(paced), door, plan).load(2.0)
    assert found["goodput_ratio"] >= 0.5, "a queue without a limit leaves 0.02 of it"
    assert found["outcomes"]["refused"] >= 0.2 * sum(found["outcomes"].values())
    assert found["num_without_retry_after"] == 0 and found["retry_after_s"][0] >= 1
    assert found["refusal_p50_ms"] < 1000 * plan.patience_s / 4
    assert found["num_bad_pings"] == 0 and not found["reasons"]
    num_refused = dict(paced.engines()[0].num_refused.items())
    assert num_refused["default"] > 0 and num_refused["high"] == num_refused["low"] == 0


def test_ten_keys_share_a_server_alike_though_one_has_many_more_clients(paced: Server) -> None:
    """They come back soon after a refusal, so that each key always has more."""
    door, seconds = Door("openai", "demo", BEARER), 10.0
    keys = [key for key in KEYS for _ in range(40 if key == KEYS[0] else 8)]
    users = [User(asks(door, key, 8), max_retry_s=0.3) for key in keys]
    phase = keep(paced, door, users, seconds)
    served = records.services(phase.records, dict.fromkeys(KEYS, 1.0), seconds / 4, seconds)
    assert min(served.values()) >= 0.8 * sum(served.values()) / len(KEYS), served


@pytest.fixture(scope="module")
def embedded() -> Iterator[Server]:
    with serve(demo_folder(), "option.model_name=demo", "job_queue_size=5000", "trust_fairness_id=true") as server:
        yield server


def test_a_light_client_beside_two_hogs_waits_three_times_what_it_waits_alone_and_a_step(embedded: Server) -> None:
    """Each hog has four requests of 512 sequences. A step of the full batch takes several times as long."""
    door = Door("openai", "demo", {"x-llm-d-inference-fairness-id": "{tenant}"})
    light = asks(door, "light", 8)
    alone = keep(embedded, door, [User(light, pause_s=0.1)], 3.0).records
    hogs = [User(asks(door, hog, 200, 128, 4)) for hog in ("hog 1", "hog 2") for _ in range(4)]
    beside = keep(embedded, door, [*hogs, User(light, 1.0, 0.1)], 10.0).records
    (alone_s, _), (beside_s, is_open) = records.waits_s(alone, "light"), records.waits_s(beside, "light")
    assert len(of(alone, Outcome.WHOLE)) >= 3 and len(of(beside, Outcome.WHOLE)) >= 3
    assert sum(record.num_tokens for record in beside if record.tenant != "light") > 64 * 8, "the hogs are served too"
    assert quantile(beside_s, 0.5) <= 3 * quantile(alone_s, 0.5) + step_s(beside), (alone_s, beside_s, is_open)
