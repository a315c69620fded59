"""`/tokenize` and `/detokenize` over real sockets, in vLLM's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripted import CONTEXT, Host, host

USER = {"role": "user", "content": "say é"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ (tools or []) | length }}"
    template += "{% if add_generation_prompt %}!{% endif %}"
    with host(tmp_path_factory.mktemp("tokens"), model={"chat_template": template}) as served:
        yield served


def ask(server: Host, path: str, **body: Any) -> tuple[int, Any]:
    response, answer = server.post(body, path)
    return response.status, json.loads(answer)


def text_of(server: Host, **body: Any) -> str:
    """The text whose ids /tokenize gives."""
    status, answer = ask(server, "/tokenize", **body)

    assert status == 200, answer
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), CONTEXT)

    return str(ask(server, "/detokenize", tokens=answer["tokens"])[1]["prompt"])


@pytest.mark.parametrize("text", ["The capital", "é 🦙\n", "x" * 3 * CONTEXT])
def test_a_text_comes_back_from_its_ids_however_long_it_is(served: Host, text: str) -> None:
    assert text_of(served, prompt=text, add_special_tokens=False) == text


def test_the_ids_are_those_that_generation_begins_with(served: Host) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "say é"}),
        ("/v1/chat/completions", {"messages": [USER]}),
    ):
        assert served.post({**body, "max_tokens": 3}, path)[0].status == 200
        _, answer = ask(served, "/tokenize", **body)
        assert answer["tokens"] == list(served.executor.requests[-1].input_token_ids)


def test_a_chat_may_have_tools_and_no_generation_prompt(served: Host) -> None:
    assert text_of(served, messages=[USER]) == "<say é>0!"
    assert text_of(served, messages=[USER], tools=[TOOL]) == "<say é>1!", (
        "without any parser of calls"
    )
    assert text_of(served, messages=[USER], add_generation_prompt=False) == "<say é>0"


def test_the_tokens_are_spelled_if_asked(served: Host) -> None:
    assert ask(served, "/tokenize", prompt="ab")[1]["token_strs"] is None
    status, answer = ask(
        served, "/tokenize", prompt="ab", return_token_strs=True, add_special_tokens=False
    )
    assert (status, answer["token_strs"]) == (200, ["a", "b"])


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (
            "/tokenize",
            {},
            400,
            "prompt must be a non-empty string, a list of token ids, or a list of such",
        ),
        ("/tokenize", {"prompt": ["a", "b"]}, 400, "prompt must be one prompt, given '2 prompts'"),
        (
            "/tokenize",
            {"prompt": "a", "return_token_strs": 1},
            400,
            "return_token_strs must be true or false, given 1",
        ),
        (
            "/tokenize",
            {"prompt": "a", "add_special_tokens": "no"},
            400,
            "add_special_tokens must be true or false",
        ),
        ("/tokenize", {"prompt": [35187292578]}, 400, "prompt must be token ids from 0 to "),
        (
            "/tokenize",
            {"prompt": [35187292578], "return_token_strs": True},
            400,
            "prompt must be token ids from 0 to ",
        ),
        ("/tokenize", {"messages": "a"}, 400, "messages must be a non-empty list of messages"),
        (
            "/tokenize",
            {"prompt": "a" * 5_000_000},
            400,
            "prompt must be at most 4194304 characters",
        ),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "the model 'other' does not exist"),
        ("/detokenize", {}, 400, "tokens must be a list of token ids, given null"),
        ("/detokenize", {"tokens": []}, 400, "tokens must be a non-empty list of token ids"),
        ("/detokenize", {"tokens": [1, "a"]}, 400, "tokens[1] must be an integer"),
        ("/detokenize", {"tokens": [1, 10**6]}, 400, "tokens must be ids below "),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "the model 'other' does not exist"),
    ],
)
def test_what_cannot_be_read_is_refused_in_openai_s_form(
    served: Host, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    response_status, answer = ask(served, path, **body)
    assert response_status == status and said in answer["error"]["message"]


def test_a_word_of_the_template_in_a_message_is_counted_as_text(tmp_path: Path) -> None:
    with host(tmp_path, model={"chat_template": "{{ messages[0].content }}"}) as served:
        _, plain = ask(served, "/tokenize", messages=[{"role": "user", "content": "a<|end|>"}])
        assert len(plain["tokens"]) == len("a<|end|>")
