"""A stream without a token begins after a while, and says in the events of its API that
it waits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest

from lmi.executor import PromptProgress
from lmi.server.waiting import EarlyStart, status_of_all
from lmi.types import WaitStatus
from tests.scripted import Host, host

KEEPALIVE_S = 0.1
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
PROGRESS = PromptProgress(num_computed_tokens=9, num_cached_tokens=4)
# Events of waiting that a test reads before the engine answers
NUM_TOLD = 3


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    settings: dict[str, object] = {"chat_template": "{{ messages[-1].content }}"}
    timing: dict[str, object] = {"stream_keepalive_s": KEEPALIVE_S}
    with host(tmp_path_factory.mktemp("waiting"), server=timing, model=settings) as server:
        server.executor.progress = PROGRESS
        yield server


def body_of(path: str, prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": messages},
        TEXT: {"prompt": prompt},
        MESSAGES: {"messages": messages, "max_tokens": 90},
        RESPONSES: {"input": prompt},
    }
    return bodies[path] | {"model": "scripted", "stream": True}


@contextmanager
def streamed(
    server: Host, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Iterator[Any]:
    """Send a request, and give what waits for its response."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), headers or {})
        yield connection.getresponse
    finally:
        connection.close()


def events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def all_events(
    server: Host, path: str, order: str, is_waiting: Callable[[dict[str, Any]], bool]
) -> list[Any]:
    """The events of a stream whose engine answers once the stream has told a few times that it
    waits.
    """
    told_events: list[dict[str, Any]] = []
    with streamed(server, path, body_of(path, f"late {order}")) as answer:
        for event in events(answer()):
            told_events.append(event)
            if sum(map(is_waiting, told_events)) == NUM_TOLD:
                server.executor.let_go.set()

    return told_events


def is_progress(event: dict[str, Any]) -> bool:
    return "prompt_progress" in event


def shape_of_waiting(event: dict[str, Any], num_prompt_tokens: int) -> dict[str, Any]:
    """Check what stands in an event of waiting, and return what its API adds."""
    progress = event.pop("prompt_progress")
    queue_status = event.pop("queue_status")
    assert progress.pop("time_ms") >= 1000 * KEEPALIVE_S
    assert progress == {"total": num_prompt_tokens, "cache": 4, "processed": 9}
    assert queue_status["queue_position"] == 0
    assert queue_status["estimated_wait_seconds"] > 0
    return event


PROMPT_TOKENS = len("late say hi")


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_of_openai_tells_its_progress_in_chunks_without_choices(
    served: Host, path: str
) -> None:
    all_told = all_events(served, path, "say hi", is_progress)
    waiting = [event for event in all_told if is_progress(event)]
    assert all_told[: len(waiting)] == waiting

    for event in waiting:
        shape = shape_of_waiting(event, PROMPT_TOKENS)
        assert shape["choices"] == []
        assert shape["id"] == all_told[-1]["id"]

    choices = [event["choices"][0] for event in all_told[len(waiting) :]]
    texts = [choice["delta"]["content"] if path == CHAT else choice["text"] for choice in choices]

    assert "".join(texts) == "hi"


def test_a_stream_of_messages_tells_its_progress_in_deltas_without_a_stop_reason(
    served: Host,
) -> None:
    all_told = all_events(served, MESSAGES, "say hi", is_progress)
    kinds = [event["type"] for event in all_told]

    assert kinds[:2] == ["message_start", "ping"]
    assert kinds.count("message_start") == 1
    assert kinds[2 : 2 + NUM_TOLD] == ["message_delta"] * NUM_TOLD

    for event in all_told[2 : 2 + NUM_TOLD]:
        shape = shape_of_waiting(event, PROMPT_TOKENS)
        assert shape["delta"] == {"stop_reason": None, "stop_sequence": None}
        assert (shape["usage"]["input_tokens"], shape["usage"]["output_tokens"]) == (
            PROMPT_TOKENS - 4,
            0,
        )

    assert all_told[0]["message"]["usage"]["input_tokens"] == PROMPT_TOKENS - 4
    assert all_told[-2]["delta"]["stop_reason"] == "end_turn"
    assert all_told[-2]["usage"]["input_tokens"] == PROMPT_TOKENS


def test_a_stream_of_responses_is_in_progress_again_and_again(served: Host) -> None:
    all_told = all_events(served, RESPONSES, "say hi", is_progress)
    kinds = [event["type"] for event in all_told]
    assert kinds[0] == "response.created"
    assert kinds.count("response.created") == 1
    assert kinds[1 : 2 + NUM_TOLD] == ["response.in_progress"] * (1 + NUM_TOLD)
    assert kinds[-1] == "response.completed"
    assert [event["sequence_number"] for event in all_told] == list(range(len(all_told)))
    assert shape_of_waiting(all_told[2], PROMPT_TOKENS)["response"]["status"] == "in_progress"


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, RESPONSES])
def test_an_error_after_the_beginning_has_the_form_of_the_stream(served: Host, path: str) -> None:
    all_told = all_events(served, path, "fail ", is_progress)
    forms = {MESSAGES: ("error",), RESPONSES: ("response", "error")}
    last = all_told[-1]
    for name in forms.get(path, ("error",)):
        last = last[name]

    assert "the script says so" in last["message"]


