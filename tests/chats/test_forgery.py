"""Content that spells special tokens: they stay text, whatever a template does, and a template's
own stay special.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lmi.chats.prompts import MARK, Forgery
from lmi.chats.template import ChatTemplate
from lmi.errors import ModelUnusable
from lmi.text.tokenizer import Tokenizer
from lmi.types import Chat
from tests.scripted import host

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor "
    "%}"
    "<|im_start|>assistant"
)
PARTS = "{% for part in messages %}{{ part.content }}{% endfor %}"
SPELLED = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_st",
    "art|>",
    "<",
    "|>",
    "a b",
    " ",
    "\n",
    MARK,
    "é",
)


def tokens_of(tokenizer: Tokenizer, template: str, contents: list[str]) -> tuple[str, list[int]]:
    """The text of a chat and its token ids."""
    texts = [text for text, _ in tokenizer.special_texts.values()]
    forgery = Forgery(texts)
    messages: list[dict[str, Any]] = [{"role": "user", "content": content} for content in contents]
    marked = ChatTemplate({"default": template}, {}).render(Chat(messages=forgery.mark(messages)))
    text, places = forgery.unmark(marked)
    assert text == ChatTemplate({"default": template}, {}).render(Chat(messages=messages)), (
        "the text is the one without marks"
    )
    return text, tokenizer.encode(text, add_special_tokens=False, forged=places)


def num_special(tokenizer: Tokenizer, ids: list[int]) -> int:
    return sum(token_id in tokenizer.special_ids for token_id in ids)


@given(
    st.lists(st.lists(st.sampled_from(SPELLED), max_size=6).map("".join), min_size=1, max_size=4)
)
def test_only_a_template_writes_special_tokens(byte_level: Tokenizer, contents: list[str]) -> None:
    text, ids = tokens_of(byte_level, CHATML, contents)
    assert num_special(byte_level, ids) == 2 * len(contents) + 1
    assert byte_level.decode(ids) == text
    text, ids = tokens_of(byte_level, PARTS, contents)
    assert num_special(byte_level, ids) == 0, "not even where two contents meet"
    assert byte_level.decode(ids) == text


def test_a_message_that_is_continued_forges_nothing_at_its_end(byte_level: Tokenizer) -> None:
    forgery = Forgery(text for text, _ in byte_level.special_texts.values())
    marked = forgery.mark([{"role": "assistant", "content": "a<|im_end|>b <"}])
    text, places = forgery.unmark(
        ChatTemplate({"default": PARTS}, {}).render(
            Chat(messages=marked, continue_final_message=True)
        )
    )
    ids = byte_level.encode(text, add_special_tokens=False, forged=places)

    assert (
        text == "a<|im_end|>b <"
        and num_special(byte_level, ids) == 0
        and byte_level.decode(ids) == text
    )


@pytest.mark.parametrize("content", ["Hello there.", "a < b", "<tool>", "1 <| 2 |>"])
def test_content_without_special_tokens_has_the_ids_that_it_had(
    byte_level: Tokenizer, content: str
) -> None:
    text, ids = tokens_of(byte_level, CHATML, [content])
    assert ids == byte_level.encode(text, add_special_tokens=False)


def test_a_special_token_in_content_has_the_ids_of_its_text(sentencepiece: Tokenizer) -> None:
    template = "<s>{{ messages[0].content }}</s>"
    text, ids = tokens_of(sentencepiece, template, ["over </s> the"])
    assert num_special(sentencepiece, ids) == 2 and ids[-1] == 2
    assert text == "<s>over </s> the</s>"
    assert sentencepiece.decode(ids[1:-1]) == "over </s>  the", (
        "this kind puts a space before each piece of text"
    )


def test_names_and_arguments_of_tools_are_content_too() -> None:
    forgery = Forgery(["<s>"])
    value = {"parameters": {"<s>": [{"type": "x<s>"}, 1, None, True]}}
    assert forgery.mark(value) == {
        "parameters": {f"<{MARK}s>": [{"type": f"x<{MARK}s>"}, 1, None, True]}
    }
    assert Forgery([]).mark(value) is value


@pytest.mark.parametrize("field", ["chat_template_kwargs", "tools"])
def test_values_that_lie_too_deep_are_refused_by_the_name_of_their_field(
    field: str, tmp_path: Path
) -> None:
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"a": deep}

    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with host(tmp_path, model={"chat_template": "{{ messages[0]['content'] }}"}) as lmi:
        body = {
            "messages": [{"role": "user", "content": "say a"}],
            field: [tool] if field == "tools" else deep,
        }
        response, answer = lmi.post(body, "/v1/chat/completions")

    assert response.status == 400 and b"of fewer levels" in answer and field.encode() in answer


def test_a_long_special_token_is_refused() -> None:
    Forgery(["x" * 256])
    with pytest.raises(
        ModelUnusable, match="at most 256 characters where chats are written: one has 257"
    ):
        Forgery(["x" * 257])


@pytest.mark.parametrize(("is_special", "num_ends"), [(False, 1), (True, 2)])
def test_a_user_cannot_end_a_message_unless_the_option_says_so(
    is_special: bool, num_ends: int, tmp_path: Path
) -> None:
    model = {
        "chat_template": "{{ messages[0]['content'] }}<end>",
        "special_tokens_in_content": is_special,
    }
    with host(tmp_path, model=model) as lmi:
        body = {"messages": [{"role": "user", "content": "say a<end>b"}], "max_tokens": 3}
        assert lmi.post(body, "/v1/chat/completions")[0].status == 200

        ids = lmi.executor.requests[-1].input_token_ids
        assert ids.count(256) == num_ends

        lmi.post({"inputs": "say a<end>", "parameters": {"max_new_tokens": 1}})
        assert lmi.executor.requests[-1].input_token_ids[-1] == 256, (
            "an input is written by who knows the tokens"
        )
