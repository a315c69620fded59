"""The routes of adapters, and which adapter answers a request, over HTTP with an engine that notes
what it is asked.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from lmi.adapters.files import Adapter
from lmi.executor import Capabilities
from lmi.http.exchange import ENDPOINT_NAME
from lmi.shared.desired_state import Folder, State
from lmi.shared.state import Phase
from lmi.user_code.options import UserCodeConfig
from tests.scripted import CAPABILITIES, Host, host

LORA = Capabilities(max_top_log_probs=5, typical_p=True, lora=True)
ENABLED = {"enable_lora": "true"}
HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
ALIAS = "X-Amzn-SageMaker-Adapter-Alias"
NAMES = ("in-header", "in-query", "in-body")
CHAT_TEMPLATE = "{{ messages[0]['content'] }}"
MODEL = {"chat_template": CHAT_TEMPLATE, "aliases": ("other",)}


def write_files(folder: Path) -> Path:
    """Write the files that each adapter has. The scripted engine reads none of them."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text("")
    return folder


def call(
    server: Host, method: str, path: str, body: object = None, alias: str = ""
) -> tuple[int, dict[str, Any]]:
    data = None if body is None else json.dumps(body).encode()
    response, answer = server.send(method, path, data, {ALIAS: alias} if alias else {})

    assert response.getheader("content-type") == "application/json", answer

    answer_body: dict[str, Any] = json.loads(answer)
    assert response.status == 200 or (
        answer_body["code"],
        isinstance(answer_body["error"], str),
    ) == (
        response.status,
        True,
    )

    return response.status, answer_body


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("adapted")
    with host(folder, model=MODEL, capabilities=LORA, options=ENABLED) as server:
        for name in NAMES:
            register(server, name)

        yield server


def register(server: Host, name: str, **more: object) -> None:
    folder = Path(server.config.model.path) / "loras" / name
    if not folder.exists():
        write_files(folder)

    assert call(server, "POST", "/adapters", {"name": name, "src": str(folder), **more})[0] == 200


@pytest.fixture(scope="module")
def batching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("batching")
    with host(folder, model={"dynamic_batch": True}, capabilities=LORA, options=ENABLED) as server:
        for name in NAMES:
            register(server, name)

        yield server


# Which adapter answers.

Body = dict[str, Any]


def lmi(name: str | None) -> Body:
    return {"inputs": "say a", "adapters": name}


def lmi_list(name: str | None) -> Body:
    return {"inputs": "say a"} | ({} if name is None else {"adapters": [name]})


def chat(name: str | None) -> Body:
    return {"messages": [{"role": "user", "content": "say a"}], "model": name}


def completion(name: str | None) -> Body:
    return {"prompt": "say a", "model": name}


def chat_beside(name: str | None) -> Body:
    """A chat with LMI's own field, as clients of the reference send it."""
    return {"messages": [{"role": "user", "content": "say a"}], "model": "model", "adapters": name}


def completion_beside(name: str | None) -> Body:
    return {"prompt": "say a"} | ({} if name is None else {"adapters": [name]})


def message_beside(name: str | None) -> Body:
    return {"messages": [{"role": "user", "content": "say a"}], "max_tokens": 8, "adapters": name}


def response_beside(name: str | None) -> Body:
    return {"input": "say a", "adapters": name}


def tgi(name: str | None) -> Body:
    return {"inputs": "say a", "parameters": {"adapter_id": name}}


def tgi_beside(name: str | None) -> Body:
    return {"inputs": "say a", "adapters": name}


def triton(name: str | None) -> Body:
    return {"text_input": "say a"} | ({} if name is None else {"lora_name": name})


