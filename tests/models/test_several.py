"""`/models` of a server with one model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi.errors import InvalidParameter, StartError, Unavailable, UnknownModel
from lmi.models.choice import SeveralModels
from lmi.models.folder import Model, ModelFolder
from lmi.models.pages import page
from lmi.models.registry import ModelRegistry
from lmi.runtime import Runtime, ServerRuntime
from lmi.server.front_end import FrontEnd
from lmi.server.service import WATCH_S, Models
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.shared.desired_state import State
from lmi.shared.state import Phase
from lmi.supervisor.running_model import RunningModel
from tests.scripted import Host, host
from tests.system.container import write_byte_tokenizer, write_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("one")) as running:
        yield running


def test_the_only_model_is_listed_and_described_as_the_reference_does(server: Host) -> None:
    server.block.engines[0].pid = os.getpid()
    response, body = server.send("GET", "/models")

    assert response.status == 200
    assert json.loads(body) == {
        "models": [{"modelName": "scripted", "modelUrl": "scripted", "status": "READY"}]
    }

    [workflow] = json.loads(server.send("GET", "/models/scripted")[1])
    assert (workflow["workflowName"], workflow["version"]) == ("scripted", "1")

    [model] = workflow["models"]
    assert (model["modelName"], model["modelUrl"], model["status"]) == (
        "scripted",
        "scripted",
        "READY",
    )

    [group] = model["workerGroups"]
    assert (group["device"]["deviceType"], group["minWorkers"], group["maxWorkers"]) == (
        "cpu",
        1,
        1,
    )

    [worker] = group["workers"]
    assert (worker["id"], worker["status"], worker["startTime"][-1:]) == (1, "READY", "Z")


@pytest.mark.parametrize(("method", "path"), [("POST", "/models"), ("DELETE", "/models/scripted")])
def test_one_model_stays_and_the_answer_says_what_switches_more_on(
    server: Host, method: str, path: str
) -> None:
    response, body = server.send(method, path, b'{"model_name": "a", "url": "/opt/ml/models/a"}')
    assert response.status == 404
    assert "multi_model=true or SAGEMAKER_MULTI_MODEL=true" in json.loads(body)["error"]


def test_another_model_and_another_method_are_refused(server: Host) -> None:
    assert server.send("GET", "/models/other")[0].status == 404

    response, _ = server.send("PATCH", "/models/scripted")
    assert response.status == 405
    assert set(str(response.getheader("allow")).split(", ")) == {"DELETE", "GET", "HEAD"}


def test_a_model_that_comes_while_a_front_end_starts_is_served_and_a_broken_one_is_tried_again(
    tmp_path: Path,
) -> None:
    runtime = ServerRuntime.create(ServerConfig())
    try:
        asyncio.run(follow_a_model(runtime, tmp_path))
    finally:
        runtime.remove()


async def follow_a_model(runtime: ServerRuntime, folder: Path) -> None:
    block = runtime.attach()
    block.supervisor.phase = Phase.READY
    models = Models(FrontEnd(runtime, block, block.frontends[0]))
    models.load()
    late = ModelConfig(path=str(folder), name="late")
    config = Config(server=runtime.config, model=late, engine=EngineConfig())
    model = RunningModel(runtime.add_model(config))
    runtime.show_model(model.runtime)
    async with models.running():
        await asyncio.sleep(3 * WATCH_S)
        # Its folder has no tokenizer
        assert models.only is None and not any(record.pid for record in model.block.frontends)
        write_byte_tokenizer(folder)
        async with asyncio.timeout(60):
            while models.only is None:
                await asyncio.sleep(0.01)

        assert any(record.pid for record in model.block.frontends)

    async with asyncio.timeout(60):
        # It ends, since the only model stays
        await models.follow()


def test_a_model_that_is_not_usable_yet_delays_no_other(tmp_path: Path) -> None:
    runtime = ServerRuntime.create(ServerConfig(multi_model=True))
    write_byte_tokenizer(tmp_path)
    try:
        asyncio.run(follow_two_models(runtime, tmp_path))
    finally:
        runtime.remove()


async def follow_two_models(runtime: ServerRuntime, folder: Path) -> None:
    block = runtime.attach()
    models = SeveralModels(FrontEnd(runtime, block, block.frontends[0]))
    slow = runtime.path / "0" / "config.json"
    slow.parent.mkdir()
    # Who reads it waits
    os.mkfifo(slow)
    config = Config(
        server=runtime.config,
        model=ModelConfig(path=str(folder), name="quick"),
        engine=EngineConfig(),
    )
    quick = models.folder.add_folder(config).path.name
    for name, files in (("first", "0"), ("quick", quick)):
        models.folder.replace(Model(name=name, state=State.READY, folder=files))

    async with asyncio.timeout(60):
        async with models.running():
            while "quick" not in models.services:
                await asyncio.sleep(0.01)

        await asyncio.to_thread(slow.write_bytes, b"")

    assert "first" not in models.services


def test_a_model_whose_files_are_gone_is_an_error_and_does_not_load_for_ever(
    tmp_path: Path,
) -> None:
    runtime = ServerRuntime.create(ServerConfig())
    try:
        model = runtime.add_model(
            Config(
                server=runtime.config, model=ModelConfig(path="/m", name="m"), engine=EngineConfig()
            )
        )
        (model.path / "config.json").unlink()
        assert runtime.shown_model() is None

        runtime.show_model(model)
        with pytest.raises(StartError, match="1/config.json cannot be read: No such file"):
            runtime.shown_model()

        block = runtime.attach()
        models = SeveralModels(FrontEnd(runtime, block, block.frontends[0]))
        entry = Model(name="m", state=State.READY, folder="1")
        models.folder.replace(entry)
        with pytest.raises(Unavailable, match="cannot be started, see the log"):
            asyncio.run(models.here(entry))

        models.folder.remove("m")
        with pytest.raises(UnknownModel, match="has just been unloaded"):
            asyncio.run(models.here(entry))
    finally:
        runtime.remove()


def test_a_model_that_cannot_be_shown_on_a_full_disk_is_an_error_that_says_so(
    tmp_path: Path,
) -> None:
    runtime = ServerRuntime(tmp_path, ServerConfig())
    (tmp_path / "model").mkdir()
    model = Runtime(
        tmp_path / "1",
        Config(
            server=runtime.config, model=ModelConfig(path="/m", name="m"), engine=EngineConfig()
        ),
    )
    with pytest.raises(StartError, match=r"model \(TMPDIR chooses another place\): Is a directory"):
        runtime.show_model(model)


def test_a_load_whose_processes_cannot_start_is_refused_and_leaves_its_name_free(
    tmp_path: Path,
) -> None:
    write_model(tmp_path)
    runtime = ServerRuntime.create(ServerConfig(multi_model=True, model_store=str(tmp_path.parent)))
    try:
        asyncio.run(load_what_cannot_start(runtime, str(tmp_path)))
    finally:
        runtime.remove()


async def load_what_cannot_start(runtime: ServerRuntime, url: str) -> None:
    block = runtime.attach()
    models = SeveralModels(FrontEnd(runtime, block, block.frontends[0]))
    supervisor = asyncio.create_task(discard_every_model(runtime))
    for _ in range(2):
        with pytest.raises(Unavailable, match="cannot be started, see the log"):
            async with asyncio.timeout(60):
                await ModelRegistry(models).register("a", url)

        assert ModelFolder(runtime).entries() == []

    supervisor.cancel()


async def discard_every_model(runtime: ServerRuntime) -> None:
    """Do what the supervisor does with models whose folders it cannot read."""
    while True:
        for entry in ModelFolder(runtime).entries():
            shutil.rmtree(runtime.path / entry.folder, ignore_errors=True)

        await asyncio.sleep(0)


ITEMS = list(range(250))


def test_pages_hold_every_item_once() -> None:
    items = []
    token = "0"
    while token:
        items_of_page, more = page(ITEMS, {"limit": "90", "next_page_token": token})
        items += items_of_page
        token = more.get("nextPageToken", "")

    assert items == ITEMS
    assert page(ITEMS, {"next_page_token": "999"}) == ([], {})


@pytest.mark.parametrize(
    ("limit", "number"), [("", 100), ("0", 100), ("101", 100), ("-1", 100), ("x", 100), ("7", 7)]
)
def test_a_page_has_up_to_a_hundred_items(limit: str, number: int) -> None:
    assert len(page(ITEMS, {"limit": limit})[0]) == number


@pytest.mark.parametrize("token", ["abc", "-1", "1.5", "²", "1" * 10])
def test_a_token_that_no_page_gave_is_refused(token: str) -> None:
    with pytest.raises(InvalidParameter, match="next_page_token"):
        page(ITEMS, {"next_page_token": token})
