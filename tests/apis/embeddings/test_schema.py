"""Bodies of embeddings: what may be embedded, and what each field of OpenAI's means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lmi.apis.base.body import Parsed
from lmi.apis.embeddings.api import EMBEDDINGS
from lmi.apis.embeddings.schema import MAX_INPUTS
from lmi.errors import InvalidParameter, InvalidRequest, MalformedRequest
from lmi.executor import PoolingParams
from lmi.settings.config import ModelConfig

MODEL = ModelConfig(path="demo", name="demo")


def parse(**fields: object) -> Parsed[Any]:
    return EMBEDDINGS.parse(
        EMBEDDINGS.read(json.dumps({"input": "hi"} | fields).encode(), None, MODEL)
    )


def test_each_input_is_a_request_of_its_own() -> None:
    assert [request.prompt for request in parse(input="a").requests] == ["a"]
    assert [request.prompt for request in parse(input=["a", "b"]).requests] == ["a", "b"]
    assert [request.prompt_token_ids for request in parse(input=[1, 2]).requests] == [(1, 2)]
    assert [request.prompt_token_ids for request in parse(input=[[1, 2], [3]]).requests] == [
        (1, 2),
        (3,),
    ]
    assert parse(input=["a"] * MAX_INPUTS).num_places == MAX_INPUTS


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "input must be a non-empty string"),
        ([], "input must be a non-empty string"),
        (5, "input must be a non-empty string"),
        (["a", ""], r"input\[1\] must be a non-empty string"),
        ([1, -2], r"input\[1\] must be at least 0"),
        ([[1], [True]], r"input\[1\]\[0\] must be an integer"),
        (["a"] * (MAX_INPUTS + 1), "input must be a list of at most 2048 prompts"),
    ],
)
def test_what_cannot_be_embedded_is_refused_with_its_place(given: object, said: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{said}"):
        parse(input=given)


def test_the_request_asks_for_an_embedding_of_so_many_numbers() -> None:
    assert parse().request.pooling == PoolingParams()
    assert parse(dimensions=256).request.pooling == PoolingParams(256)
    for dimensions in (0, -1, True, 1.5, "8"):
        with pytest.raises(InvalidParameter, match="^dimensions must be"):
            parse(dimensions=dimensions)


def test_the_model_may_be_an_adapter_and_the_user_changes_nothing() -> None:
    parsed = parse(model="style", user="u-1", encoding_format="float")
    assert (parsed.request.adapter, parsed.format.model, parsed.ignored) == ("style", "style", ())
    assert not parsed.format.is_base64 and parse(encoding_format="base64").format.is_base64


@pytest.mark.parametrize(
    "name", ["messages", "truncate_prompt_tokens", "normalize", "embed_dtype", "stream"]
)
def test_a_field_that_would_change_the_answer_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported here"):
        parse(**{name: [{"role": "user"}] if name == "messages" else True})


def test_a_long_text_may_fill_the_body_and_small_values_may_not() -> None:
    assert len(parse(input=["x" * (1 << 20)] * 2).requests) == 2
    with pytest.raises(MalformedRequest, match="all but the prompt's text must have at most"):
        parse(input=[1] * (1 << 20))
