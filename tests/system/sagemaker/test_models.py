"""Several models on one server, as SageMaker's multi-model endpoints ask for them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from lmi.models.folder import ModelFolder
from lmi.runtime import ServerRuntime
from lmi.shared.processes import descendants
from tests.system.container import ROOT, wait_until
from tests.system.engines.foreign_engine import write_adapter
from tests.system.sagemaker.several import SeveralServer, error_of, several_models
from tests.wheels import write_wheel

NUM_FRONT_ENDS = 4
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
SESSION = "X-Amzn-SageMaker-Session-Id"
DIE = "option.echo_die_token=33"  # "!"


@pytest.fixture(scope="module")
def server() -> Iterator[SeveralServer]:
    with several_models(f"frontend_workers={NUM_FRONT_ENDS}", "max_models=8") as running:
        running.wait_for_front_ends(NUM_FRONT_ENDS)
        yield running


@pytest.fixture(autouse=True)
def no_model_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        running: SeveralServer = request.getfixturevalue("server")
        for model in running.listed()["models"]:
            running.unload(model["modelName"])

        wait_until(lambda: running.folders() == [], "no folder of a model is left")


def test_a_model_is_loaded_described_asked_and_unloaded(server: SeveralServer) -> None:
    url = server.model("first")
    loaded = server.load("first", url)

    assert (loaded.status, json.loads(loaded.body)) == (
        200,
        {"status": 'Model "first" registered.'},
    )
    assert server.described("first") == {
        "modelName": "first",
        "modelUrl": url,
        "status": "READY",
        "code": 200,
    }
    assert json.loads(server.invoke("first").body) == {"generated_text": "abca"}

    unloaded = server.unload("first")
    assert (unloaded.status, json.loads(unloaded.body)) == (
        200,
        {"status": 'Model "first" unregistered'},
    )
    assert server.pids("lmi-engine") == [], "its processes ended before the answer"
    assert [
        server.described("first")["code"],
        server.invoke("first").status,
        server.unload("first").status,
    ] == [404] * 3


def test_every_front_end_serves_a_model_straight_after_its_load(server: SeveralServer) -> None:
    for number in range(3):
        name = f"new-{number}"
        assert server.load(name, server.model(name)).status == 200

        with ThreadPoolExecutor(16) as clients:
            answers = list(clients.map(lambda _: server.invoke(name).status, range(32)))  # noqa: B023

        assert answers == [200] * 32
        assert server.unload(name).status == 200

        with ThreadPoolExecutor(16) as clients:
            answers = list(clients.map(lambda _: server.invoke(name).status, range(32)))  # noqa: B023

        assert answers == [404] * 32

    served_by = {line["pid"] for line in server.log_lines() if line.get("logger") == "lmi.access"}
    assert len(served_by) == NUM_FRONT_ENDS, "every front end was asked"


def test_two_requests_for_one_name_are_one_load(server: SeveralServer) -> None:
    url = server.model("twice", "option.load_s=4", engine="slow")
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda _: server.load("twice", url), range(6)))

    assert [answer.status for answer in answers] == [200] * 6
    assert len({answer.body for answer in answers}) == 1
    assert len(server.pids("lmi-engine")) == 1
    assert server.log.read_text().count("engine 0 of twice starts") == 1


def test_a_name_is_taken_while_its_model_loads_and_afterwards(server: SeveralServer) -> None:
    url = server.model("taken", "option.load_s=4", engine="slow")
    second_model = server.model("other")
    with ThreadPoolExecutor(1) as clients:
        loading = clients.submit(server.load, "taken", url)
        wait_until(lambda: server.described("taken").get("status") == "PENDING", "it loads")
        assert server.load("taken", second_model).status == 409

        invoked = server.invoke("taken")
        assert invoked.status == 503 and "PENDING" in error_of(invoked)
        assert loading.result().status == 200

    again = server.load("taken", url)
    assert again.status == 409 and "the model 'taken' is READY from" in error_of(again)


def test_loads_of_different_models_run_side_by_side(server: SeveralServer) -> None:
    urls = {
        name: server.model(name, "option.load_s=2", engine="slow") for name in ("left", "right")
    }
    with ThreadPoolExecutor(2) as clients:
        loads = [clients.submit(server.load, *url) for url in urls.items()]
        wait_until(lambda: len(server.pids("lmi-engine")) == 2, "both load at once")
        assert not any(load.done() for load in loads)
        assert [load.result().status for load in loads] == [200, 200]


def test_a_model_may_be_unloaded_while_it_loads(server: SeveralServer) -> None:
    url = server.model("brief", "option.load_s=20", engine="slow")
    with ThreadPoolExecutor(1) as clients:
        loading = clients.submit(server.load, "brief", url)
        wait_until(lambda: server.described("brief").get("status") == "PENDING", "it loads")
        assert server.unload("brief").status == 200
        refused = loading.result()

    assert refused.status == 409 and "was unloaded while it loaded" in error_of(refused)
    assert server.folders() == [] and server.pids("lmi-engine") == []


def test_a_load_goes_on_for_others_when_the_front_end_that_began_it_dies(
    server: SeveralServer,
) -> None:
    url = server.model("taken-over", "option.load_s=4", engine="slow")
    [runtime] = Path(server.environ["TMPDIR"]).glob("lmi-*")
    folder = ModelFolder(ServerRuntime.at(runtime))
    with ThreadPoolExecutor(12) as clients:
        loads = [clients.submit(server.load, "taken-over", url) for _ in range(12)]
        wait_until(lambda: server.pids("lmi-engine"), "it loads")
        begun = folder.read("taken-over")
        assert begun is not None

        os.kill(begun.writer, signal.SIGKILL)
        answers = [load.result().status for load in loads if load.exception() is None]

    assert answers and set(answers) == {200}, "those of other front ends"
    assert server.invoke("taken-over").status == 200

    server.wait_for_front_ends(NUM_FRONT_ENDS)


def test_a_client_that_leaves_does_not_end_its_load(server: SeveralServer) -> None:
    url = server.model("left-alone", "option.load_s=2", engine="slow")
    body = json.dumps({"model_name": "left-alone", "url": url}).encode()
    with server.connect_raw() as connection:
        connection.sendall(
            b"POST /models HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        wait_until(lambda: server.described("left-alone").get("status") == "PENDING", "it loads")

    wait_until(
        lambda: server.described("left-alone").get("status") == "READY", "it is loaded all the same"
    )

    assert server.invoke("left-alone").status == 200


@pytest.mark.parametrize(
    "name", ["", "../x", "..", ".hid", "<b>", "~", "a/b", "%2e%2e", "a b", "é", "a" * 257, 7, None]
)
def test_a_name_that_is_none_is_refused(server: SeveralServer, name: object) -> None:
    answer = server.request("POST", "/models", {"model_name": name, "url": server.model("fine")})
    assert answer.status == 400 and error_of(answer).startswith("model_name must be ")


@pytest.mark.parametrize("name", ["a..b", "a" * 256, "a:b_c-d", "index.json"])
def test_a_strange_name_is_only_a_name(server: SeveralServer, name: str) -> None:
    assert server.load(name, server.model("strange")).status == 200
    assert [model["modelName"] for model in server.listed()["models"]] == [name]

    posted = server.post(
        {"inputs": "abc"}, headers={"x-amzn-sagemaker-custom-attributes": f"model_name={name}"}
    )

    assert posted.status == 200
    assert (
        server.request(
            "DELETE", "/models/" + "".join(f"%{byte:02x}" for byte in name.encode())
        ).status
        == 200
    )


def test_a_model_outside_of_the_store_is_refused(server: SeveralServer, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (server.store / "link").symlink_to(tmp_path / "model")
    (server.store / "file").write_text("")
    server.model("inside")
    refusals = {
        str(tmp_path / "model"): "leads elsewhere",
        str(server.store / "link"): "leads elsewhere",
        str(server.store / "inside/../../empty"): "leads elsewhere",
        str(server.store): "leads elsewhere",
        f"/proc/self/root{server.store}/inside/model": "leads elsewhere",
        "models/inside": "must be an absolute folder",
        "s3://bucket/model": "must be an absolute folder",
        str(server.store / "missing"): "does not exist",
        str(server.store / "file"): "is not a folder",
    }
    for url, why in refusals.items():
        answer = server.load("outside", url)
        assert answer.status == 400 and why in error_of(answer), url
        assert str(server.store) not in error_of(answer).replace(url, ""), (
            "only what the client has sent"
        )

    assert server.listed() == {"models": []}


def test_a_model_that_cannot_be_used_is_refused_with_the_cause(server: SeveralServer) -> None:
    refusals = {
        server.model("no-engine", engine="nonsense"): "option.rolling_batch='nonsense'",
        server.model("broken", engine="broken"): "model.safetensors is cut short",
        server.model("crashing", "retry_threshold=2", engine="crashing"): "the weights are cursed",
        server.model("elsewhere", "option.model_id=/etc"): "/etc",
    }
    (server.store / "hollow").mkdir()
    refusals[str(server.store / "hollow")] = "a model's folder has a config.json"
    unreadable = server.model("unreadable")
    (Path(unreadable) / "tokenizer.json").write_text("{")
    refusals[unreadable] = "tokenizer.json"
    for number, (url, why) in enumerate(refusals.items()):
        answer = server.load(f"bad-{number}", url)
        assert answer.status == 400 and why in error_of(answer), url

    assert server.ping() == 200

    wait_until(lambda: server.pids("lmi-engine") == [], "no process of them is left")


def test_a_model_whose_processes_failed_says_why_until_it_is_loaded_afresh(
    server: SeveralServer,
) -> None:
    url = server.model("cursed", "retry_threshold=1", engine="crashing")
    assert server.load("cursed", url).status == 400
    description = server.described("cursed")
    assert description["status"] == "FAILED" and "the weights are cursed" in description["reason"]
    assert server.ping() == 200
    server.model("cursed")
    assert server.load("cursed", url).status == 200
    assert server.described("cursed")["status"] == "READY" and server.invoke("cursed").status == 200


def test_without_room_for_a_model_the_answer_is_507_and_nothing_is_left(
    server: SeveralServer,
) -> None:
    too_large = server.load("large", server.model("large", "required_memory_mb=100000000"))
    assert too_large.status == 507 and "needs 100000000 MB" in error_of(too_large)

    exhausted = server.load(
        "exhausted", server.model("exhausted", "retry_threshold=1", engine="exhausted")
    )

    assert exhausted.status == 507 and "no room for 16 GiB" in error_of(exhausted)
    assert (
        server.listed() == {"models": []}
        and server.folders() == []
        and server.pids("lmi-engine") == []
    )


def test_memory_that_a_loading_model_will_take_is_not_given_twice(server: SeveralServer) -> None:
    free_mb = next(
        int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if "MemAvail" in line
    )
    need = f"required_memory_mb={free_mb // 1024 * 6 // 10}"
    urls = [server.model(f"half-{n}", need, "option.load_s=4", engine="slow") for n in range(2)]
    with ThreadPoolExecutor(2) as clients:
        answers = list(clients.map(lambda n: server.load(f"half-{n}", urls[n]).status, range(2)))

    assert sorted(answers) == [200, 507]


def test_more_models_than_max_models_are_refused_exactly(server: SeveralServer) -> None:
    urls = [server.model(f"many-{n}") for n in range(12)]
    with ThreadPoolExecutor(12) as clients:
        answers = list(clients.map(lambda n: server.load(f"many-{n}", urls[n]), range(12)))

    assert sorted(answer.status for answer in answers) == [200] * 8 + [507] * 4
    assert "max_models is 8" in error_of(next(answer for answer in answers if answer.status == 507))

    names = [model["modelName"] for model in server.listed()["models"]]
    pages = []
    query = "?limit=3"
    while query:
        page = server.listed(query)
        pages.append([model["modelName"] for model in page["models"]])
        query = (
            f"?limit=3&next_page_token={page['nextPageToken']}" if "nextPageToken" in page else ""
        )

    assert [len(page) for page in pages] == [3, 3, 2] and sum(pages, []) == names == sorted(names)
    assert len(server.listed("?limit=0")["models"]) == len(server.listed("?limit=x")["models"]) == 8
    assert server.request("GET", "/models?next_page_token=abc").status == 400

    for name in names:
        assert server.unload(name).status == 200


def test_a_load_that_takes_too_long_is_504_and_leaves_nothing(server: SeveralServer) -> None:
    url = server.model("late", "model_loading_timeout=1", engine="freezing")
    with ThreadPoolExecutor(2) as clients:
        answers = list(clients.map(lambda _: server.load("late", url), range(2)))

    assert [answer.status for answer in answers] == [504, 504]
    assert "model_loading_timeout (1 s)" in error_of(answers[0])
    assert (
        server.listed() == {"models": []}
        and server.folders() == []
        and server.pids("lmi-engine") == []
    )


def test_a_killed_engine_harms_only_its_model(server: SeveralServer) -> None:
    for name in ("hurt", "well"):
        assert (
            server.load(
                name, server.model(name, DIE, "retry_threshold=2", "option.echo_step_ms=20")
            ).status
            == 200
        )

    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(server.invoke, "well", "abc", 100, True)
        assert server.invoke("hurt", "!").status == 503

        wait_until(lambda: server.invoke("hurt").status == 200, "its engine is back")
        assert server.described("hurt")["status"] == "READY"
        assert server.invoke("hurt", "!").status == 503

        wait_until(
            lambda: server.described("hurt")["status"] == "FAILED", "its engine died too often"
        )

        assert "died 2 times" in server.described("hurt")["reason"]
        assert len(answer.result().lines) == 100, "the other model's answer is whole"

    invoked = server.invoke("hurt")
    assert invoked.status == 503 and "FAILED" in error_of(invoked)
    assert server.ping() == 200 and server.invoke("well").status == 200

    restarts = server.request("GET", "/metrics").body.decode()
    assert 'lmi_engine_restarts_total{model="hurt"} 1.0' in restarts
    assert 'lmi_engine_restarts_total{model="well"} 0.0' in restarts
    assert (
        server.load("hurt", server.model("hurt")).status == 200
        and server.invoke("hurt").status == 200
    )


def test_a_stream_ends_before_its_model_is_unloaded(server: SeveralServer) -> None:
    assert server.load("streamed", server.model("streamed", "option.echo_step_ms=20")).status == 200

    body = {"inputs": "abc", "parameters": {"max_new_tokens": 100}, "stream": True}
    with ThreadPoolExecutor(1) as clients, server.open(body, "/models/streamed/invoke") as response:
        first = response.readline()
        unloaded = clients.submit(server.unload, "streamed")
        wait_until(lambda: server.invoke("streamed").status == 404, "new requests are refused")
        further_lines = response.read().splitlines()

        assert first and len(further_lines) == 99 and "error" not in json.loads(further_lines[-1])
        assert unloaded.result().status == 200

    assert server.pids("lmi-engine") == []


def test_a_request_is_for_the_model_that_it_names(server: SeveralServer) -> None:
    alone = server.post({"inputs": "abc"})
    assert alone.status == 400 and "none is loaded" in error_of(alone)
    assert server.load("red", server.model("red")).status == 200
    assert server.post({"inputs": "abc"}).status == 200, "the only model is meant"
    assert server.load("blue", server.model("blue")).status == 200

    unclear = server.post({"inputs": "abc"})
    assert unclear.status == 400 and "loaded are 'blue', 'red'" in error_of(unclear)

    attributes = {"x-amzn-sagemaker-custom-attributes": "a=b; model_name=blue"}
    before = counted(server)

    assert server.post({"inputs": "a"}, "/invocations?model_name=red", attributes).status == 200
    assert server.post({"prompt": "a", "model": "red"}, headers=attributes).status == 404, (
        "blue does not know red"
    )
    assert server.post({"inputs": "a", "model": "x"}, headers=attributes).status == 200
    assert server.post({"prompt": "a", "model": "blue"}).status == 200
    assert (
        json.loads(server.post({"prompt": "a", "model": "red"}, "/v1/completions").body)["model"]
        == "red"
    )

    by_folder = server.post({"prompt": "a", "model": server.model("red")}, "/v1/completions")
    assert json.loads(by_folder.body)["model"] == "red"
    assert server.post({"text_input": "a"}, "/v2/models/red/generate").status == 200

    unknown = server.post({"prompt": "a", "model": "green"}, "/v1/completions")
    assert unknown.status == 404 and json.loads(unknown.body)["error"]["code"] == "model_not_found"

    after = counted(server)
    assert {name: after[name] - before[name] for name in after} == {"red": 4, "blue": 2}


def counted(server: SeveralServer) -> dict[str, int]:
    """The generations of each model, which KServe's statistics count."""
    stats = json.loads(server.request("GET", "/v2/models/stats").body)["model_stats"]
    return {model["name"]: model["inference_count"] for model in stats}


