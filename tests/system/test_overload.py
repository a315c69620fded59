"""Whole servers with more load than they can carry. What is compared is measured in one run, on any
machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi.settings.served_folder import demo_folder
from scripts.benchmarks.overload import records
from scripts.benchmarks.overload.client import User
from scripts.benchmarks.overload.door import Door, model_35m
from scripts.benchmarks.overload.parts import Plan, Run
from tests.served import Server, serve
from tests.system.offered_load import alone_and_beside, asks, keep, step_s, target, wait_s

KEYS = tuple(f"key-number-{number}" for number in range(10))
BEARER = {"Authorization": "Bearer {tenant}"}
PACE = (
    "option.rolling_batch=echo",
    "option.echo_step_ms=60",
    "option.echo_max_num_sequences=16",
    "frontend_workers=1",
)


@pytest.fixture(scope="module")
def paced() -> Iterator[Server]:
    """266 tokens a second at most, which takes a fraction of a core, and ten keys."""
    with serve(
        demo_folder(), *PACE, f"option.api_key={','.join(KEYS)}", "option.model_name=demo"
    ) as server:
        yield server


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


def test_a_light_client_beside_two_hogs_waits_three_times_what_it_waits_alone_and_a_step(
    embedded: Server,
) -> None:
    """A step of the full batch takes ten times as long as one of the light client alone."""
    alone, beside = alone_and_beside(embedded)
    assert wait_s(beside) <= 3 * wait_s(alone) + step_s(beside, 64)
