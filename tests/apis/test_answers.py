"""Eleven ways in which clients of SageMaker's notebooks read an answer, held against our bytes.

Each reader is a generator of texts over the pieces that a client receives. Readers with a buffer
get the bytes cut anywhere; readers without one get one record in each piece, as we write them.
"""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from lmi.apis.base.api import AnyApi
from lmi.apis.table import APIS
from lmi.errors import GenerationFailed
from lmi.settings.config import ModelConfig
from lmi.types import AnswerEnd, Delta, Token

NUM_CUTS = 200
TEXT = 'He said: "Zoë" {\u2028data: 1}\n\nand left. '
MODEL = ModelConfig(path="demo", name="demo")
TGI = ModelConfig(path="demo", name="demo", tgi_compat=True)
LMI = APIS["lmi"]
LMI_EVENTS = LMI.for_accept("text/event-stream")
CHAT_LINES = APIS["openai_chat_lines"]
CHAT = APIS["openai_chat"]
CHAT_EVENTS = CHAT_LINES.for_accept("text/event-stream")
MESSAGES = [{"role": "user", "content": "Hi"}]

Reader = Callable[[Iterable[bytes]], Iterator[str]]


def written(
    api: AnyApi, body: dict[str, Any], model: ModelConfig = MODEL, *, fails: bool = False
) -> list[bytes]:
    """The pieces that a route writes for an answer of TEXT, or for one that fails after TEXT."""
    message = api.read(json.dumps(body).encode(), None, model)
    formatter = api.formatter(api.parse(message))
    pieces = [TEXT[n : n + 3] for n in range(0, len(TEXT), 3)]
    deltas = [Delta([Token(n, piece, -0.5)], prompt="Hi") for n, piece in enumerate(pieces)]
    if not fails:
        deltas.append(
            Delta([Token(2, "", -0.5, is_special=True)], AnswerEnd.EOS_TOKEN, prompt="Hi")
        )

    records = [record for delta in deltas for record in formatter.feed(delta)]
    if fails:
        records.append(
            api.errors.render(GenerationFailed("no"), message.format, accepted=True).body
        )

    return (
        records if formatter.is_streaming else [api.whole(formatter.media_type, b"".join(records))]
    )


def cuts(records: list[bytes]) -> Iterator[list[bytes]]:
    """The bytes as they are written, then cut at random."""
    yield records
    body = b"".join(records)
    dice = random.Random(7)
    for _ in range(NUM_CUTS):
        places = [0, *sorted(dice.choices(range(len(body)), k=dice.randint(0, 40))), len(body)]
        yield [
            body[start:end] for start, end in zip(places, places[1:], strict=False) if start < end
        ]


def by_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """AWS's LineIterator. At the end of the stream it looks again for a newline, so leftover bytes
    must have one.
    """
    buffer = b""
    for piece in pieces:
        buffer += piece
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            yield line

    if buffer:
        pytest.fail(f"the client would wait for ever behind {buffer!r}")


def shown(fields: dict[str, Any]) -> str:
    """The text of one record of the LMI schema."""
    return fields["token"]["text"] if fields["token"]["id"] >= 0 else f"[{fields['error']}]"


def lmi_from_the_brace_on(pieces: Iterable[bytes]) -> Iterator[str]:
    for line in by_lines(pieces):
        if b"{" in line:
            yield shown(json.loads(line[line.find(b"{") :]))


def lmi_each_line(pieces: Iterable[bytes]) -> Iterator[str]:
    for line in by_lines(pieces):
        yield shown(json.loads(line))


def lmi_each_data_line(pieces: Iterable[bytes]) -> Iterator[str]:
    for piece in pieces:
        for line in piece.decode().strip("\n").split("\n"):
            if line.startswith("data:"):
                yield shown(json.loads(line[len("data:") :]))


def chat_from_the_brace_on(pieces: Iterable[bytes]) -> Iterator[str]:
    for line in by_lines(pieces):
        if b"{" in line:
            yield json.loads(line[line.find(b"{") :])["choices"][0]["delta"].get("content", "")


def chat_with_a_buffer(pieces: Iterable[bytes]) -> Iterator[str]:
    buffer = ""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for piece in pieces:
        *lines, buffer = (buffer + decoder.decode(piece)).splitlines(keepends=True) or [""]
        if buffer.endswith("\n"):
            lines, buffer = [*lines, buffer], ""

        for line in lines:
            data = line.removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield json.loads(data)["choices"][0]["delta"].get("content") or ""

    assert not buffer


