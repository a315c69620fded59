"""Output formatters of every kind: how often and with what they are called, and what their text
becomes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmi.types import Token
from lmi.user_code.answer import TokenAnswer
from lmi.user_code.calls import Feed, Open
from lmi.user_code.options import UserCodeConfig
from lmi.user_code.runner import UserCode
from tests.user_code.written import model

FILES = Path(__file__).parent / "files"


def opened(
    loaded: UserCode, request_id: int = 0, prompt: str = "", request: object = None, **fields: Any
) -> TokenAnswer:
    """Open an answer that is streamed."""
    [answer] = loaded.answers(Open([prompt], fields, True, False, False), request, request_id)
    return answer


def feed(
    answer: TokenAnswer,
    tokens: list[tuple[int, str, float | None]],
    finish_reason: str | None = None,
) -> bytes:
    return answer.feed(Feed(0, [Token(*token) for token in tokens], finish_reason))


def test_a_formatter_is_called_once_for_each_token_and_told_the_last() -> None:
    formatter = opened(
        UserCode(UserCodeConfig(path=str(FILES / "formatter" / "model.py"))), 3, "prompt"
    )
    assert feed(formatter, []) == b""

    lines = feed(formatter, [(1, "a", -0.5), (2, "b", None)]).decode().splitlines()
    assert [json.loads(line)["token_text"] for line in lines] == ["a", "b"]
    assert json.loads(feed(formatter, [], "stop_sequence")) == {
        "token_id": -1,
        "token_text": "",
        "token_log_prob": None,
        "finish_reason": "stop_sequence",
    }


def test_a_formatter_that_reads_all_tokens_at_once_is_not_called_again(tmp_path: Path) -> None:
    source = """
from djl_python.output_formatter import *
@output_formatter
def write(output: RequestOutput) -> str:
    best = output.sequences[output.best_sequence_index]
    text = ""
    while best.has_next_token():
        text += best.get_next_token()[0].text
    return f"[{text}{best.cumulative_log_prob} {output.finished}]"
"""
    formatter = opened(model(tmp_path, source))
    assert feed(formatter, [(1, "a", -1.0), (2, "b", -1.0)], "length") == b"[ab-2.0 True]"


@pytest.mark.parametrize(
    ("parameter", "kind"),
    [
        ("output: TextGenerationOutput", "TextGenerationOutput"),
        ("output: djl_python.output_formatter.RequestOutput", "TextGenerationOutput"),
        ("output: 'request_io.TextGenerationOutput'", "TextGenerationOutput"),
        ("output: TextGenerationOutput, tokenizer=None", "TextGenerationOutput"),
        ("response: dict[str, object]", "Attributes"),
        ("response: 'dict'", "Attributes"),
        ("request_output", "Attributes"),
        ("response, tokenizer, request", "Attributes"),
    ],
)
def test_the_first_parameter_says_what_an_output_formatter_is_given(
    tmp_path: Path, parameter: str, kind: str
) -> None:
    source = f"""
import djl_python.output_formatter
from djl_python.output_formatter import *
def write({parameter}):
    return type({parameter.split(",")[0].split(":")[0]}).__name__
"""
    formatter = opened(model(tmp_path, source, output_formatter="write"))
    assert feed(formatter, [(1, "a", None)], "length").decode().strip() == kind


def test_a_formatter_that_reads_no_tokens_is_called_once_for_each_step(tmp_path: Path) -> None:
    source = """
from djl_python.output_formatter import RequestOutput, output_formatter
@output_formatter
def write(output: RequestOutput):
    return "end" if output.finished else None
"""
    formatter = opened(model(tmp_path, source))
    assert feed(formatter, [(1, "a", None), (2, "b", None)]) == b""
    assert feed(formatter, [(3, "c", None)], "length") == b"end"


def test_the_first_signature_is_told_by_its_parameters_and_not_by_annotations(
    tmp_path: Path,
) -> None:
    source = (
        "def write(token, first, last, details, text, id): return "
        "f'{token.id}{first}{last}{text}{id} {details}'"
    )
    formatter = opened(model(tmp_path, source, output_formatter="write"), 7, "p")
    details = "{'finish_reason': 'length', 'generated_tokens': 1, 'inputs': 'p', 'tokens': %s}"
    tokens = "[{'id': 5, 'text': 'a', 'log_prob': -1.0}]"
    assert feed(formatter, [(5, "a", -1.0)], "length").decode() == f"5TrueTruea7 {details % tokens}"
