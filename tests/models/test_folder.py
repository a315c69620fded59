"""Changes of the folder of models, which are exact however many processes ask at once."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmi.errors import Conflict, InvalidParameter
from lmi.models.folder import MAX_FAILED, Model, ModelFolder
from lmi.runtime import ServerRuntime
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.settings.user import User
from lmi.shared.desired_state import State


def models(tmp_path: Path) -> ModelFolder:
    return ModelFolder(ServerRuntime(tmp_path, ServerConfig()))


def pending(name: str, folder: str = "1") -> Model:
    return Model(name=name, state=State.PENDING, folder=folder)


def of_a_dead_writer(name: str) -> Model:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass

    return Model(name=name, state=State.PENDING, folder="9", writer=process.pid)


def test_a_limit_is_exact_however_many_ask(tmp_path: Path) -> None:
    def make(name: str, others: list[Model]) -> Model:
        if len(others) >= 3:
            raise Conflict("full")

        return pending(name)

    def ask(number: int) -> bool:
        try:
            models(tmp_path).register(f"m{number}", lambda others: make(f"m{number}", others))
        except Conflict:
            return False

        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(ask, range(16))) == 3

    assert len(models(tmp_path).entries()) == 3


def test_a_name_that_is_none_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter):
        models(tmp_path).register("../x", lambda others: pending("../x"))

    assert models(tmp_path).entries() == []


def test_an_entry_is_settled_or_withdrawn_only_by_its_own_load(tmp_path: Path) -> None:
    folder = models(tmp_path)
    first = pending("m", "1")
    second = pending("m", "2")
    folder.register("m", lambda others: first)
    folder.register("m", lambda others: second)
    assert not folder.settle(first, State.READY) and not folder.holds(first)

    folder.withdraw(first)
    assert folder.settle(second, State.FAILED, "it broke", "invalid_request")
    assert [(entry.state, entry.reason) for entry in folder.entries()] == [
        (State.FAILED, "it broke")
    ]

    folder.withdraw(second)
    assert folder.entries() == []


def test_failures_of_old_loads_are_forgotten(tmp_path: Path) -> None:
    folder = models(tmp_path)
    for number in range(MAX_FAILED + 5):
        entry = folder.register(f"m{number:02}", lambda others: pending(f"m{number:02}"))  # noqa: B023
        folder.settle(entry, State.FAILED, "it broke")

    folder.register("last", lambda others: pending("last"))
    names = {entry.name for entry in folder.entries()}
    assert len(names) == MAX_FAILED + 1 and {"last", "m05"} <= names and "m04" not in names


def test_an_entry_is_taken_once(tmp_path: Path) -> None:
    models(tmp_path).register("m", lambda others: pending("m"))
    with ThreadPoolExecutor(8) as threads:
        removed = list(threads.map(lambda _: models(tmp_path).remove("m"), range(8)))

    assert [entry.folder for entry in removed if entry is not None] == ["1"]


def test_what_a_dead_writer_left_is_swept_and_counts_for_nothing(tmp_path: Path) -> None:
    folder = models(tmp_path)
    folder.register("kept", lambda others: pending("kept"))
    folder.register("left", lambda others: of_a_dead_writer("left"))

    assert [entry.name for entry in folder.entries()] == ["kept"]
    assert [entry.name for entry in folder.sweep()] == ["left"]
    assert len(folder.version() or ()) == 1 and folder.sweep() == []


def test_sweeping_waits_for_nobody(tmp_path: Path) -> None:
    folder = models(tmp_path)
    folder.register("left", lambda others: of_a_dead_writer("left"))
    with open(tmp_path / "models" / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert folder.sweep() == [] and len(folder.version() or ()) == 1

    assert len(folder.sweep()) == 1


def test_a_model_whose_processes_are_gone_fails_with_the_reason_and_may_be_loaded_again(
    tmp_path: Path,
) -> None:
    folder = models(tmp_path)
    entry = folder.register("m", lambda others: pending("m"))
    assert folder.settle(entry, State.READY)
    with open(tmp_path / "models" / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not folder.lose(entry, "gone"), "the supervisor waits for nobody"

    assert folder.lose(entry, "gone")
    assert [(model_entry.state, model_entry.reason) for model_entry in folder.entries()] == [
        (State.FAILED, "gone")
    ]
    assert not folder.lose(pending("m", "2"), "gone"), "another load has the name"


def test_the_processes_of_a_model_run_as_the_user_that_the_server_names_whatever_its_folder_says(
    tmp_path: Path,
) -> None:
    server = ServerConfig(multi_model=True, user=User.of("nobody"))
    folder = ModelFolder(ServerRuntime(tmp_path, server))
    forged = Config(
        server=ServerConfig(),
        model=ModelConfig(path=str(tmp_path), name="m"),
        engine=EngineConfig(environ={"A": "1"}),
    )
    added = folder.add_folder(forged)
    config = folder.runtime_with_environ(pending("m", added.path.name)).config
    assert (config.server, config.engine.environ) == (server, {"A": "1"})
