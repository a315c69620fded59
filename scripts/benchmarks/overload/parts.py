"""The parts of a run and their figures: load over capacity, a burst, two hogs, tenants that all
have a backlog.
"""

import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmi.client.bench.figures import quantile
from scripts.benchmarks.overload import client, records as counted
from scripts.benchmarks.overload.client import Clients, Phase, User
from scripts.benchmarks.overload.door import Ask, Door, Target, poisson
from scripts.benchmarks.overload.records import Outcome, Record, of

Figures = dict[str, Any]

# The load beside a burst, of capacity.
BURST_LOAD = 0.5
# What the light client asks for, and how long it pauses after an answer.
LIGHT_TOKENS = 8
LIGHT_PAUSE_S = 0.2
# How long hogs ask before the light client begins.
HOG_LEAD_S = 0.5


@dataclass(frozen=True)
class Tenant:
    name: str
    weight: float
    num_streams: int
    # Of each answer.
    num_tokens: int


@dataclass(frozen=True)
class Plan:
    """What is asked, and for how long."""

    # How long each load lasts.
    seconds: float = 20.0
    # How long a client waits for its answer.
    patience_s: float = 5.0
    # How long capacity is measured.
    capacity_s: float = 8.0
    # In the closed loop that measures capacity.
    num_users: int = 128
    # Of an answer.
    num_tokens: int = 32
    # How much work comes at once in a burst, in seconds of capacity.
    burst_s: float = 10.0
    # Prompts, answers to each, tokens of an answer.
    hog: tuple[int, int, int] = (128, 4, 200)
    # How many requests each hog has at a time.
    hog_requests: int = 4
    tenants: tuple[Tenant, ...] = (Tenant("heavy", 1, 256, 48), Tenant("light", 1, 128, 16))
    # How long to wait at most, between parts, until the server answers at once again.
    settle_s: float = 60.0
    seed: str = "0"


class NoAnswer(Exception):
    """The server answers nothing, so that there is no capacity to compare with."""