DOORS = {
    "lmi": ("/invocations", lmi),
    "lmi's list of one": ("/predictions/scripted", lmi_list),
    "chat": ("/v1/chat/completions", chat),
    "chat at /invocations": ("/invocations", chat),
    "completions": ("/v1/completions", completion),
    "chat with adapters at /invocations": ("/invocations", chat_beside),
    "chat with adapters at /predictions": ("/predictions/scripted", chat_beside),
    "chat with adapters at /models": ("/models/scripted/invoke", chat_beside),
    "chat with adapters": ("/v1/chat/completions", chat_beside),
    "completion with adapters at /invocations": ("/invocations", completion_beside),
    "completion with adapters": ("/v1/completions", completion_beside),
    "message with adapters": ("/v1/messages", message_beside),
    "response with adapters": ("/v1/responses", response_beside),
    "tgi with adapters": ("/generate", tgi_beside),
    "tgi": ("/generate", tgi),
    "tgi at /": ("/", tgi),
    "triton": ("/v2/models/scripted/generate", triton),
}
OF_OPENAI = (chat, completion, chat_beside, completion_beside)
CARRIERS = list(product((True, False), repeat=3))


def ask(
    server: Host, path: str, body: Body, header: str | None, query: str | None
) -> tuple[int, Body, str | None]:
    """Send one request. Returns status and answer, and the adapter that the engine was
    asked for.
    """
    num_before = len(server.executor.requests)
    where = path if query is None else f"{path}?adapter={quote(query)}"
    response, answer = server.post(body, where, {} if header is None else {HEADER: header})
    requests = server.executor.requests[num_before:]
    names = {
        None if request.lora_config is None else request.lora_config.name for request in requests
    }

    assert len(names) <= 1

    answer_body = json.loads(answer)
    return (
        response.status,
        answer_body[0] if isinstance(answer_body, list) else answer_body,
        next(iter(names), None),
    )


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("carriers", CARRIERS, ids=str)
def test_the_header_beats_the_query_which_beats_the_body(
    server: Host, door: str, carriers: tuple[bool, bool, bool]
) -> None:
    path, write = DOORS[door]
    header, query, body = (
        name if is_sent else None for name, is_sent in zip(NAMES, carriers, strict=True)
    )
    status, answer, used = ask(server, path, write(body), header, query)
    assert (status, used) == (200, header or query or body), answer
    if write in OF_OPENAI:
        assert answer["model"] == (used or "scripted")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["", "scripted", "other", "model"])
def test_an_empty_name_and_the_model_s_own_mean_the_model_alone(
    server: Host, door: str, name: str
) -> None:
    path, write = DOORS[door]
    for header, query, body in (
        (name, "in-query", "in-body"),
        (None, name, "in-body"),
        (None, None, name),
    ):
        status, answer, used = ask(server, path, write(body), header, query)
        assert (status, used) == (200, None), answer
        if write in OF_OPENAI:
            assert answer["model"] == "scripted"


@pytest.mark.parametrize("write", [chat, completion])
def test_at_invocations_the_reference_s_name_and_the_endpoint_s_mean_the_model_too(
    server: Host, write: Any
) -> None:
    for name in ("lmi", "my-endpoint"):
        response, body = server.post(write(name), "/invocations", {ENDPOINT_NAME: "my-endpoint"})
        assert (response.status, json.loads(body)["model"]) == (200, "scripted")

    assert server.executor.requests[-1].lora_config is None

    for path, name in (("/v1/chat/completions", "lmi"), ("/invocations", "another-endpoint")):
        response, body = server.post(chat(name), path, {ENDPOINT_NAME: "my-endpoint"})
        assert response.status == 404 and "'scripted', 'other', 'in-body'" in body.decode()

    status, _, used = ask(server, "/invocations", write(None), "lmi", None)
    assert (status, used) == (404, None)


def test_an_adapter_of_the_endpoint_s_name_is_that_adapter(server: Host) -> None:
    response, body = server.post(chat("in-body"), "/invocations", {ENDPOINT_NAME: "in-body"})
    assert (response.status, json.loads(body)["model"]) == (200, "in-body")


def test_a_name_that_loses_is_one_line_in_the_log(
    server: Host, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "lmi.server.front_end"):
        ask(server, "/invocations", lmi("in-body"), "in-header", None)
        ask(server, "/invocations", lmi("in-header"), "in-header", None)
        ask(server, "/v1/completions", completion("scripted"), "in-header", None)

    assert [record.message for record in caplog.records if "adapter" in record.message] == [
        f"the adapter 'in-body' has no effect beside the header {HEADER}"
    ]


