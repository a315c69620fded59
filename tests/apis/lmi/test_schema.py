"""The LMI request schema: every parameter's default, type and range, and the form of the answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, strategies as st

from lmi.apis.base.body import MAX_IGNORED, Parsed
from lmi.apis.lmi import schema as lmi
from lmi.errors import InvalidParameter, InvalidRequest, LmiError, MalformedRequest, Unsupported
from lmi.executor import GuidedDecodingParams, GuideType, SamplingConfig
from lmi.settings.config import ModelConfig
from lmi.types import GenerationRequest, OutputFormat
from tests.apis.test_rows import APIS, WRONG as EVERYWHERE, field_of

MODEL = ModelConfig(path="demo", name="demo")
TGI = ModelConfig(path="demo", name="demo", tgi_compat=True)


def _parse(body: dict[str, Any], model: ModelConfig = MODEL) -> Parsed[lmi.LmiFormat]:
    return lmi.parse(lmi.read(json.dumps(body).encode(), "application/json", model))


def _request(parameters: dict[str, Any], **others: Any) -> GenerationRequest:
    return _parse({"inputs": "hi", "parameters": parameters} | others).request


def _fields(parsed: Parsed[lmi.LmiFormat]) -> dict[str, Any]:
    """The fields of the request and of the format of its answer."""
    return msgspec.structs.asdict(parsed.request) | msgspec.structs.asdict(parsed.format)


# The documented defaults, from the lists of all backends. None means None or random on that page.
DEFAULTS: list[tuple[str, Any]] = [
    ("do_sample", False),
    ("seed", None),
    ("temperature", 1.0),
    ("repetition_penalty", 1.0),
    ("top_k", 0),
    ("top_k", -1),
    ("top_p", 1.0),
    ("max_new_tokens", 30),
    ("details", False),
    ("return_full_text", False),
    ("stop_sequences", None),
    ("decoder_input_details", False),
    ("typical_p", 1.0),
    ("truncate", None),
    ("truncation_side", "left"),
    ("ignore_eos_token", False),
    ("min_p", 0.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("n", 1),
    ("best_of", 1),
    ("num_beams", 1),
    ("length_penalty", 1.0),
    ("early_stopping", False),
    ("stop_token_ids", None),
    ("include_stop_str_in_output", False),
    ("logprobs", None),
    ("prompt_logprobs", None),
    ("skip_special_tokens", True),
    ("spaces_between_special_tokens", True),
    ("min_length", 1),
    ("bad_sequences", None),
    ("stop", False),
    ("stop", True),
    ("response_format", {"type": "text"}),
    ("cache_salt", None),
    ("no_repeat_ngram_size", 0),
    ("logits_post_processor_name", None),
    *((name, None) for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")),
]
EFFECT: dict[str, tuple[Any, dict[str, Any]]] = {
    "details": (True, {"details": True, "needs_log_probs": True}),
    "decoder_input_details": (True, {"num_prompt_log_probs": 0}),
    "output_formatter": ("sse", {"output_format": OutputFormat.SSE, "is_streaming": True}),
    "response_format": (
        {"type": "json_object"},
        {"guided_decoding": GuidedDecodingParams(GuideType.JSON)},
    ),
    "guided_json": ({}, {"guided_decoding": GuidedDecodingParams(GuideType.JSON_SCHEMA, "{}")}),
    "guided_regex": ("a+", {"guided_decoding": GuidedDecodingParams(GuideType.REGEX, "a+")}),
    "guided_choice": (
        ["a", "b"],
        {"guided_decoding": GuidedDecodingParams(GuideType.REGEX, "a|b")},
    ),
    "guided_grammar": ("g", {"guided_decoding": GuidedDecodingParams(GuideType.EBNF_GRAMMAR, "g")}),
}
# Beside those of every API
WRONG: dict[str, list[Any]] = {
    "max_new_tokens": ["30", 0],
    "min_length": [31],
    "min_tokens": [31],
    "stop_sequences": ["stop", [""]],
    "stop": ["stop", [""]],
    "bad_sequences": ["x", [""]],
    "details": ["true", 1],
    "decoder_input_details": ["true", 1],
    "logprobs": [True],
    "top_n_tokens": [True, 21],
    "output_formatter": ["xml", 5, ["json"], "none", ""],
}


@pytest.mark.parametrize(("name", "default"), DEFAULTS)
@pytest.mark.parametrize(
    "others",
    [{}, {"do_sample": True, "seed": 1}, {"details": True}],
    ids=["plain", "sample", "details"],
)
def test_a_documented_default_sent_literally_is_the_same_as_leaving_it_out(
    name: str, default: Any, others: dict[str, Any]
) -> None:
    others = {key: value for key, value in others.items() if key != name}
    assert _request(others | {name: default}) == _request(others)
    assert _request({name: default} | others, stream=True) == _request(others, stream=True)


def test_the_tables_of_this_file_hold_every_parameter() -> None:
    assert {name for name in lmi.PARAMETERS if field_of(name) not in EVERYWHERE} <= set(WRONG)
    beams = {"num_beams", "length_penalty", "early_stopping"}
    assert {*EFFECT, *APIS["lmi"].names.split()} | beams | {"do_sample"} == set(lmi.PARAMETERS)
    assert {name for name, _ in DEFAULTS} | {
        "min_tokens",
        "top_n_tokens",
        "output_formatter",
    } == set(lmi.PARAMETERS)


@pytest.mark.parametrize("name", EFFECT)
def test_a_parameter_changes_what_it_names_and_nothing_else(name: str) -> None:
    value, changes = EFFECT[name]
    base = {} if name == "details" else {"details": True}
    before, after = (
        _fields(_parse({"inputs": "hi", "parameters": parameters}))
        for parameters in (base, base | {name: value})
    )
    assert {field: after[field] for field in changes} == changes

    unchanged = set(after) - {*changes, "field_names"}
    assert {field: after[field] for field in unchanged} == {
        field: before[field] for field in unchanged
    }


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_type_or_range_is_refused_with_the_field_even_where_it_has_no_effect(
    name: str, value: Any
) -> None:
    with pytest.raises(InvalidParameter, match=rf"^parameters\.{name}(\[0\]|\.[a-z_]+)? must be "):
        _request({name: value})


@pytest.mark.parametrize(
    ("others", "num"), [({}, 4), ({"n": 1}, 4), ({"n": 2}, 2), ({"best_of": 4, "n": 4}, 4)]
)
def test_the_answer_has_all_beams_unless_n_asks_for_fewer(others: dict[str, int], num: int) -> None:
    request = _request({"num_beams": 4, **others})
    assert request.sampling == SamplingConfig(
        4, num_return_sequences=num, length_penalty=1.0, early_stopping=0
    )
    assert (request.num_sequences, request.num_places, request.needs_log_probs) == (num, 4, False)


def test_a_search_has_a_penalty_for_length_and_may_stop_early() -> None:
    sampling = _request({"num_beams": 2, "length_penalty": 0.5, "early_stopping": True}).sampling
    assert (sampling.length_penalty, sampling.early_stopping) == (0.5, 1)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (
            {"best_of": 3},
            r"parameters\.best_of must be equal to num_beams \(4\), or left out, given 3",
        ),
        ({"n": 5}, r"parameters\.n must be at most num_beams \(4\), given 5"),
    ],
)
def test_what_does_not_fit_the_width_of_a_search_is_refused(
    others: dict[str, int], words: str
) -> None:
    with pytest.raises(InvalidParameter, match=f"^{words}$"):
        _request({"num_beams": 4, **others})


def test_nothing_is_sampled_in_a_search() -> None:
    sampled = {"do_sample": True, "temperature": 0.5, "seed": 1, "top_k": 5}
    parsed = _parse({"inputs": "hi", "parameters": {"num_beams": 2, **sampled}})
    assert parsed.request == _request({"num_beams": 2})
    assert set(parsed.ignored) == {
        f"parameters.{name}: no effect in beam search" for name in sampled
    }


@pytest.mark.parametrize(
    ("given", "num"),
    [({"n": 3}, 3), ({"best_of": 3}, 3), ({"n": 2, "best_of": 4}, 4), ({"n": 1, "best_of": 1}, 1)],
)
def test_as_many_sequences_are_generated_as_the_larger_of_n_and_best_of(
    given: dict[str, int], num: int
) -> None:
    request = _request({"do_sample": True, **given})
    assert (request.num_sequences, request.needs_log_probs) == (num, num > 1)


def test_best_of_is_never_less_than_n() -> None:
    with pytest.raises(
        InvalidParameter, match=r"^parameters\.best_of must be at least n \(3\), given 2$"
    ):
        _request({"n": 3, "best_of": 2})


@pytest.mark.parametrize("name", ["n", "best_of", "num_beams"])
def test_several_sequences_are_refused_in_a_stream(name: str) -> None:
    with pytest.raises(
        Unsupported, match=rf"^parameters\.{name} is not supported here: .* not streamed"
    ):
        _request({name: 2}, stream=True)


def test_an_adapter_is_a_name_or_a_list_of_one() -> None:
    for base in (None, "", [""]):
        parsed = _parse({"inputs": "hi", "adapters": base})
        assert (parsed.request, parsed.ignored) == (_request({}), ())

    assert _request({}, adapters="fr").adapter == _request({}, adapters=["fr"]).adapter == "fr"

    for wrong in (5, {}, [], ["a", "b"], [5], True):
        with pytest.raises(InvalidParameter, match="^adapters must be a string or a list of one"):
            _request({}, adapters=wrong)


def test_a_request_is_greedy_unless_it_asks_for_samples() -> None:
    assert _request({}).sampling.temperature == 0
    assert _request({"do_sample": False, "temperature": 0.7}).sampling.temperature == 0
    assert _request({"do_sample": True}).sampling.temperature is None
    assert _request({"do_sample": True, "temperature": 0}) == _request({})
    assert _request({"do_sample": True, "top_p": 0}) == _request({})
    assert _request({"do_sample": True, "temperature": 1}) == _request({"do_sample": True})


def test_penalties_count_in_greedy_decoding_too() -> None:
    sampling = _request(
        {"repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": -1}
    ).sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (
        1.5,
        1.0,
        -1.0,
    )


def test_names_without_effect_are_forgotten_and_told() -> None:
    useless = {
        "temperature": 0.5,
        "typical_p": 0.5,
        "seed": 1,
        "length_penalty": 2,
        "early_stopping": True,
    }
    parsed = _parse(
        {
            "inputs": "hi",
            "parameters": useless | {"logprobs": 3, "prompt_logprobs": 3, "x": 1, "top_k": None},
        }
    )

    assert parsed.request == _request({})
    assert set(parsed.ignored) == {
        "parameters.'x': unknown",
        "parameters.length_penalty: no effect without beams",
        "parameters.early_stopping: no effect without beams",
        "parameters.seed: no effect in greedy decoding",
        "parameters.temperature: no effect in greedy decoding",
        "parameters.typical_p: no effect in greedy decoding",
        "parameters.prompt_logprobs: no effect without details",
        "parameters.logprobs: no effect without details or a stream",
    }


def test_best_alternatives_are_kept_for_a_stream_without_details() -> None:
    assert _request({"logprobs": 3}, stream=True).num_top_log_probs == 3
    assert _request({"top_n_tokens": 3}, stream=True).num_top_log_probs == 3
    assert _request({"top_n_tokens": 3, "logprobs": 2}, stream=True).num_top_log_probs == 2


def test_unknown_names_are_ignored_and_reported_in_few_short_lines() -> None:
    unknown = {"x" * 500 + str(i): i for i in range(500)} | {"line\nbreak": 1}
    parsed = _parse(
        {"inputs": "hi", "parameters": unknown, "sagemaker_base_url": "u", "aws_region_name": None}
    )
    assert parsed.request == _request({})
    assert len(parsed.ignored) == MAX_IGNORED
    assert all(len(line) < 120 and line.isprintable() for line in parsed.ignored)


def test_a_stop_list_may_come_under_either_name_and_is_bounded_together() -> None:
    assert _request({"stop": ["b"], "stop_sequences": ["a"]}).stop_sequences == ("a", "b")
    with pytest.raises(InvalidParameter, match="at most 64"):
        _request({"stop": ["b"] * 33, "stop_sequences": ["a"] * 33})


def test_nulls_are_as_if_left_out() -> None:
    nulls = dict.fromkeys([*lmi.PARAMETERS, "grammar"])
    parsed = _parse({"inputs": "hi", "parameters": nulls, "adapters": None, "watermark": None})

    assert (parsed.request, parsed.ignored) == (_request({}), ())
    assert _parse({"inputs": "hi", "parameters": None, "stream": None}).request == _request({})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "inputs is missing"),
        ({"messages": []}, "inputs is missing"),
        ({"inputs": ""}, "inputs must be a non-empty string, given ''"),
        ({"inputs": None}, "inputs must be a non-empty string, given null"),
        ({"inputs": 5}, "inputs must be a non-empty string, given 5"),
        ({"inputs": {"a": 1}}, "inputs must be a non-empty string, given an object of 1"),
        ({"inputs": ["a", "b"]}, "option.rolling_batch=disable"),
        ({"inputs": "s3cr3t", "parameters": []}, "parameters must be an object, given a list of 0"),
        ({"inputs": "s3cr3t", "parameters": "x"}, "parameters must be an object, given 'x'"),
        ({"inputs": "s3cr3t", "stream": "true"}, "stream must be true or false, given 'true'"),
        ({"inputs": "s3cr3t", "stream": 1}, "stream must be true or false, given 1"),
    ],
)
def test_a_wrong_body_is_malformed_and_the_prompt_is_not_in_the_message(
    body: dict[str, Any], words: str
) -> None:
    with pytest.raises(MalformedRequest, match=words) as caught:
        _parse(body)

    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "application/json",
        "application/json; charset=utf-8",
        "application/x-www-form-urlencoded",
        "image/png",
    ],
)
def test_json_is_read_whatever_the_content_type_says(content_type: str | None) -> None:
    message = lmi.read(
        b'  {"inputs": "hi", "parameters": {"max_new_tokens": 5}}\r\n', content_type, MODEL
    )
    assert lmi.parse(message).request == _request({"max_new_tokens": 5})


@pytest.mark.parametrize(
    "content_type", [None, "application/x-www-form-urlencoded", "application/octet-stream"]
)
def test_what_is_no_json_is_refused_whatever_the_content_type_says(
    content_type: str | None,
) -> None:
    with pytest.raises(MalformedRequest, match="not JSON"):
        lmi.read(b"inputs=hi", content_type, MODEL)


@pytest.mark.parametrize("content_type", ["text/plain", "Text/Plain; charset=utf-8", " text/plain"])
def test_a_plain_text_is_a_prompt(content_type: str) -> None:
    assert lmi.parse(lmi.read('{"né"\n'.encode(), content_type, MODEL)).request.prompt == '{"né"\n'
    for body in (b"", b"\xff"):
        with pytest.raises(MalformedRequest):
            lmi.read(body, content_type, MODEL)


J = OutputFormat.JSON
L = OutputFormat.JSONLINES
S = OutputFormat.SSE


@pytest.mark.parametrize(
    ("configured", "own", "stream", "tgi", "result"),
    [
        (None, None, False, False, J),
        (None, None, True, False, L),
        (None, None, False, True, J),
        (None, None, True, True, S),
        ("json", None, True, False, J),
        ("json", None, True, True, J),
        ("jsonlines", None, False, False, L),
        ("jsonlines", None, True, True, L),
        ("sse", None, False, False, S),
        ("sse", "json", True, False, J),
        ("json", "sse", False, False, S),
        (None, "json", True, True, J),
        (None, "jsonlines", False, True, L),
        (None, "sse", False, False, S),
        ("sse", None, True, True, S),
    ],
)
def test_the_request_s_formatter_beats_the_configured_one_which_beats_stream(
    configured: str | None, own: str | None, stream: bool, tgi: bool, result: OutputFormat
) -> None:
    model = ModelConfig(path="demo", name="demo", output_formatter=configured, tgi_compat=tgi)
    body = {"inputs": "hi", "parameters": {"output_formatter": own}, "stream": stream}
    parsed = _parse(body, model)

    assert (parsed.format.output_format, parsed.format.tgi_compat) == (result, tgi)
    assert parsed.request.is_streaming is (result is not J)


def test_stream_counts_at_the_top_level_only() -> None:
    parsed = _parse({"inputs": "hi", "parameters": {"stream": True}})
    assert parsed.format.output_format is J
    assert parsed.ignored == ("parameters.'stream': unknown",)


def test_tgi_compat_gives_details_unless_they_are_refused() -> None:
    assert _parse({"inputs": "hi"}, TGI).format.details
    assert _parse({"inputs": "hi", "parameters": {"details": None}}, TGI).format.details
    assert not _parse({"inputs": "hi", "parameters": {"details": False}}, TGI).format.details


def test_the_form_of_the_answer_is_known_before_a_parameter_is_refused() -> None:
    body = (
        b'{"inputs": "hi", "stream": true, "parameters": {"top_p": 7, "output_formatter": "sse"}}'
    )
    message = lmi.read(body, None, MODEL)
    assert message.format.output_format is S
    with pytest.raises(InvalidParameter):
        lmi.parse(message)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES: Any = st.recursive(
    SCALARS | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = st.sampled_from(sorted(lmi.PARAMETERS)) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=5
)
PARAMETERS = st.dictionaries(
    NAMES, VALUES | st.integers(0, 20) | st.floats(0, 1) | st.booleans(), max_size=8
)
BODIES = st.fixed_dictionaries(
    {"inputs": st.just("hi") | VALUES},
    optional={"parameters": PARAMETERS | VALUES, "stream": st.booleans() | VALUES},
)


@given(body=BODIES, tgi=st.booleans())
@example(body={"inputs": "hi", "parameters": {"stop": [[[[]]]]}}, tgi=False)
def test_any_json_gives_a_request_or_a_refusal(body: dict[str, Any], tgi: bool) -> None:
    try:
        parsed = _parse(body, TGI if tgi else MODEL)
    except InvalidRequest as error:
        assert str(error).isprintable()
        return

    assert parsed.request.max_new_tokens >= 1
    assert parsed.request.prompt == body["inputs"]


@pytest.mark.parametrize("name", ["inputs", "parameters", "stream"])
def test_a_value_nested_deeper_than_python_prints_is_refused_like_any_other(name: str) -> None:
    nested = b"[" * 1000 + b"]" * 1000
    fields = {b"inputs": b'"hi"', name.encode(): nested}
    body = b"{%b}" % b", ".join(b'"%b": %b' % field for field in fields.items())
    with pytest.raises(LmiError):
        lmi.parse(lmi.read(body, None, MODEL))

    for parameter in lmi.PARAMETERS:
        with pytest.raises(InvalidParameter):
            lmi.parse(
                lmi.read(
                    b'{"inputs": "hi", "parameters": {"%b": %b}}' % (parameter.encode(), nested),
                    None,
                    MODEL,
                )
            )
