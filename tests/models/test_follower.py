"""The life of one of several models, on a clock that the test turns."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from lmi.models.folder import Model
from lmi.models.follower import KILL_S, LOST, UNLOAD_S, ModelFollower, PassingModel
from lmi.runtime import Runtime, ServerRuntime
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.shared.desired_state import State
from lmi.shared.state import FrontEndRecord, Phase
from tests.descriptors import no_descriptor_left

START_S = 1000.0


@pytest.fixture
def life(tmp_path: Path) -> PassingModel:
    """A model that is loaded. It has no processes, so nothing but its requests keeps it."""
    server = ServerConfig(multi_model=True)
    model = ModelConfig(path=str(tmp_path), name="m")
    config = Config(server=server, model=model, engine=EngineConfig())
    folder = tmp_path / "runtime"
    folder.mkdir()
    life = PassingModel(Runtime.create(config, folder))
    life.block.supervisor.phase = Phase.READY
    return life


def used_by(life: PassingModel, pid: int) -> FrontEndRecord:
    """Let the front end `pid` have a request for the model."""
    record = life.block.frontends[0]
    record.pid = pid
    record.num_in_flight = 1
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
    # No process has such an id
    used_by(life, 2**22 + 1)
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

        # It was told to end
        process.wait()
        engine.pid = None

    life.look(now + KILL_S)
    assert life.left == set()
    # Its folder says why until the model is loaded again or unloaded
    assert not life.is_over


@pytest.fixture
def follower(tmp_path: Path) -> ModelFollower:
    """A follower with one model that is READY, whose processes are still to start."""
    server = ServerConfig(multi_model=True)
    follower = ModelFollower(ServerRuntime.create(server, tmp_path))
    config = Config(
        server=server, model=ModelConfig(path=str(tmp_path), name="m"), engine=EngineConfig()
    )
    runtime = follower._folder.add_folder(config)
    follower._folder.replace(Model(name="m", state=State.READY, folder=runtime.path.name))
    follower.look()
    return follower


def look(follower: ModelFollower, after_s: float) -> None:
    """Do what the supervisor does in a turn."""
    follower.look()
    for model in follower.models:
        model.look(START_S + after_s)


def test_an_entry_that_cannot_be_read_for_a_while_unloads_nothing(
    follower: ModelFollower, tmp_path: Path
) -> None:
    [file] = (tmp_path / "models").glob("*.json")
    whole = file.read_bytes()
    [model] = follower.models
    for after_s in range(4):
        file.write_bytes(b"{")
        look(follower, 100 * after_s)
        file.write_bytes(whole)
        look(follower, 100 * after_s + 1)
        with no_descriptor_left():
            look(follower, 100 * after_s + 2)

    assert follower.models == [model] and model.is_wanted
    assert model.runtime.path.is_dir() and not any(child.is_retired for child in model.children)


def test_no_folder_is_tidied_away_that_may_belong_to_an_entry_which_cannot_be_read(
    follower: ModelFollower, tmp_path: Path
) -> None:
    orphan = tmp_path / "7"
    orphan.mkdir()
    os.utime(orphan, (0, 0))
    unknown = tmp_path / "models" / f"{'0' * 64}.json"
    unknown.write_bytes(b"{")
    look(follower, 0)
    assert orphan.is_dir()
    unknown.unlink()
    look(follower, 1)
    assert not orphan.exists()


def test_a_ready_entry_without_its_folder_fails_with_the_reason(
    follower: ModelFollower, tmp_path: Path
) -> None:
    [model] = follower.models
    [entry] = follower._folder.entries()
    # As after the end of a model whose entry was away, and then came back
    follower.models.clear()
    shutil.rmtree(model.runtime.path)
    look(follower, 0)
    [model_entry] = follower._folder.entries()

    assert (model_entry.state, model_entry.reason, model_entry.folder) == (
        State.FAILED,
        LOST,
        entry.folder,
    )
    assert follower.models == []
