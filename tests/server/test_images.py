"""Images in chats over real sockets: what an engine that reads them gets, and what others say."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.scripted import CAPABILITIES, Host, host

PNG = b"\x89PNG\r\n\x1a\n and the rest"
SHOWN = {
    "type": "image_url",
    "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"},
}
SOURCE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
SAY = {"type": "text", "text": "say it "}
# An image is #, but not in an order to the scripted engine to reject a field.
PARTS = (
    "{% for part in messages[-1].content %}{{ part.text if part.type == 'text' else '#' if 'say' "
    "in "
    "messages[-1].content[0].text else '' }}{% endfor %}"
)
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    able = msgspec.structs.replace(CAPABILITIES, max_images=2)
    with host(
        tmp_path_factory.mktemp("seeing"), model={"chat_template": PARTS}, capabilities=able
    ) as served:
        yield served


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("blind"), model={"chat_template": PARTS}) as served:
        yield served


def ask(server: Host, *parts: object, path: str = CHAT, **fields: object) -> tuple[int, Any]:
    messages = [{"role": "user", "content": parts}]
    response, body = server.post({"messages": messages, "max_tokens": 9, **fields}, path)
    return response.status, json.loads(body)


def test_an_engine_gets_the_files_and_a_prompt_with_their_placeholders(seeing: Host) -> None:
    status, answer = ask(seeing, SAY, SHOWN, SHOWN)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "it ##")
    assert seeing.executor.requests[-1].images == (PNG, PNG)


def test_anthropic_s_messages_show_images_in_results_of_tools_too(seeing: Host) -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [SAY, {"type": "image", "source": SOURCE}],
    }
    status, answer = ask(seeing, result, path="/v1/messages")
    assert (status, answer["content"][0]["text"]) == (200, "it #")
    assert seeing.executor.requests[-1].images == (PNG,)


def test_an_engine_that_reads_text_alone_says_so(blind: Host) -> None:
    words = (
        "messages[0].content[1] is not supported here: messages are text alone, given a part "
        "of type"
    )
    for path, part, kind in (
        (CHAT, SHOWN, "image_url"),
        ("/v1/messages", {"type": "image", "source": SOURCE}, "image"),
    ):
        status, answer = ask(blind, SAY, part, path=path)
        assert (status, answer["error"]["message"]) == (400, f"{words} '{kind}'")


def test_more_images_than_a_prompt_may_have_are_refused(seeing: Host) -> None:
    status, answer = ask(seeing, SAY, SHOWN, SHOWN, SHOWN)
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert (
        answer["error"]["message"]
        == "messages must have at most 2 images (option.limit_mm_per_prompt), given 3"
    )


def test_what_an_engine_says_of_an_image_names_its_place(seeing: Host) -> None:
    status, answer = ask(seeing, {"type": "text", "text": "reject images[1]"}, SHOWN, SHOWN)
    assert (status, answer["error"]["message"]) == (400, "messages[0].content[2] must be another")


def test_only_an_engine_counts_the_tokens_of_an_image(seeing: Host) -> None:
    status, answer = ask(
        seeing, SAY, {"type": "image", "source": SOURCE}, path="/v1/messages/count_tokens"
    )
    assert status == 400 and "an engine that reads the image knows" in answer["error"]["message"]
