"""The life of one of several models, on a clock that the test turns."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from lmi.models.follower import KILL_S, UNLOAD_S, PassingModel
from lmi.runtime import Runtime
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.shared.state import FrontEndRecord, Phase

START_S = 1000.0


@pytest.fixture
def life(tmp_path: Path) -> PassingModel:
    """A model that is loaded. It has no processes, so nothing but its requests keeps it."""
    server, model = ServerConfig(multi_model=True), ModelConfig(path=str(tmp_path), name="m")
    config = Config(server=server, model=model, engine=EngineConfig())
    folder = tmp_path / "runtime"
    folder.mkdir()
    life = PassingModel(Runtime.create(config, folder))
    life.block.supervisor.phase = Phase.READY
    return life


def used_by(life: PassingModel, pid: int) -> FrontEndRecord:
    """Let the front end `pid` have a request for the model."""
    record = life.block.frontends[0]
    record.pid, record.num_in_flight = pid, 1
    return record


def is_over(life: PassingModel, after_s: float) -> bool:
    life.is_wanted = False
    life.look(START_S + after_s)
    return life.is_over


def test_a_request_keeps_a_model_for_thirty_seconds_at_most(life: PassingModel) -> None:
    used_by(life, os.getpid())
    assert UNLOAD_S == 30
    assert [is_over(life, after_s) for after_s in (0, 1, 29.9, 30)] == [False, False, False, True]


def test_a_model_ends_with_its_last_request(life: PassingModel) -> None:
    record = used_by(life, os.getpid())
    assert not is_over(life, 0) and not is_over(life, 10)
    record.num_in_flight = 0
    assert is_over(life, 10.1)


def test_requests_of_a_front_end_that_died_keep_no_model(life: PassingModel) -> None:
    used_by(life, 2**22 + 1)  # no process has such an id
    assert [is_over(life, after_s) for after_s in (0, 1)] == [False, True]


def test_a_model_that_loads_is_ended_at_once(life: PassingModel) -> None:
    life.block.supervisor.phase = Phase.LOADING
    used_by(life, os.getpid())
    assert is_over(life, 0)


def test_a_failed_model_forgets_the_processes_that_ended_since_others_may_get_their_numbers(
    life: PassingModel,
) -> None:
    [engine] = life.children
    with subprocess.Popen(["/bin/sleep", "60"], process_group=0) as process:
        engine.pid = process.pid
        now = time.monotonic()
        life.give_up("lost", now)
        assert life.left == {process.pid}
        process.wait()  # it was told to end
        engine.pid = None
    life.look(now + KILL_S)
    assert life.left == set()
    assert not life.is_over  # its folder says why until the model is loaded again or unloaded
