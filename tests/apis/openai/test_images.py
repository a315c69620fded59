"""What is read of an image in a chat, and what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from lmi.apis.openai import chat_schema
from lmi.errors import InvalidRequest
from lmi.settings.config import ModelConfig
from lmi.types import Chat, Image

PNG = b"\x89PNG\r\n\x1a\n and the rest"
GIF = b"GIF89a and the rest"
PLACE = "messages[0].content[1]"


def url(file: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


def chat(*parts: object, role: str = "user") -> Chat:
    body = {
        "messages": [
            {"role": role, "tool_call_id": "c", "content": [{"type": "text", "text": "a"}, *parts]}
        ]
    }
    message = chat_schema.read(
        json.dumps(body).encode(), None, ModelConfig(path="demo", name="demo")
    )
    parsed = chat_schema.parse(message)
    request_chat = parsed.request.chat

    assert request_chat is not None
    assert parsed.format.field_names == {
        f"images[{n}]": image.place for n, image in enumerate(request_chat.images)
    }

    return request_chat


@pytest.mark.parametrize("role", ["user", "tool"])
def test_texts_and_images_keep_their_order(role: str) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": url(PNG), "detail": "low"}},
        {"type": "text", "text": "b"},
        {"type": "input_image", "image_url": url(GIF, "image/gif")},
    ]
    images = Image(PNG, PLACE, "image_url"), Image(GIF, "messages[0].content[3]", "input_image")
    request_chat = chat(*parts, role=role)
    assert request_chat.messages[0]["content"] == ["a", images[0], "b", images[1]]
    assert request_chat.images == list(images)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            {"image_url": {"url": "https://example.com/a.png"}},
            f"{PLACE}.image_url.url is not supported here: this server",
        ),
        ({"image_url": {"url": "file:///etc/passwd"}}, "fetches no image"),
        ({"image_url": {"url": 5}}, f"{PLACE}.image_url.url must be a data URL, given 5"),
        ({"image_url": {"url": "data:image/png,abc"}}, "in base64, given 'data:image/png'"),
        (
            {"image_url": {"url": url(PNG, "image/svg+xml")}},
            "must be a data URL of one of image/png, image/jpeg,",
        ),
        (
            {"image_url": {"url": "data:image/png;base64,a?b="}},
            f"{PLACE}.image_url.url must be base64 (",
        ),
        ({"image_url": {"url": "data:image/png;base64,é"}}, "must be base64 ("),
        (
            {"image_url": {"url": url(b"<svg/>")}},
            "must be a file of one of image/png, image/jpeg, image/gif, image/webp",
        ),
        ({"image_url": url(PNG)[:-2]}, f"{PLACE}.image_url must be base64 ("),
        (
            {"type": "input_image", "file_id": "f"},
            f"{PLACE}.file_id is not supported here: no files are stored here",
        ),
        (
            {"type": "image", "source": {"type": "url", "url": "http://a"}},
            f"{PLACE}.source.type is not supported here",
        ),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "a", "data": ""}},
            f"{PLACE}.source.media_type",
        ),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png"}},
            f"{PLACE}.source.data must be",
        ),
    ],
)
def test_what_is_no_image_is_refused_by_its_place(part: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat({"type": "image_url", **part})

    assert words in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_a_user_and_a_tool_show_images(role: str) -> None:
    with pytest.raises(
        InvalidRequest, match="messages are text alone, given a part of type 'image_url'"
    ):
        chat({"type": "image_url", "image_url": {"url": url(PNG)}}, role=role)


@pytest.mark.parametrize("part", ["image_url", "input_image", "image"])
def test_an_image_of_megabytes_is_no_heap_of_small_values(part: str) -> None:
    file = PNG + bytes(3 << 20)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file).decode()}
    picture = {"image_url": {"url": url(file)}, "input_image": url(file), "image": source}[part]
    assert (
        chat({"type": part, "source" if part == "image" else "image_url": picture}).images[0].data
        == file
    )
