"""When a process may start again and when an engine counts as hung. The tests use times and rules,
no processes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.shared.state import Block, EngineRecord, Phase
from lmi.supervisor.code import limits
from lmi.supervisor.hangs import HangLimits, StepWork, hang
from lmi.supervisor.pauses import NO_PAUSES, PauseNotes, Pauses
from lmi.supervisor.restarts import RestartTable, drain_notice_s
from lmi.user_code.options import UserCodeConfig

ENGINE = HangLimits.of(
    EngineConfig(step_timeout_s=60.0, first_step_timeout_s=300.0, model_loading_timeout_s=1200.0)
)


def test_delays_of_starts_that_fail_double_from_a_fifth_of_a_second_to_half_a_minute() -> None:
    table = RestartTable(max_deaths=100, window_s=1e9)
    delays = [table.delay_s(at, was_ready=False) for at in range(10)]
    assert delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0])


def test_a_process_that_was_ready_starts_again_at_once_and_the_delays_begin_anew() -> None:
    table = RestartTable(max_deaths=100, window_s=1e9)
    lives = [True, True, False, False, True, False]
    assert [table.delay_s(at, was_ready=was_ready) for at, was_ready in enumerate(lives)] == [
        0,
        0,
        0.2,
        0.4,
        0,
        0.2,
    ]


def test_too_many_deaths_in_the_window_are_the_end_and_old_ones_do_not_count() -> None:
    table = RestartTable(max_deaths=3, window_s=600)
    assert table.delay_s(0, was_ready=True) is not None
    assert table.delay_s(300, was_ready=True) is not None
    # The first death no longer counts
    assert table.delay_s(601, was_ready=True) is not None
    assert table.delay_s(602, was_ready=True) is None
    assert table.num_deaths == 3


def test_starts_that_fail_count_however_long_each_took_until_one_succeeds() -> None:
    table = RestartTable(max_deaths=3, window_s=600)
    ends = [table.delay_s(at + 1200, was_ready=False) for at in range(0, 3600, 1200)]

    assert [end is None for end in ends] == [False, False, True]

    table = RestartTable(max_deaths=3, window_s=600)
    ends = [table.delay_s(at + 1200, was_ready=at % 3600 == 0) for at in range(0, 12_000, 1200)]

    assert None not in ends


@pytest.mark.parametrize("max_deaths", [0, 1])
def test_the_first_death_is_the_end_where_no_more_are_allowed(max_deaths: int) -> None:
    table = RestartTable(max_deaths, window_s=600)
    assert table.delay_s(1, was_ready=True) is None
    assert table.num_deaths == 1


@pytest.fixture
def record(tmp_path: Path) -> EngineRecord:
    record = Block.create(tmp_path / "state", num_engines=1, num_frontends=1).engines[0]
    record.phase = Phase.READY
    record.beat_s = 1000.0
    record.step_s = 1000.0
    record.step = 5
    return record


def test_an_idle_engine_hangs_when_its_beat_stops(record: EngineRecord) -> None:
    assert hang(record, ENGINE, 0.0, 1009.0) is None
    assert "no sign of life" in (hang(record, ENGINE, 0.0, 1011.0) or "")


@pytest.mark.parametrize("field", ["num_running", "num_waiting"])
def test_a_busy_engine_hangs_when_its_steps_stop_and_not_when_its_beat_does(
    record: EngineRecord, field: str
) -> None:
    setattr(record, field, 1)
    assert hang(record, ENGINE, 0.0, 1059.0) is None
    assert "no step" in (hang(record, ENGINE, 0.0, 1061.0) or "")


def test_the_first_step_may_take_longer(record: EngineRecord) -> None:
    record.num_running = 1
    record.step = 0
    assert hang(record, ENGINE, 0.0, 1299.0) is None
    assert hang(record, ENGINE, 0.0, 1301.0) is not None


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.LOADING])
def test_a_loading_engine_has_the_deadline_of_loading_alone(
    record: EngineRecord, phase: Phase
) -> None:
    record.phase = phase
    assert hang(record, ENGINE, 0.0, 1199.0) is None
    assert "loading" in (hang(record, ENGINE, 0.0, 1201.0) or "")


@pytest.mark.parametrize("phase", [Phase.LOST, Phase.FAILED])
def test_an_engine_that_is_lost_is_never_hung(record: EngineRecord, phase: Phase) -> None:
    record.phase = phase
    assert hang(record, ENGINE, 0.0, 1e6) is None


def paused(*turns: float) -> Pauses:
    """A loop that runs at these times and is expected to run each second."""
    pauses = Pauses(late_s=1.0)
    for now in turns:
        pauses.note(now)

    return pauses


def test_time_in_which_the_loop_did_not_turn_counts_for_nothing() -> None:
    pauses = paused(10.0, 11.0, 21.0, 21.5, 31.5)
    assert pauses.ran_s(5.0, 40.0) == 35.0 - 10.0 - 10.0
    assert pauses.ran_s(15.0, 40.0) == 25.0 - 6.0 - 10.0, "only what lies after the beginning"
    assert pauses.ran_s(15.0, 21.0) == 0.0
    assert pauses.ran_s(32.0, 40.0) == 8.0
    assert paused(0.0, 1.0, 1.9, 2.9).ran_s(0.0, 3.0) == 3.0
    assert (pauses.note(32.5), pauses.note(34.0), pauses.note(34.5)) == (0.0, 1.5, 0.0)


def test_an_engine_that_was_paused_with_its_supervisor_is_not_hung(record: EngineRecord) -> None:
    pauses = paused(1000.0, 5000.0)
    assert hang(record, ENGINE, 0.0, 5009.0, pauses) is None
    assert "no sign of life for 11.0 s" in (hang(record, ENGINE, 0.0, 5011.0, pauses) or "")
    record.num_running = 1
    assert hang(record, ENGINE, 0.0, 5059.0, pauses) is None
    assert "no step" in (hang(record, ENGINE, 0.0, 5061.0, pauses) or "")
    record.phase = Phase.LOADING
    assert hang(record, ENGINE, 1000.0, 6199.0, pauses) is None
    assert "loading" in (hang(record, ENGINE, 1000.0, 6201.0, pauses) or "")


def last_look(
    record: EngineRecord,
    shares: dict[int, float],
    *,
    until_s: float = math.inf,
    paused_at_s: float = math.inf,
    paused_s: float = 0.0,
) -> float:
    """When an engine whose threads work with these shares of a core counts as hung, looked at five
    times a second, without a pause of `paused_s`.

    The step begins at 1000 and its threads work until `until_s`.
    """
    pauses = paused(1000.0)
    times = {thread: 0.0 for thread in shares}
    work = StepWork(lambda: dict(times))
    record.num_running = 1
    now = 1000.0
    while hang(record, ENGINE, 0.0, now, pauses, work) is None:
        assert now < 3000.0 + paused_s
        now += 0.2
        pauses.note(now)
        if now > paused_at_s:
            paused_at_s = math.inf
            now += paused_s
            pauses.note(now)

        for thread, share in shares.items():
            times[thread] += 0.2 * share if now <= until_s else 0.0

    return pauses.ran_s(1000.0, now)


@pytest.mark.parametrize(
    ("shares", "until_s", "expected_s"),
    [
        ({}, math.inf, 60),
        ({1: 0.0, 2: 0.005}, math.inf, 60),
        ({1: 1.0}, math.inf, 60),
        ({1: 1.0, 2: 1.0, 3: 1.0}, math.inf, 60),
        ({1: 0.5, 2: 0.5, 3: 0.5}, math.inf, 117),
        ({1: 0.05, 2: 0.0}, math.inf, 600),
        ({1: 0.5}, 1030.0, 90),
        ({1: 0.5}, 1100.0, 160),
    ],
    ids=[
        "no threads",
        "threads that wait",
        "a loop",
        "a loop of three threads",
        "half a core each",
        "starved",
        "a thread that soon waits",
        "a thread that waits at last",
    ],
)
def test_a_step_may_last_longer_where_the_machine_gives_its_engine_little(
    record: EngineRecord, shares: dict[int, float], until_s: float, expected_s: float
) -> None:
    """Up to 60 s of work by one thread, to 60 s without work by any, and to 600 s by the clock."""
    assert last_look(record, shares, until_s=until_s) == pytest.approx(expected_s, abs=4)


@pytest.mark.parametrize("paused_at_s", [1001.0, 1030.0], ids=["before a look", "between looks"])
def test_a_pause_of_the_machine_is_neither_work_nor_time_without_it(
    record: EngineRecord, paused_at_s: float
) -> None:
    lasted_s = last_look(record, {1: 0.05}, paused_at_s=paused_at_s, paused_s=4000.0)
    assert lasted_s == pytest.approx(600, abs=4)


def test_a_late_step_is_told_once(record: EngineRecord) -> None:
    times = {1: 0.0}
    work = StepWork(lambda: dict(times))
    record.num_running = 1
    restarts_told = []
    for second in range(1001, 1201):
        times[1] += 0.1
        record.step_s = 1000.0 if second < 1100 else 1100.0
        assert hang(record, ENGINE, 0.0, float(second), NO_PAUSES, work) is None

        restarts_told += [second] if work.is_newly_late() else []

    assert restarts_told == [1061, 1161]


def test_pauses_are_told_once_a_minute_with_their_sum() -> None:
    notes = PauseNotes()
    [first, *further] = [
        notes.note(paused_s, now)
        for paused_s, now in ((1.4, 10.0), (0.0, 11.0), (2.0, 20.0), (3.0, 60.0))
    ]

    assert (
        first
        == "the machine gave this process no time for 1.4 s (busy, or suspended); deadlines are "
        "extended"
    )
    assert further == [None] * 3
    assert notes.note(0.0, 69.9) is None
    assert notes.note(0.0, 70.0) == (
        "the machine gave this process no time for 5.0 s in 2 pauses (busy, or suspended); "
        "deadlines are extended"
    )
    assert notes.note(0.0, 500.0) is None


def test_the_notice_of_a_drain_is_a_second_and_never_most_of_the_drain() -> None:
    assert (drain_notice_s(25.0), drain_notice_s(2.0), drain_notice_s(0.0)) == (1.0, 0.5, 0.0)


def code_record(
    tmp_path: Path, phase: Phase, *, num_running: int, step_s: float, beat_s: float
) -> EngineRecord:
    record = Block.create(tmp_path / "state", 0, 0, 1).formatters[0]
    record.phase = phase
    record.num_running = num_running
    record.step_s = step_s
    record.beat_s = beat_s
    return record


def test_a_handler_hangs_after_predict_timeout_and_never_without_one(tmp_path: Path) -> None:
    record = code_record(tmp_path, Phase.READY, num_running=1, step_s=100.0, beat_s=0.0)
    model = ModelConfig(path="", name="")
    engine = EngineConfig(handler="python")
    code = UserCodeConfig(path="model.py", handler="handle")
    limited = Config(
        server=ServerConfig(predict_timeout_s=5), model=model, engine=engine, user_code=code
    )

    assert hang(record, limits(limited), 0.0, 104.9) is None
    assert (
        hang(record, limits(limited), 0.0, 105.1) == "worked on one request for 5.1 s (limit 5 s)"
    )
    assert hang(record, limits(replace(limited, server=ServerConfig())), 0.0, 1e9) is None


def test_a_formatter_hangs_after_step_timeout_and_idle_code_when_it_falls_silent(
    tmp_path: Path,
) -> None:
    record = code_record(tmp_path, Phase.READY, num_running=1, step_s=100.0, beat_s=100.0)
    model = ModelConfig(path="", name="")
    engine = EngineConfig(step_timeout_s=2, model_loading_timeout_s=50)
    config = Config(
        server=ServerConfig(), model=model, engine=engine, user_code=UserCodeConfig(path="model.py")
    )
    assert hang(record, limits(config), 0.0, 102.1) == "worked on one request for 2.1 s (limit 2 s)"

    # it was put into the queue and not yet taken out
    record.num_running = 0
    record.num_waiting = 1

    assert hang(record, limits(config), 0.0, 102.1) is None
    assert (
        hang(record, limits(config), 0.0, 111.0) == "gave no sign of life for 11.0 s (limit 10 s)"
    )

    record.phase = Phase.LOADING
    assert (
        hang(record, limits(config), 0.0, 51.0) == "did not finish loading for 51.0 s (limit 50 s)"
    )


def test_code_that_was_paused_with_its_supervisor_is_not_hung(tmp_path: Path) -> None:
    record = code_record(tmp_path, Phase.READY, num_running=1, step_s=1000.0, beat_s=1000.0)
    model = ModelConfig(path="", name="")
    engine = EngineConfig(step_timeout_s=2, model_loading_timeout_s=50)
    config = Config(
        server=ServerConfig(), model=model, engine=engine, user_code=UserCodeConfig(path="model.py")
    )
    pauses = paused(1000.0, 5000.0)

    assert hang(record, limits(config), 0.0, 5001.9, pauses) is None
    assert hang(record, limits(config), 0.0, 5002.1, pauses) is not None

    record.num_running = 0
    assert hang(record, limits(config), 0.0, 5009.0, pauses) is None

    record.phase = Phase.LOADING
    assert hang(record, limits(config), 1000.0, 5049.0, pauses) is None
