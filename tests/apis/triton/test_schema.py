"""Triton's request: each name that its models read, in each place of the body, and the words of
each refusal.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from msgspec.structs import replace

from lmi.apis.base.body import Parsed
from lmi.apis.triton import inputs, schema as triton
from lmi.errors import InvalidRequest, LmiError, MalformedRequest, Unsupported
from lmi.executor import GuidedDecodingParams, GuideType, SamplingConfig
from lmi.settings.config import ModelConfig
from lmi.types import GenerationRequest, OutputFormat
from tests.apis.test_rows import APIS, VALUES, WRONG as EVERYWHERE, field_of

MODEL = ModelConfig(path="demo", name="demo")
J = OutputFormat.JSON
S = OutputFormat.SSE


def _parse(fields: dict[str, Any], url: OutputFormat = J) -> Parsed[triton.TritonFormat]:
    body = json.dumps({"text_input": "hi"} | fields).encode()
    return triton.parse(triton.read(body, None, MODEL, output_format=url))


def _request(fields: dict[str, Any], url: OutputFormat = J) -> GenerationRequest:
    return _parse(fields, url).request


def _fault(fields: dict[str, Any], url: OutputFormat = J) -> str:
    with pytest.raises(InvalidRequest) as caught:
        _parse(fields, url)

    assert caught.value.status == 400
    return str(caught.value)


OWN: dict[str, Any] = {
    "exclude_input_in_output": False,
    "stream": False,
    "length_penalty": 0.5,
    **dict.fromkeys(inputs.RETURNS, True),
}
GIVEN = {name: VALUES[field_of(name)] for name in APIS["triton"].names.split()} | OWN


OFF: list[tuple[str, Any]] = [
    ("max_tokens", 30),
    ("temperature", 0),
    ("top_k", 0),
    ("top_k", -1),
    ("top_p", 1.0),
    ("min_p", 0.0),
    ("repetition_penalty", 1.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0),
    ("min_tokens", 0),
    ("stop_words", ""),
    ("stop_words", [""]),
    ("stop_words", []),
    ("stop", False),
    ("bad_words", ""),
    ("bad_words", ["", ""]),
    ("n", 1),
    ("best_of", 1),
    ("beam_width", 1),
    ("exclude_input_in_output", True),
    ("return_log_probs", False),
    ("guided_decoding_guide_type", ""),
    ("guided_decoding_guide", ""),
    ("sampling_parameters", ""),
    ("sampling_parameters", "{}"),
    ("lora_name", ""),
    ("lora_task_id", [0]),
    ("use_beam_search", False),
    ("return_context_logits", False),
    ("return_generation_logits", [False]),
    ("image", [""]),
    ("decoder_text_input", ""),
    ("end_id", 50256),
    ("pad_id", [50256]),
    ("accumulate_tokens", True),
    ("length_penalty", 2.0),
    ("anything", "else"),
]
# Beside null and those of every API
WRONG: dict[str, list[Any]] = {
    "text_input": ["", 5, True, {"a": 1}, ["a", "b"], [], [5]],
    "max_tokens": [0, [1, 2], "true"],
    "stream": ["yes", 1, []],
    "min_tokens": [31],
    "stop_words": [True],
    "stop_token_ids": ["5"],
    "guided_decoding_guide_type": ["xml", 5],
    "guided_decoding_guide": [5],
    "exclude_input_in_output": [1],
    **{name: [1] for name in inputs.RETURNS},
}


def test_the_tables_of_this_file_hold_every_input() -> None:
    assert {name for name in inputs.MEANINGS if field_of(name) not in EVERYWHERE} <= set(WRONG)

    handled_fields = {"text_input", "guided_decoding_guide_type", "guided_decoding_guide"}
    handled_fields |= {"beam_width", "use_beam_search", "early_stopping"}

    assert set(GIVEN) | handled_fields == set(inputs.MEANINGS)

    names = [*inputs.INPUTS, *inputs.REFUSED, *inputs.WITHOUT_EFFECT, inputs.PACKED]
    assert len(names) == len(set(names))


def test_a_prompt_alone_is_thirty_tokens_greedy() -> None:
    parsed = _parse({})
    assert (parsed.request.prompt, parsed.request.max_new_tokens) == ("hi", 30)
    assert parsed.request.sampling.temperature == 0 and not parsed.request.needs_log_probs
    assert (parsed.format.head, parsed.format.outputs) == (
        {"model_name": "demo", "model_version": "1"},
        (),
    )
    assert parsed.ignored == ()


@pytest.mark.parametrize(("name", "value"), OFF)
def test_a_value_that_asks_for_nothing_is_as_if_left_out(name: str, value: Any) -> None:
    for further in ({}, {"temperature": 0.5, "seed": 1}):
        if name not in further:
            assert _request({name: value} | further) == _request(further)
            assert _request({"parameters": {name: value}} | further, S) == _request(further, S)


def test_flags_ask_for_keys_of_the_answer_and_for_log_probs_where_a_key_needs_them() -> None:
    for flag, keys in inputs.RETURNS.items():
        parsed = _parse({flag: True})
        assert parsed.format.outputs == keys
        assert parsed.request == replace(_request({}), needs_log_probs="log" in flag)

    assert _request({"exclude_input_in_output": False}) == replace(
        _request({}), return_full_text=True
    )


@pytest.mark.parametrize("name", GIVEN)
def test_a_name_means_the_same_in_every_place_and_in_an_array(name: str) -> None:
    value = GIVEN[name]
    further = {} if name == "temperature" else {"temperature": 0.7}
    expected = _parse({name: value, **further})
    array = value if isinstance(value, list) else [value]
    for fields in (
        {name: array},
        {"parameters": {name: value}},
        {"parameters": {name: array}},
        {"sampling_parameters": json.dumps({name: value, "logit_bias": None})},
        {"parameters": {"sampling_parameters": [json.dumps({name: value})]}},
        {name: json.dumps(value)} if not isinstance(value, list | str) else {name: value},
    ):
        parsed = _parse(fields | further)
        assert (parsed.request, parsed.format) == (expected.request, expected.format)


@pytest.mark.parametrize(("twin", "name"), inputs.TWINS.items())
def test_another_models_name_means_the_same(twin: str, name: str) -> None:
    value = GIVEN[name]
    further: dict[str, Any] = {} if name == "temperature" else {"temperature": 0.7}
    if name == "length_penalty":
        further = {"beam_width": 2}

    url = S if name == "stream" else J
    assert _request({twin: value} | further, url) == _request({name: value} | further, url)
    assert f"input '{name}' already exists in request" in _fault(
        {twin: value, name: value} | further, url
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in inputs.MEANINGS for value in (None, *WRONG.get(name, []))],
)
def test_a_wrong_type_or_range_is_refused_with_the_name(name: str, value: Any) -> None:
    further = {"temperature": 1} if name != "temperature" else {}
    for fields in ({name: value}, {"parameters": {name: value}}):
        body = json.dumps(
            ({"text_input": "hi"} if name != "text_input" else {}) | further | fields
        ).encode()
        for url in (J, S):
            with pytest.raises(InvalidRequest, match=rf"input '{name}'") as caught:
                triton.parse(triton.read(body, None, MODEL, output_format=url))

            assert caught.value.status == 400


@pytest.mark.parametrize(
    "name", ["max_tokens", "text_input", "sampling_parameters", "stop_words", "lora_name", "stream"]
)
def test_the_same_name_in_two_places_is_refused(name: str) -> None:
    value = {"max_tokens": 30, "stream": True}.get(name, "")
    value = "hi" if name == "text_input" else value
    assert (
        _fault({name: value, "parameters": {name: value}})
        == f"input '{name}' already exists in request"
    )


@pytest.mark.parametrize("value", [None, [], ["a"], {}, {"a": 1}])
def test_an_unknown_name_is_refused_unless_it_is_a_scalar(value: Any) -> None:
    assert _fault({"x": value}).startswith("parameter 'x' has invalid type.")

    in_parameters = _fault({"parameters": {"x": value}})
    assert in_parameters.startswith(
        "Converting keyword: 'parameters': parameter 'x' has invalid type."
    )

    for scalar in (True, 0, 1.5, "text", ""):
        parsed = _parse({"x": scalar, "parameters": {"y": scalar, "id": "7"}})
        assert (parsed.request, set(parsed.ignored)) == (
            _request({}),
            {"'x': unknown", "'y': unknown", "'id': unknown"},
        )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"parameters": None}, "Expected JSON object for keyword: 'parameters', given null"),
        ({"parameters": [1]}, "Expected JSON object for keyword: 'parameters', given a list of 1"),
        ({"parameters": {"parameters": {}}}, "parameter 'parameters' has invalid type"),
        ({"id": 5}, "Unable to parse 'id': it must be a string, given 5"),
        ({"id": None}, "Unable to parse 'id'"),
        ({"id": "x" * 1025}, "Unable to parse 'id': it must have at most 1024 bytes"),
        ({"sampling_parameters": "{"}, "Unable to parse 'sampling_parameters'"),
        ({"sampling_parameters": "[]"}, "Unable to parse 'sampling_parameters'"),
        (
            {"sampling_parameters": {"top_k": 1}},
            "input 'sampling_parameters' must be a string that holds",
        ),
        ({"sampling_parameters": '{"sampling_parameters": "{}"}'}, "already exists"),
        (
            {"sampling_parameters": '{"x": []}'},
            "Converting keyword: 'sampling_parameters': parameter 'x'",
        ),
        (
            {"min_tokens": 5, "max_tokens": 4},
            "input 'min_tokens' must be at most max_tokens (4), given 5",
        ),
        ({"n": 3, "best_of": 2}, "input 'best_of' must be at least n (3), given 2"),
        (
            {"n": 3, "best_of": 2, "use_beam_search": True},
            "input 'best_of' must be at least n (3), given 2",
        ),
        (
            {"stop": ["a"] * 33, "stop_words": ["b"] * 33},
            "input 'stop' must be at most 64 with stop_words",
        ),
        ({"guided_decoding_guide": "a+"}, "input 'guided_decoding_guide_type' must be given"),
        (
            {"guided_decoding_guide_type": "regex"},
            "input 'guided_decoding_guide' must be given for regex, given null",
        ),
        (
            {"guided_decoding_guide_type": "json", "guided_decoding_guide": "{}"},
            "must be left out for json",
        ),
        (
            {"stop": True},
            "input 'stop' is not supported here: a request is cancelled by closing its connection",
        ),
        (
            {"lora_id": 1},
            (
                "input 'lora_id' is not supported here: an adapter is used by the name that it was "
                "loaded"
            ),
        ),
        (
            {"use_beam_search": True, "beam_width": 2},
            "input 'use_beam_search' must be left out beside beam_width",
        ),
        (
            {"beam_width": 2, "best_of": 3},
            "input 'best_of' must be equal to beam_width (2), or left out, given 3",
        ),
        ({"beam_width": 2, "n": 3}, "input 'n' must be at most beam_width (2), given 3"),
        ({"return_context_logits": [True]}, "input 'return_context_logits' is not supported here"),
    ],
)
def test_what_does_not_fit_is_refused_and_told(fields: dict[str, Any], words: str) -> None:
    assert words in _fault(fields)


@pytest.mark.parametrize("name", ["n", "best_of", "beam_width"])
def test_several_sequences_are_refused_in_a_stream_alone(name: str) -> None:
    assert f"input '{name}' is not supported here" in _fault({name: 2}, S)
    assert _request({name: 2, "stream": False}, S).num_sequences == 2


@pytest.mark.parametrize(
    ("url", "stream", "result"),
    [
        (J, None, False),
        (J, True, False),
        (J, False, False),
        (S, None, True),
        (S, True, True),
        (S, False, False),
    ],
)
def test_the_url_decides_the_form_and_stream_false_makes_one_event(
    url: OutputFormat, stream: bool | None, result: bool
) -> None:
    parsed = _parse({} if stream is None else {"stream": stream}, url)
    assert (parsed.format.output_format, parsed.request.is_streaming) == (url, result)


def test_without_a_temperature_what_belongs_to_sampling_has_no_effect() -> None:
    sampled = {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3}
    for fields in ({}, {"temperature": 0}, {"temperature": "0"}):
        parsed = _parse(fields | sampled)
        assert parsed.request == _request({})
        assert set(parsed.ignored) == {
            f"input '{name}': no effect in greedy decoding" for name in sampled
        }

    assert _request({"temperature": 1, "top_p": 0}) == _request({})
    assert _request({"temperature": 1}).sampling.temperature == 1


@pytest.mark.parametrize(
    ("fields", "width", "num"),
    [
        ({"beam_width": 4}, 4, 4),
        ({"beam_width": 4, "n": 2}, 4, 2),
        ({"use_beam_search": True, "n": 3}, 3, 3),
        ({"use_beam_search": True, "best_of": 4}, 4, 1),
        ({"use_beam_search": True, "best_of": 4, "n": 2}, 4, 2),
    ],
)
def test_a_beam_search_is_asked_for_in_the_words_of_either_backend(
    fields: dict[str, Any], width: int, num: int
) -> None:
    parsed = _parse(fields | {"length_penalty": 0.5, "early_stopping": True, "temperature": 0.7})
    search = SamplingConfig(width, num_return_sequences=num, length_penalty=0.5, early_stopping=1)

    assert (parsed.request.sampling, parsed.format.num_answers) == (search, num)
    assert parsed.ignored == ("input 'temperature': no effect in beam search",)


def test_a_search_of_one_beam_is_greedy() -> None:
    assert _request({"use_beam_search": True, "temperature": 0.7}) == _request({})


def test_alternatives_are_asked_for_only_where_they_are_shown() -> None:
    assert _request({"logprobs": 3}) == _request({})
    assert _request({"logprobs": 3, "return_logprobs": True}).num_top_log_probs == 3


def test_a_guide_reaches_the_engine() -> None:
    for kind, guide, result in (
        ("json", None, GuidedDecodingParams(GuideType.JSON)),
        ("json_schema", "{}", GuidedDecodingParams(GuideType.JSON_SCHEMA, "{}")),
        ("regex", "a+", GuidedDecodingParams(GuideType.REGEX, "a+")),
        (
            "ebnf_grammar",
            'root ::= "a"',
            GuidedDecodingParams(GuideType.EBNF_GRAMMAR, 'root ::= "a"'),
        ),
    ):
        fields = {"guided_decoding_guide_type": kind} | (
            {} if guide is None else {"guided_decoding_guide": [guide]}
        )

        assert _request(fields).guided_decoding == result


def test_what_litellm_and_the_load_generators_send_is_understood() -> None:
    litellm = {
        "parameters": {"max_tokens": 9, "bad_words": [""], "stop_words": [""]},
        "stream": True,
    }
    genai_perf = {"text_input": ["hi"], "stream": True, "max_tokens": 9}
    bench = {
        "accumulate_tokens": True,
        "max_tokens": 9,
        "temperature": 0.0,
        "top_p": 1.0,
        "stream": True,
    }

    ensemble = {
        "max_tokens": 9,
        "bad_words": "",
        "stop_words": "",
        "pad_id": 2,
        "end_id": 2,
        "top_k": 1,
        "top_p": 0,
    }
    for fields in (litellm, genai_perf, bench, ensemble):
        assert _request(fields, S) == _request({"max_tokens": 9}, S)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
VALUES: Any = st.recursive(
    SCALARS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
KNOWN = st.sampled_from(
    [*inputs.INPUTS, *inputs.REFUSED, *inputs.WITHOUT_EFFECT, inputs.PACKED, "id", "parameters"]
)
LIKELY = VALUES | st.integers(0, 20) | st.floats(0, 1) | st.booleans() | st.integers(0, 20).map(str)
FIELDS = st.dictionaries(KNOWN | TEXTS, LIKELY, max_size=6)
PACKED = FIELDS.map(json.dumps)


@given(
    fields=FIELDS, parameters=FIELDS | VALUES, packed=PACKED | TEXTS, url=st.sampled_from([J, S])
)
@example(fields={"lora_name": [[[[]]]]}, parameters={"stop": [[[[]]]]}, packed="{}", url=J)
@example(fields={"lora_name": {}}, parameters={"stop": True}, packed="null", url=S)
def test_any_json_gives_a_request_or_a_refusal(
    fields: dict[str, Any], parameters: Any, packed: str, url: OutputFormat
) -> None:
    body = {"text_input": "hi"} | fields
    if parameters is not None:
        body["parameters"] = parameters

    if packed:
        body["sampling_parameters"] = packed

    try:
        parsed = triton.parse(
            triton.read(json.dumps(body).encode(), None, MODEL, output_format=url)
        )
    except InvalidRequest as error:
        assert str(error).isprintable() and len(str(error)) < 400
        return

    assert parsed.request.max_new_tokens is not None and parsed.request.max_new_tokens >= 1
    assert parsed.request.prompt


@pytest.mark.parametrize(
    "name", [*inputs.INPUTS, *inputs.REFUSED, inputs.PACKED, "id", "parameters", "x"]
)
def test_a_value_nested_deeper_than_python_prints_is_refused_like_any_other(name: str) -> None:
    nested = b"[" * 1000 + b"]" * 1000
    for body in (b'{"%b": %b}', b'{"parameters": {"%b": %b}}'):
        with pytest.raises(LmiError):
            triton.parse(triton.read(body % (name.encode(), nested), None, MODEL, output_format=J))


def test_errors_of_the_body_are_malformed_and_others_are_of_their_kind() -> None:
    for body in (b"", b"x", b"[]", b'{"text_input": "hi", }', b'{"text_input": NaN}', b"\xff"):
        with pytest.raises(MalformedRequest, match="^failed to parse the request JSON buffer: "):
            triton.read(body, None, MODEL, output_format=J)

    with pytest.raises(Unsupported):
        _parse({"stop": True})
