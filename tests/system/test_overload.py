"""Whole servers with more load than they can carry. What is compared is measured in one run, on any
machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi.client.bench.figures import quantile
from lmi.settings.served_folder import demo_folder
from scripts.benchmarks.overload import client, records
from scripts.benchmarks.overload.client import Phase, User
from scripts.benchmarks.overload.door import Ask, Door, Target, model_35m
from scripts.benchmarks.overload.parts import Plan, Run
from scripts.benchmarks.overload.records import Outcome, Record, of
from tests.served import Server, serve
from tests.system.vllm_server import SETTINGS
from tests.tiny_models import tiny_model

BESIDE_S = 10.0
KEYS = tuple(f"key-number-{number}" for number in range(10))
BEARER = {"Authorization": "Bearer {tenant}"}
PACE = (
    "option.rolling_batch=echo",
    "option.echo_step_ms=60",
    "option.echo_max_num_sequences=16",
    "frontend_workers=1",
)
DRAW = random.Random(0)


@pytest.fixture(scope="module")
def paced() -> Iterator[Server]:
    """266 tokens a second at most, which takes a fraction of a core, and ten keys."""
    with serve(
        demo_folder(), *PACE, f"option.api_key={','.join(KEYS)}", "option.model_name=demo"
    ) as server:
        yield server


def target(server: Server) -> Target:
    return Target("127.0.0.1", server.port, "/ping", "demo")


def asks(
    door: Door, tenant: str, num_tokens: int, num_prompts: int = 1, num_choices: int = 1
) -> Iterator[Ask]:
    while True:
        yield door.ask(tenant, num_tokens, DRAW, num_prompts, num_choices)


def keep(server: Server, door: Door, users: list[User], seconds: float) -> Phase:
    return client.run(target(server), door, lambda clients: clients.keep(users, seconds))


def test_at_twice_the_capacity_most_of_it_is_whole_answers_and_the_rest_is_refused_in_time(
    paced: Server,
) -> None:
    plan = Plan(seconds=8.0, patience_s=3.0, capacity_s=2.5, num_users=32, num_tokens=16)
    door = Door("openai", "demo", {"Authorization": f"Bearer {KEYS[0]}"})
    figures = Run(target(paced), door, plan).load(2.0)

    assert figures["goodput_ratio"] >= 0.5, "a queue without a limit leaves 0.02 of it"
    assert figures["outcomes"]["refused"] >= 0.2 * sum(figures["outcomes"].values())
    assert figures["num_without_retry_after"] == 0 and figures["retry_after_s"][0] >= 1
    assert figures["refusal_p50_ms"] < 1000 * plan.patience_s / 4
    assert figures["num_bad_pings"] == 0 and not figures["reasons"]

    num_refused = dict(paced.engines()[0].num_refused.items())
    assert num_refused["default"] > 0 and num_refused["high"] == num_refused["low"] == 0


def test_ten_keys_share_a_server_alike_though_one_has_many_more_clients(paced: Server) -> None:
    """They come back soon after a refusal, so that each key always has more."""
    door = Door("openai", "demo", BEARER)
    seconds = 10.0
    keys = [key for key in KEYS for _ in range(40 if key == KEYS[0] else 8)]
    users = [User(asks(door, key, 8), max_retry_s=0.3) for key in keys]
    phase = keep(paced, door, users, seconds)
    served = records.services(phase.records, dict.fromkeys(KEYS, 1.0), seconds / 4, seconds)

    assert min(served.values()) >= 0.8 * sum(served.values()) / len(KEYS), served


@pytest.fixture(scope="module")
def embedded() -> Iterator[Server]:
    with serve(
        Path(model_35m()), "option.model_name=demo", "job_queue_size=5000", "trust_fairness_id=true"
    ) as server:
        yield server


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


def test_a_light_client_beside_two_hogs_waits_three_times_what_it_waits_alone_and_a_step(
    embedded: Server,
) -> None:
    """A step of the full batch takes ten times as long as one of the light client alone."""
    alone, beside = alone_and_beside(embedded)
    assert wait_s(beside) <= 3 * wait_s(alone) + step_s(beside, 64)


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_light_client_beside_two_hogs_waits_for_no_answer_of_theirs_in_vllm() -> None:
    """Beside 32 places one is express. An answer of a hog takes 200 steps, and one of the light
    client eight.
    """
    more = "option.max_rolling_batch_size=32", "option.model_name=demo", "trust_fairness_id=true"
    with serve(tiny_model("llama_long"), *SETTINGS, *more, "job_queue_size=5000") as server:
        assert server.engines()[0].max_num_sequences == 32
        _, beside = alone_and_beside(server)

    assert wait_s(beside) <= 4 * 8 * step_s(beside, 32)