def test_an_engine_that_knows_no_progress_tells_none(served: Host) -> None:
    served.executor.progress = None
    all_told = all_events(served, CHAT, "say hi", lambda event: not event["choices"])
    waiting = [event for event in all_told if not event["choices"]]

    assert [event.get("prompt_progress") for event in waiting] == [None] * NUM_TOLD
    assert waiting[0]["queue_status"] == {"queue_position": 0, "estimated_wait_seconds": None}


QUIET: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "lines of LMI": ("/invocations", {"inputs": "late say hi", "stream": True}, {}),
    "events of LMI": ("/invocations", {"inputs": "late say hi"}, {"Accept": "text/event-stream"}),
    "lines of a chat": (
        "/invocations",
        {"messages": [{"role": "user", "content": "late say hi"}], "stream": True},
        {},
    ),
    "Triton": ("/v2/models/scripted/generate_stream", {"text_input": "late say hi"}, {}),
    "a whole chat": (CHAT, body_of(CHAT, "late say hi") | {"stream": False}, {}),
    "a whole message": (MESSAGES, body_of(MESSAGES, "late say hi") | {"stream": False}, {}),
}


@pytest.mark.parametrize("form", QUIET)
def test_what_no_client_takes_for_progress_keeps_silent_and_has_its_status(
    served: Host, form: str
) -> None:
    path, body, headers = QUIET[form]
    failing = json.loads(json.dumps(body).replace("late say hi", "late fail "))
    with (
        streamed(served, path, body, headers) as answer,
        streamed(served, path, failing, headers) as refusal,
    ):
        # While another stream has told that it waits
        all_events(served, CHAT, "say hi", is_progress)
        response = answer()
        assert response.status == 200

        body_text = response.read()
        assert b"prompt_progress" not in body_text
        assert b'"choices":[]' not in body_text
        assert refusal().status in (424, 500)


def test_tgi_keeps_its_stream_alive_with_a_comment(served: Host) -> None:
    body = {"inputs": "late say hi", "parameters": {"max_new_tokens": 9}}
    with streamed(served, "/generate_stream", body) as answer:
        response = answer()
        assert response.readline() == b":\n"
        assert response.readline() == b"\n"
        served.executor.let_go.set()
        assert json.loads(response.read().split(b"data:")[-1])["generated_text"] == "hi"


def test_a_stream_that_has_begun_with_a_token_tells_no_progress_later(served: Host) -> None:
    with streamed(served, CHAT, body_of(CHAT, "rest hi")) as answer:
        response = answer()
        # While another stream has told that it waits
        all_events(served, CHAT, "say hi", is_progress)
        events_read = list(events(response))

    assert [event for event in events_read if is_progress(event)] == []
    assert "".join(event["choices"][0]["delta"]["content"] for event in events_read) == "hi"


def test_without_the_option_a_stream_begins_with_its_first_token(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    settings: dict[str, object] = {"chat_template": "{{ messages[-1].content }}"}
    with host(
        tmp_path_factory.mktemp("off"), server={"stream_keepalive_s": None}, model=settings
    ) as server:
        response, answer = server.post(body_of(MESSAGES, "say hi"), MESSAGES)
        assert (response.status, answer.count(b"event: message_delta")) == (200, 1)


class OneRecord:
    """A formatter of a stream that waits."""

    is_streaming = True
    begins_early = True

    def waiting(self, status: WaitStatus, waited_s: float) -> list[bytes]:
        return [b"waiting"]


@pytest.mark.parametrize("error", [ValueError("the engine is lost"), asyncio.CancelledError()])
def test_a_request_that_ends_while_a_slow_client_reads_tells_nothing_more(
    error: BaseException,
) -> None:
    num_sent = 0

    async def tell() -> None:
        is_sending = asyncio.Event()

        async def read_slowly() -> None:
            is_sending.set()
            await asyncio.sleep(0)

        def send(records: list[bytes]) -> Awaitable[None]:
            nonlocal num_sent
            num_sent += 1
            return read_slowly()

        formatter: Any = OneRecord()
        async with EarlyStart(formatter, send, 0.01, started_s=0.0):
            await is_sending.wait()
            raise error

    async def told() -> None:
        with pytest.raises(type(error)):
            await asyncio.wait_for(tell(), 10)

        [this_task] = asyncio.all_tasks()
        assert this_task is asyncio.current_task()

    asyncio.run(told())
    assert num_sent == 1


def test_of_requests_together_the_first_token_counts_and_all_prompts() -> None:
    first_status = WaitStatus(100, 40, 10, 0, 2.5)
    second_status = WaitStatus(50, 0, 0, 3, 9.0)

    assert status_of_all([first_status, second_status]) == WaitStatus(150, 40, 10, 0, 2.5)
    assert status_of_all([first_status, WaitStatus(50)]) == WaitStatus(150, None, None, 0, 2.5)
    assert status_of_all([]) == WaitStatus()
