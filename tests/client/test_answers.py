"""Commands that ask a server which answers in another form, without an end, or tells them to wait
for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lmi.client import answers
from tests.commands import Done, lmi
from tests.gateway.gateways import Script, Talk, chunked, scripted, whole

CLOSE = "Connection: close"
MAX_BYTES = 200_000


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_ANSWER_BYTES", "MAX_LINE_BYTES", "MAX_ERROR_BYTES"):
        monkeypatch.setattr(answers, name, MAX_BYTES)


def endless(status: int = 200, piece: bytes = b"x" * 1000) -> Script:
    """An answer that goes on until its client leaves."""

    def answer(talk: Talk) -> None:
        talk.send(b"HTTP/1.1 %d X\r\nConnection: close\r\n\r\n" % status)
        with suppress(ConnectionError):
            while True:
                talk.send(piece)

    return answer


def refused_in_one_line(done: Done, *words: str) -> None:
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and len(done.stderr) < 1000, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{}", "no list of models"),
        (b"<html><h1>Welcome</h1>\n</html>", "not JSON"),
        (b"[1]", "no JSON object"),
        (b'{"data": []}', "no list of models"),
        (b'{"data": [7]}', "a model is no JSON object: 7"),
        (b'{"data": [{"id": 7}]}', "the id of one is 7"),
        (b'{"data": ' + b"[" * 5000, "not JSON"),
        (b"\xff\x00", "not JSON"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_list_of_models_in_another_form_is_one_line(command: str, body: bytes, said: str) -> None:
    with scripted(whole(body, 200, CLOSE)) as server:
        refused_in_one_line(
            lmi(command, "--url", server.url, "-q", "fox"), said, "does not answer as OpenAI's API"
        )


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ('{"x": 1}', "choices is no list"),
        ("[1, 2]", "no JSON object"),
        ("7", "no JSON object"),
        ("{", "not JSON"),
        ('{"choices": [7]}', "a choice is no JSON object: 7"),
        ('{"choices": [{}]}', ""),
        ('{"choices": [{"delta": {"content": 7}, "text": 7}]}', "is no text: 7"),
        ('{"error": {"message": "' + "it broke " * 1000 + '"}}', "it broke"),
        ('{"error": ["it broke"]}', "it broke"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_an_event_in_another_form_ends_an_answer_in_one_line(
    command: str, event: str, said: str
) -> None:
    with scripted(chunked(f"data: {event}\n\n".encode())) as server:
        done = lmi(command, "--url", server.url, "--model", "any", "-q", "fox")

    if said:
        refused_in_one_line(done, said)
    else:
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "fields", [{"queue_status": 7}, {"prompt_progress": {"total": "a"}}, {"queue_status": []}]
)
def test_progress_in_another_form_is_not_shown(fields: dict[str, Any]) -> None:
    events = [{"choices": [], **fields}, {"choices": [{"delta": {"content": "yes"}}]}]
    with scripted(
        chunked(*(f"data: {json.dumps(event)}\n\n".encode() for event in events))
    ) as server:
        assert lmi("chat", "--url", server.url, "--model", "any", "-q", "fox") == (0, "yes\n", "")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (endless(), []),
        (endless(), ["--model", "any"]),
        (endless(500), ["--model", "any"]),
        (endless(piece=b'data: {"choices": [{"delta": {}}]}\n'), ["--model", "any"]),
    ],
    ids=["list of models", "line", "error", "events"],
)
def test_a_chat_does_not_read_an_answer_without_an_end(script: Script, words: list[str]) -> None:
    with scripted(script) as server:
        refused_in_one_line(lmi("chat", "--url", server.url, "-q", "fox", *words))


def test_a_server_that_is_lost_in_the_middle_of_an_answer_is_one_line() -> None:
    event = b'data: {"choices": [{"text": "The"}]}\n\n'

    def answer(talk: Talk) -> None:
        chunked(event, end=b"")(talk)
        talk.close_connection = True

    with scripted(answer) as server:
        done = lmi("complete", "--url", server.url, "--model", "any", "-q", "fox")

    refused_in_one_line(done, "no server answers")
    assert done.stdout.startswith("The")


def batch(
    tmp_path: Path, lines: list[Any], script: Script
) -> tuple[Done, dict[Any, dict[str, Any]]]:
    """What `lmi run-batch` says, and its answers by the ids of the lines."""
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    with scripted(script) as server:
        done = lmi(
            "run-batch",
            "-i",
            str(source),
            "-o",
            str(target),
            "--url",
            server.url,
            "--concurrency",
            "1",
        )

    answers = [json.loads(line) for line in target.read_text().splitlines()]
    return done, {answer["custom_id"]: answer for answer in answers}


def line(name: str, body: Any = None) -> dict[str, Any]:
    return {"custom_id": name, "url": "/v1/completions", "body": {} if body is None else body}


def test_a_batch_goes_on_after_a_line_that_is_no_request(tmp_path: Path) -> None:
    lines = [line("a"), line("b", [1]), line("c", "x"), 7, [], {"custom_id": "d"}, line("e")]
    done, answers = batch(tmp_path, lines, whole(b'{"id": 1}', 200, CLOSE))

    assert {name for name, answer in answers.items() if answer["response"]} == {"a", "e"}
    assert answers["b"]["error"] == {
        "code": "invalid_request",
        "message": "line 2: body=a list of 1: must be an object",
    }
    assert "line 3: body='x': must be an object" in answers["c"]["error"]["message"]
    assert "line 6: not a request with custom_id, url and body" in answers["d"]["error"]["message"]
    assert None in answers, "a line that has no custom_id"
    assert done.returncode == 1 and done.stderr.startswith("lmi: line 2: ")
    assert len(done.stderr.splitlines()) == 2, "the first fault, and how many there are"


@pytest.mark.parametrize(
    "asked",
    ["inf", "1e9", "99999999999999999999999"],
)
def test_a_batch_waits_no_longer_than_its_bound_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(answers, "MAX_PAUSE_S", 0.01)
    done, batch_answers = batch(
        tmp_path, [line("a")], whole(b"{}", 503, CLOSE, f"Retry-After: {asked}")
    )
    assert batch_answers["a"]["response"]["status_code"] == 503
    first, _ = done.stderr.splitlines()
    assert first == f"lmi: the server says Retry-After: '{asked}'; asking again after 0.01 s"


@pytest.mark.parametrize(
    ("asked", "pause_s"),
    [
        ("0.5", 0.5),
        ("-3", 0.0),
        ("nan", 1.0),
        ("-inf", 0.0),
        ("Fri, 31 Dec 1999 23:59:59 GMT", 1.0),
        ("61", 60.0),
    ],
)
def test_a_pause_is_a_number_of_seconds_from_none_to_a_minute(asked: str, pause_s: float) -> None:
    assert answers.pause_of({"Retry-After": asked})[0] == pause_s
    assert answers.pause_of({}) == (1.0, "")


def test_a_batch_does_not_read_an_answer_without_an_end(tmp_path: Path) -> None:
    statuses = iter((200, 500))

    def answer(talk: Talk) -> None:
        endless(next(statuses))(talk)

    done, answers = batch(tmp_path, [line("a"), line("b")], answer)
    assert (
        answers["a"]["error"]["code"] == "invalid_answer"
        and "over" in answers["a"]["error"]["message"]
    )
    assert answers["b"]["response"]["body"] == {"error": "x" * MAX_BYTES}
    assert done.returncode == 1


@pytest.mark.parametrize(
    "script",
    [
        endless(),
        endless(piece=b'data: {"token": {"text": "a"}}\n\n'),
        chunked(b'data: {"token": 7}\n\n'),
        chunked(b'data: {"token": {"text": "a"}, "details": 7}\n\n'),
    ],
    ids=["line", "events", "token", "details"],
)
def test_a_load_counts_an_answer_of_another_form_as_broken(tmp_path: Path, script: Script) -> None:
    file = tmp_path / "found.json"
    words = (
        "--dialect",
        "tgi",
        "--requests",
        "1",
        "--streams",
        "1",
        "--warmup",
        "0",
        "--json",
        str(file),
    )

    def answer(talk: Talk) -> None:
        script(talk)
        talk.close_connection = True

    with scripted(answer) as server:
        done = lmi("bench", server.url, *words)

    [report] = json.loads(file.read_text())["servers"]
    assert done.returncode == 1 and report["total"]["outcomes"] == {"broken": 1}


@pytest.mark.parametrize("make", [endless, lambda: whole(b"{}", 200, CLOSE)])
def test_a_load_of_a_server_without_a_list_of_models_asks_for_the_name(
    make: Callable[[], Script],
) -> None:
    with scripted(make()) as server:
        refused_in_one_line(lmi("bench", server.url), "no list at /v1/models", "name a --model")


def test_lines_are_cut_wherever_the_pieces_end() -> None:
    text = b"one\r\ntwo\n\nlast"
    for size in range(1, len(text) + 1):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert list(answers.lines_of(pieces)) == [b"one", b"two", b"", b"last"]