STARTER = """
import os, subprocess, sys
from djl_python import Output
SLEEP = [sys.executable, "-c", "import time; open({file!r}, 'a').close(); time.sleep(600)"]
subprocess.Popen(SLEEP, start_new_session=True, env={{}})
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, SLEEP)
    os._exit(0)
def handle(inputs):
    return None if inputs.is_empty() else Output().add("x")
"""


def test_what_user_code_started_ends_with_its_model(server: SeveralServer, tmp_path: Path) -> None:
    url = server.model("starter", engine="auto")
    file = str(tmp_path / "started")
    (Path(url) / "model.py").write_text(STARTER.format(file=file))
    assert server.load("starter", url).status == 200

    supervisor = server.pid("lmi-supervisor")

    def started() -> list[int]:
        return [
            pid
            for pid in descendants(supervisor)
            if file in Path(f"/proc/{pid}/cmdline").read_text()
        ]

    wait_until(lambda: len(started()) == 2, "both of its processes run")
    assert server.unload("starter").status == 200
    assert started() == []


def test_a_model_may_be_user_code(server: SeveralServer) -> None:
    url = server.model("code", engine="auto")
    (Path(url) / "model.py").write_text(
        "from djl_python import Output\n"
        "def handle(inputs):\n"
        "    return None if inputs.is_empty() else Output().add(inputs.get_as_string().upper())\n"
    )

    assert server.load("code", url).status == 200
    assert server.load("echo", server.model("echo")).status == 200
    assert server.post(b"hello", "/models/code/invoke").body == b"HELLO"
    assert server.invoke("echo").status == 200
    assert server.unload("code").status == 200 and server.pids("lmi-code") == []


