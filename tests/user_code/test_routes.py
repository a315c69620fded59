"""Formatters of user code around real requests: what they get, and where the text that they write
goes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from lmi.user_code.options import UserCodeConfig
from lmi.user_code.runner import COMPAT
from tests.scripted import Host, host, wait_until

FILES = Path(__file__).parents[1] / "user_code" / "files"
Serve = Callable[..., Host]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """`serve(name or source, **options of the model)`: a server with that file's formatters."""
    monkeypatch.syspath_prepend(str(COMPAT))
    with ExitStack() as servers:

        def start(code: str, properties: dict[str, str] | None = None, **options: object) -> Host:
            path = FILES / code / "model.py"
            if "\n" in code:
                path = tmp_path / "model.py"
                path.write_text(code)

            config = UserCodeConfig(
                path=str(path),
                input_formatter="" if "@input_formatter" in path.read_text() else None,
                output_formatter="" if "@output_formatter" in path.read_text() else None,
                properties=properties or {},
            )
            running = servers.enter_context(host(tmp_path, model=options, user_code=config))
            wait_until(lambda: running.post({})[0].status != 503)
            return running

        yield start


def ask(
    server: Host, text: str, path: str = "/invocations", **fields: Any
) -> tuple[HTTPResponse, bytes]:
    return server.post({"inputs": text, "parameters": {"max_new_tokens": 3}, **fields}, path)


