"""What `lmi chat` and `lmi complete` send, and `lmi run-batch` where a server is busy, gone, or
fails in the middle.
"""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lmi.client import talk
from tests.commands import Done, lmi
from tests.gateway.gateways import Talk, chunked, scripted, whole

WAIT_S = 0.2


def test_a_batch_asks_a_busy_server_again_when_that_says_so_and_names_one_that_is_gone(
    tmp_path: Path,
) -> None:
    def answer(talk: Talk) -> None:
        if json.loads(talk.seen.body)["prompt"] == "late" and len(asked_s) < 2:
            asked_s.append(time.monotonic())
            talk.send(
                b"HTTP/1.1 503 X\r\nConnection: close\r\nContent-Length: 2\r\nRetry-After: "
                b"%.1f\r\n\r\n{}" % WAIT_S
            )
        elif json.loads(talk.seen.body)["prompt"] == "late":
            asked_s.append(time.monotonic())
            whole(b'{"id": "1"}', 200, "Connection: close")(talk)

    asked_s: list[float] = []
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    lines = [
        {"custom_id": name, "url": "/v1/completions", "body": {"prompt": name}}
        for name in ("late", "lost")
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    with scripted(answer) as server:
        done = lmi("run-batch", "-i", str(source), "-o", str(target), "--url", server.url)

    answers = {
        answer["custom_id"]: answer for answer in map(json.loads, target.read_text().splitlines())
    }

    assert done.returncode == 1 and "1 requests have no answer of 200" in done.stderr
    assert answers["late"]["response"]["body"] == {"id": "1"} and len(asked_s) == 3
    assert all(
        after - before >= WAIT_S for before, after in zip(asked_s, asked_s[1:], strict=False)
    )
    assert answers["lost"]["response"] is None and answers["lost"]["error"]["code"] == "server_lost"


def test_a_batch_goes_on_after_the_page_of_a_proxy_and_after_a_date_at_which_to_ask_again(
    tmp_path: Path,
) -> None:
    def answer(talk: Talk) -> None:
        is_late = json.loads(talk.seen.body)["prompt"] == "late"
        late_calls.append(is_late)
        if is_late and late_calls.count(True) == 1:
            whole(b"", 503, "Connection: close", "Retry-After: Fri, 31 Dec 1999 23:59:59 GMT")(talk)
        else:
            whole(
                b'{"id": "1"}' if is_late else b"<h1>Bad gateway</h1>",
                200 if is_late else 502,
                "Connection: close",
            )(talk)

    late_calls: list[bool] = []
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    lines = [
        {"custom_id": name, "url": "/v1/completions", "body": {"prompt": name}}
        for name in ("late", "page")
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    with scripted(answer) as server:
        lmi("run-batch", "-i", str(source), "-o", str(target), "--url", server.url)

    answers = {
        answer["custom_id"]: answer["response"]
        for answer in map(json.loads, target.read_text().splitlines())
    }

    assert (answers["late"]["status_code"], answers["page"]["status_code"]) == (200, 502)
    assert answers["page"]["body"] == {"error": "<h1>Bad gateway</h1>"}


def test_a_batch_waits_for_a_silent_server_as_long_as_it_is_told(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}
    source.write_text(json.dumps(line))
    is_over = threading.Event()

    # Half an answer, and then nothing.
    def answer(talk: Talk) -> None:
        talk.send(b"HTTP/1.1 200 X\r\nContent-Length: 20\r\n\r\n{")
        is_over.wait(60)

    with scripted(answer) as server:
        files = ("-i", str(source), "-o", str(target))
        done = lmi("run-batch", *files, "--url", server.url, "--timeout", "0.5")
        is_over.set()

    error = json.loads(target.read_text())["error"]
    assert done.returncode == 1
    assert error["code"] == "timeout"
    assert error["message"] == "no whole answer in 0.5 s, as --timeout allows"


def test_a_batch_of_windows_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}
    source.write_text(json.dumps(line) + "\r\n", encoding="utf-8-sig")
    with scripted(whole(b'{"id": "1"}', 200, "Connection: close")) as server:
        lmi("run-batch", "-i", str(source), "-o", str(target), "--url", server.url)

    assert json.loads(target.read_text())["response"]["body"] == {"id": "1"}


def test_a_server_that_fails_in_the_middle_of_an_answer_is_an_error_after_what_it_said() -> None:
    events = (
        b'data: {"choices": [{"text": "The"}]}\n\n',
        b'data: {"error": {"message": "it broke"}}\n\n',
    )
    with scripted(chunked(*events)) as server:
        done = lmi("complete", "--url", server.url, "--model", "any", "-q", "fox")

    assert (done.returncode, done.stdout.strip()) == (1, "The") and "it broke" in done.stderr


def test_a_person_sees_the_place_in_the_queue_the_progress_of_the_prompt_and_the_time() -> None:
    progress = {"total": 200, "cache": 0, "processed": 90, "time_ms": 10_000}
    queued = {"queue_position": 3, "estimated_wait_seconds": 19.6}
    running = {"queue_position": 0, "estimated_wait_seconds": None}
    chunks: list[dict[str, Any]] = [
        {"choices": [], "prompt_progress": progress | {"processed": 0}, "queue_status": queued},
        {"choices": [], "prompt_progress": progress, "queue_status": running},
        {"choices": [{"delta": {"content": "yes"}}]},
    ]
    events = [b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks]
    with scripted(chunked(*events)) as server:
        done = lmi("chat", "--url", server.url, "--model", "any", "-q", "fox")

    assert done.stdout.strip() == "yes"
    assert done.stderr.splitlines() == [
        "waiting: place 3, about 20 s",
        "waiting: 45% of the prompt",
    ]


# The server takes one request on a connection, and a client that kept it would meet its end.
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\n\r\n"


def typed(
    monkeypatch: pytest.MonkeyPatch, text: str, *words: str
) -> tuple[Done, list[dict[str, Any]]]:
    """What a command prints for a typed text, and the bodies that it sends. The server says `yes`
    to everything.
    """
    bodies: list[dict[str, Any]] = []

    def answer(talk: Talk) -> None:
        bodies.append(json.loads(talk.seen.body))
        event = {"choices": [{"delta": {"content": "yes"}, "text": "yes"}]}
        talk.send(CLOSING + b"data: %b\n\n" % json.dumps(event).encode())

    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    with scripted(answer) as server:
        done = lmi(*words, "--url", server.url, "--model", "any")

    return done, bodies


def said_by_user(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"] if message["role"] == "user"]


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_what_a_request_says_of_sampling_is_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    names = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 7}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in names.items()]
    done, [body] = typed(monkeypatch, "", command, "-q", "fox", *flags)

    assert (done.returncode, done.stdout) == (0, "yes\n")
    assert {name: body[name] for name in names} == names

    _, [body] = typed(monkeypatch, "", command, "-q", "fox")
    assert body.keys() & names.keys() == ({"max_tokens"} if command == "complete" else set())


def test_a_text_of_several_lines_stands_between_quotes_and_a_quoted_word_is_no_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = 'one\n"""two\n  three\n"""\n"""/bye"""\n"""four\nfive'
    done, bodies = typed(monkeypatch, text, "chat")
    assert said_by_user(bodies[-1]) == ["one", "two\n  three", "/bye", "four\nfive"]
    assert done.stdout == 4 * "yes\n"


def test_help_is_shown_and_a_conversation_is_forgotten_and_ended_by_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done, bodies = typed(
        monkeypatch,
        "one\n/help\n/clear\ntwo\n/bye\nthree\n",
        "chat",
        "--system-prompt",
        "Be brief.",
    )

    assert [said_by_user(body) for body in bodies] == [["one"], ["two"]]
    assert all(body["messages"][0] == {"role": "system", "content": "Be brief."} for body in bodies)
    assert done.stdout == f"yes\n{talk.HELP}\nyes\n"
    assert typed(monkeypatch, "/help\n/clear\n/bye\n", "complete") == (
        (0, f"{talk.HELP}\n", ""),
        [],
    )