@pytest.mark.parametrize("header", [None, "in-header"])
def test_the_header_counts_for_all_inputs_of_a_dynamic_batch(
    batching: Host, header: str | None
) -> None:
    num_before = len(batching.executor.requests)
    body = {"inputs": ["say a", "say b"], "adapters": ["in-body", ""]}
    response, answer = batching.post(body, headers={} if header is None else {HEADER: header})
    assert response.status == 200, answer
    used = [
        request.lora_config and request.lora_config.name
        for request in batching.executor.requests[num_before:]
    ]
    assert used == (["in-body", None] if header is None else [header, header])


@pytest.mark.parametrize("header", [None, "in-header"])
def test_the_header_counts_for_all_lines_of_a_body(server: Host, header: str | None) -> None:
    num_before = len(server.executor.requests)
    lines = b"\n".join(json.dumps(lmi(name)).encode() for name in ("in-body", "", None))
    headers = {"Content-Type": "application/jsonlines"} | (
        {} if header is None else {HEADER: header}
    )
    response, answer = server.send("POST", "/invocations", lines, headers)
    assert response.status == 200 and len(answer.splitlines()) == 3, answer

    used = [
        request.lora_config and request.lora_config.name
        for request in server.executor.requests[num_before:]
    ]

    assert Counter(used) == Counter(["in-body", None, None] if header is None else [header] * 3)


UNKNOWN = {
    "lmi": (424, lambda said: said["error"]),
    "lmi's list of one": (424, lambda said: said["error"]),
    "tgi": (422, lambda said: said["error"]),
    "tgi at /": (422, lambda said: said["error"]),
    "triton": (400, lambda said: said["error"]),
    "chat": (404, lambda said: said["error"]["message"]),
    "completions": (404, lambda said: said["error"]["message"]),
}


@pytest.mark.parametrize("door", UNKNOWN)
@pytest.mark.parametrize("alias", ["", "the polite one"])
def test_an_unknown_adapter_is_refused_under_its_alias_and_never_answered_by_the_model(
    server: Host, door: str, alias: str
) -> None:
    path, write = DOORS[door]
    status, message = UNKNOWN[door]
    num_before = len(server.executor.requests)
    for where, headers in ((path, {HEADER: "poetic"}), (f"{path}?adapter=poetic", {})):
        response, answer = server.post(
            write(None), where, headers | ({ALIAS: alias} if alias else {})
        )
        body = json.loads(answer)

        assert (response.status, message(body)) == (
            status,
            f"Adapter {alias or 'poetic'} is not registered",
        )
        assert status != 404 or body["error"]["code"] == "model_not_found"

    assert len(server.executor.requests) == num_before


