"""Each text of an answer has the log-probs of the tokens that wrote it, however the answer was cut
into parts.
"""

import json
from typing import Any

import pytest

from lmi.apis.base.body import Parsed
from lmi.apis.responses.api import RESPONSES
from lmi.apis.responses.log_probs import TextLogProbs
from lmi.settings.config import ModelConfig
from lmi.types import AnswerEnd, Delta, Token

ANSWER = ["<think>", "h", "m", "</think>He", "l", "", "lo", "<tool", "_call>", "{}", ""]


def tokens_of(texts: list[str]) -> TextLogProbs:
    tokens = TextLogProbs()
    tokens.add(
        [Token(id=n, text=text) for n, text in enumerate(texts)],
        [{"token": n} for n in range(len(texts))],
    )
    return tokens


def numbers(log_probs: list[dict[str, int]]) -> list[int]:
    return [log_prob["token"] for log_prob in log_probs]


def test_marks_and_thoughts_are_left_out_and_a_token_may_end_one_part_and_begin_the_next() -> None:
    tokens = tokens_of(ANSWER)
    behind_thought = "Hello<tool_call>{}"
    tokens.forget(len(behind_thought))
    assert numbers(tokens.take(len("Hello"), len("<tool_call>{}"))) == [3, 4, 5, 6]
    tokens.forget(0)
    assert numbers(tokens.take_ends()) == [10]


def test_a_token_whose_text_comes_in_two_pieces_is_told_once() -> None:
    tokens = tokens_of(["Hello", " you"])
    assert numbers(tokens.take(len("Hel"), len("lo you"))) == [0]
    assert numbers(tokens.take(len("lo y"), len("ou"))) == [1]
    assert numbers(tokens.take(len("ou"), 0)) == []


def test_tokens_that_are_part_of_no_text_are_forgotten() -> None:
    tokens = tokens_of(["{'a'", ": 1}"])
    tokens.forget(0)
    assert tokens.take_ends() == []


# The tokens of each answer, and the places of those that wrote its text.
MARKED: dict[str, tuple[dict[str, str], list[str], list[int]]] = {
    "a thought": (
        {"tool_call_parser": "hermes", "reasoning_parser": "think"},
        ["<think>", "i", "</think>", "\n\n", "i", "n", "k", ""],
        [4, 5, 6, 7],
    ),
    "calls": (
        {"tool_call_parser": "hermes"},
        ["call", "\n", '<tool_call>{"name": "f", "arguments": {}}', "</tool_call>", "all", ""],
        [0, 4, 5],
    ),
    "the beginning of a mark": (
        {"tool_call_parser": "hermes"},
        ["<", "<tool", "<", "!"],
        [*range(4)],
    ),
    "Harmony": (
        {"tool_call_parser": "openai", "reasoning_parser": "openai"},
        ["<|channel|>", "final", "<|message|>", "a", "g", "e", "<|end|>"],
        [3, 4, 5],
    ),
}


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize(("settings", "texts", "told"), MARKED.values(), ids=MARKED)
def test_no_mark_is_taken_for_the_text_behind_it(
    settings: dict[str, Any], texts: list[str], told: list[int], is_streaming: bool
) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    request = {
        "input": "a",
        "include": ["message.output_text.logprobs"],
        "tools": tools,
        "stream": is_streaming,
    }
    model = ModelConfig(path="demo", name="demo", **settings)
    parsed: Parsed[Any] = RESPONSES.parse(RESPONSES.read(json.dumps(request).encode(), None, model))
    formatter = RESPONSES.formatter(parsed)

    tokens = [Token(number, text, -float(number)) for number, text in enumerate(texts)]
    cuts = [[token] for token in tokens] if is_streaming else [tokens]
    records: list[bytes] = []
    for number, cut in enumerate(cuts, 1):
        end = AnswerEnd.EOS_TOKEN if number == len(cuts) else None
        records += formatter.feed(Delta(cut, end))

    answer = json.loads(records[-1].rpartition(b"data: ")[2])
    output = answer.get("response", answer)["output"]
    log_probs = [
        -log_prob["logprob"]
        for item in output
        if item["type"] == "message"
        for log_prob in item["content"][0]["logprobs"]
    ]
    assert log_probs == told
