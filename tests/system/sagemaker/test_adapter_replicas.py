"""Adapters on servers with several engines and front ends. The engine is small, so that it can be
killed often.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.served import Server, launch
from tests.system.container import wait_until, write_model
from tests.system.engines.foreign_engine import MAX_RANK, write_adapter

pytestmark = pytest.mark.timeout(120)

NUM_ENGINES = 2
NUM_FRONT_ENDS = 4
MAX_ADAPTERS = 8
HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
# The engine repeats its first letter, and an adapter shifts the first one
PROMPT = "abc"


@contextmanager
def starting(folder: Path, **options: object) -> Iterator[Server]:
    settings = {
        "option.rolling_batch": "foreign",
        "option.enable_lora": "true",
        "frontend_workers": NUM_FRONT_ENDS,
        "max_adapters": MAX_ADAPTERS,
        "adapter_roots": folder.parent,
        **options,
    }
    with launch(write_model(folder, **settings)) as server:
        yield server


@contextmanager
def serving(folder: Path, num_engines: int = NUM_ENGINES, **options: object) -> Iterator[Server]:
    workers = {"minWorkers": num_engines, "maxWorkers": num_engines}
    with starting(folder, **workers, **options) as server:
        server.wait_ready()
        wait_until(lambda: num_ready(server) == num_engines, "every engine is ready")
        yield server


def num_ready(server: Server) -> int:
    return sum(engine.is_alive for engine in server.engines())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("replicas") / "model") as server:
        server.wait_for_front_ends(NUM_FRONT_ENDS)
        yield server


@pytest.fixture
def src(server: Server) -> Path:
    """A new folder below the allowed ones."""
    return Path(tempfile.mkdtemp(dir=server.folder.parent))


def call(server: Server, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
    answer = server.request(method, path, body)
    answer_body: dict[str, Any] = json.loads(answer.body)
    return answer.status, answer_body


def register(server: Server, name: str, src: Path, **more: object) -> tuple[int, dict[str, Any]]:
    return call(server, "POST", "/adapters", {"name": name, "src": str(src), **more})


def unregister(server: Server, *names: str) -> None:
    for name in names:
        assert call(server, "DELETE", f"/adapters/{name}")[0] == 200


def names(server: Server) -> list[str]:
    return [adapter["name"] for adapter in call(server, "GET", "/adapters")[1]["adapters"]]


def first_letter(server: Server, adapter: str) -> str:
    """The first letter of an answer, or the status of a refusal."""
    answer = server.post(
        {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}}, headers={HEADER: adapter}
    )
    return (
        str(json.loads(answer.body)["generated_text"])[:1]
        if answer.status == 200
        else str(answer.status)
    )


def letters(server: Server, adapter: str, num_requests: int = 24) -> set[str]:
    """The first letters of many answers at once, on connections to every front end."""
    with ThreadPoolExecutor(num_requests) as pool:
        return set(pool.map(lambda _: first_letter(server, adapter), range(num_requests)))


def test_an_adapter_is_there_at_every_front_end_at_once_and_gone_at_once(
    server: Server, src: Path
) -> None:
    for shift in range(1, 6):
        folder = write_adapter(src / str(shift), shift)
        assert register(server, "formal", folder)[0] == 200
        assert letters(server, "formal") == {chr(ord(PROMPT[0]) + shift)}
        unregister(server, "formal")
        assert letters(server, "formal", 8) == {"424"}


def test_one_name_is_registered_once_however_many_ask_for_it(server: Server, src: Path) -> None:
    folder = write_adapter(src / "wanted", 1)
    with ThreadPoolExecutor(12) as pool:
        statuses = [
            status
            for status, _ in pool.map(lambda _: register(server, "wanted", folder), range(12))
        ]

    assert sorted(statuses) == [200, *[409] * 11]
    unregister(server, "wanted")


def test_the_room_for_adapters_is_never_exceeded(server: Server, src: Path) -> None:
    folder = write_adapter(src / "many", 1)
    many = [f"many-{number}" for number in range(2 * MAX_ADAPTERS)]
    with ThreadPoolExecutor(len(many)) as pool:
        answers = list(pool.map(lambda name: register(server, name, folder, preload=False), many))

    assert [status for status, _ in answers].count(200) == MAX_ADAPTERS
    refusals = {(status, answer_body["error"]) for status, answer_body in answers if status != 200}
    assert refusals == {(507, f"{MAX_ADAPTERS} adapters are registered, which is max_adapters")}
    assert len(names(server)) == MAX_ADAPTERS
    unregister(server, *names(server))


def test_what_the_engine_cannot_take_is_424_and_what_does_not_fit_507(
    server: Server, src: Path
) -> None:
    status, answer_body = register(server, "wide", write_adapter(src / "wide", 1, r=MAX_RANK + 1))
    assert status == 424 and answer_body["error"].endswith(
        f"rank {MAX_RANK + 1} is over {MAX_RANK}"
    )
    assert register(server, "wide", src / "wide", preload=False)[0] == 424, (
        "the rank is checked at once"
    )

    status, answer_body = register(server, "huge", write_adapter(src / "huge", 1, is_huge=True))
    assert status == 507 and answer_body["error"].endswith("no room for these weights")

    plain = write_adapter(src / "plain", 1)
    assert register(server, "first", plain, pin=True)[0] == 200
    assert register(server, "second", plain)[0] == register(server, "unpinned", plain)[0] == 200

    for status, answer_body in (
        register(server, "third", plain, pin=True),
        call(server, "POST", "/adapters/second/update", {"pin": True}),
    ):
        assert (status, answer_body["error"]) == (
            507,
            "2 adapters fit into a batch, and the pinned ones take all places",
        )

    assert call(server, "GET", "/adapters/second")[1]["pin"] is False
    assert letters(server, "second", 8) == letters(server, "first", 8) == {"b"}

    unregister(server, "unpinned")
    assert call(server, "POST", "/adapters/second/update", {"pin": True})[0] == 200
    assert register(server, "third", plain)[0] == 507

    unregister(server, "first", "second")


def test_weights_that_come_late_and_are_broken_harm_only_those_that_ask_for_them(
    server: Server, src: Path
) -> None:
    folder = write_adapter(src / "late", 3)
    (folder / "adapter_model.safetensors").write_text("{")
    assert register(server, "late", folder, preload=False)[0] == 200

    with ThreadPoolExecutor(8) as pool:
        fine, broken = (
            pool.map(lambda name: first_letter(server, name), [name] * 4) for name in ("", "late")
        )
        assert (set(fine), set(broken)) == ({"a"}, {"424"})

    (folder / "adapter_model.safetensors").write_text('{"shift": 3}')
    assert letters(server, "late", 8) == {"d"}

    unregister(server, "late")


def test_an_adapter_whose_files_are_gone_when_its_engine_is_back_is_424_with_the_cause(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "model", num_engines=1, frontend_workers=2) as server:
        folder = write_adapter(tmp_path / "model" / "lost", 1)
        assert register(server, "lost", Path("lost"))[0] == 200
        assert register(server, "kept", write_adapter(tmp_path / "k", 2))[0] == 200

        shutil.rmtree(folder)
        server.lose_engine()
        wait_until(lambda: num_ready(server) == 1, "it is back", 60.0)
        answer = server.post({"inputs": PROMPT}, headers={HEADER: "lost"})
        message = json.loads(answer.body)["error"]

        assert (
            answer.status == 424
            and message.startswith("Adapter lost cannot be used: ")
            and "adapter_config" in message
        )
        assert first_letter(server, "kept") == "c"

        reason = call(server, "GET", "/adapters/lost")[1]["reason"]
        assert "adapter_config" in reason and str(tmp_path) not in message + reason
        assert names(server) == ["kept", "lost"]

        unregister(server, "lost")
        assert first_letter(server, "lost") == "424"


# Adapters beside the model.


def test_adapters_beside_the_model_and_serving_properties_are_there_from_the_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    model = write_model(tmp_path / "model" / "weights")
    write_adapter(model / "adapters" / "formal", 1)
    write_adapter(tmp_path / "model" / "adapters" / "rude", 2)
    (model / "adapters" / ".hidden").mkdir()
    options: dict[str, Any] = {"option.model_id": model, "frontend_workers": 1}
    with serving(tmp_path / "model", **options) as server:
        assert (names(server), first_letter(server, "formal"), first_letter(server, "rude")) == (
            ["formal", "rude"],
            "b",
            "c",
        )
        assert register(server, "formal", model / "adapters" / "formal")[0] == 409
        assert register(server, "new", write_adapter(tmp_path / "new", 3))[0] == 200

        unregister(server, "formal")
        server.lose_engine()
        wait_until(lambda: num_ready(server) == NUM_ENGINES, "it is back", 60.0)

        assert names(server) == ["new", "rude"] and letters(server, "formal", 8) == {"424"}

    with serving(tmp_path / "model", **options) as server:
        assert names(server) == ["formal", "rude"], (
            "a server that starts again keeps only those beside the model"
        )


def test_an_adapter_beside_the_model_that_cannot_be_loaded_ends_the_start(tmp_path: Path) -> None:
    write_adapter(tmp_path / "model" / "adapters" / "formal", 1, r=99)
    with starting(tmp_path / "model", frontend_workers=1) as server:
        assert server.wait(60.0) == 4
        assert re.search("adapter formal: .*rank 99 is over", server.log.read_text())


def test_pickled_weights_beside_the_model_end_the_start(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "model" / "adapters" / "formal", 1)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with starting(tmp_path / "model", frontend_workers=1) as server:
        assert server.wait(60.0) == 5
        assert "adapter_model.bin is a pickle, which can run code" in server.log.read_text()
