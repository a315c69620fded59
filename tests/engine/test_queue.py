"""The queue in front of an engine, beside an engine that is a clock."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from lmi.engine.overload import MAX_RETRY_AFTER_S, LearningQueue
from lmi.engine.patience import ClientPatience
from lmi.engine.queue import QueueEntry, RequestQueue
from lmi.engine.speed import Speed
from lmi.errors import DeadlineExceeded, Overloaded
from lmi.executor import DEFAULT_PRIORITY
from scripts.benchmarks.overload import clocked
from scripts.benchmarks.overload.clocked import (
    CAPACITY,
    PLACES,
    PROMPT,
    PROMPT_TOKEN_S,
    ROW_S,
    STEP_S,
    TOKENS,
    Arrival,
    arrival,
    hog,
    poisson,
)


class Engine(clocked.Engine):
    """The clock behind a queue that learns."""

    def __init__(
        self,
        step_s: float = STEP_S,
        *,
        max_wait_s: float = 10.0,
        num_express: int = 4,
        keeps_short: bool = True,
    ) -> None:
        queue = LearningQueue(PLACES, max_wait_s, num_express, keeps_short=keeps_short)
        super().__init__(queue, step_s)


def whole_between(engine: Engine, from_s: float, to_s: float) -> float:
    """Whole answers in a second, of the capacity."""
    return (
        sum(end == "whole" and from_s <= at_s < to_s for end, _, at_s in engine.ends)
        / (to_s - from_s)
        / CAPACITY
    )


@pytest.mark.parametrize("load", [1, 2, 4])
def test_under_any_load_clients_who_leave_after_five_seconds_get_what_the_engine_can_do(
    load: int,
) -> None:
    engine = Engine()
    engine.run(poisson(load * CAPACITY, 20, patience_s=5.0), 20)
    assert whole_between(engine, 5, 20) >= 0.9
    assert sum(end == "left" for end, _, at_s in engine.ends if at_s > 10) <= 0.02 * len(
        engine.ends
    )


@pytest.mark.parametrize("patience_s", [5.0, 60.0])
def test_who_is_refused_under_a_lasting_load_is_refused_at_once(patience_s: float) -> None:
    engine = Engine()
    ends = engine.run(poisson(1.5 * CAPACITY, 60, patience_s=patience_s), 60)
    assert ends["refused"] > 500 and ends["late"] == 0


def test_a_batch_that_takes_longer_than_clients_wait_gets_smaller() -> None:
    # A full batch answers after 5.4 s, less than half of one after 4 s, 7 a second
    engine = Engine(step_s=0.06)
    engine.run(poisson(20, 30, patience_s=5.0, num_tokens=48), 30)
    assert sum(end == "whole" and at_s > 15 for end, _, at_s in engine.ends) >= 15 * 5


def test_a_batch_that_became_small_in_a_slow_moment_grows_again() -> None:
    engine = Engine(step_s=0.06)
    engine.slow_from_s = 15.0
    engine.slow_until_s = 20.0
    engine.run(poisson(40, 50, patience_s=5.0), 50)
    assert sum(end == "whole" and at_s > 35 for end, _, at_s in engine.ends) >= 15 * 15


def test_after_a_burst_the_load_that_fits_is_served_whole_again() -> None:
    engine = Engine()
    burst = [arrival(5.0, patience_s=5.0) for _ in range(int(10 * CAPACITY))]
    engine.run(burst + poisson(0.8 * CAPACITY, 40, patience_s=5.0), 40)
    late = [(end, entry) for end, entry, _ in engine.ends if 10 <= entry.arrived_s < 35]

    assert Counter(end for end, _ in late)["whole"] >= 0.95 * len(late)


def test_a_load_that_fits_is_refused_nothing() -> None:
    engine = Engine()
    assert set(engine.run(poisson(0.8 * CAPACITY, 40, patience_s=5.0), 60)) == {"whole"}


def test_answers_that_end_early_are_not_counted_as_long() -> None:
    engine = Engine()
    arrivals = [
        arrival(light_arrival.at_s, max_tokens=2048)
        for light_arrival in poisson(0.9 * CAPACITY, 30)
    ]
    assert set(engine.run(arrivals, 60)) == {"whole"}


def test_a_crowd_of_patient_clients_is_answered_within_the_limit_of_the_wait() -> None:
    engine = Engine(max_wait_s=20.0)
    assert set(engine.run([arrival(0.0, f"client {i}") for i in range(300)], 60)) == {"whole"}


def test_clients_who_may_all_wait_for_a_minute_are_all_served() -> None:
    load = poisson(3 * CAPACITY, 6)
    assert Engine(max_wait_s=60.0).run(load, 30)["refused"] > 0.3 * len(load)
    assert Engine(max_wait_s=60.0, keeps_short=False).run(load, 30) == Counter(whole=len(load))


def test_nobody_is_let_in_who_would_wait_for_longer_than_all_may() -> None:
    engine = Engine(max_wait_s=5.0, keeps_short=False)
    ends = engine.run(poisson(3 * CAPACITY, 10), 30)

    assert ends["refused"] > 0.1 * ends["whole"] and ends["late"] < 0.01 * ends["refused"]
    assert 4.5 < max(engine.first_s.values()) < 5.5


def hogs() -> list[Arrival]:
    return hog("hog 0", 0.0, 16) + hog("hog 1", 0.001, 16)


@pytest.mark.parametrize("num_sequences", [1, 4, 16])
def test_a_light_client_beside_two_hogs_waits_for_no_answer_of_theirs(num_sequences: int) -> None:
    """The second comes when the first has the whole batch."""
    engine = Engine()
    light = [arrival(2.0 + i, "light", num_tokens=8) for i in range(20)]
    engine.run(hog("hog 0", 0.0, num_sequences) + hog("hog 1", 1.9, num_sequences) + light, 30)
    step_s = STEP_S + (PLACES + 20) * ROW_S + PLACES // num_sequences * PROMPT * PROMPT_TOKEN_S

    assert all(engine.first_s[light_arrival.entry] <= 2 * step_s for light_arrival in light)


def test_a_short_step_of_express_requests_counts_as_a_part_of_the_next_step() -> None:
    queue = LearningQueue(4, 10.0, num_express=1)
    for number in range(5):
        queue.offer(arrival(0.0, f"client {number}").entry, 0.0)

    assert [entry.is_express for entry in queue.start(0.0)] == [False] * 4 + [True]
    for _ in range(8):
        queue.note_step(0.01, 0, 1)
        queue.note_step(0.09, 0, 5)

    assert queue.speed.step_s == pytest.approx(0.1)


def test_the_time_that_a_body_took_to_come_is_no_wait_in_the_queue() -> None:
    queue = LearningQueue(1, 10.0)
    for at_s in (0.0, -11.0):
        queue.offer(arrival(at_s, f"from {at_s:g}").entry, 0.0)

    assert len(list(queue.start(0.0))) == 1
    assert queue.expired(9.9) == []
    assert [str(error) for _, error in queue.expired(10.1)] == [
        "the engine is busy: it has waited 10.1 s"
    ]


def test_what_a_request_has_waited_for_another_engine_counts() -> None:
    queue = LearningQueue(1, 2.0)
    queue.offer(arrival(0.0).entry, 0.0)
    list(queue.start(0.0))
    with pytest.raises(Overloaded, match=r"it has waited 2\.1 s"):
        queue.offer(arrival(0.0, received_s=-2.1).entry, 0.0)

    queue.offer(arrival(0.0, received_s=-1.5).entry, 0.0)
    assert queue.expired(0.4) == []
    assert [str(error) for _, error in queue.expired(0.6)] == [
        "the engine is busy: it has waited 2.1 s"
    ]


def test_what_it_is_expected_to_wait_is_added_to_what_it_has_waited() -> None:
    queue = LearningQueue(1, 2.0)
    queue.offer(arrival(0.0, num_tokens=15).entry, 0.0)
    list(queue.start(0.0))
    for _ in range(5):
        queue.note_step(0.1, 0, 1)

    with pytest.raises(Overloaded, match=r"it would wait 2\.5 s, of at most 2"):
        queue.offer(arrival(0.0, received_s=-1.0).entry, 0.5)

    queue.offer(arrival(0.0, received_s=0.0).entry, 0.5)


def test_who_has_waited_too_long_elsewhere_is_answered_where_a_place_is_free() -> None:
    queue = LearningQueue(1, 2.0)
    late = arrival(0.0, received_s=-5.0).entry
    queue.offer(late, 0.0)
    assert list(queue.start(0.0)) == [late]


def test_an_express_request_that_ends_makes_no_place_in_the_batch() -> None:
    queue = LearningQueue(1, 10.0, num_express=1)
    for number, num_tokens in enumerate((80, 1)):
        queue.offer(arrival(0.0, f"client {number}", num_tokens=num_tokens).entry, 0.0)

    assert [entry.is_express for entry in queue.start(0.0)] == [False, True]

    for _ in range(8):
        queue.note_step(0.1, 0, 2)

    last = arrival(0.0, "client 2", num_sequences=2, deadline_s=5.0)
    with pytest.raises(Overloaded, match="would take"):
        queue.offer(last.entry, 0.8)


def test_without_express_places_a_light_client_is_the_next_when_a_place_is_free() -> None:
    engine = Engine(num_express=0, max_wait_s=60.0)
    light = [arrival(2.0 + 3 * i, "light", num_tokens=8) for i in range(8)]
    engine.run(hogs() + light, 60)
    answer_s = 200 * (STEP_S + (PLACES + 16) * ROW_S)

    assert all(engine.first_s[light_arrival.entry] <= answer_s for light_arrival in light)


def test_clients_who_always_have_more_get_equal_parts_of_the_engine() -> None:
    engine = Engine(max_wait_s=1e9)
    arrivals = [arrival(0.0, "many short", num_tokens=8, is_further=True) for _ in range(3000)]
    arrivals += [arrival(0.0, "few long", num_tokens=64, is_further=True) for _ in range(500)]
    engine.run(arrivals, 15)
    tokens: Counter[str] = Counter()
    for end, entry, _ in engine.ends:
        tokens[entry.client] += entry.max_tokens * (end == "whole")

    assert min(tokens.values()) >= 0.8 * sum(tokens.values()) / 2


def test_a_client_pays_for_the_tokens_of_its_images_when_they_are_known() -> None:
    queue = LearningQueue(1, 1e9)
    for num_tokens in (0, 100) * 8:
        queue.speed.note(0.1 + 0.001 * num_tokens, num_tokens, 1, 1)

    for client in ("with images", "without") * 2:
        queue.offer(arrival(0.0, client, is_further=True).entry, 0.0)

    order = []
    while queue.num_waiting:
        [entry] = queue.start(0.0)
        order.append(entry.client)
        queue.note_prompt(entry, PROMPT + 1000 * (entry.client == "with images"))
        queue.remove(entry, 0.0, is_answered=True)

    assert order == ["with images", "without", "without", "with images"]


def test_the_more_urgent_request_goes_first() -> None:
    engine = Engine()
    crowd = [arrival(0.0, is_further=True) for _ in range(4 * PLACES)]
    urgent = arrival(0.5, priority=1.0)
    engine.run([*crowd, urgent], 60)
    assert (
        sum(first_s < 0.5 + engine.first_s[urgent.entry] for first_s in engine.first_s.values())
        <= 2 * PLACES
    )


def test_whatever_priorities_clients_name_the_queue_counts_three_classes() -> None:
    queue = LearningQueue(1, 10.0)
    for number, priority in enumerate((0.5, 0.5, 0.7, 1.0, 0.1, 0.49)):
        queue.offer(arrival(0.0, f"client {number % 2}", priority=priority).entry, 0.0)

    assert queue.num_by_class() == (Counter(high=2, default=2, low=2), Counter())

    [first] = queue.start(0.0)
    assert queue.num_by_class() == (Counter(high=1, default=2, low=2), Counter(high=1))
    assert queue.num_busy_clients == 2

    queue.remove(first, 1.0)
    assert queue.num_by_class()[1] == Counter()


def test_what_cannot_meet_its_deadline_is_refused_at_once_and_says_when_to_come_again() -> None:
    engine = Engine(max_wait_s=60.0)
    engine.run([arrival(0.0, f"client {i % 4}", is_further=True) for i in range(8 * PLACES)], 0.8)
    own_s = TOKENS * (STEP_S + (PLACES + 1) * ROW_S) + PROMPT * PROMPT_TOKEN_S
    with pytest.raises(Overloaded, match=r"it would take \d+\.\d s, and has 2\.1") as caught:
        engine.queue.offer(arrival(0.8, "client 1", deadline_s=0.8 + own_s).entry, 0.8)

    assert 1 <= (caught.value.retry_after_s or 0) <= 1.2 * MAX_RETRY_AFTER_S

    engine.queue.offer(arrival(0.8, "client 1", deadline_s=60.0).entry, 0.8)
    engine.queue.offer(arrival(0.8, "an idle client", deadline_s=0.9 + own_s).entry, 0.8)


def test_a_deadline_that_passes_in_the_queue_ends_the_wait() -> None:
    queue = LearningQueue(1, 10.0)
    queue.offer(arrival(0.0).entry, 0.0)
    list(queue.start(0.0))
    queue.offer(arrival(0.0, deadline_s=1.0).entry, 0.0)
    assert queue.expired(0.5) == []
    [(_, error)] = queue.expired(1.5)
    assert isinstance(error, DeadlineExceeded) and queue.num_waiting == 0


def test_further_requests_of_one_body_wait_for_as_long_as_it_takes() -> None:
    engine = Engine(max_wait_s=1.0)
    arrivals = [arrival(0.0, is_further=i > 0) for i in range(10 * PLACES)]
    assert set(engine.run(arrivals, 120)) == {"whole"}


def test_patience_is_the_time_after_which_clients_leave() -> None:
    patience = ClientPatience()
    assert patience.seconds(0.0) == float("inf")
    for i in range(20):
        patience.note(5.0, has_left=True, now=0.2 * i)

    assert 4.2 < patience.seconds(4.0) <= 5.0


def test_a_crowd_that_leaves_at_one_moment_is_not_the_patience_of_all() -> None:
    patience = ClientPatience()
    for i in range(200):
        patience.note(0.01 * i, has_left=True, now=5.0 + 0.0002 * i)

    assert patience.seconds(6.0) == float("inf")


def test_a_few_who_leave_early_among_many_who_stay_are_not_the_patience_of_all() -> None:
    patience = ClientPatience()
    for i in range(400):
        patience.note(0.3 if i % 20 == 0 else 8.0, has_left=i % 20 == 0, now=0.01 * i)

    assert patience.seconds(4.0) == float("inf")


def test_impatience_is_forgotten() -> None:
    patience = ClientPatience()
    for i in range(20):
        patience.note(5.0, has_left=True, now=0.2 * i)

    assert patience.seconds(60.0) <= 5.0
    assert patience.seconds(3600.0) == float("inf")


def test_the_speed_of_prompts_and_answers_is_found_from_steps_that_have_both() -> None:
    speed = Speed()
    draw = random.Random(0)
    for _ in range(200):
        num_prompt = draw.randrange(0, 200)
        speed.note(STEP_S + PROMPT_TOKEN_S * num_prompt, num_prompt, PLACES, PLACES)

    assert speed.prompt_token_s == pytest.approx(PROMPT_TOKEN_S, rel=0.01)
    assert speed.step_s == pytest.approx(STEP_S, rel=0.01)
    assert speed.output_token_s == pytest.approx(STEP_S / PLACES, rel=0.01)


def test_a_queue_that_learns_nothing_lets_all_in_and_serves_clients_by_their_tokens() -> None:
    queue = RequestQueue(1, 10.0)
    entries = [arrival(0.0, client).entry for client in "aaab"]
    for entry in entries:
        queue.offer(entry, 0.0)

    order = []
    for _ in entries:
        [started] = queue.start(1.0)
        order.append(started.client)
        queue.remove(started, 1.0, is_answered=True)

    assert order == ["a", "b", "a", "a"]

    queue.offer(arrival(1.0).entry, 1.0)
    queue.offer(arrival(1.0).entry, 1.0)
    assert len(list(queue.start(1.0))) == 1

    [(_, error)] = queue.expired(11.5)
    assert isinstance(error, Overloaded) and error.retry_after_s == 1


def test_the_place_of_each_who_waits_is_that_in_which_all_start() -> None:
    dice = random.Random(4)
    for _ in range(30):
        queue, entries = queue_with(dice, (DEFAULT_PRIORITY,))
        places = {entry: queue.ahead_of(entry).num_requests + 1 for entry in entries}
        for place in range(1, len(entries) + 1):
            [started] = queue.start(1.0)
            assert places[started] == place

            # The answer is as long as it may be
            for _ in range(started.max_tokens):
                queue.note_step(0.01, 0, 1)

            queue.remove(started, 1.0)


def test_the_more_urgent_have_the_first_places() -> None:
    queue, entries = queue_with(random.Random(5), (DEFAULT_PRIORITY, 1.0))
    urgent = [entry for entry in entries if entry.priority == 1.0]
    assert 0 < len(urgent) < len(entries)
    for entry in entries:
        assert (queue.ahead_of(entry).num_requests < len(urgent)) == (entry in urgent)


def queue_with(
    dice: random.Random, priorities: tuple[float, ...]
) -> tuple[RequestQueue, list[QueueEntry]]:
    """A queue with a dozen requests of three clients, who came while another one ran and has just
    ended.
    """
    queue = RequestQueue(1)
    running = arrival(0.0, "z").entry
    queue.offer(running, 0.0)
    assert list(queue.start(0.0)) == [running]
    entries = []
    for _ in range(12):
        client = dice.choice("abc")
        num_tokens = dice.randint(1, 50)
        priority = dice.choice(priorities)
        entries.append(arrival(0.0, client, num_tokens=num_tokens, priority=priority).entry)
        queue.offer(entries[-1], 0.0)

    queue.remove(running, 1.0)
    return queue, entries


def test_a_wait_is_expected_once_the_speed_is_known() -> None:
    entry = arrival(20.0, "b").entry
    new = Engine().queue
    new.offer(entry, 20.0)
    assert (new.expected_wait_s(entry), new.prompt_s(1000)) == (None, None)

    engine = Engine()
    engine.run(poisson(3 * CAPACITY, 20.0), 20.0)
    engine.queue.offer(entry, 20.0)
    expected_s = engine.queue.expected_wait_s(entry)
    prompt_s = engine.queue.prompt_s(1000)

    assert expected_s is not None and 0.0 <= expected_s < 10.0
    assert prompt_s == pytest.approx(1000 * PROMPT_TOKEN_S, rel=0.5)
