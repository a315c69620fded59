"""gunicorn's settings as gunicorn reads them, and the slot of each worker. tests/system tests live
workers.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from gunicorn.app.wsgiapp import WSGIApplication

from lmi.errors import ModelUnusable
from lmi.runtime import ENVIRONMENT_NAME, ServerRuntime
from lmi.server.front_end import explain
from lmi.settings.config import ServerConfig
from lmi.shared.state import Block
from lmi.supervisor.restarts import DRAIN_CUT_S

MODULE = "lmi.server.gunicorn"
DEAD_PID = 1 << 30


@pytest.fixture
def runtime(tmp_path: Path) -> ServerRuntime:
    server = ServerConfig(
        frontend_workers=2, drain_timeout_s=10.0, header_timeout_s=3.0, body_timeout_s=4.0
    )
    return ServerRuntime.create(server, tmp_path)


@pytest.fixture
def settings(runtime: ServerRuntime, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setenv(ENVIRONMENT_NAME, str(runtime.path))
    monkeypatch.setenv("LMI_SUPERVISOR_PID", str(os.getpid()))
    sys.modules.pop(MODULE, None)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


@pytest.fixture
def block(settings: ModuleType) -> Block:
    block: Block = settings._block
    return block


def test_gunicorn_reads_the_settings_and_finds_them_sound(
    settings: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["gunicorn", "-c", f"python:{MODULE}", "-b", "fd://3", "tests:app"]
    )
    cfg = WSGIApplication().cfg
    assert (cfg.workers, cfg.timeout, cfg.keepalive, cfg.max_requests) == (2, 10, 120, 0)
    assert cfg.control_socket_disable and not cfg.preload_app and cfg.forwarded_allow_ips == []
    assert cfg.worker_class is settings.FrontEndWorker and cfg.logger_class is settings.Log
    assert cfg.address == [3]


def test_requests_end_with_the_drain_and_uvicorn_cancels_a_second_later_before_gunicorn(
    settings: ModuleType,
) -> None:
    cancel_s = settings.FrontEndWorker.CONFIG_KWARGS["timeout_graceful_shutdown"]
    # The first second is the notice
    assert cancel_s - settings.LAST_S == 9.0
    assert cancel_s < settings.graceful_timeout and settings.LAST_S < DRAIN_CUT_S


def test_the_protocol_has_the_times_of_the_configuration(settings: ModuleType) -> None:
    protocol = settings.FrontEndProtocol
    assert (protocol.header_timeout_s, protocol.body_timeout_s) == (3.0, 4.0)
    assert 0 < protocol.max_connections <= 10_000


def take(settings: ModuleType, workers: dict[int, Any]) -> int:
    worker = SimpleNamespace()
    settings.pre_fork(SimpleNamespace(WORKERS=workers), worker)
    slot: int = worker.slot
    return slot


def test_workers_of_one_master_get_the_lowest_slots_even_before_they_have_claimed_them(
    settings: ModuleType,
) -> None:
    workers: dict[int, Any] = {}
    for pid in range(2):
        workers[pid] = SimpleNamespace(slot=take(settings, workers))

    assert [worker.slot for worker in workers.values()] == [0, 1]


def test_the_slot_of_a_dead_worker_is_used_again(settings: ModuleType, block: Block) -> None:
    block.frontends[0].pid = DEAD_PID
    block.frontends[0].beat_s = time.monotonic()
    assert take(settings, {}) == 0


def test_a_worker_that_still_drains_keeps_its_slot_from_the_next_master(
    settings: ModuleType, block: Block
) -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as draining:
        block.frontends[0].pid = draining.pid
        block.frontends[0].beat_s = time.monotonic()
        assert take(settings, {}) == 1
        draining.kill()


def test_where_every_slot_is_taken_the_one_that_was_silent_longest_is_freed_by_force(
    settings: ModuleType, block: Block
) -> None:
    draining = [subprocess.Popen(["/bin/sleep", "60"]) for _ in block.frontends]
    now_s = time.monotonic()
    for age, (record, process) in enumerate(zip(block.frontends, draining, strict=True)):
        record.pid = process.pid
        record.beat_s = now_s - age

    assert take(settings, {}) == 3
    assert draining[3].wait(60) == -9

    for process in draining:
        process.kill()
        process.wait()


def test_a_worker_that_ended_leaves_no_gauge_behind_and_all_its_totals(
    settings: ModuleType, block: Block
) -> None:
    record = block.frontends[1]
    record.pid = 77
    record.num_in_flight = 5
    record.num_prompt_tokens = 9
    settings.child_exit(SimpleNamespace(), SimpleNamespace(slot=1, pid=76))
    # It belongs to another worker now
    assert record.num_in_flight == 5
    settings.child_exit(SimpleNamespace(), SimpleNamespace(slot=1, pid=77))
    assert (record.pid, record.num_in_flight, record.num_prompt_tokens) == (0, 0, 9)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ModelUnusable("/m: no tokenizer"), 4, "/m: no tokenizer"),
        (OSError("stale handle"), 3, "OSError: stale handle"),
    ],
)
def test_the_supervisor_learns_why_a_front_end_cannot_start(
    runtime: ServerRuntime, error: Exception, code: int, said: str
) -> None:
    assert explain(runtime, error) == code
    assert runtime.front_end_failure().read_text() == said


def test_gunicorn_is_silent_about_an_end_that_the_supervisor_explains(
    settings: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("lmi.test.gunicorn")
    log.addFilter(settings.is_news)
    log.error("Worker (pid:%s) exited with code %s.", 7, 4)
    log.error("Shutting down: %s", "Master")
    log.error("Reason: %s", "App failed to load.")
    log.error("Worker (pid:%s) exited with code %s.", 7, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "Worker (pid:7) exited with code 1."
    ]


def test_a_master_that_was_paused_counts_only_the_time_in_which_it_ran(
    settings: ModuleType,
) -> None:
    clock = iter([100.0, 101.0, 500.0, 512.0])
    cfg = SimpleNamespace(umask=0, worker_tmp_dir=None, uid=os.geteuid(), gid=os.getegid())
    beat = settings.Beat(cfg, clock=lambda: next(clock))
    os.utime(beat.fileno(), (100.5, 100.5))

    assert [101.0 - beat.last_update(), 500.0 - beat.last_update()] == [0.5, 0.5]

    for second in range(501, 512):
        beat.pauses.note(float(second))

    assert 512.0 - beat.last_update() == 12.5

    beat.close()