def test_each_model_has_sessions_of_its_own(server: SeveralServer) -> None:
    for name in ("red", "blue"):
        assert server.load(name, server.model(name)).status == 200

    url = server.model("stateful", "minWorkers=2", "maxWorkers=2", engine="auto")
    shutil.copy(ROOT / "tests/user_code/files/stateful/model.py", url)
    assert server.load("stateful", url).status == 200

    opened = server.post({"requestType": "NEW_SESSION"}, "/models/red/invoke").headers[
        SESSION.lower()
    ]
    session = {SESSION: opened.partition(";")[0]}
    for _ in range(8):
        assert server.post({"inputs": "abc"}, "/models/red/invoke", session).status == 200
        assert server.post({"inputs": "abc"}, "/models/blue/invoke", session).status == 400

    created = server.post({"action": "create"}, "/models/stateful/invoke").headers[SESSION.lower()]
    answers = [
        server.post({"action": "regular"}, "/models/stateful/invoke", {SESSION: created})
        for _ in range(4)
    ]

    assert [json.loads(answer.body)["state"][0] for answer in answers] == [
        [n, n] for n in (2, 3, 4, 5)
    ]


def test_the_name_that_the_platform_has_for_a_model_is_logged(server: SeveralServer) -> None:
    assert server.load("hashed", server.model("hashed")).status == 200
    headers = {"x-amzn-sagemaker-target-model": "mine.tar.gz"}
    assert server.post({"inputs": "a"}, "/models/hashed/invoke", headers).status == 200
    wait_until(
        lambda: '"target_model":"mine.tar.gz"' in server.log.read_text(), "the line is written"
    )


