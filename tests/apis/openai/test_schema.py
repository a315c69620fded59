"""Bodies of the OpenAI API become requests: defaults, names, guides, tools, messages, and every
refusal.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lmi.apis.base.body import MAX_VALUES_BYTES, Parsed
from lmi.apis.openai import chat_schema as openai_chat, schema as openai
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.errors import InvalidParameter, InvalidRequest, LmiError, MalformedRequest, Unsupported
from lmi.executor import GuidedDecodingParams, GuideType, SamplingConfig
from lmi.settings.config import ModelConfig
from lmi.types import GenerationRequest

MODEL = ModelConfig(path="demo", name="demo", aliases=("other",), tool_call_parser="hermes")
USER = {"role": "user", "content": "Hi"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "f"}}


def completion(model: ModelConfig = MODEL, /, **fields: Any) -> Parsed[OpenAIFormat]:
    body = json.dumps({"prompt": "Once", **fields}).encode()
    return openai.parse(openai.read(body, "application/json", model))


def chat(model: ModelConfig = MODEL, /, **fields: Any) -> Parsed[OpenAIFormat]:
    body = json.dumps({"messages": [USER], **fields}).encode()
    return openai_chat.parse(openai_chat.read(body, None, model))


def test_the_least_completion_has_openai_s_defaults() -> None:
    parsed = completion()
    assert parsed.requests == (
        GenerationRequest(prompt="Once", max_new_tokens=16, sampling=SamplingConfig()),
    )
    assert not parsed.request.sampling.is_greedy
    assert parsed.format.model == "demo" and parsed.ignored == ()


def test_the_least_chat_takes_the_room_that_is_left() -> None:
    parsed = chat()
    assert parsed.request.max_new_tokens is None and not parsed.request.sampling.is_greedy
    assert parsed.request.chat is not None and parsed.request.chat.messages == [USER]


@pytest.mark.parametrize("name", ["", "demo", "other", "model", None])
def test_the_model_s_names_and_none_are_taken(name: str | None) -> None:
    assert completion(model=name).format.model == chat(model=name).format.model == "demo"


def test_another_model_may_be_a_registered_adapter() -> None:
    for parsed in (completion(model="fr"), chat(model="fr")):
        assert (parsed.request.adapter, parsed.format.model) == ("fr", "fr")

    assert completion(model="demo").request.adapter is None


# field, value, the fields of the request
SAMPLING: list[tuple[str, Any, dict[str, Any]]] = [
    ("temperature", 0, {"temperature": 0.0}),
    ("temperature", 1, {}),
    ("top_p", 1, {}),
    ("top_p", 0, {"temperature": 0.0}),
    ("top_k", -1, {}),
    ("min_p", 0, {}),
    ("presence_penalty", 0, {}),
    ("frequency_penalty", 2, {"frequency_penalty": 2.0}),
    ("repetition_penalty", 1, {}),
]


@pytest.mark.parametrize(("name", "value", "expected"), SAMPLING)
def test_sampling_is_told_in_the_contract_s_words(
    name: str, value: Any, expected: dict[str, Any]
) -> None:
    assert completion(**{name: value}).request.sampling == SamplingConfig(**expected)
    assert chat(**{name: value}).request.sampling == SamplingConfig(**expected)


def test_greedy_decoding_forgets_what_it_cannot_use() -> None:
    parsed = chat(temperature=0, top_k=5, top_p=0.5, min_p=0.1, seed=3)
    assert parsed.request.sampling == SamplingConfig(temperature=0.0)


# field, value, the request's field, its value
FIELDS: list[tuple[str, Any, str, Any]] = [
    ("stop", "x", "stop_sequences", ("x",)),
    ("stop", "", "stop_sequences", ()),
    ("stop", ["x", "yz"], "stop_sequences", ("x", "yz")),
    ("logit_bias", {"5": -100, "6": 1}, "token_biases", ((5, -100.0), (6, 1.0))),
    ("stream", True, "is_streaming", True),
    ("cache_salt", "u-1+=_.", "cache_salt", "u-1+=_."),
    ("cache_salt", None, "cache_salt", None),
    ("priority", 0, "priority", 0.5),
    ("priority", -(2**19), "priority", 1.0),
    ("priority", 2**19, "priority", 0.0),
]


@pytest.mark.parametrize(("name", "value", "field", "expected"), FIELDS)
def test_a_field_is_told_in_the_request_s_words(
    name: str, value: Any, field: str, expected: Any
) -> None:
    assert getattr(completion(**{name: value}).request, field) == expected
    assert getattr(chat(**{name: value}).request, field) == expected


def schema_of(guide: GuidedDecodingParams | None) -> Any:
    assert (
        guide is not None and guide.guide_type is GuideType.JSON_SCHEMA and guide.guide is not None
    )
    return json.loads(guide.guide)


GUIDES: list[tuple[dict[str, Any], GuidedDecodingParams | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, GuidedDecodingParams(GuideType.JSON)),
    ({"structured_outputs": {"json_object": True}}, GuidedDecodingParams(GuideType.JSON)),
    ({"guided_regex": "a+"}, GuidedDecodingParams(GuideType.REGEX, "a+")),
    ({"structured_outputs": {"regex": "a+"}}, GuidedDecodingParams(GuideType.REGEX, "a+")),
    ({"guided_choice": ["a b", "c.d|e"]}, GuidedDecodingParams(GuideType.REGEX, r"a b|c\.d\|e")),
    (
        {"guided_grammar": 'root ::= "a"'},
        GuidedDecodingParams(GuideType.EBNF_GRAMMAR, 'root ::= "a"'),
    ),
    (
        {"guided_json": {"type": "string"}},
        GuidedDecodingParams(GuideType.JSON_SCHEMA, '{"type":"string"}'),
    ),
    (
        {"guided_json": '{"type": "string"}'},
        GuidedDecodingParams(GuideType.JSON_SCHEMA, '{"type":"string"}'),
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "null"}},
            }
        },
        GuidedDecodingParams(GuideType.JSON_SCHEMA, '{"type":"null"}'),
    ),
    *(
        (
            {"response_format": {"type": kind, "value": value}},
            GuidedDecodingParams(GuideType.JSON_SCHEMA, '{"a":1}'),
        )
        for kind, value in (
            ("json_object", {"a": 1}),
            ("json", '{"a": 1}'),
            ("json_schema", {"schema": {"a": 1}}),
        )
    ),
    (
        {"response_format": {"type": "regex", "value": "a+"}},
        GuidedDecodingParams(GuideType.REGEX, "a+"),
    ),
    (
        {"response_format": {"type": "json_object", "value": None}},
        GuidedDecodingParams(GuideType.JSON),
    ),
]


@pytest.mark.parametrize(("fields", "expected"), GUIDES)
def test_a_structure_is_asked_for_by_any_of_its_names(
    fields: dict[str, Any], expected: GuidedDecodingParams | None
) -> None:
    assert chat(**fields).request.guided_decoding == expected
    assert completion(**fields).request.guided_decoding == expected


def test_tools_are_rendered_and_looked_for_in_the_text() -> None:
    parsed = chat(tools=[TOOL])
    assert parsed.request.chat is not None and parsed.request.chat.tools == [TOOL]
    assert (parsed.format.tool_calls, parsed.format.function) == ("hermes", None)
    assert parsed.request.guided_decoding is None and not parsed.request.skip_special_tokens


def test_no_tools_are_shown_to_a_model_that_may_call_none() -> None:
    parsed = chat(tools=[TOOL], tool_choice="none")
    assert parsed.request.chat is not None and parsed.request.chat.tools is None
    assert parsed.format.tool_calls is None and parsed.request.skip_special_tokens


def test_a_named_function_guides_the_answer_by_its_parameters() -> None:
    parsed = chat(
        ModelConfig(path="demo", name="demo", reasoning_parser="think"),
        tools=[TOOL],
        tool_choice=NAMED,
    )
    assert schema_of(parsed.request.guided_decoding) == PARAMETERS
    assert (parsed.format.function, parsed.format.tool_calls, parsed.format.reasoning) == (
        "f",
        None,
        None,
    )


@pytest.mark.parametrize("ask", [chat, completion])
def test_what_the_options_of_a_stream_do_not_know_is_told(
    ask: Callable[..., Parsed[OpenAIFormat]],
) -> None:
    parsed = ask(
        stream=True, stream_options={"include_usage": True, "include_obfuscation": False, "pace": 5}
    )
    assert parsed.ignored == ("stream_options.'pace': unknown",)
    assert ask(stream_options={}).ignored == ask(stream_options=None).ignored == ()


def test_a_named_function_may_be_its_bare_name_as_at_tgi() -> None:
    bare, with_name = (chat(tools=[TOOL], tool_choice=choice) for choice in ("f", NAMED))
    assert (bare.request, bare.format.function) == (with_name.request, "f")
    with pytest.raises(
        InvalidRequest, match="auto, none, required or the name of one of tools, given 'g'"
    ):
        chat(tools=[TOOL], tool_choice="g")


def test_a_function_may_have_the_name_of_a_mode() -> None:
    tools = [{"type": "function", "function": {"name": "auto"}}]
    assert (
        free := chat(tools=tools)
    ).format.function is None and free.request.guided_decoding is None
    choice = {"type": "function", "function": {"name": "auto"}}
    assert chat(tools=tools, tool_choice=choice).format.function == "auto"
    assert chat(tools=tools, tool_choice="auto").format.function is None


def test_a_required_call_guides_the_answer_by_a_list_of_calls() -> None:
    properties = {"x": {"$ref": "#/$defs/X"}}
    referring = {"type": "object", "properties": properties, "$defs": {"X": {"type": "null"}}}
    tools = [TOOL, {"type": "function", "function": {"name": "g", "parameters": referring}}]
    parsed = chat(tools=tools, tool_choice="required", parallel_tool_calls=False)
    schema = schema_of(parsed.request.guided_decoding)

    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    assert schema["$defs"] == {"X": {"type": "null"}}

    first, second = schema["items"]["anyOf"]
    assert first["properties"] == {
        "name": {"type": "string", "enum": ["f"]},
        "arguments": PARAMETERS,
    }
    assert second["properties"]["arguments"] == {"type": "object", "properties": properties}
    assert parsed.format.is_forced and parsed.format.function is None


def test_messages_are_told_as_templates_know_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parsed = chat(
        messages=[
            {
                "role": "developer",
                "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}],
            },
            {"role": "user", "content": "Hi", "name": "Bo", "unknown": 1},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        add_generation_prompt=False,
    )

    assert parsed.request.chat is not None
    assert parsed.request.chat.messages == [
        {"role": "system", "content": "Be\nbrief"},
        {"role": "user", "content": "Hi", "name": "Bo"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call | {"function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    assert parsed.request.chat.variables == {"enable_thinking": False, "reasoning_effort": "low"}
    assert not parsed.request.chat.add_generation_prompt


def test_a_message_that_is_continued_needs_no_second_field() -> None:
    continued = chat(continue_final_message=True).request.chat
    assert continued is not None
    assert (continued.continue_final_message, continued.add_generation_prompt) == (True, False)


def test_prompts_of_every_form_are_requests_of_their_own() -> None:
    assert [request.prompt for request in completion(prompt=["a", "b"]).requests] == ["a", "b"]
    assert completion(prompt=[1, 2]).request.prompt_token_ids == (1, 2)

    mixed = completion(prompt=["a", [3]], n=2, best_of=3)
    assert [(request.prompt, request.prompt_token_ids) for request in mixed.requests] == [
        ("a", None),
        ("", (3,)),
    ]
    assert {request.num_sequences for request in mixed.requests} == {3}
    assert (
        all(request.needs_log_probs for request in mixed.requests) and mixed.format.num_choices == 2
    )


def test_echo_asks_for_the_prompt_s_log_probs_with_the_answer_s_alone() -> None:
    assert completion(echo=True).request.num_prompt_log_probs is None
    request = completion(echo=True, logprobs=2, max_tokens=0).request
    assert (request.num_prompt_log_probs, request.num_top_log_probs, request.max_new_tokens) == (
        2,
        2,
        1,
    )
    assert request.prefill_details and request.return_full_text


def test_log_probs_of_a_completion_may_be_asked_for_as_those_of_a_chat() -> None:
    assert completion(logprobs=True) == completion(logprobs=1)
    assert completion(logprobs=False) == completion()
    assert (
        completion(logprobs=0).format.has_log_probs
        and not completion(logprobs=0).request.num_top_log_probs
    )


def test_what_has_no_effect_is_taken() -> None:
    parsed = chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        max_tokens=None,
        use_beam_search=False,
    )
    assert parsed.ignored == ()
    assert completion(frobnicate=1, nothing=None).ignored == ("'frobnicate': unknown",)


@pytest.mark.parametrize("ask", [chat, completion])
def test_a_beam_search_is_asked_for_as_vllms_clients_do(
    ask: Callable[..., Parsed[OpenAIFormat]],
) -> None:
    sampled = {"temperature": 0.5, "top_k": 5}
    parsed = ask(
        use_beam_search=True, n=3, length_penalty=0.5, early_stopping=True, top_p=1, **sampled
    )
    search = SamplingConfig(3, num_return_sequences=3, length_penalty=0.5, early_stopping=1)
    assert (parsed.request.sampling, parsed.format.num_choices) == (search, 3)
    assert parsed.ignored == tuple(f"{name}: no effect in beam search" for name in sampled)


def test_a_temperature_of_zero_beside_a_search_is_nothing_to_tell() -> None:
    parsed = completion(use_beam_search=True, n=2, temperature=0)
    assert (parsed.request, parsed.ignored) == (completion(use_beam_search=True, n=2).request, ())


def test_best_of_is_the_width_of_a_search_and_n_the_number_of_its_choices() -> None:
    request = completion(use_beam_search=True, n=2, best_of=4).request
    assert (request.sampling.beam_width, request.num_sequences, request.num_places) == (4, 2, 4)
    assert not request.needs_log_probs


def test_a_search_of_one_beam_is_greedy_and_may_be_streamed() -> None:
    assert (
        completion(use_beam_search=True, stream=True).request
        == completion(temperature=0, stream=True).request
    )


def test_without_a_search_its_fields_have_no_effect() -> None:
    parsed = chat(length_penalty=2, early_stopping=True)
    assert (
        parsed.request == chat(length_penalty=1.0, early_stopping=False).request == chat().request
    )
    assert parsed.ignored == (
        "length_penalty: no effect without beams",
        "early_stopping: no effect without beams",
    )
    assert chat(length_penalty=1.0, early_stopping=False).ignored == ()


def test_a_lower_priority_is_more_urgent_and_neighbours_differ_in_float32() -> None:
    priorities = [chat(priority=rank).request.priority for rank in (-7, -1, 0, 1, 7)]
    assert priorities == sorted(priorities, reverse=True)
    assert len({struct.pack("f", priority) for priority in priorities}) == 5


REFUSED_BY_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 3}, "temperature"),
    ({"stop": [""]}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, r"logit_bias\.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"response_format": {"type": "regex", "value": 5}}, r"response_format\.value"),
    ({"response_format": {"type": "text", "value": {}}}, r"response_format\.type"),
    (
        {"response_format": {"type": "json_object", "value": {}, "strict": True}},
        "of type and value alone, .*strict",
    ),
    (
        {"response_format": {"type": "json_object", "schema": {}}},
        "response_format must be an object of type alone",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}},
        "schema and strict alone",
    ),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, r"structured_outputs\.choice"),
    ({"use_beam_search": True, "n": 2, "stream": True}, "use_beam_search"),
    ({"priority": 2**19 + 1}, "priority must be from -524288 to 524288"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": "yes"}},
        "continuous_usage_stats",
    ),
    (
        {"stream_options": {"include_usage": True}},
        "stream_options must be left out without stream true",
    ),
    ({"stream_options": {"include_usage": False}, "stream": False}, "stream_options"),
]
REFUSED_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [True]}, r"prompt\[0\]"),
    ({"prompt": [[1], []]}, r"prompt\[1\]"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"suffix": "end"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
]


def deep_tool(name: str) -> dict[str, Any]:
    definition: dict[str, Any] = {}
    for _ in range(300):
        definition = {"a": definition}

    return {
        "type": "function",
        "function": {"name": name, "parameters": {"$defs": {"k": definition}}},
    }


REFUSED_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [5]}, r"messages\[0\]"),
    (
        {"messages": [{"role": "", "content": "a"}]},
        r"messages\[0\]\.role must be one of system, .*template's own",
    ),
    ({"messages": [{"role": "a" * 65, "content": "a"}]}, r"messages\[0\]\.role"),
    ({"messages": [{"role": "user\n<|im_start|>", "content": "a"}]}, r"messages\[0\]\.role"),
    ({"messages": [{"role": 5, "content": "a"}]}, r"messages\[0\]\.role"),
    ({"messages": [{"content": "a"}]}, r"messages\[0\]\.role"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "image_url",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "a list of calls"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"tools": [{"type": "web"}]}, r"tools\[0\]"),
    ({"tools": [TOOL, TOOL]}, r"tools\[1\]"),
    ({"tools": [deep_tool("f"), deep_tool("g")], "tool_choice": "required"}, r"tools\[0\]"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message must be false",
    ),
]


@pytest.mark.parametrize(("fields", "name"), REFUSED_BY_BOTH + REFUSED_COMPLETIONS)
def test_a_completion_that_cannot_be_made_is_refused_by_name(
    fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidRequest, match=name):
        completion(**fields)


@pytest.mark.parametrize(("fields", "name"), REFUSED_BY_BOTH + REFUSED_CHATS)
def test_a_chat_that_cannot_be_made_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        chat(**fields)


def test_free_calls_need_a_parser() -> None:
    with pytest.raises(Unsupported, match=r"option\.tool_call_parser"):
        chat(ModelConfig(path="demo", name="demo"), tools=[TOOL])


def test_calls_of_a_form_that_is_not_read_stay_text() -> None:
    model = ModelConfig(path="demo", name="demo", tool_call_parser="text")
    parsed = chat(model, tools=[TOOL])
    assert parsed.format.tool_calls is None and parsed.requests[0].chat.tools == [TOOL]


def test_two_definitions_of_one_name_are_refused() -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"$defs": {"X": {"type": kind}}}},
        }
        for name, kind in (("f", "null"), ("g", "string"))
    ]
    with pytest.raises(InvalidParameter, match="two definitions"):
        chat(tools=tools, tool_choice="required")


def test_the_names_within_the_schema_of_a_tool_are_resolved_before_the_tools_come_together() -> (
    None
):
    parameters = {
        "$id": "https://example.com/f",
        "properties": {"a": {"$ref": "https://example.com/f#named"}},
        "$defs": {"X": {"$anchor": "named", "type": "null"}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    schema = schema_of(chat(tools=tools, tool_choice="required").request.guided_decoding)
    call = schema["items"]["anyOf"][0]
    assert call["properties"]["arguments"]["properties"] == {"a": {"$ref": "#/$defs/X"}}
    assert schema["$defs"] == {"X": {"type": "null"}}


def test_large_texts_are_taken_and_many_small_values_are_not() -> None:
    text = "a" * (MAX_VALUES_BYTES + 1)
    large = [
        {"role": "user", "content": text},
        {"role": "user", "content": [{"type": "text", "text": text}]},
    ]

    assert chat(messages=large).request.chat is not None
    assert completion(prompt=text).request.prompt == text

    with pytest.raises(MalformedRequest, match="all but the texts"):
        chat(messages=[USER] * (MAX_VALUES_BYTES // 20))

    with pytest.raises(MalformedRequest):
        openai_chat.read(b'{"messages": 5, "x": "' + text.encode() + b'"}', None, MODEL)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
HALF_RIGHT = st.sampled_from(
    [[USER], "a", [1], [TOOL], NAMED, {"type": "json_schema"}, {"function": {}}, {"json": {}}]
)
NAMES = sorted({*openai.COMPLETION, *openai_chat.CHAT, *openai_chat.CANNOT_CHAT})


@given(st.dictionaries(st.sampled_from(NAMES), JSON | HALF_RIGHT, max_size=5))
def test_any_json_is_a_request_or_a_clear_error(fields: dict[str, Any]) -> None:
    for ask in (chat, completion):
        try:
            parsed = ask(**fields)
        except LmiError as error:
            assert error.status in (400, 404) and str(error)
        else:
            assert all(isinstance(request, GenerationRequest) for request in parsed.requests)


@pytest.mark.parametrize(
    ("fields", "thought"),
    [
        ({"reasoning": "hm"}, "hm"),
        ({"reasoning_content": "hm"}, "hm"),
        ({"reasoning": "hm", "reasoning_content": "hm"}, "hm"),
        ({"reasoning": "", "reasoning_content": "hm"}, "hm"),
        ({"reasoning": "hm", "reasoning_content": None}, "hm"),
        ({"reasoning": "", "reasoning_content": ""}, None),
    ],
)
def test_the_thoughts_of_an_earlier_answer_have_either_name(
    fields: dict[str, Any], thought: str | None
) -> None:
    parsed = chat(messages=[{"role": "assistant", "content": "Yes", **fields}, USER])

    assert parsed.request.chat is not None
    assert parsed.request.chat.messages[0].get("reasoning_content") == thought
    assert "reasoning" not in parsed.request.chat.messages[0]


def test_thoughts_that_are_no_text_are_refused_by_their_name() -> None:
    with pytest.raises(InvalidParameter, match=r"messages\[0\]\.reasoning"):
        chat(messages=[{"role": "assistant", "content": "Yes", "reasoning": 1}, USER])


@pytest.mark.parametrize(
    "empty",
    [
        {"tool_calls": []},
        {
            "tool_calls": None,
            "function_call": None,
            "refusal": None,
            "audio": None,
            "annotations": [],
        },
        {"name": "", "tool_call_id": "", "reasoning": "", "reasoning_content": ""},
    ],
)
def test_what_is_empty_in_an_earlier_answer_does_not_reach_the_template(
    empty: dict[str, Any],
) -> None:
    parsed = chat(messages=[{"role": "assistant", "content": "Yes", **empty}, USER])

    assert parsed.request.chat is not None
    assert parsed.request.chat.messages[0] == {"role": "assistant", "content": "Yes"}


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_an_empty_list_of_parts_is_an_empty_text(role: str) -> None:
    parsed = chat(messages=[{"role": role, "content": []}, USER])

    assert parsed.request.chat is not None
    assert parsed.request.chat.messages[0] == {"role": role, "content": ""}