def test_an_unknown_adapter_in_the_body_is_refused_in_the_same_words(server: Host) -> None:
    for door in ("lmi", "tgi", "triton"):
        path, write = DOORS[door]
        status, message = UNKNOWN[door]
        got, body, used = ask(server, path, write("poetic"), None, None)

        assert (got, message(body), used) == (status, "Adapter poetic is not registered", None)

    got, body, _ = ask(server, "/v1/completions", completion("gpt-4"), None, None)
    assert (got, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")

    served = (
        "'scripted', 'other', 'in-body', 'in-header', 'in-query' (option.served_model_name "
        "sets the model's names)"
    )

    assert body["error"]["message"] == f"the model 'gpt-4' does not exist, only {served}"


@pytest.mark.parametrize("door", [door for door in DOORS if "with adapters" in door])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_unknown_adapter_beside_any_body_is_refused(
    server: Host, door: str, is_streamed: bool
) -> None:
    path, write = DOORS[door]
    num_before = len(server.executor.requests)
    response, answer = server.post(write("poetic") | {"stream": is_streamed}, path)
    assert (response.status, b"Adapter poetic is not registered" in answer) == (
        422 if "tgi" in door else 404,
        True,
    )
    assert len(server.executor.requests) == num_before


@pytest.mark.parametrize("write", [chat_beside, completion_beside])
@pytest.mark.parametrize("headers", [{}, {"Accept": "text/event-stream"}])
def test_adapters_choose_for_a_stream_too(
    server: Host, write: Any, headers: dict[str, str]
) -> None:
    response, answer = server.post(write("in-body") | {"stream": True}, "/invocations", headers)
    assert (response.status, b'"model":"in-body"' in answer) == (200, True), answer

    lora = server.executor.requests[-1].lora_config
    assert lora is not None and lora.name == "in-body"


@pytest.mark.parametrize("write", [chat_beside, completion_beside])
def test_adapters_choose_for_each_line_of_a_body(server: Host, write: Any) -> None:
    num_before = len(server.executor.requests)
    lines = b"\n".join(json.dumps(write(name)).encode() for name in ("in-body", None, "poetic"))
    response, answer = server.send(
        "POST", "/invocations", lines, {"Content-Type": "application/jsonlines"}
    )
    models = [json.loads(line).get("model") for line in answer.splitlines()]
    assert (response.status, models) == (200, ["in-body", "scripted", None])

    used = [
        request.lora_config and request.lora_config.name
        for request in server.executor.requests[num_before:]
    ]

    assert Counter(used) == Counter(["in-body", None])


def test_adapters_count_before_the_model_of_a_body(server: Host) -> None:
    body = chat_beside("in-body") | {"model": "in-query"}
    assert ask(server, "/invocations", body, None, None)[2] == "in-body"

    beside_tgi = tgi("in-query") | {"adapters": "in-body"}
    assert ask(server, "/generate", beside_tgi, None, None)[2] == "in-body"


@pytest.mark.parametrize("adapters", [5, ["in-body", "in-query"], {"name": "in-body"}, True])
def test_adapters_of_a_wrong_form_are_refused_by_name(server: Host, adapters: object) -> None:
    response, answer = server.post(chat(None) | {"adapters": adapters}, "/invocations")
    message = json.loads(answer)["error"]["message"]
    assert (response.status, message.startswith("adapters must be a string or a list of one")) == (
        400,
        True,
    )


def test_a_refusal_in_the_lmi_schema_has_the_form_of_the_answer(server: Host) -> None:
    response, answer = server.post({"inputs": "say a", "stream": True}, headers={HEADER: "poetic"})
    body = json.loads(answer)

    assert (response.status, body["code"], body["generated_text"]) == (424, 424, "")
    assert body["details"]["finish_reason"] == "error"


def test_a_registered_adapter_that_no_engine_has_is_503_and_never_answered_by_the_model(
    tmp_path: Path,
) -> None:
    with host(tmp_path, capabilities=LORA, options=ENABLED) as running:
        entry = Adapter(name="lost", path="/nowhere", state=State.READY)
        assert Folder(tmp_path / "adapters", Adapter).add(entry)
        status, body, used = ask(running, "/invocations", lmi("lost"), None, None)
        assert (status, used) == (503, None)
        assert body["error"] == "Adapter lost cannot be used: no engine that has it is ready"


@pytest.mark.parametrize("name", ["../../etc/passwd", "a b", "ä", "x" * 4000, "a\r\nb: c"])
def test_a_hostile_name_is_only_an_unknown_one(server: Host, name: str) -> None:
    status, body, _ = ask(server, "/invocations", lmi(name), None, name)
    assert status == 424 and body["error"].startswith("Adapter ") and len(body["error"]) < 400


def test_adapters_are_listed_as_models_with_their_parent(server: Host) -> None:
    cards = json.loads(server.send("GET", "/v1/models")[1])["data"]
    assert {card["id"]: card.get("parent") for card in cards} == {
        "scripted": None,
        "other": None,
        **dict.fromkeys(NAMES, "scripted"),
    }
    response, answer = server.send("GET", "/v1/models/in-body")
    assert (response.status, json.loads(answer)["parent"]) == (200, "scripted")


def test_the_root_of_a_model_is_its_folder_and_that_of_an_adapter_the_source_that_was_named(
    server: Host,
) -> None:
    cards = json.loads(server.send("GET", "/v1/models")[1])["data"]
    folder = server.config.model.path
    assert {card["id"]: card["root"] for card in cards} == {
        "scripted": folder,
        "other": folder,
        **{name: f"{folder}/loras/{name}" for name in NAMES},
    }


# The routes.


@pytest.mark.parametrize(
    "prefix", ["/adapters", "/models/scripted/adapters", "/models/other/adapters"]
)
def test_an_adapter_is_registered_described_updated_and_unregistered(
    server: Host, prefix: str
) -> None:
    src = str(Path(server.config.model.path) / "loras" / "in-body")
    registration = {"name": "new", "src": src, "preload": False, "further": 5}
    assert call(server, "POST", prefix, registration) == (200, {"status": "Adapter new registered"})

    description = {"name": "new", "src": src, "preload": False, "pin": False}
    assert call(server, "GET", f"{prefix}/new") == (200, description)
    assert call(server, "POST", f"{prefix}/new/update", {"pin": True}) == (
        200,
        {"status": "Adapter new updated"},
    )
    assert call(server, "GET", f"{prefix}/new") == (
        200,
        description | {"preload": True, "pin": True},
    )
    assert call(server, "DELETE", f"{prefix}/new") == (200, {"status": "Adapter new unregistered"})

    for method, path, body in (("GET", "", None), ("DELETE", "", None), ("POST", "/update", {})):
        missing = {"error": "Adapter new is not registered", "code": 404}
        assert call(server, method, f"{prefix}/new{path}", body) == (404, missing)


def test_vllm_s_routes_load_and_unload_an_adapter(server: Host) -> None:
    new = {
        "lora_name": "new",
        "lora_path": str(Path(server.config.model.path) / "loras" / "in-body"),
    }
    loaded, unloaded = (
        f"Success: LoRA adapter 'new' {done} successfully." for done in ("added", "removed")
    )

    assert (at_vllm_s(server, "load", new), running_with(server, "new")) == ((200, loaded), "new")
    assert call(server, "GET", "/adapters/new")[1]["src"] == new["lora_path"]
    assert at_vllm_s(server, "unload", {"lora_name": "new"}) == (200, unloaded)
    assert at_vllm_s(server, "unload", {"lora_name": "new"}) == (
        404,
        "Adapter new is not registered",
    )


@pytest.mark.parametrize(
    ("action", "body", "status", "sentence"),
    [
        (
            "load",
            {"lora_name": "in-body", "lora_path": "in-body"},
            409,
            "Adapter in-body is registered already",
        ),
        ("load", {"lora_name": "new"}, 400, "lora_path is missing"),
        ("unload", {}, 400, "lora_name is missing"),
        ("load", {"lora_name": 5, "lora_path": "x"}, 400, "lora_name must be a string"),
        ("load", {"lora_name": "new", "lora_path": "/etc"}, 400, "lora_path must be a folder"),
        ("load", {"lora_name": "a/b", "lora_path": "in-body"}, 400, "lora_name must be"),
        (
            "load",
            {"lora_name": "in-body", "lora_path": "x", "load_inplace": True},
            400,
            "load_inplace is not supported",
        ),
    ],
)
def test_a_refusal_of_vllm_s_routes_has_openai_s_form(
    server: Host, action: str, body: Body, status: int, sentence: str
) -> None:
    got, message = at_vllm_s(server, action, body)
    assert got == status and message.startswith(sentence)


def at_vllm_s(server: Host, action: str, body: Body) -> tuple[int, str]:
    """The status, and the answer or the error's message."""
    response, answer = server.post(body, f"/v1/{action}_lora_adapter")
    return response.status, answer.decode() if response.status == 200 else json.loads(answer)[
        "error"
    ]["message"]


def running_with(server: Host, name: str) -> str:
    assert server.post({"model": name, "prompt": "say a"}, "/v1/completions")[0].status == 200
    return str(server.executor.requests[-1].lora_config.name)


def test_parameters_may_stand_in_the_query_too_and_an_alias_is_only_for_messages(
    server: Host,
) -> None:
    where = f"/adapters?name=new&src={quote(server.config.model.path)}/loras/in-body&preload=False&pin=false"  # noqa: E501
    assert call(server, "POST", where, alias="The New One") == (
        200,
        {"status": "Adapter The New One registered"},
    )
    assert call(server, "GET", "/adapters/new")[1]["preload"] is False

    conflict = {"error": "Adapter The New One is registered already", "code": 409}
    assert call(server, "POST", where, {"name": "new"}, alias="The New One") == (409, conflict)

    changed = call(server, "POST", "/adapters/new/update?preload=true", alias="The New One")
    assert changed == (200, {"status": "Adapter The New One updated"})

    changed = call(server, "DELETE", "/adapters/new", alias="The New One")
    assert changed == (200, {"status": "Adapter The New One unregistered"})


def faulty(**changes: object) -> dict[str, object]:
    return {"name": "new", "src": "loras/in-body"} | changes


@pytest.mark.parametrize(
    ("query", "body", "status", "sentence"),
    [
        ("", {"src": "/x"}, 400, "name is missing"),
        ("", {"name": "new"}, 400, "src is missing"),
        ("", faulty(src=""), 400, "src is missing"),
        ("", faulty(name=5), 400, "name must be a string, given 5"),
        ("", faulty(preload=1), 400, "preload must be true or false, given 1"),
        ("?pin=perhaps", faulty(), 400, "pin must be true or false, given 'perhaps'"),
        (
            "?name=old",
            faulty(),
            400,
            "name must be the same in the query and the body, given 'new'",
        ),
        (
            "?pin=true",
            faulty(pin=False),
            400,
            "pin must be the same in the query and the body, given false",
        ),
        (
            "",
            faulty(preload=False, pin=True),
            400,
            "preload must be true with pin=true, given false",
        ),
        (
            "",
            faulty(name="a/b"),
            400,
            "name must be 1 to 256 letters, digits and . _ : -, with a letter or digit first",
        ),
        ("", faulty(name="../x"), 400, "name must be 1 to 256"),
        ("", faulty(name="x" * 257), 400, "name must be 1 to 256"),
        ("", faulty(name="a b"), 400, "name must be 1 to 256"),
        ("", faulty(name="scripted"), 409, "name scripted belongs to the model"),
        ("", faulty(name="other"), 409, "name other belongs to the model"),
        ("", faulty(name="model"), 409, "name model belongs to the model"),
        ("", faulty(name="in-body"), 409, "Adapter in-body is registered already"),
        (
            "",
            faulty(src="/etc"),
            400,
            (
                "src must be a folder below the model's folder, /opt/ml, download_dir or one of "
                "adapter_roots"
            ),
        ),
        ("", faulty(src="/nowhere"), 400, "src must be a folder below the model's folder"),
        ("", faulty(src="../.."), 400, "src must be a folder below the model's folder"),
        ("", faulty(src="file:///etc"), 400, "src must be a folder below the model's folder"),
        ("", faulty(src="a\0b"), 400, "src must be the path of a folder, given 'a\\x00b'"),
        ("", faulty(src="x" * 5000), 400, "src must be the path of a folder, given 'xxx"),
        ("", faulty(src="file://["), 400, "src must be the path of a folder, given 'file://['"),
        ("", faulty(src="loras/nowhere/deep"), 400, "src 'loras/nowhere/deep' is no folder"),
        ("", faulty(src="loras"), 400, "src loras: an adapter's folder has an adapter_config.json"),
        (
            "",
            faulty(src="ftp://host/a"),
            400,
            "src 'ftp://host/a': no source has the scheme ftp://",
        ),
        ("", faulty(src="s3:///a"), 400, "src 's3:///a': names no bucket"),
    ],
)
def test_a_registration_that_cannot_be_done_names_the_field(
    server: Host, query: str, body: dict[str, object], status: int, sentence: str
) -> None:
    before = call(server, "GET", "/adapters")
    got, answer = call(server, "POST", f"/adapters{query}", body)
    assert got == status and sentence in answer["error"], answer
    assert server.config.model.path not in answer["error"]
    assert call(server, "GET", "/adapters") == before


def test_a_body_that_is_no_object_is_refused(server: Host) -> None:
    for body in ([], "x", 5):
        assert (
            "the body must be a JSON object" in call(server, "POST", "/adapters", body)[1]["error"]
        )


def test_an_update_cannot_change_the_source_or_unpin(server: Host) -> None:
    register(server, "held", pin=True)
    for body, sentence in (
        ({"src": "/opt/ml/other"}, "src must be that of the registered adapter"),
        (
            {"pin": False},
            "pin must be true for a pinned adapter; delete it and register it again, given false",
        ),
        ({"preload": False}, "preload must be true with pin=true, given false"),
    ):
        status, answer = call(server, "POST", "/adapters/held/update", body)
        assert status == 400 and sentence in answer["error"]

    assert call(server, "POST", "/adapters/held/update", {})[0] == 200
    assert call(server, "DELETE", "/adapters/held")[0] == 200


def test_files_of_an_adapter_are_looked_at_before_the_engine_gets_it(server: Host) -> None:
    folder = write_files(Path(server.config.model.path) / "loras" / "spoilt")
    registration = {"name": "spoilt", "src": str(folder)}
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    status, answer = call(server, "POST", "/adapters", registration)
    assert status == 400 and "adapter_model.bin is a pickle, which can run code" in answer["error"]

    (folder / "adapter_model.bin").unlink()
    status, answer = call(server, "POST", "/adapters", registration)
    assert (
        status == 400 and "an adapter's folder has an adapter_model.safetensors" in answer["error"]
    )

    (folder / "adapter_config.json").write_text("{")
    assert "adapter_config.json: " in call(server, "POST", "/adapters", registration)[1]["error"]

    (folder / "adapter_config.json").write_text('{"a": "' + "x" * (1 << 20) + '"}')
    assert (
        "adapter_config.json: over 1048576 bytes"
        in call(server, "POST", "/adapters", registration)[1]["error"]
    )


def test_an_adapter_with_code_is_refused_where_its_code_does_not_run(server: Host) -> None:
    folder = write_files(Path(server.config.model.path) / "loras" / "coded")
    (folder / "model.py").write_text("raise SystemExit")
    status, answer = call(server, "POST", "/adapters", {"name": "coded", "src": str(folder)})
    assert (status, answer["error"]) == (
        424,
        "model.py in the adapter's folder runs with option.adapter_code=true alone",
    )
    assert call(server, "GET", "/adapters/coded")[0] == 404


def test_a_link_that_leads_outside_is_outside(server: Host, tmp_path: Path) -> None:
    link = Path(server.config.model.path) / "loras" / "link"
    link.symlink_to(write_files(tmp_path / "outside"))
    status, answer = call(server, "POST", "/adapters", {"name": "linked", "src": str(link)})

    assert status == 400 and "src must be a folder below" in answer["error"]


def test_adapter_roots_allow_further_folders(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "roots" / "a")
    roots = (str(tmp_path / "roots"),)
    with host(
        tmp_path, capabilities=LORA, options=ENABLED, server={"adapter_roots": roots}
    ) as server:
        assert call(server, "POST", "/adapters", {"name": "a", "src": str(folder)})[0] == 200


def test_lists_come_in_pages(server: Host) -> None:
    registered = [{"name": name, "preload": True, "pin": False} for name in sorted(NAMES)]

    def names(query: str) -> tuple[list[str], str | None]:
        status, page = call(server, "GET", f"/adapters{query}")
        assert status == 200
        assert [{**adapter_shown, "src": None} for adapter_shown in page["adapters"]] == [
            {**adapter_shown, "src": None}
            for adapter_shown in registered
            if adapter_shown["name"] in {adapter["name"] for adapter in page["adapters"]}
        ]

        return [adapter_shown["name"] for adapter_shown in page["adapters"]], page.get(
            "nextPageToken"
        )

    assert (
        names("")
        == names("?limit=0")
        == names("?limit=101")
        == names("?limit=x")
        == (sorted(NAMES), None)
    )
    assert names("?limit=2") == (["in-body", "in-header"], "2")
    assert names("?limit=2&next_page_token=2") == (["in-query"], None)
    assert names("?next_page_token=9") == ([], None)

    for token in ("x", "-1", "1.5"):
        status, refusal = call(server, "GET", f"/adapters?next_page_token={token}")
        assert (
            status == 400
            and "next_page_token must be a number that an earlier answer gave" in refusal["error"]
        )


@pytest.mark.parametrize("name", ["%2e%2e", "..%5c..", "%00", "a%20b", "x" * 3000, "%0d%0aX:%20y"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_hostile_names_in_the_path_are_not_found_and_make_no_file(
    server: Host, name: str, method: str
) -> None:
    folder = Path(server.config.model.path).parent
    before = sorted(path for path in folder.rglob("*"))
    response, _ = server.send(method, f"/adapters/{name}")
    assert response.status == 404
    assert sorted(path for path in folder.rglob("*")) == before


def test_another_model_has_no_adapters(server: Host) -> None:
    assert call(server, "GET", "/models/gpt-4/adapters")[0] == 404


def test_there_is_room_for_max_adapters(tmp_path: Path) -> None:
    with host(tmp_path, capabilities=LORA, options=ENABLED, server={"max_adapters": 2}) as server:
        register(server, "a")
        register(server, "b")
        status, answer = call(server, "POST", "/adapters", faulty(src="loras/a"))
        assert (status, answer["error"]) == (
            507,
            "2 adapters are registered, which is max_adapters",
        )
        assert call(server, "DELETE", "/adapters/a")[0] == 200
        register(server, "c")


def test_a_server_that_shuts_down_changes_no_adapters(tmp_path: Path) -> None:
    with host(tmp_path, capabilities=LORA, options=ENABLED) as server:
        server.server_block.supervisor.phase = Phase.DRAINING
        for method, path, body in CALLS:
            status, answer = call(server, method, path, body)
            assert (status, answer["error"]) == (
                503,
                "the server is shutting down and takes no new requests",
            )


# Servers without adapters.

CALLS = [
    ("POST", "/adapters", faulty()),
    ("GET", "/adapters", None),
    ("GET", "/adapters/a", None),
    ("DELETE", "/adapters/a", None),
    ("POST", "/adapters/a/update", {}),
    ("GET", "/models/scripted/adapters", None),
]


@pytest.mark.parametrize(
    ("options", "server", "status", "sentence"),
    [
        ({}, {}, 400, "LoRA is not enabled."),
        ({"enable_lora": "false"}, {}, 400, "LoRA is not enabled."),
        (ENABLED, {}, 400, "the engine scripted has no adapters"),
        (ENABLED, {"management": False}, 404, "adapters cannot be changed here (management=false)"),
    ],
)
def test_every_route_says_why_there_are_no_adapters(
    tmp_path: Path, options: dict[str, str], server: dict[str, object], status: int, sentence: str
) -> None:
    with host(tmp_path, capabilities=CAPABILITIES, options=options, server=server) as running:
        for method, path, body in CALLS:
            got, answer_body = call(running, method, path, body)
            assert got == status and answer_body["error"].startswith(sentence)

        for action in ("load", "unload"):
            got, message = at_vllm_s(running, action, {"lora_name": "new", "lora_path": "new"})
            assert got == status and message.startswith(sentence)

        response, answer = running.post({"inputs": "say a"}, headers={HEADER: "formal"})
        reason = (
            "scripted has no adapters"
            if options == ENABLED
            else "adapters are switched on by option.enable_lora=true"
        )

        assert response.status == 424 and f"adapters is not supported here: {reason}" in str(answer)


def test_user_code_as_the_model_has_no_adapters(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def handle(inputs):\n    return None\n")
    code = UserCodeConfig(path=str(tmp_path / "model.py"), handler="handle")
    with host(tmp_path, user_code=code, options=ENABLED, capabilities=LORA) as server:
        for method, path, body in CALLS:
            assert call(server, method, path, body) == (
                400,
                {"error": "the model is user code, which has no adapters", "code": 400},
            )
