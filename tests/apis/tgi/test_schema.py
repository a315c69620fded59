"""TGI's schema: the request that each parameter makes, and the name in each refusal. No other error
comes out.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, strategies as st

from lmi.apis.base.body import Parsed
from lmi.apis.guides.fields import GRAMMARS
from lmi.apis.tgi import schema as tgi
from lmi.apis.tgi.formatter import TgiWhole
from lmi.errors import InvalidRequest, LmiError, MalformedRequest
from lmi.executor import GuidedDecodingParams, GuideType, SamplingConfig
from lmi.settings.config import ModelConfig
from lmi.types import AnswerEnd, Delta, GenerationRequest, OutputFormat, Token

MODEL = ModelConfig(path="demo", name="demo")
SCHEMA = {"properties": {"a": {"type": "integer"}}}


def _parse(
    parameters: Any = None, *, stream: bool | None = None, **others: Any
) -> Parsed[tgi.TgiFormat]:
    body = {"inputs": "hi", "parameters": parameters} | others
    return tgi.parse(tgi.read(json.dumps(body).encode(), None, MODEL, stream=stream))


def _fields(parsed: Parsed[tgi.TgiFormat]) -> dict[str, Any]:
    """The fields of the request and of the format of its answer."""
    return msgspec.structs.asdict(parsed.request) | msgspec.structs.asdict(parsed.format)


def _request(**parameters: Any) -> GenerationRequest:
    return _parse(parameters).request


def test_without_parameters_the_answer_is_greedy_and_of_tgis_default_length() -> None:
    for body in (
        {"inputs": "hi"},
        {"inputs": "hi", "parameters": {}},
        {"inputs": "hi", "parameters": None},
    ):
        parsed = tgi.parse(tgi.read(json.dumps(body).encode(), None, MODEL))
        assert parsed.request == GenerationRequest(
            prompt="hi",
            max_new_tokens=1024,
            sampling=SamplingConfig(temperature=0.0),
            include_stop_str_in_output=True,
        )
        assert parsed.ignored == ()


ROWS: list[tuple[dict[str, Any], str, Any]] = [
    ({"details": True}, "details", True),
    ({"details": True}, "needs_log_probs", True),
    ({"decoder_input_details": True}, "details", True),
    ({"decoder_input_details": True}, "num_prompt_log_probs", 0),
    (
        {"grammar": {"type": "regex", "value": "a+"}},
        "guided_decoding",
        GuidedDecodingParams(GuideType.REGEX, "a+"),
    ),
]


@pytest.mark.parametrize(("parameters", "field", "value"), ROWS)
def test_a_parameter_sets_its_field(parameters: dict[str, Any], field: str, value: object) -> None:
    assert _fields(_parse(parameters))[field] == value


SAMPLING_ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"do_sample": True}, {"temperature": None}),
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"top_k": 5}, {"temperature": None, "top_k": 5}),
    ({"top_p": 0.9}, {"temperature": None, "top_p": 0.9}),
    ({"typical_p": 0.9}, {"temperature": None, "typical_p": 0.9}),
    ({"do_sample": True, "temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 1}, {"temperature": 0.0}),
    ({"top_p": 1, "typical_p": 1}, {"temperature": 0.0, "top_p": None, "typical_p": None}),
    (
        {"repetition_penalty": 1, "frequency_penalty": 0},
        {"repetition_penalty": None, "frequency_penalty": None},
    ),
    ({"do_sample": True, "best_of": 3}, {"num_return_sequences": 3}),
    ({"temperature": 1.0, "best_of": 2}, {"num_return_sequences": 2}),
]


@pytest.mark.parametrize(("parameters", "expected"), SAMPLING_ROWS)
def test_a_sampling_parameter_alone_asks_for_sampling(
    parameters: dict[str, Any], expected: dict[str, Any]
) -> None:
    sampling = _request(**parameters).sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


def test_a_seed_is_drawn_where_the_details_of_a_sampled_answer_tell_it() -> None:
    sampled = {"do_sample": True, "details": True}
    seeds = {_request(**sampled).sampling.seed for _ in range(8)}

    assert len(seeds) == 8 and None not in seeds
    assert _request(**sampled, best_of=2).sampling.seed is not None
    assert _request(**sampled, seed=-1).sampling.seed not in (None, -1)
    assert _request(**sampled, seed=7).sampling.seed == 7

    for parameters in ({"details": True}, {"do_sample": True}, {**sampled, "temperature": 0}):
        assert _request(**parameters).sampling.seed is None


def test_each_of_the_best_sequences_tells_the_seed_that_makes_it() -> None:
    parsed = _parse({"do_sample": True, "best_of": 2, "details": True}, stream=False)
    formatter = TgiWhole(parsed)
    records: list[bytes] = []
    for index, log_prob in enumerate((-2.0, -1.0)):
        tokens = [Token(id=1, text="a", log_prob=log_prob)]
        records += formatter.feed(Delta(tokens, AnswerEnd.EOS_TOKEN, index=index))

    details = json.loads(b"".join(records))["details"]
    drawn = parsed.request.sampling.seed

    assert drawn is not None
    assert (details["seed"], details["best_of_sequences"][0]["seed"]) == (drawn + 1, drawn)


def test_only_a_length_that_the_client_names_must_have_room() -> None:
    assert _request(max_new_tokens=10_000).needs_full_room
    assert not _request().needs_full_room and not _request(max_new_tokens=None).needs_full_room


@pytest.mark.parametrize(
    "value",
    [
        SCHEMA,
        json.dumps(SCHEMA),
        {"schema": SCHEMA, "name": "x", "strict": True},
        {"schema": json.dumps(SCHEMA)},
    ],
)
def test_a_json_schema_is_taken_as_an_object_and_as_text(value: Any) -> None:
    kinds = ["json_schema"] if "schema" in value else ["json", "json_object"]
    for kind in kinds:
        guide = _request(grammar={"type": kind, "value": value}).guided_decoding
        assert (
            guide is not None
            and guide.guide_type is GuideType.JSON_SCHEMA
            and guide.guide is not None
        )
        assert json.loads(guide.guide) == SCHEMA


def test_an_empty_name_is_no_adapter() -> None:
    assert _request(adapter_id="").adapter is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"watermark": True}, "parameters.watermark is not supported here"),
    ({"adapter_id": 5}, "parameters.adapter_id must be a string"),
    ({"best_of": 2}, "parameters.best_of must be 1 without sampling"),
    ({"best_of": 2, "do_sample": True, "seed": 1}, "parameters.seed must be left out with best_of"),
    ({"best_of": 17}, "parameters.best_of must be from 1 to 16"),
    ({"max_new_tokens": 0}, "parameters.max_new_tokens must be at least 1"),
    ({"top_k": 0}, "parameters.top_k must be at least 1"),
    ({"top_p": 0}, "parameters.top_p must be over 0"),
    ({"top_n_tokens": 21}, "parameters.top_n_tokens"),
    ({"details": "yes"}, "parameters.details must be true or false"),
    ({"grammar": "a+"}, "parameters.grammar must be an object with type and value"),
    ({"grammar": {"type": "lark", "value": ""}}, "parameters.grammar.type must be one of"),
    ({"grammar": {"type": "regex", "value": {}}}, "parameters.grammar.value must be a string"),
    ({"grammar": {"type": "json", "value": "{"}}, "parameters.grammar.value must be a JSON schema"),
    (
        {"grammar": {"type": "json_schema", "value": {"name": "x"}}},
        "parameters.grammar.value must be a JSON schema",
    ),
]


@pytest.mark.parametrize(("parameters", "words"), REFUSED)
def test_a_parameter_is_refused_by_its_name(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _parse(parameters)

    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(("name", "value"), [("best_of", 2), ("decoder_input_details", True)])
def test_what_only_a_whole_answer_can_hold_is_refused_in_a_stream(name: str, value: object) -> None:
    parameters = {name: value, "do_sample": True}
    assert _parse(parameters, stream=False).request.needs_log_probs
    for parsed in (
        lambda: _parse(parameters, stream=True),
        lambda: _parse(parameters, **{"stream": True}),
    ):
        with pytest.raises(InvalidRequest, match=f"^parameters.{name} is not supported here"):
            parsed()


def test_what_has_no_effect_is_ignored_and_reported() -> None:
    parsed = _parse(
        {"seed": 4, "top_n_tokens": 3, "best_off": 1, "stop": [], "typical_p": None}, modle="x"
    )
    assert parsed.request.sampling.seed is None and parsed.request.num_top_log_probs is None
    assert parsed.ignored == (
        "'modle': unknown",
        "parameters.'best_off': unknown",
        "parameters.seed: no effect in greedy decoding",
        "parameters.top_n_tokens: no effect without details or a stream",
    )


def test_only_the_root_reads_stream_and_answers_with_a_list() -> None:
    def read(stream_field: object, stream: bool | None) -> tgi.TgiFormat:
        body = json.dumps({"inputs": "hi", "stream": stream_field}).encode()
        return tgi.read(body, "text/plain", MODEL, stream=stream).format

    assert read(True, None) == tgi.TgiFormat(output_format=OutputFormat.SSE, is_list=True)
    assert read(None, None) == tgi.TgiFormat(output_format=OutputFormat.JSON, is_list=True)
    assert read("anything", False) == tgi.TgiFormat(output_format=OutputFormat.JSON)
    assert read(False, True) == tgi.TgiFormat(output_format=OutputFormat.SSE)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "inputs must be a non-empty string"),
        ({"inputs": ["a"]}, "inputs must be a non-empty string, given a list of 1"),
        ({"inputs": ""}, "inputs must be a non-empty string, given ''"),
        ({"inputs": "a", "parameters": []}, "parameters must be an object, given a list of 0"),
        ({"inputs": "a", "stream": "yes"}, "stream must be true or false, given 'yes'"),
    ],
)
def test_a_body_of_another_form_is_refused_as_a_whole(body: dict[str, Any], words: str) -> None:
    with pytest.raises(MalformedRequest) as caught:
        tgi.read(json.dumps(body).encode(), None, MODEL)

    assert str(caught.value) == words


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
GRAMMAR = st.fixed_dictionaries({"type": st.sampled_from(GRAMMARS) | VALUES, "value": VALUES})
NAMES = st.sampled_from(sorted(tgi.PARAMETERS)) | TEXTS
PARAMETERS = st.dictionaries(
    NAMES, VALUES | GRAMMAR | st.integers(0, 20) | st.floats(0, 1), max_size=8
)
BODIES = st.fixed_dictionaries(
    {"inputs": st.just("hi") | VALUES},
    optional={"parameters": PARAMETERS | VALUES, "stream": VALUES},
)


@given(body=BODIES, stream=st.none() | st.booleans())
@example(body={"inputs": "hi", "parameters": {"grammar": {"type": [], "value": 5}}}, stream=None)
def test_any_json_gives_a_request_or_a_refusal(body: dict[str, Any], stream: bool | None) -> None:
    try:
        parsed = tgi.parse(tgi.read(json.dumps(body).encode(), None, MODEL, stream=stream))
    except InvalidRequest as error:
        assert str(error).isprintable()
        return

    assert parsed.request.prompt == body["inputs"]
    assert parsed.request.is_streaming is (parsed.format.output_format is OutputFormat.SSE)


@pytest.mark.parametrize("parameter", sorted(tgi.PARAMETERS))
def test_a_value_nested_deeper_than_python_prints_is_refused_like_any_other(parameter: str) -> None:
    nested = b"[" * 1000 + b"]" * 1000
    with pytest.raises(LmiError):
        tgi.parse(
            tgi.read(
                b'{"inputs": "hi", "parameters": {"%b": %b}}' % (parameter.encode(), nested),
                None,
                MODEL,
            )
        )


def test_a_schema_nested_deeper_than_can_be_written_is_refused() -> None:
    schema = b'{"a": ' * 500 + b"1" + b"}" * 500
    body = b'{"inputs": "hi", "parameters": {"grammar": {"type": "json", "value": %b}}}' % schema
    with pytest.raises(InvalidRequest):
        tgi.parse(tgi.read(body, None, MODEL))
