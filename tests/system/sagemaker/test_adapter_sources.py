"""Adapters that a client names at a hub or in S3: another process fetches them, and the front ends
stay without.
"""

from __future__ import annotations

import io
import json
import os
import signal
import tarfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.machine import measurements
from tests.served import Server, launch
from tests.sources.hub_server import HubServer
from tests.sources.s3_server import S3Server, moto
from tests.system.container import wait_until, write_model
from tests.system.sagemaker.several import several_models

pytestmark = pytest.mark.timeout(120)

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
TOKEN = "hf_secret_of_someone"
BUCKET = "adapters"
WEIGHTS = "GET .*/{id}/resolve/.*safetensors"


def adapter_files(shift: int, **more: bytes) -> dict[str, bytes]:
    """The files of an adapter that moves the first letter of an answer by `shift`."""
    return {
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": b'{"shift": %d}' % shift,
        **more,
    }


@contextmanager
def serving(folder: Path, environ: Mapping[str, str], **options: object) -> Iterator[Server]:
    settings = {
        "option.rolling_batch": "foreign",
        "option.enable_lora": "true",
        "frontend_workers": 2,
        **options,
    }
    write_model(folder, **settings)
    places = {
        name: str(folder.parent / name.lower()) for name in ("SERVING_DOWNLOAD_DIR", "HF_HOME")
    }
    with launch(folder, {"HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN, **places, **environ}) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.token = TOKEN
        yield hub


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with moto(tmp_path_factory.mktemp("moto")) as port, S3Server(port) as s3:
        s3.client.create_bucket(Bucket=BUCKET)
        yield s3


@pytest.fixture(scope="module")
def server(
    hub: HubServer, s3: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sources") / "model"
    with serving(folder, {"HF_ENDPOINT": hub.url, **s3.environ}) as server:
        yield server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


Said = tuple[int, dict[str, Any]]


def call(server: Server, method: str, path: str, body: object = None) -> Said:
    answer = server.request(method, path, body, timeout_s=60.0)
    return answer.status, json.loads(answer.body)


def register(server: Server, name: str, src: str) -> Said:
    return call(server, "POST", "/adapters", {"name": name, "src": src})


def letter(server: Server, adapter: str) -> str:
    """The first letter of an answer to "abc" with an adapter."""
    answer = server.post(
        {"inputs": "abc", "parameters": {"max_new_tokens": 1}}, headers={HEADER: adapter}
    )
    return str(json.loads(answer.body).get("generated_text", answer.status))


def fetches(server: Server) -> list[Path]:
    """The folders of the fetches that someone waits for."""
    return list(Path(server.environ["TMPDIR"]).glob("lmi-*/fetches/*"))


def wait_for_none(server: Server) -> None:
    wait_until(
        lambda: not fetches(server) and not server.pids("lmi-fetch"),
        "nothing is left of the fetches",
    )


@pytest.fixture
def begun(
    hub: HubServer, server: Server, pool: ThreadPoolExecutor
) -> Iterator[tuple[Future[Said], Any]]:
    """A registration whose fetch has got the first byte of the weights, and the rule that lets it
    go on.
    """
    id = f"writers/held-{time.monotonic_ns()}"
    hub.publish(id, adapter_files(2))
    rule = hub.hold(WEIGHTS.format(id=id), after=1, times=9)
    registered = pool.submit(register, server, "held", id)
    assert rule.reached.wait(60)
    yield registered, rule
    rule.released.set()
    registered.result()
    call(server, "DELETE", "/adapters/held")
    wait_for_none(server)


def test_an_adapter_of_a_hub_is_fetched_and_served(hub: HubServer, server: Server) -> None:
    hub.publish("writers/formal", adapter_files(1))
    assert register(server, "formal", "writers/formal") == (
        200,
        {"status": "Adapter formal registered"},
    )
    assert {letter(server, "formal") for _ in range(8)} == {"b"}

    description = {"name": "formal", "src": "writers/formal", "preload": True, "pin": False}
    assert call(server, "GET", "/adapters/formal") == (200, description)

    num_asked = len(hub.requests)
    assert register(server, "formal", "writers/formal")[0] == 409
    assert len(hub.requests) == num_asked, "a name that is taken fetches nothing"
    assert call(server, "DELETE", "/adapters/formal")[0] == 200

    wait_for_none(server)


def test_adapters_of_s3_are_fetched_and_one_with_code_is_refused_by_the_option(
    s3: S3Server, server: Server
) -> None:
    s3.put(BUCKET, {f"rude/{name}": data for name, data in adapter_files(3).items()})
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, data in adapter_files(4, **{"model.py": b"raise SystemExit"}).items():
            member = tarfile.TarInfo(f"top/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))

    s3.put(BUCKET, {"packed.tar.gz": archive.getvalue()})
    assert register(server, "rude", f"s3://{BUCKET}/rude") == (
        200,
        {"status": "Adapter rude registered"},
    )

    status, answer_body = register(server, "packed", f"s3://{BUCKET}/packed.tar.gz")
    assert status == 424 and "option.adapter_code" in answer_body["error"], answer_body
    assert letter(server, "rude") == "d"

    assert call(server, "DELETE", "/adapters/rude")[0] == 200


def test_a_source_that_cannot_be_used_is_400_with_its_line(
    hub: HubServer, s3: S3Server, server: Server, pool: ThreadPoolExecutor
) -> None:
    hub.publish("writers/whole-model", {"config.json": b"{}", "model.safetensors": b"x"})
    hub.publish("writers/pickled", {"adapter_config.json": b"{}", "adapter_model.bin": b"x"})
    lines = {
        "writers/nothing": (
            "src writers/nothing: no such folder below the model's; as an id of a hub there is no"
        ),
        "writers/whole-model": (
            "holds config.json, model.safetensors; an adapter has adapter_config.json"
        ),
        "writers/pickled": "adapter_model.bin is pickled, which can run code",
        f"s3://{BUCKET}/nothing": f"s3://{BUCKET}/nothing",
        "s3://no-such-bucket/a": "NoSuchBucket",
        "ftp://host/a": "no source has the scheme ftp://",
    }
    answers = pool.map(lambda src: register(server, "bad", src), lines)
    for (status, answer_body), line in zip(answers, lines.values(), strict=True):
        assert status == 400 and line in answer_body["error"], answer_body

    assert call(server, "GET", "/adapters/bad")[0] == 404

    wait_for_none(server)


def test_a_hub_that_cannot_be_reached_is_503_and_others_do_not_wait(
    hub: HubServer, server: Server, pool: ThreadPoolExecutor
) -> None:
    hub.fail("/writers/lost", 503, times=99)
    hub.publish("writers/other", adapter_files(5))
    lost = pool.submit(register, server, "lost", "writers/lost")
    assert register(server, "other", "writers/other")[0] == 200
    assert letter(server, "other") == "f" and not lost.done()
    status, answer_body = lost.result()
    assert (
        status == 503 and "writers/lost" in answer_body["error"] and "503" in answer_body["error"]
    ), answer_body
    assert call(server, "DELETE", "/adapters/other")[0] == 200


def test_one_source_for_many_names_is_fetched_once(
    hub: HubServer, server: Server, pool: ThreadPoolExecutor
) -> None:
    hub.publish("writers/many", adapter_files(6))
    rule = hub.hold(WEIGHTS.format(id="writers/many"), after=1)
    names = [f"many-{number}" for number in range(6)]
    registered = [pool.submit(register, server, name, "writers/many") for name in names]
    assert rule.reached.wait(60)

    wait_until(
        lambda: len(server.pids("lmi-fetch")) == 4, "four processes wait for the one that fetches"
    )
    assert len(fetches(server)) == 6, "the others wait for a place"

    rule.released.set()
    assert [future.result()[0] for future in registered] == [200] * 6
    assert hub.num_requests(WEIGHTS.format(id="writers/many")) == 1

    for name in names:
        assert call(server, "DELETE", f"/adapters/{name}")[0] == 200

    wait_for_none(server)


def test_only_the_process_that_fetches_has_secrets(
    begun: tuple[Future[Said], Any], server: Server
) -> None:
    knowing = {"lmi-fetch", "lmi-supervisor"}
    with_secrets = set()
    for pid in server.pids():
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        if any(secret.encode() in environ for secret in (TOKEN, "aws-secret-of-someone")):
            with_secrets.add(Path(f"/proc/{pid}/comm").read_text().strip())

    assert with_secrets == knowing


def test_a_fetch_process_that_is_killed_starts_again(
    begun: tuple[Future[Said], Any], server: Server
) -> None:
    registered, rule = begun
    rule.times = 0
    os.kill(server.pid("lmi-fetch"), signal.SIGKILL)
    assert registered.result()[0] == 200
    assert letter(server, "held") == "c"


def test_a_fetch_that_is_killed_three_times_is_503_and_the_server_goes_on(
    begun: tuple[Future[Said], Any], server: Server
) -> None:
    registered, rule = begun
    lasting_pids = set(server.pids()) - set(server.pids("lmi-fetch"))
    for _ in range(3):
        assert rule.reached.wait(60)
        rule.reached.clear()
        os.kill(server.pid("lmi-fetch"), signal.SIGKILL)

    status, answer_body = registered.result()
    assert (
        status == 503
        and "': fetch process died 3 times, the last time it was killed by SIGKILL"
        in answer_body["error"]
    )

    wait_for_none(server)
    assert set(server.pids()) == lasting_pids and server.ping() == 200 and letter(server, "") == "a"


def test_a_client_that_leaves_has_its_adapter_all_the_same(hub: HubServer, server: Server) -> None:
    hub.publish("writers/left", adapter_files(7))
    rule = hub.hold(WEIGHTS.format(id="writers/left"), after=1)
    with server.connect({"name": "left", "src": "writers/left"}, path="/adapters"):
        assert rule.reached.wait(60)

    rule.released.set()
    wait_until(lambda: call(server, "GET", "/adapters/left")[0] == 200, "it is registered")
    assert letter(server, "left") == "h"
    assert call(server, "DELETE", "/adapters/left")[0] == 200


def test_a_fetch_ends_with_the_front_end_that_waits_for_it(hub: HubServer, server: Server) -> None:
    hub.publish("writers/orphan", adapter_files(1))
    rule = hub.hold(WEIGHTS.format(id="writers/orphan"), after=1)
    with server.connect({"name": "orphan", "src": "writers/orphan"}, path="/adapters"):
        assert rule.reached.wait(60)
        [folder] = fetches(server)
        os.kill(json.loads((folder / "request.json").read_bytes())["writer"], signal.SIGKILL)
        wait_for_none(server)

    assert call(server, "GET", "/adapters/orphan")[0] == 404


def test_sigterm_during_a_fetch_ends_the_server_and_answers_the_client(
    hub: HubServer, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    for number, measurement in enumerate(measurements()):
        name = f"writers/last-{number}"
        hub.publish(name, adapter_files(1))
        rule = hub.hold(WEIGHTS.format(id=name), after=1)
        with serving(
            tmp_path / f"model-{number}", {"HF_ENDPOINT": hub.url}, frontend_workers=1
        ) as server:
            registered = pool.submit(register, server, "last", name)
            assert rule.reached.wait(60)

            with measurement.within(5.0):
                server.signal(signal.SIGTERM)
                status, answer_body = registered.result()
                assert server.wait() == 0

            assert (status, answer_body["error"]) == (
                503,
                "the server is shutting down, it fetches nothing",
            )
            assert server.pids() == []


def test_secure_mode_looks_at_what_was_fetched(hub: HubServer, tmp_path: Path) -> None:
    hub.publish("writers/chatty", adapter_files(1, **{"chat_template.jinja": b"x"}))
    hub.publish("writers/plain", adapter_files(1))
    secured = {
        "SAGEMAKER_SECURE_MODE": "true",
        "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_CHAT_TEMPLATE",
    }

    with serving(
        tmp_path / "model", {**secured, "HF_ENDPOINT": hub.url}, frontend_workers=1
    ) as server:
        status, answer_body = register(server, "chatty", "writers/chatty")
        assert status == 400 and answer_body["error"].endswith(
            "chat_template.jinja: refused by DISALLOW_CHAT_TEMPLATE"
        )
        assert register(server, "plain", "writers/plain")[0] == 200
        assert letter(server, "plain") == "b"


def test_one_of_several_models_has_an_adapter_of_a_hub(hub: HubServer, tmp_path: Path) -> None:
    hub.publish("writers/shared", adapter_files(2))
    places = {
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path),
        "HF_TOKEN": TOKEN,
        "HF_ENDPOINT": hub.url,
    }
    with several_models("frontend_workers=1", environ=places) as server:
        url = server.model("one", "option.enable_lora=true", engine="foreign")
        assert server.load("one", url).status == 200

        answer = server.request(
            "POST", "/models/one/adapters", {"name": "b", "src": "writers/shared"}
        )
        assert answer.status == 200, answer.body

        pids = [server.pid("lmi-supervisor"), server.pid("lmi-engine-0")]
        answer = server.request(
            "POST", "/models/one/adapters", {"name": "c", "src": "writers/none"}
        )

        assert answer.status == 400 and b"as an id of a hub there is no such model" in answer.body
        assert letter(server, "b") == "c"
        assert pids == [server.pid("lmi-supervisor"), server.pid("lmi-engine-0")]