def test_each_model_has_adapters_of_its_own(server: SeveralServer) -> None:
    for name in ("red", "blue"):
        url = server.model(name, "option.enable_lora=true", engine="foreign")
        shutil.rmtree(Path(url) / "adapters", ignore_errors=True)
        write_adapter(Path(url) / "adapters" / f"{name}-static", 1)
        write_adapter(Path(url) / "more" / "late", 2)

        assert server.load(name, url).status == 200

    registration = {"name": "late", "src": "more/late"}
    unclear = server.request("POST", "/adapters", registration)

    assert (
        unclear.status == 400
        and "a path below /models/NAME): loaded are 'blue', 'red'" in error_of(unclear)
    )
    assert server.request("POST", "/models/red/adapters", registration).status == 200

    for adapter, name, letter in (
        ("late", "red", "c"),
        ("red-static", "red", "b"),
        ("blue-static", "blue", "b"),
    ):
        answer = server.post(
            {"model": adapter, "prompt": "abc", "max_tokens": 2}, "/v1/completions"
        )
        assert json.loads(answer.body)["choices"][0]["text"][0] == letter

        invoked = server.post({"inputs": "abc"}, f"/models/{name}/invoke", {ADAPTER: adapter})
        assert json.loads(invoked.body)["generated_text"][0] == letter

    assert server.post({"inputs": "abc"}, "/models/blue/invoke", {ADAPTER: "late"}).status == 424
    assert (
        json.loads(server.request("GET", "/models/blue/adapters").body)["adapters"][0]["name"]
        == "blue-static"
    )
    assert [server.unload("red").status, server.load("red", url.replace("blue", "red")).status] == [
        200,
        200,
    ]
    assert server.request("GET", "/models/red/adapters/late").status == 404