class Run:
    """A run against one server. Capacity is measured before and after each part, since the machine
    may change.
    """

    def __init__(self, target: Target, door: Door, plan: Plan) -> None:
        self._target = target
        self._door = door
        self.plan = plan
        self._draw = random.Random(plan.seed)
        # As it was measured last; None where a part has run since.
        self._capacity: float | None = None
        self.phases: list[Phase] = []

    def load(self, factor: float) -> Figures:
        """Poisson arrivals at `factor` times capacity."""
        before = self._capacity_now()
        plan = self.plan
        times_s = poisson(factor * before / plan.num_tokens, plan.seconds, f"{plan.seed} {factor}")
        phase = self._offer(times_s)
        from_s = min(plan.patience_s, plan.seconds / 4)
        return {"load": factor} | self._figures_of(phase, before, from_s)

    def burst(self) -> Figures:
        """Half of capacity, and at a quarter of the phase `burst_s` of work at once."""
        before = self._capacity_now()
        plan = self.plan
        rate = before / plan.num_tokens
        at_s = plan.seconds / 4
        num_at_once = int(rate * plan.burst_s)
        steady_s = poisson(BURST_LOAD * rate, plan.seconds, f"{plan.seed} burst")
        burst_s = [at_s] * num_at_once
        phase = self._offer(sorted(steady_s + burst_s))
        return {
            "num_at_once": num_at_once,
            "recovery_s": counted.recovery_s(phase.records, at_s, plan.seconds),
            "watched_s": plan.seconds - at_s,
        } | self._figures_of(phase, before, at_s)

    def hogs(self) -> Figures:
        """A light client by itself, then beside two that each ask for many answers at once, again
        and again.
        """
        light = User(self._asks("light", LIGHT_TOKENS), pause_s=LIGHT_PAUSE_S)
        self._settle()
        alone = self._keep([light], max(2.0, self.plan.seconds / 4)).records

        light_later = User(light.asks, HOG_LEAD_S, LIGHT_PAUSE_S)
        beside = self._keep([*self._hog_users(), light_later], self.plan.seconds).records
        settle_s = self._settle()

        waits_alone_s, _ = counted.waits_s(alone, "light")
        waits_beside_s, is_open = counted.waits_s(beside, "light")
        alone_s = quantile(waits_alone_s, 0.5)
        beside_s = quantile(waits_beside_s, 0.5)
        hog_records = [record for record in beside if record.tenant != "light"]
        return {
            "light_alone_s": alone_s,
            "light_beside_s": beside_s,
            "light_worst_s": quantile(waits_beside_s, 1),
            "light_ratio": (beside_s - step_s(beside)) / alone_s,
            "is_at_least": is_open and len(waits_beside_s) == 1,
            "num_light_answers": len(of(beside, Outcome.WHOLE)),
            "hogs": {outcome.value: len(of(hog_records, outcome)) for outcome in Outcome},
            "hog_tokens": sum(record.num_tokens for record in hog_records),
            "reasons": sorted({record.reason for record in of(beside, Outcome.FAILED)}),
            "settle_s": settle_s,
        }

    def _hog_users(self) -> list[User]:
        """Return the users of two hogs, each of which has several requests at a time."""
        num_prompts, num_choices, num_tokens = self.plan.hog
        users: list[User] = []
        for name in ("hog-1", "hog-2"):
            for _ in range(self.plan.hog_requests):
                users.append(User(self._asks(name, num_tokens, num_prompts, num_choices)))

        return users

    def tenants(self) -> Figures:
        """Tenants of different size in a closed loop, each of which would fill the server by
        itself.
        """
        before = self._capacity_now()
        plan = self.plan
        users: list[User] = []
        for tenant in plan.tenants:
            for _ in range(tenant.num_streams):
                users.append(User(self._asks(tenant.name, tenant.num_tokens)))

        records = self._keep(users, plan.seconds).records
        capacity = self._capacity_after(before)

        weights = {tenant.name: tenant.weight for tenant in plan.tenants}
        from_s = plan.seconds / 4
        to_s = plan.seconds
        served = counted.services(records, weights, from_s, to_s)
        mean_service = sum(served.values()) / len(served)
        gap_tokens = counted.service_gap(records, weights, from_s, to_s)
        return {
            "services": served,
            "least_share": min(served.values()) / (mean_service or math.nan),
            "gap_tokens": gap_tokens,
            "gap_s": gap_tokens / capacity,
            "goodput_ratio": counted.delivered(records, from_s, to_s) / capacity,
            "outcomes": {outcome.value: len(of(records, outcome)) for outcome in Outcome},
        }

    def _figures_of(self, phase: Phase, before: float, from_s: float) -> Figures:
        """Return the figures of an open-loop phase, of what was due or read from `from_s` on."""
        settle_s = self._settle()
        capacity = self._capacity_after(before)
        plan = self.plan
        to_s = plan.seconds

        due = [record for record in phase.records if record.start_s >= from_s]
        refused = of(due, Outcome.REFUSED)
        whole = of(due, Outcome.WHOLE)
        refusals_ms = [(record.end_s - record.start_s) * 1e3 for record in refused]
        retries_s = [record.retry_after_s for record in refused if record.retry_after_s is not None]
        firsts_s = [record.times_s[0] - record.start_s for record in whole if record.times_s]

        offered = sum(record.num_wanted for record in due) / (to_s - from_s)
        goodput = counted.goodput(phase.records, from_s, to_s)
        num_refused = len(of(phase.records, Outcome.REFUSED))
        num_servable = counted.servable(phase.records, capacity, to_s, plan.patience_s)
        return {
            "capacity": capacity,
            "capacity_drift": self._capacity_now() / before,
            "offered_ratio": offered / capacity,
            "goodput_ratio": goodput / (min(capacity, offered) or math.nan),
            "delivered_ratio": counted.delivered(phase.records, from_s, to_s) / capacity,
            "outcomes": {outcome.value: len(of(due, outcome)) for outcome in Outcome},
            "reasons": sorted({record.reason for record in of(due, Outcome.FAILED)})[:3],
            "refusal_p50_ms": quantile(refusals_ms, 0.5),
            "refusal_p99_ms": quantile(refusals_ms, 0.99),
            "retry_after_s": [quantile(retries_s, share) for share in (0, 0.5, 1)],
            "num_without_retry_after": len(refused) - len(retries_s),
            "first_p50_s": quantile(firsts_s, 0.5),
            "first_p99_s": quantile(firsts_s, 0.99),
            "ping_p50_ms": quantile(phase.pings_s, 0.5) * 1e3,
            "ping_p99_ms": quantile(phase.pings_s, 0.99) * 1e3,
            "num_bad_pings": phase.num_bad_pings,
            "servable_share": num_servable / (num_refused or math.nan),
            "settle_s": settle_s,
            "driver_cores": phase.driver_cores,
            "driver_late_p99_ms": quantile(phase.late_s, 0.99) * 1e3,
            "foreign_cores": phase.foreign_cores,
        }

    def _capacity_now(self) -> float:
        """Return the tokens a second in a closed loop, which is run unless that is known.

        Its users ask again soon after a refusal, so that the server stays full. The first answer of
        each has another length, so that they spread. At the end none leaves before its answer, for
        a server learns from that how long clients wait. Raises NoAnswer.
        """
        if self._capacity is not None:
            return self._capacity

        plan = self.plan
        self._settle()
        users = []
        for _ in range(plan.num_users):
            first = self._door.ask("load", self._draw.randint(1, plan.num_tokens), self._draw)
            asks = itertools.chain([first], self._asks("load", plan.num_tokens))
            users.append(User(asks, max_retry_s=client.MIN_RETRY_S))

        records = self._keep(users, plan.capacity_s, plan.patience_s).records
        capacity = counted.delivered(records, plan.capacity_s / 4, plan.capacity_s)
        if not capacity:
            reasons = sorted({record.reason for record in of(records, Outcome.FAILED)})
            raise NoAnswer(f"no tokens came while capacity was measured {reasons[:3]}")

        print(f"  capacity {capacity:.0f} tokens/s", file=sys.stderr, flush=True)
        self._capacity = capacity
        return capacity

    def _capacity_after(self, before: float) -> float:
        """The mean of the capacity before a part and of that now."""
        self._capacity = None
        return (before + self._capacity_now()) / 2

    def _asks(
        self, tenant: str, num_tokens: int, num_prompts: int = 1, num_choices: int = 1
    ) -> Iterator[Ask]:
        while True:
            yield self._door.ask(tenant, num_tokens, self._draw, num_prompts, num_choices)

    def _offer(self, times_s: list[float]) -> Phase:
        asks = list(itertools.islice(self._asks("load", self.plan.num_tokens), len(times_s)))
        return self._phase(lambda clients: clients.offer(asks, times_s, self.plan.patience_s))

    def _keep(self, users: list[User], seconds: float, patience_s: float = 0.0) -> Phase:
        return self._phase(lambda clients: clients.keep(users, seconds, patience_s))

    def _phase(self, load: Callable[[Clients], Coroutine[Any, Any, None]]) -> Phase:
        self.phases.append(client.run(self._target, self._door, load))
        return self.phases[-1]

    def _settle(self) -> float:
        """Seconds until one small request is answered whole, or NaN if none is in `settle_s`."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < self.plan.settle_s:
            ask = partial(
                Clients.offer,
                asks=[self._door.ask("load", 1, self._draw)],
                times_s=[0.0],
                patience_s=self.plan.settle_s,
            )
            if of(client.run(self._target, self._door, ask).records, Outcome.WHOLE):
                return time.monotonic() - began_s

            time.sleep(client.MIN_RETRY_S)

        return math.nan


def step_s(records: list[Record]) -> float:
    """The median time between two tokens of the light client's whole answers, or NaN."""
    gaps_s: list[float] = []
    for record in of(records, Outcome.WHOLE):
        num_gaps = len(record.times_s) - 1
        if record.tenant == "light" and num_gaps > 0:
            seconds = record.times_s[-1] - record.times_s[0]
            gaps_s.append(seconds / num_gaps)

    return quantile(gaps_s, 0.5)