def test_a_formatter_without_the_old_annotation_gets_the_finished_answer_once(serve: Serve) -> None:
    response, body = ask(serve("response"), "say ab")
    answer = json.loads(body)

    assert (response.status, response.getheader("content-type")) == (200, "application/json")
    assert body.endswith(b"}\n")
    assert answer["generated_text"] == "ab" and answer["original_length"] == 2
    assert answer["choices"] == [
        {"index": 0, "text": "[ab]", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert (answer["model"], answer["object"], answer["id"][:5]) == (
        "scripted",
        "text_completion",
        "cmpl-",
    )
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 3, "total_tokens": 9}
    assert answer["num_keys"] == 8 and "details" not in answer


def test_the_finished_answer_has_details_and_the_prompt_where_they_are_asked_for(
    serve: Serve,
) -> None:
    parameters = {
        "details": True,
        "decoder_input_details": True,
        "logprobs": 2,
        "return_full_text": True,
    }
    answer = json.loads(ask(serve("response"), "say a", parameters=parameters)[1])
    assert answer["generated_text"] == "say aa"

    details = answer["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["inputs"]) == (
        "eos_token",
        2,
        "say a",
    )
    assert details["tokens"][0] == {"id": 97, "text": "a", "log_prob": -0.5}
    assert [token["id"] for token in details["prefill"]] == list(b"say a")
    assert [[token["id"] for token in top] for top in details["top_tokens"]] == [[97, 98]] * 2


def test_a_stream_gives_the_formatter_each_step_and_its_clients_lines(serve: Serve) -> None:
    response, body = ask(serve("response"), "run ab", stream=True)
    assert response.getheader("content-type") == "application/jsonlines" and body.endswith(b"\n")

    lines = [json.loads(line) for line in body.splitlines()]
    assert [line["choices"][0]["text"] for line in lines] == ["[a]", "[b]", "[a]"]
    assert [line["choices"][0]["finish_reason"] for line in lines] == [None, None, "length"]
    assert "generated_text" not in lines[0] and lines[-1]["generated_text"] == "aba"
    assert lines[-1]["usage"]["completion_tokens"] == 3 and len({line["id"] for line in lines}) == 1


@pytest.mark.parametrize(
    "parameter", ["response", "output, **kwargs", "response_data: dict, tokenizer=None"]
)
@pytest.mark.parametrize(
    "write", ["return {'text': %s.choices[0]['text']}", "%s.extra = 1\n    return %s.model_dump()"]
)
def test_formatters_of_any_name_get_the_object_with_choices(
    serve: Serve, parameter: str, write: str
) -> None:
    name = parameter.split(",")[0].split(":")[0]
    source = "from djl_python.output_formatter import output_formatter\n@output_formatter\n"
    server = serve(f"{source}def write({parameter}):\n    {write.replace('%s', name)}\n")
    answer = json.loads(ask(server, "say ab")[1])

    assert answer == {"text": "ab"} or (answer["extra"], answer["choices"][0]["text"]) == (1, "ab")


def test_the_output_formatter_finds_the_object_that_the_input_formatter_made(serve: Serve) -> None:
    server = serve("own_fields", {"greeting": "hello"})
    parameters = {
        "max_new_tokens": 5,
        "decoder_input_details": True,
        "logprobs": 2,
        "stop_sequences": ["bc"],
    }
    _, body = server.post({"question": "say abcd", "trace": "t1", "parameters": parameters})
    told_fields = json.loads(body)

    assert (told_fields["type"], told_fields["trace"], told_fields["seen"]) == (
        "MyInput",
        "t1",
        ["hello", "hello"],
    )
    assert told_fields["ids"] == told_fields["prompt"] == list(b"say abcd")
    assert told_fields["top"] == [[97, 98]] * 3
    assert (told_fields["text"], told_fields["stop_reason"], told_fields["adapters"]) == (
        "a",
        "bc",
        None,
    )


def test_what_a_request_does_not_ask_for_is_not_there(serve: Serve) -> None:
    _, body = serve("own_fields", {"greeting": "hello"}).post({"question": "say ab"})
    told_fields = json.loads(body)

    assert (told_fields["prompt"], told_fields["top"], told_fields["stop_reason"]) == ([], [], None)
    assert told_fields["ids"] == list(b"say ab"), "these are always"


def test_a_stop_tokens_id_is_the_reason_of_the_stop(serve: Serve) -> None:
    _, body = serve("own_fields", {"greeting": ""}).post(
        {"question": "run ab", "parameters": {"stop_token_ids": [98]}}
    )
    assert json.loads(body)["stop_reason"] == 98


def test_the_fields_of_an_object_are_found_too(serve: Serve) -> None:
    server = serve("""
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import TextGenerationOutput, output_formatter
@input_formatter
def read(decoded_payload: dict, **kwargs) -> dict:
    return {"inputs": decoded_payload["q"], "trace": 7, "parameters": {"max_new_tokens": 2, "own": "x"}}
@output_formatter
def write(output: TextGenerationOutput):
    *_, is_last = output.sequences[0].get_next_token()
    return f"{output.input.trace} {output.input.parameters['own']}" if is_last else ""
""")  # noqa: E501
    assert server.post({"q": "run ab"})[1] == b"7 x"


def test_formatters_read_and_write_for_a_dynamic_batch_too(serve: Serve) -> None:
    server = serve(
        """
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter
@input_formatter
def read(decoded_payload: dict) -> dict:
    return {"inputs": decoded_payload["inputPrompt"], "parameters": {"max_new_tokens": 2}}
@output_formatter
def write(response):
    text = response["generated_text"]
    return {"text": text} if text != "cd" else "plain " + text
""",
        dynamic_batch=True,
    )
    response, body = server.post({"inputPrompt": "run ab"})
    assert (response.getheader("content-type"), body) == ("application/json", b'{"text": "ab"}\n')

    response, body = server.post({"inputPrompt": ["run ab", "run cd", "run ef"]})
    assert response.getheader("content-type") == "application/json"
    assert json.loads(body) == [{"text": "ab"}, "plain cd\n", {"text": "ef"}] and body.endswith(
        b"]\n"
    )
    assert server.post({"inputs": "run ab"})[0].status == 424


def test_the_lines_of_a_streamed_dynamic_batch_have_what_was_written_of_each_input(
    serve: Serve,
) -> None:
    server = serve(
        """
from djl_python.output_formatter import TextGenerationOutput, output_formatter
@output_formatter
def write(output: TextGenerationOutput):
    return output.sequences[0].get_next_token()[0].text.upper()
""",
        dynamic_batch=True,
        enable_streaming=True,
    )
    assert ask(server, "run ab")[1] == b"ABA\n"

    response, body = server.post(
        {"inputs": ["run ab", "run cd"], "parameters": {"max_new_tokens": 30}}
    )
    lines = [json.loads(line)["outputs"] for line in body.splitlines()]

    assert response.getheader("content-type") == "application/jsonlines"
    assert ["".join(texts) for texts in zip(*lines, strict=True)] == ["AB" * 15, "CD" * 15]
    assert len(lines) <= 30 + 3, "a step of both is one line"


def test_a_completion_that_names_a_form_gets_that_and_not_the_models_own(serve: Serve) -> None:
    server = serve("response")
    request_body = {"prompt": "say ab", "max_tokens": 2, "stream": True}
    response, body = server.post(request_body | {"output_formatter": "sse"})
    assert response.getheader("content-type") == "text/event-stream" and b"custom" not in body
    assert body.startswith(b'data: {"id"') and body.endswith(b"data: [DONE]\n\n")


def test_a_request_that_names_a_form_gets_that_from_a_dynamic_batch(serve: Serve) -> None:
    server = serve("response", dynamic_batch=True)
    body = ask(server, "run ab", parameters={"max_new_tokens": 2, "output_formatter": "json"})[1]
    assert json.loads(body) == [{"generated_text": "ab"}]


def test_memory_that_ran_out_in_a_formatter_is_507(serve: Serve) -> None:
    server = serve("""
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter
class OutOfMemoryError(RuntimeError):
    pass
@input_formatter
def read(decoded_payload: dict) -> dict:
    if decoded_payload["inputs"] == "large":
        raise MemoryError("no room")
    return decoded_payload
@output_formatter
def write(response):
    raise OutOfMemoryError("CUDA out of memory")
""")
    response, body = ask(server, "large")

    assert (response.status, json.loads(body)["code"]) == (507, 507) and "no room" in json.loads(
        body
    )["error"]

    response, body = ask(server, "say a")
    assert response.status == 507 and "CUDA out of memory" in json.loads(body)["error"]


def test_a_formatter_that_looks_for_the_text_in_an_engines_response_finds_it(serve: Serve) -> None:
    server = serve("completion")
    answer = json.loads(server.post({"inputPrompt": "run ab"})[1])

    assert (
        answer["choices"][0]["text"] == "ABAB" and answer["choices"][0]["finish_reason"] == "length"
    )

    lines = server.post({"inputPrompt": "run ab", "stream": True})[1].splitlines()
    assert [json.loads(line)["choices"][0]["text"] for line in lines] == ["A", "B", "A", "B"]


def test_a_formatter_is_given_openais_responses_too_where_the_path_has_no_form_of_its_own(
    serve: Serve,
) -> None:
    server = serve("completion", chat_template="say {{ messages[0].content }}")
    completion = {"prompt": "say ab", "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}

    assert json.loads(server.post(completion)[1])["choices"][0]["text"] == "AB"
    assert json.loads(server.post(completion, "/v1/completions")[1])["choices"][0]["text"] == "ab"
    assert json.loads(server.post(chat)[1])["choices"][0]["message"]["content"] == "message"

    response, body = server.post({**completion, "stream": True})
    chunks = [
        json.loads(line.removeprefix(b"data: ")) for line in body.splitlines() if b"{" in line
    ]

    assert (
        response.status == 200 and "".join(chunk["choices"][0]["text"] for chunk in chunks) == "AB"
    )

    body = server.post({**chat, "stream": True})[1]
    texts = [
        json.loads(line[line.index(b"{") :])["choices"][0]["delta"]
        for line in body.splitlines()
        if b"{" in line
    ]

    assert {"content": "delta"} in texts and b'"ab"' not in body


@pytest.mark.parametrize(
    ("written", "event"),
    [
        ("'one\\n\\ntwo'", b"data: one\ndata: \ndata: two\n\n"),
        ("'data: one\\n\\ndata: two\\n\\n'", b"data: one\n\ndata: two\n\n"),
        ("'data:one'", b"data:one\n\n"),
        ("'event: token\\ndata: one\\n'", b"event: token\ndata: one\n\n"),
    ],
)
def test_events_that_a_formatter_writes_itself_stay_as_they_are(
    serve: Serve, written: str, event: bytes
) -> None:
    server = serve(f"""
from djl_python.output_formatter import output_formatter
@output_formatter
def write(response):
    return {written}
""")
    _, body = server.post(
        {"prompt": "say a", "max_tokens": 1, "stream": True},
        headers={"accept": "text/event-stream"},
    )

    assert body.startswith(event) and body.endswith(event + b"data: [DONE]\n\n")


def test_a_formatter_of_tokens_leaves_openais_responses_as_they_are(serve: Serve) -> None:
    server = serve("""
from djl_python.output_formatter import TextGenerationOutput, output_formatter
@output_formatter
def write(output: TextGenerationOutput):
    return output.sequences[0].get_next_token()[0].text.upper()
""")
    assert ask(server, "run ab")[1] == b"ABA"
    body = server.post({"prompt": "say ab", "max_tokens": 2, "parameters": "of no meaning here"})[1]
    assert json.loads(body)["choices"][0]["text"] == "ab" and body.endswith(b"}\n")


def test_what_a_formatter_raises_over_openais_response_is_in_its_form(serve: Serve) -> None:
    server = serve("""
from djl_python.output_formatter import output_formatter
@output_formatter
def write(response):
    raise ValueError("cannot write")
""")
    response, body = server.post({"prompt": "say ab", "max_tokens": 2})

    assert (
        response.status == 424
        and "ValueError: cannot write" in json.loads(body)["error"]["message"]
    )

    wait_until(lambda: not any(connection.calls for connection in server.user_code.alive))


def test_a_formatter_that_is_ready_for_any_shape_of_response_adds_its_field(serve: Serve) -> None:
    server = serve("any_shape")
    answer = json.loads(ask(server, "run ab")[1])

    assert (answer["tenant"], answer["generated_text"]) == ("blue", "aba")

    lines = [json.loads(line) for line in ask(server, "run ab", stream=True)[1].splitlines()]
    assert [(line["tenant"], line["choices"][0]["text"]) for line in lines] == [
        ("blue", text) for text in "aba"
    ]


def test_nothing_is_left_of_a_call_when_its_answer_is_over(serve: Serve) -> None:
    server = serve("own_fields", {"greeting": ""})
    for body in ({"question": "say a"}, {"question": ""}, {"question": "fail a"}, {"q": 1}):
        server.post(body)

    wait_until(lambda: server.executor.num_active == 0)
    assert server.user_code is not None
    wait_until(lambda: not any(connection.calls for connection in server.user_code.alive))


def test_each_line_of_a_body_goes_through_both_formatters(serve: Serve) -> None:
    server = serve("""
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import TextGenerationOutput, output_formatter
@input_formatter
def read(decoded_payload: dict) -> dict:
    return {"inputs": "say " + decoded_payload["question"], "parameters": {"max_new_tokens": 9}}
@output_formatter
def write(output: TextGenerationOutput):
    token, is_first, is_last = output.sequences[0].get_next_token()
    return token.text.upper() + ("\\n" if is_last else "")
""")
    lines = b'{"question": "ab"}\n{"inputs": "x"}\n{"question": "c", "stream": true}\n'
    response, body = server.post(lines, headers={"content-type": "application/x-ndjson"})
    assert response.status == 200

    first, refused, last = (json.loads(line) for line in body.splitlines())
    assert (first, last) == ("AB", "C")
    assert refused["code"] == 424 and "the input formatter failed: KeyError" in refused["error"]


def test_sessions_are_opened_beside_an_input_formatter_which_keeps_its_own_request_types(
    serve: Serve,
) -> None:
    server = serve("""
from djl_python.input_parser import input_formatter
@input_formatter
def read(decoded_payload: dict) -> dict:
    return {"inputs": "say " + decoded_payload["requestType"]}
""")
    response, _ = server.post({"requestType": "NEW_SESSION"})
    session = str(response.headers["x-amzn-sagemaker-new-session-id"]).partition(";")[0]
    answer = server.post(
        {"requestType": "summary"}, headers={"x-amzn-sagemaker-session-id": session}
    )[1]

    assert json.loads(answer) == {"generated_text": "summary"}