def test_a_static_adapter_that_cannot_be_loaded_refuses_its_model(server: SeveralServer) -> None:
    url = server.model("adapted", "option.enable_lora=true", "retry_threshold=1", engine="foreign")
    write_adapter(Path(url) / "adapters" / "wide", 1, r=1000)
    refused = server.load("adapted", url)

    assert refused.status == 400 and "wide" in error_of(refused) and server.ping() == 200


def test_execution_parameters_are_those_of_all_models_together(server: SeveralServer) -> None:
    states = []
    for name in (None, "red", "blue"):
        if name is not None:
            assert (
                server.load(name, server.model(name, "option.max_rolling_batch_size=3")).status
                == 200
            )

        states.append(
            json.loads(server.request("GET", "/execution-parameters").body)[
                "MaxConcurrentTransforms"
            ]
        )

    assert states == [1, 3, 6]


def test_lists_of_other_apis_have_every_model(server: SeveralServer) -> None:
    for name in ("red", "blue"):
        assert server.load(name, server.model(name)).status == 200

    cards = json.loads(server.request("GET", "/v1/models").body)["data"]
    assert [card["id"] for card in cards] == ["blue", "red"]
    assert json.loads(server.request("GET", "/v1/models/red").body)["id"] == "red"
    assert server.request("GET", "/v1/models/green").status == 404

    index = json.loads(server.request("POST", "/v2/repository/index").body)
    assert [(model["name"], model["state"]) for model in index] == [
        ("blue", "READY"),
        ("red", "READY"),
    ]

    metrics = server.request("GET", "/metrics").body.decode()
    assert (
        'lmi_engines_ready{model="blue"} 1.0' in metrics
        and 'lmi_engines_ready{model="red"} 1.0' in metrics
    )