def chat_one_piece_one_object(pieces: Iterable[bytes]) -> Iterator[str]:
    for piece in pieces:
        data = piece.decode().removeprefix("data: ").strip()
        if data != "[DONE]":
            yield json.loads(data)["choices"][0]["delta"].get("content", "")


def chat_lines_that_are_json(pieces: Iterable[bytes]) -> Iterator[str]:
    for line in by_lines(pieces):
        try:
            chunk = json.loads(line)
        except json.JSONDecodeError:
            continue

        yield chunk["choices"][0]["delta"].get("content", "")


def chat_content_of_every_delta(pieces: Iterable[bytes]) -> Iterator[str]:
    for line in by_lines(pieces):
        if b"{" in line:
            yield json.loads(line[line.find(b"{") :])["choices"][0]["delta"]["content"]


def whole_by_lines(pieces: Iterable[bytes]) -> Iterator[str]:
    for line in by_lines(pieces):
        answer = json.loads(line)
        answer = answer[0] if isinstance(answer, list) else answer
        yield (
            answer["choices"][0]["message"]["content"]
            if "choices" in answer
            else answer["generated_text"]
        )


def whole_object(pieces: Iterable[bytes]) -> Iterator[str]:
    yield json.loads(b"".join(pieces))["generated_text"]


def whole_list(pieces: Iterable[bytes]) -> Iterator[str]:
    yield json.loads(b"".join(pieces))[0]["generated_text"]


STREAM = {"inputs": "Hi", "stream": True, "parameters": {}}
DETAILED = {**STREAM, "parameters": {"details": True}}
TALK = {"messages": MESSAGES, "stream": True}
LINES = (LMI, STREAM, MODEL)
EVENTS = (LMI_EVENTS, STREAM, MODEL)
LINES_DETAILED = (LMI, DETAILED, MODEL)
EVENTS_TGI = (LMI, STREAM, TGI)
CHATS = [(CHAT_LINES, TALK, MODEL), (CHAT_EVENTS, TALK, MODEL), (CHAT, TALK, MODEL)]
WHOLE = (LMI, {"inputs": "Hi"}, MODEL)
WHOLE_TGI = (LMI, {"inputs": "Hi"}, TGI)
WHOLE_CHAT = (CHAT_LINES, {"messages": MESSAGES}, MODEL)
Asked = tuple[AnyApi, dict[str, Any], ModelConfig]

BUFFERED: list[tuple[Reader, list[Asked]]] = [
    (lmi_from_the_brace_on, [LINES, LINES_DETAILED, EVENTS, EVENTS_TGI]),
    (lmi_each_line, [LINES, LINES_DETAILED]),
    (chat_from_the_brace_on, CHATS),
    (chat_with_a_buffer, CHATS),
    (chat_lines_that_are_json, CHATS[:1]),
    (chat_content_of_every_delta, CHATS),
    (whole_by_lines, [WHOLE, WHOLE_TGI, WHOLE_CHAT]),
    (whole_object, [WHOLE]),
    (whole_list, [WHOLE_TGI]),
]
UNBUFFERED: list[tuple[Reader, list[Asked]]] = [
    (lmi_each_data_line, [EVENTS, EVENTS_TGI]),
    (chat_one_piece_one_object, CHATS),
]


def each(table: list[tuple[Reader, list[Asked]]]) -> list[Any]:
    return [
        pytest.param(reader, body, id=f"{reader.__name__}-{n}")
        for reader, all_asked in table
        for n, body in enumerate(all_asked)
    ]


@pytest.mark.parametrize(("reader", "asked"), each(BUFFERED))
def test_a_reader_with_a_buffer_gets_the_text_however_it_is_cut(
    reader: Reader, asked: Asked
) -> None:
    for pieces in cuts(written(*asked)):
        assert "".join(reader(pieces)) == TEXT


@pytest.mark.parametrize(("reader", "asked"), each(UNBUFFERED))
def test_a_reader_without_a_buffer_gets_the_text_as_we_write_it(
    reader: Reader, asked: Asked
) -> None:
    assert "".join(reader(written(*asked))) == TEXT


@pytest.mark.parametrize("asked", [LINES, LINES_DETAILED, EVENTS, EVENTS_TGI])
def test_an_error_in_a_stream_reaches_the_readers_of_lines(asked: Asked) -> None:
    for pieces in cuts(written(*asked, fails=True)):
        assert "".join(lmi_from_the_brace_on(pieces)) == f"{TEXT}[no]"


@pytest.mark.parametrize("asked", CHATS)
def test_an_error_in_a_chat_is_a_record_of_its_own(asked: Asked) -> None:
    *_, last = (
        line for line in by_lines(written(*asked, fails=True)) if line and b"[DONE]" not in line
    )
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "no"
