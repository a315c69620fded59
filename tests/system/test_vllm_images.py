"""Images in chats, through the doors of three APIs to the real vLLM with a small model
that sees.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.served import Server, serve
from tests.system.container import Answer
from tests.tiny_vision import png, tiny_vision_model, transformers_answer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_TOKENS = 12
RED = png((200, 30, 10))
BLUE = png((10, 30, 200), width=32, height=32)
PROMPT = "<|user|>What is<image><|end|><|assistant|>"
EXACT = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def seeing() -> Iterator[Server]:
    settings = ("option.rolling_batch=vllm", "option.dtype=fp32", "option.max_kv_cache_tokens=4096")
    limits = (
        "frontend_workers=1",
        "option.block_size=32",
        'option.limit_mm_per_prompt={"image": 9}',
        "option.enforce_eager=true",
    )
    with serve(tiny_vision_model(), *settings, *limits) as server:
        yield server


def encoded(file: bytes) -> str:
    return base64.b64encode(file).decode()


def url(file: bytes) -> str:
    return f"data:image/png;base64,{encoded(file)}"


def asking(*files: bytes) -> list[dict[str, Any]]:
    images = [{"type": "image_url", "image_url": {"url": url(file)}} for file in files]
    return [{"role": "user", "content": [{"type": "text", "text": "What is"}, *images]}]


def chat(server: Server, messages: object, **fields: Any) -> dict[str, Any]:
    answer = server.post({"messages": messages, **EXACT, "return_token_ids": True, **fields}, CHAT)
    assert answer.status == 200, answer.body
    answer_body: dict[str, Any] = json.loads(answer.body)
    return answer_body


def refusal(answer: Answer) -> tuple[str, str]:
    assert answer.status == 400, answer.body
    error = json.loads(answer.body)["error"]
    return error["param"], error["message"]


@pytest.mark.parametrize(
    "files", [[RED], [BLUE], [BLUE, RED]], ids=["tiles", "one tile", "two images"]
)
def test_an_answer_to_images_is_that_of_transformers(seeing: Server, files: list[bytes]) -> None:
    answer_body = chat(seeing, asking(*files))
    text = PROMPT.replace("<image>", "<image>" * len(files))
    assert (
        answer_body["prompt_token_ids"],
        answer_body["choices"][0]["token_ids"],
    ) == transformers_answer(text, files, NUM_TOKENS)
    assert answer_body["usage"]["prompt_tokens"] == len(answer_body["prompt_token_ids"]), (
        "with the tokens of its images"
    )


def test_the_apis_of_chats_read_the_same_image(seeing: Server) -> None:
    answer_text = chat(seeing, asking(RED))["choices"][0]["message"]["content"]
    words = {"type": "text", "text": "What is"}
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": encoded(RED)},
    }
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": [words, image]}],
        "max_tokens": NUM_TOKENS,
    }
    answer = seeing.post(body | {"temperature": 0}, "/v1/messages")

    assert answer.status == 200 and answer_text.startswith(
        json.loads(answer.body)["content"][0]["text"]
    ), answer.body

    parts = [
        {"type": "input_text", "text": "What is"},
        {"type": "input_image", "image_url": url(RED)},
    ]
    body = {
        "input": [{"role": "user", "content": parts}],
        "max_output_tokens": NUM_TOKENS,
        "temperature": 0,
    }
    answer = seeing.post(body, "/v1/responses")

    assert answer.status == 200, answer.body
    assert answer_text.startswith(json.loads(answer.body)["output"][0]["content"][0]["text"]), (
        answer.body
    )


def test_a_template_of_parts_writes_a_chat_without_images_too(seeing: Server) -> None:
    assert chat(seeing, [{"role": "user", "content": "a"}])["usage"]["prompt_tokens"] == 4


def test_answers_to_one_image_are_drawn_apart_and_alike_with_a_seed(seeing: Server) -> None:
    drawn = [chat(seeing, asking(RED), temperature=1.0, seed=5, n=2)["choices"] for _ in range(2)]
    first, second = ([choice["token_ids"] for choice in choices] for choices in drawn)
    assert first == second and first[0] != first[1]


def test_images_of_different_salts_share_no_cache(seeing: Server) -> None:
    def num_cached(**fields: Any) -> int:
        num: int = chat(seeing, asking(RED, RED), **fields)["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        return num

    assert num_cached(cache_salt="a") == 0
    assert num_cached(cache_salt="a") > 0
    assert num_cached(cache_salt="b") == 0


def test_what_is_no_image_is_refused_by_its_place(seeing: Server) -> None:
    bomb = RED[:16] + (head := struct.pack(">II", 9_000, 8_000) + RED[24:29])
    bomb += struct.pack(">I", zlib.crc32(b"IHDR" + head)) + RED[33:]
    for files, words in (
        ([RED, RED[:60]], "must be a file of one of PNG, JPEG, GIF, WEBP that can be read"),
        (
            [RED, bomb],
            "must be of at most 16777216 pixels (the server's limit, unless VLLM_MAX_IMAGE_PIXELS "
            "is set), given '9000x8000'",
        ),
    ):
        param, message = refusal(seeing.post({"messages": asking(*files)}, CHAT))
        assert param == "messages[0].content[2]" and words in message, message

    param, message = refusal(seeing.post({"messages": asking(*[RED] * 10)}, CHAT))
    assert (
        message == "messages must have at most 9 images (option.limit_mm_per_prompt), given 10"
        and param == "messages"
    )

    remote = [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}],
        }
    ]
    param, message = refusal(seeing.post({"messages": remote}, CHAT))

    assert param == "messages[0].content[0].image_url.url" and "fetches no image" in message
    assert chat(seeing, asking(RED))["usage"]["completion_tokens"] == NUM_TOKENS, (
        "the next one is answered"
    )


def test_images_over_the_context_are_refused_with_both_numbers(seeing: Server) -> None:
    long = [{"role": "user", "content": "She sells " * 100}, *asking(*[RED] * 9)]
    _, message = refusal(seeing.post({"messages": long}, CHAT))
    assert "must be shorter than the model's context of 1024 tokens" in message, message
    assert "with those of its images" in message


def test_only_an_engine_counts_the_tokens_of_an_image(seeing: Server) -> None:
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": encoded(RED)},
    }
    answer = seeing.post(
        {"messages": [{"role": "user", "content": [image]}]}, "/v1/messages/count_tokens"
    )
    assert answer.status == 400 and b"an engine that reads the image knows" in answer.body


def test_a_prompt_that_writes_an_image_without_one_ends_no_engine(seeing: Server) -> None:
    """Such prompts ended engines of other models that see (CVE-2026-44222)."""
    ids = json.loads(seeing.post({"prompt": "<image>"}, "/tokenize").body)["tokens"]
    [image_id] = ids
    engine_pid = seeing.pid("lmi-engine")

    for prompt in ("<image>", "a<image><image>b", [image_id], [1, *[image_id] * 64]):
        answer = seeing.post({"prompt": prompt, **EXACT}, "/v1/completions")
        assert answer.status == 200, answer.body

    written = [{"role": "user", "content": [{"type": "text", "text": "<image>"}]}]
    answer = seeing.post({"messages": [*written, *asking(RED)], **EXACT}, CHAT)
    assert answer.status == 200, answer.body

    assert chat(seeing, asking(RED))["usage"]["completion_tokens"] == NUM_TOKENS
    assert seeing.pid("lmi-engine") == engine_pid, "it is the same engine"