def test_a_front_end_that_dies_takes_no_model_with_it_and_its_half_done_load_is_removed(
    server: SeveralServer,
) -> None:
    assert server.load("stays", server.model("stays")).status == 200

    url = server.model("half", "option.load_s=20", engine="slow")
    with ThreadPoolExecutor(1) as clients:
        loading = clients.submit(lambda: server.load("half", url))
        wait_until(lambda: server.described("half").get("status") == "PENDING", "it loads")
        [entry] = [entry for entry in entries(server) if entry["name"] == "half"]
        os.kill(entry["writer"], signal.SIGKILL)

        assert loading.exception() is not None, "its client lost the connection"

    wait_until(lambda: len(entries(server)) == len(server.folders()) == 1, "nothing of it is left")
    wait_until(lambda: len(server.pids("lmi-front")) == NUM_FRONT_ENDS, "the front end is back")
    with ThreadPoolExecutor(16) as clients:
        assert set(clients.map(lambda _: server.invoke("stays").status, range(32))) == {200}

    assert server.load("half", server.model("half")).status == 200


def entries(server: SeveralServer) -> list[dict[str, object]]:
    [runtime] = Path(server.environ["TMPDIR"]).glob("lmi-*")
    records_found = []
    for path in (runtime / "models").glob("*.json"):
        # The server just removed it
        with suppress(FileNotFoundError):
            records_found.append(json.loads(path.read_bytes()))

    return records_found


