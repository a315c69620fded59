"""The dynamic-batch schema: a request for each input, with the parameters of the rolling-batch
schema.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lmi.apis import batch as dynamic_batch
from lmi.apis.base.body import MAX_VALUES_BYTES, Parsed
from lmi.apis.lmi import schema as lmi
from lmi.errors import InvalidRequest, MalformedRequest
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat, OutputFormat

MODEL = ModelConfig(path="demo", name="demo", dynamic_batch=True)
STREAMING = ModelConfig(path="demo", name="demo", dynamic_batch=True, enable_streaming=True)


def _parse(body: dict[str, Any], model: ModelConfig = MODEL) -> Parsed[AnswerFormat]:
    return dynamic_batch.parse(dynamic_batch.read(json.dumps(body).encode(), None, model))


@pytest.mark.parametrize("inputs", ["a", ["a"], ["a", "b", "a"]])
def test_each_input_is_the_request_that_the_rolling_batch_schema_makes_of_it(
    inputs: str | list[str],
) -> None:
    parameters = {
        "do_sample": True,
        "top_k": 5,
        "seed": 3,
        "stop_sequences": ["x"],
        "return_full_text": True,
    }
    parsed = _parse({"inputs": inputs, "parameters": parameters})
    texts = [inputs] if isinstance(inputs, str) else inputs
    rolling = ModelConfig(path="demo", name="demo")
    for text, request in zip(texts, parsed.requests, strict=True):
        alone = json.dumps({"inputs": text, "parameters": parameters}).encode()
        assert request == lmi.parse(lmi.read(alone, None, rolling)).request


def test_thirty_tokens_are_generated_greedily_and_nobody_asks_for_log_probs() -> None:
    for model, is_streaming in ((MODEL, False), (STREAMING, True)):
        request = _parse({"inputs": "a", "parameters": None}, model).request
        assert (request.max_new_tokens, request.sampling.temperature) == (30, 0.0)
        assert (request.is_streaming, request.needs_log_probs) == (is_streaming, False)


def test_what_belongs_into_details_is_checked_and_has_no_effect() -> None:
    parameters = {
        "details": True,
        "logprobs": 3,
        "output_formatter": "sse",
        "decoder_input_details": True,
    }
    parsed = _parse({"inputs": ["a", "b"], "parameters": parameters, "stream": True})
    request = parsed.requests[0]

    assert (request.needs_log_probs, request.num_top_log_probs, request.prefill_details) == (
        False,
        None,
        False,
    )
    assert request.is_streaming is False
    assert parsed.ignored == (
        "parameters.details: no effect with option.rolling_batch=disable",
        "parameters.output_formatter: no effect with option.rolling_batch=disable",
        "stream: no effect, option.enable_streaming says it for all requests",
        "parameters.decoder_input_details: no effect without details",
        "parameters.logprobs: no effect without details or a stream",
    )

    for name, value in {"details": 1, "logprobs": -1, "output_formatter": "xml"}.items():
        with pytest.raises(InvalidRequest, match=f"^parameters.{name} must be"):
            _parse({"inputs": "a", "parameters": {name: value}})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "inputs is missing"),
        ({"inputs": None}, "inputs must be non-empty strings, given null"),
        ({"inputs": ""}, "inputs must be non-empty strings, given ''"),
        ({"inputs": ["a", 5]}, "inputs must be non-empty strings, given 5"),
        ({"inputs": [["a"]]}, "inputs must be non-empty strings, given a list of 1"),
        ({"inputs": []}, "inputs must be one string or a list of 1 to 1000, given a list of 0"),
        (
            {"inputs": ["a"] * 1001},
            "inputs must be one string or a list of 1 to 1000, given a list of 1001",
        ),
        ({"inputs": "a", "parameters": []}, "parameters must be an object, given a list of 0"),
    ],
)
def test_a_body_of_another_form_is_refused_as_a_whole(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(MalformedRequest) as caught:
        _parse(fields)

    assert str(caught.value) == words


def test_prompts_may_fill_a_large_body() -> None:
    for inputs in (
        'a, \\"[{' * (MAX_VALUES_BYTES // 6),
        ["a, [{" * 2000] * 200,
        ['"' * 3000] * 200,
    ):
        body = json.dumps({"inputs": inputs, "parameters": {"top_k": 5}}).encode()
        assert len(body) > MAX_VALUES_BYTES
        assert dynamic_batch.read(body, None, MODEL).fields["inputs"] == inputs

    assert (
        dynamic_batch.read(b"a" * (2 * MAX_VALUES_BYTES), "text/plain", MODEL).fields["inputs"][:2]
        == "aa"
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs": [%b1]}' % (b"1," * MAX_VALUES_BYTES),
        b'{"inputs": [%b"a"]}' % (b'"a",' * MAX_VALUES_BYTES),
        b'{"inputs": [%b"a"]}' % (b'"\\\\",' * MAX_VALUES_BYTES),
        b'{"inputs": "a", "x": [%b1]}' % (b"1," * MAX_VALUES_BYTES),
        b'{"inputs": [%b"a"], "inputs": "a"}' % (b'"a",' * MAX_VALUES_BYTES),
        b'{"x": [%b1]}' % (b"1," * MAX_VALUES_BYTES),
        b'{"inputs": %b' % (b"[" * MAX_VALUES_BYTES),
    ],
)
def test_a_large_body_of_anything_but_prompts_is_refused_before_it_is_read(body: bytes) -> None:
    with pytest.raises(MalformedRequest) as caught:
        dynamic_batch.read(body, None, MODEL)

    assert len(str(caught.value)) < 200


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES: Any = st.recursive(
    SCALARS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
PARAMETERS = st.dictionaries(
    st.sampled_from(sorted(lmi.PARAMETERS)) | TEXTS,
    VALUES | st.integers(0, 20) | st.floats(0, 1),
    max_size=8,
)
BODIES = st.fixed_dictionaries(
    {"inputs": st.lists(TEXTS, max_size=3) | VALUES},
    optional={"parameters": PARAMETERS | VALUES, "stream": VALUES},
)


@given(body=BODIES, model=st.sampled_from([MODEL, STREAMING]))
def test_any_json_gives_requests_or_a_refusal(body: dict[str, Any], model: ModelConfig) -> None:
    try:
        parsed = _parse(body, model)
    except InvalidRequest as error:
        assert str(error).isprintable()
        return

    inputs = body["inputs"] if isinstance(body["inputs"], list) else [body["inputs"]]
    assert [request.prompt for request in parsed.requests] == inputs
    output_format = OutputFormat.JSONLINES if model.enable_streaming else OutputFormat.JSON
    assert parsed.format.output_format is output_format


def test_an_adapter_is_for_all_inputs_or_each_has_its_own() -> None:
    def adapters(value: Any) -> list[str | None]:
        return [
            request.adapter
            for request in _parse({"inputs": ["a", "b"], "adapters": value}).requests
        ]

    assert adapters("fr") == adapters(["fr"]) == ["fr", "fr"]
    assert adapters(["fr", ""]) == ["fr", None]
    assert adapters(None) == [None, None]

    with pytest.raises(InvalidRequest, match="^adapters must be"):
        adapters(["a", "b", "c"])
