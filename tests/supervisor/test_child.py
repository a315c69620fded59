"""A child process of the supervisor: the effect of its exit, and the processes that a signal
reaches.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from lmi.errors import ModelUnusable, StartError
from lmi.shared.state import Block, EngineRecord, Phase
from lmi.supervisor.child import Child, ChildKind
from lmi.supervisor.hangs import HangLimits
from lmi.supervisor.pauses import NO_PAUSES, Pauses
from lmi.supervisor.restarts import RestartTable

DEAD_PID = 1 << 30


def fatal(code: int, why: str) -> StartError | None:
    return ModelUnusable(why) if code == ModelUnusable.exit_code else None


ENGINE = ChildKind(
    title="engine {slot}",
    argv=lambda slot: ["/bin/false"],
    environ=lambda slot: {},
    limits=HangLimits(loading_s=600.0, first_step_s=10.0, step_s=10.0, step_complaint="slept"),
    restarts=lambda: RestartTable(max_deaths=2, window_s=600),
    fatal=fatal,
    lost_label="engine_lost",
    lost_notice_s=2.0,
)
FRONT_END = replace(
    ENGINE, title="front end", lost_label="front_end_lost", lost_notice_s=0.0, serves_clients=True
)


@pytest.fixture
def record(tmp_path: Path) -> EngineRecord:
    record = Block.create(tmp_path / "state", num_engines=1, num_frontends=1).engines[0]
    record.phase = Phase.LOADING
    record.pid = DEAD_PID
    record.stage = "weights"
    return record


@pytest.fixture
def engine(record: EngineRecord) -> Child:
    child = Child(ENGINE, 0, record)
    child.pid = DEAD_PID
    return child


def test_an_exit_that_no_restart_mends_is_the_failure_that_the_process_reported(
    engine: Child,
) -> None:
    assert engine.record is not None
    engine.record.reason = "config.json is missing"
    failure = engine.exited(4, now=1.0, is_ending=False)
    assert failure is not None and (failure.code, failure.cause) == (4, "model_unusable")
    assert (failure.message, failure.stage, failure.notice_s) == (
        "config.json is missing",
        "weights",
        0.0,
    )
    assert engine.record.phase == Phase.FAILED and engine.pid is None


def test_after_too_many_deaths_there_is_no_other_start(engine: Child) -> None:
    assert engine.exited(1, now=1.0, is_ending=False) is None
    assert engine.record is not None and engine.record.phase == Phase.LOST

    engine.pid = DEAD_PID
    failure = engine.exited(-9, now=2.0, is_ending=False)

    assert failure is not None and (failure.code, failure.cause, failure.notice_s) == (
        1,
        "engine_lost",
        2.0,
    )
    assert failure.message.startswith(
        "engine 0 died 2 times, the last time it was killed by SIGKILL"
    )


def test_a_place_whose_engine_dies_again_and_again_is_set_aside_while_another_replica_serves(
    engine: Child, tmp_path: Path
) -> None:
    second_block = Block.create(tmp_path / "other", num_engines=1, num_frontends=1).engines[0]
    second_block.phase = Phase.READY
    engine.others = [second_block]
    assert engine.record is not None

    for now in (1.0, 2.0, 3.0):
        engine.pid = DEAD_PID
        assert engine.exited(1, now=now, is_ending=False) is None

    assert engine.record.phase == Phase.FAILED
    assert not starts_at_once(engine, now=32.9) and starts_at_once(engine, now=33.0), (
        "it is tried again, but slowly"
    )

    second_block.phase = Phase.LOST
    assert engine.exited(1, now=34.0, is_ending=False) is not None, "nobody serves"

    engine.send(signal.SIGKILL)


@pytest.mark.parametrize(
    ("num_starts", "others", "is_fatal"),
    [(1, Phase.READY, True), (2, Phase.READY, False), (2, Phase.LOST, True)],
)
def test_what_no_restart_mends_ends_no_server_that_another_replica_serves(
    engine: Child, tmp_path: Path, num_starts: int, others: Phase, is_fatal: bool
) -> None:
    second_block = Block.create(tmp_path / "other", num_engines=1, num_frontends=1).engines[0]
    second_block.phase = others
    engine.others = [second_block]
    assert engine.record is not None
    engine.record.num_starts = num_starts
    assert (engine.exited(4, now=1.0, is_ending=False) is not None) == is_fatal
    assert engine.record.phase == (Phase.FAILED if is_fatal else Phase.LOST)  # which starts again


@pytest.mark.parametrize(
    ("code", "told", "cause"),
    [
        (1, "no_memory", "no_memory"),
        (4, "model_unusable", "model_unusable"),
        (-9, "", "no_memory"),
        (-11, "", ""),
    ],
)
def test_the_label_of_a_failure_is_in_the_record(
    engine: Child, code: int, told: str, cause: str
) -> None:
    assert engine.record is not None
    engine.record.reason = "it said so"
    engine.record.cause = told
    engine.exited(code, now=1.0, is_ending=False)
    assert engine.record.cause == cause


def starts_at_once(child: Child, now: float) -> bool:
    """Whether a place whose process has ended has the next one after a look at this time."""
    child.look(now, NO_PAUSES)
    return child.pid is not None


@pytest.mark.parametrize(("phase", "is_at_once"), [(Phase.LOADING, False), (Phase.READY, True)])
def test_only_an_engine_that_was_ready_starts_again_without_delay(
    engine: Child, phase: Phase, is_at_once: bool
) -> None:
    assert engine.record is not None
    # Since the supervisor's last look
    engine.record.phase = phase
    engine.exited(-9, now=1.0, is_ending=False)
    assert starts_at_once(engine, now=1.0) == is_at_once


@pytest.mark.parametrize(("lived_s", "is_at_once"), [(59.0, False), (60.0, True)])
def test_a_process_without_a_record_starts_again_without_delay_where_it_ran_a_minute(
    lived_s: float, is_at_once: bool
) -> None:
    child = Child(FRONT_END)
    child.pid = DEAD_PID
    child.exited(-9, now=lived_s, is_ending=False)
    assert starts_at_once(child, now=lived_s) == is_at_once


def test_an_exit_while_the_server_ends_is_no_failure(engine: Child) -> None:
    assert [engine.exited(4, now=1.0, is_ending=True) for _ in range(5)] == [None] * 5
    assert engine.record is not None and (engine.record.phase, engine.record.pid) == (Phase.LOST, 0)


# It becomes ready, works, hangs
@pytest.mark.parametrize(
    ("phase", "num_running", "looks", "why"),
    [
        (
            Phase.READY,
            1,
            (9.0, 9.1, 11.0),
            "slept for 11.0 s (limit 10 s)",
        ),
        (
            Phase.DRAINING,
            0,
            (1e3, 1003.0, 1003.5),
            "stopped its work and did not end for 3.5 s (limit 3 s)",
        ),
    ],
    ids=["works", "ends by itself"],
)
def test_a_hung_process_is_asked_for_its_stacks_and_then_killed(
    record: EngineRecord, phase: Phase, num_running: int, looks: Sequence[float], why: str
) -> None:
    record.phase = phase
    record.num_running = num_running
    child = Child(ENGINE, 0, record)
    script = (
        "import os, signal, time; signal.signal(signal.SIGUSR2, lambda *_: os.write(1, "
        "b'stacks\\n'))"
    )
    script += "; print('up', flush=True); [time.sleep(0.01) for _ in range(6000)]"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"

        child.pid = process.pid
        for now in looks:
            assert record.phase == phase
            child.look(now, NO_PAUSES)

        assert process.stdout.readline() == "stacks\n"
        assert (record.phase, record.reason) == (Phase.LOST, why)

        child.look(looks[-1] + 1.0, NO_PAUSES)
        assert process.wait(60) == -signal.SIGKILL

    assert child.exited(-9, now=looks[-1] + 1.0, is_ending=False) is None
    assert record.reason == why, "that is why it was killed"


WORKS = """
import threading, time