def test_the_memory_of_a_model_returns_when_it_is_unloaded(server: SeveralServer) -> None:
    """Front ends import what they need for their first model, so the memory of the first times does
    not return.
    """
    folder = server.store / "demo"
    shutil.copytree(ROOT / "handlers/lmi_dist/demo", folder)

    def returns() -> bool:
        before = server.resident_bytes()

        assert server.load("demo", str(folder)).status == 200
        assert json.loads(server.invoke("demo", "The fox").body)["generated_text"]
        assert server.resident_bytes() > before + (40 << 20)

        assert server.unload("demo").status == 200

        return server.resident_bytes() < before + (20 << 20)

    assert any(returns() for _ in range(6))


@pytest.mark.parametrize("num_each", [1, 2])
def test_a_model_whose_queue_is_full_leaves_the_others_their_own(num_each: int) -> None:
    with several_models("frontend_workers=2", "job_queue_size=1") as server:
        for name in ("full", "free"):
            url = server.model(name, "option.echo_step_ms=50", "option.echo_max_num_sequences=1")
            assert server.load(name, url).status == 200

        body = {
            "inputs": "abc",
            "parameters": {"max_new_tokens": 100, "do_sample": True, "best_of": num_each},
        }
        with ExitStack() as stack:
            for _ in range(2 // num_each):
                stack.enter_context(server.connect(body, path="/models/full/invoke"))

            wait_until(
                lambda: server.metric("lmi_sequences_in_flight") == 2, "one runs and one waits"
            )
            refused = server.invoke("full")

            assert refused.status == 503 and "2 of 2 sequences for the model 'full'" in error_of(
                refused
            )
            assert server.invoke("free").status == 200

        wait_until(lambda: server.invoke("full").status == 200, "they left")


def test_without_management_no_model_comes_or_goes() -> None:
    with several_models("frontend_workers=1", "management=false") as server:
        for answer in (server.load("new", server.model("new")), server.unload("new")):
            assert answer.status == 404 and "management=false" in error_of(answer)

        assert server.listed() == {"models": []}


def test_a_server_with_several_models_stops_in_order() -> None:
    with several_models("frontend_workers=1") as server:
        assert server.load("last", server.model("last", "option.echo_step_ms=20")).status == 200

        with server.open(
            {"inputs": "abc", "parameters": {"max_new_tokens": 60}, "stream": True}
        ) as response:
            response.readline()
            server.drain()
            assert len(response.read().splitlines()) == 59

        assert server.wait() == 0
        assert server.pids() == []


def test_a_signal_ends_a_load_and_its_client_has_an_answer() -> None:
    secrets = {"HF_TOKEN": "canary-1", "AWS_SECRET_ACCESS_KEY": "canary-2"}
    with (
        several_models("frontend_workers=1", environ=secrets) as server,
        ThreadPoolExecutor(1) as clients,
    ):
        loading = clients.submit(
            server.load, "late", server.model("late", "option.load_s=20", engine="slow")
        )
        wait_until(lambda: server.pids("lmi-engine"), "it loads")
        for pid in set(server.pids()) - {server.process.pid}:
            assert b"canary" not in Path(f"/proc/{pid}/environ").read_bytes()

        server.signal(signal.SIGTERM)
        assert loading.result().status == 503
        assert server.wait_within(5) == 0 and server.pids() == []


NEEDS_ONE = """
import one
from djl_python import Output

def handle(inputs):
    return None if inputs.is_empty() else Output().add_as_json({"version": one.VERSION})
"""


def test_what_the_code_of_a_model_needs_is_installed_before_it_starts(tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "SERVING_DOWNLOAD_DIR": str(tmp_path / "downloads")}
    with several_models(environ=offline) as server:
        whole = server.model("whole")
        broken = server.model("broken")
        for url in (whole, broken):
            Path(url, "model.py").write_text(NEEDS_ONE)
            Path(url, "requirements.txt").write_text("one\n")

        write_wheel(Path(whole) / "requirements", "one")
        (Path(broken) / "requirements").mkdir()

        assert server.load("whole", whole).status == 200
        assert json.loads(server.invoke("whole").body) == {"version": "1.0"}

        metrics = server.request("GET", "/metrics").body.decode().splitlines()
        # An installation that ends is no restart
        assert 'lmi_engine_restarts_total{model="whole"} 0.0' in metrics

        refused = server.load("broken", broken)
        assert refused.status == 400 and b"ERROR: No matching distribution" in refused.body
        assert server.described("broken")["status"] == "FAILED" and server.ping() == 200