def work():
    while True:
        rests_s = time.thread_time() + 0.01
        while time.thread_time() < rests_s:
            pass
        time.sleep({rest_s})

threading.Thread(target=work, daemon=True).start()
print("up", flush=True)
threading.Event().wait()
"""
RESTS = "import threading; print('up', flush=True); threading.Event().wait()"


@pytest.mark.parametrize(
    ("script", "is_stopped", "least_s", "most_s"),
    [
        (RESTS, False, 1.0, 1.5),
        (WORKS.format(rest_s=0.0), True, 1.0, 1.5),
        (WORKS.format(rest_s=0.0), False, 1.0, math.inf),
        (WORKS.format(rest_s=0.04), False, 3.0, math.inf),
    ],
    ids=["waits", "stopped", "works", "works with a fifth of a core"],
)
def test_a_step_ends_by_its_limit_of_work_or_when_nothing_works_in_it(
    record: EngineRecord, script: str, is_stopped: bool, least_s: float, most_s: float
) -> None:
    """The limit is 1 s. `least_s` and `most_s` are how long the step lasts until its process counts
    as hung.
    """
    assert ENGINE.limits is not None

    limits = replace(ENGINE.limits, step_s=1.0, work_counts=True)
    child = Child(replace(ENGINE, limits=limits), 0, record)
    pauses = Pauses(0.5)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"

        if is_stopped:
            process.send_signal(signal.SIGSTOP)

        child.pid = process.pid
        record.phase = Phase.READY
        record.num_running = 1
        record.step = 1
        record.step_s = began_s = time.monotonic()
        while record.phase == Phase.READY:
            now = time.monotonic()
            pauses.note(now)
            child.look(now, pauses)
            time.sleep(0.02)

        lasted_s = pauses.ran_s(began_s, now)
        process.kill()

    assert least_s < lasted_s < most_s
    assert record.reason.startswith("slept for ")


@pytest.mark.parametrize(("kind", "is_left"), [(ENGINE, False), (FRONT_END, True)])
def test_what_a_dead_process_leaves_in_its_group_goes_on_only_where_it_serves_clients(
    kind: ChildKind, is_left: bool
) -> None:
    with subprocess.Popen(["/bin/sleep", "60"], start_new_session=True) as leftover:
        child = Child(kind)
        # The group's number is that of its first process
        child.pid = leftover.pid
        child.exited(0, now=1.0, is_ending=True)
        if not is_left:
            assert leftover.wait(60) == -signal.SIGKILL
        else:
            time.sleep(0.05)
            assert leftover.poll() is None
            leftover.kill()
