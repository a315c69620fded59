"""Bodies of OpenAI's Responses become requests: items, tools, structures, and every refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lmi.apis.base.body import MAX_VALUES_BYTES, Parsed
from lmi.apis.responses.api import RESPONSES
from lmi.errors import InvalidRequest
from lmi.executor import GuidedDecodingParams, GuideType, SamplingConfig
from lmi.settings.config import ModelConfig
from lmi.types import Chat, GenerationRequest

MODEL = ModelConfig(path="demo", name="demo", tool_call_parser="hermes", reasoning_parser="think")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
USER = {"role": "user", "content": "Hi"}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "f",
    "arguments": '{"a": 1}',
}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "12 °C"}
TOLD_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def parse(model: ModelConfig = MODEL, /, **fields: Any) -> Parsed[Any]:
    body = json.dumps({"input": "Hi", **fields}).encode()
    return RESPONSES.parse(RESPONSES.read(body, "application/json", model))


def chat(**fields: Any) -> Chat:
    request_chat = parse(**fields).request.chat
    assert request_chat is not None
    return request_chat


def test_the_least_response_takes_the_room_that_is_left() -> None:
    parsed = parse(ModelConfig(path="demo", name="demo"))
    expected = GenerationRequest(
        chat=Chat(messages=[USER]), max_new_tokens=None, sampling=SamplingConfig()
    )
    assert (parsed.request, parsed.ignored, parsed.format.model) == (expected, (), "demo")


def test_what_agents_send_beside_is_no_cause_of_a_warning() -> None:
    beside: dict[str, Any] = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "stream_options": {"include_obfuscation": False},
        "background": False,
        "truncation": "disabled",
        "text": {"verbosity": "low"},
        "top_logprobs": 0,
    }
    assert parse(**beside).request == parse().request and parse(**beside).ignored == ()
    assert parse(betray=1).ignored == ("'betray': unknown",)


def test_instructions_and_developers_speak_as_the_system() -> None:
    messages = chat(
        instructions="Be brief.", input=[{"role": "developer", "content": "Be kind."}, USER]
    ).messages
    assert messages == [{"role": "system", "content": "Be brief.\nBe kind."}, USER]


def test_items_of_one_turn_are_one_message_of_the_assistant() -> None:
    thought = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    message = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look."}],
    }
    second = CALL | {"call_id": "call_2"}
    result = RESULT | {"call_id": "call_2", "output": [{"type": "input_text", "text": "b"}]}
    messages = chat(input=[USER, thought, message, CALL, second, RESULT, result]).messages

    assert messages[1] == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": [TOLD_CALL, TOLD_CALL | {"id": "call_2"}],
    }
    assert messages[2:] == [
        {"role": "tool", "content": "12 °C", "tool_call_id": "call_1"},
        {"role": "tool", "content": "b", "tool_call_id": "call_2"},
    ]


def test_thoughts_that_only_another_server_can_read_have_no_effect() -> None:
    hidden = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    messages = chat(input=[USER, hidden, {"role": "assistant", "content": "Hello"}, USER]).messages
    assert [(message["role"], message["content"]) for message in messages][1] == (
        "assistant",
        "Hello",
    )


def test_tools_reach_the_template_in_the_form_that_templates_expect() -> None:
    function = {"name": "f", "description": "d", "parameters": SCHEMA}
    assert chat(tools=[TOOL]).tools == [{"type": "function", "function": function}]
    assert chat(tools=[TOOL], tool_choice="none").tools is None


def test_tools_of_openai_s_own_servers_are_left_out_of_prompt_and_answer() -> None:
    parsed = parse(tools=[{"type": "web_search"}, TOOL])
    assert parsed.request == parse(tools=[TOOL]).request
    assert parsed.ignored == ("tools[0]: no effect, functions are the only tools",)
    assert [tool["name"] for tool in parsed.format.state.settings["tools"]] == ["f"]

    with pytest.raises(InvalidRequest, match="tool_choice must be given together with tools"):
        parse(tools=[{"type": "web_search"}], tool_choice="required")


def test_a_call_that_must_come_guides_the_answer() -> None:
    for choice in ("required", {"type": "function", "name": "f"}):
        parsed = parse(tools=[TOOL], tool_choice=choice)
        assert parsed.request.guided_decoding is not None
        assert parsed.format.field_names == {"guided_decoding_params": "tool_choice"}

    assert parse(tools=[TOOL]).request.guided_decoding is None


def test_a_structure_is_asked_for_in_the_format_of_the_text() -> None:
    guide = parse(
        text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    ).request.guided_decoding
    assert guide is not None and json.loads(str(guide.guide)) == SCHEMA
    assert parse(
        text={"format": {"type": "json_object"}}
    ).request.guided_decoding == GuidedDecodingParams(GuideType.JSON)
    assert parse(text={"format": {"type": "text"}}).request.guided_decoding is None


def test_an_effort_is_passed_to_the_template() -> None:
    assert chat(reasoning={"effort": "low", "summary": "auto"}).variables == {
        "reasoning_effort": "low"
    }


KEPT = "is not supported here: nothing is kept here"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input must be a string or a non-empty list of items, given null"),
    ({"input": []}, "input must be a string or a non-empty list of items"),
    ({"input": ["Hi"]}, "input[0] must be an object"),
    (
        {"input": [{"role": "tool", "content": "x"}]},
        "input[0].role must be one of user, assistant, system, developer",
    ),
    ({"input": [{"role": "user"}]}, "input[0].content must be a string or a list of text parts"),
    (
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input[0] is not supported here: a conversation has",
    ),
    ({"input": [{"type": [1]}]}, "input[0] is not supported here: a conversation has"),
    ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments must be a string"),
    (
        {"input": [{"type": "function_call_output", "output": "x"}]},
        "input[0].call_id must be a string",
    ),
    (
        {"input": [RESULT | {"output": [{"type": "input_image"}]}]},
        "input[0].output[0].image_url must be a data URL",
    ),
    ({"store": True}, f"store {KEPT}"),
    ({"previous_response_id": "resp_1"}, f"previous_response_id {KEPT}"),
    ({"conversation": "conv_1"}, f"conversation {KEPT}"),
    ({"background": True}, f"background {KEPT}"),
    ({"truncation": "auto"}, "truncation must be one of disabled"),
    ({"top_logprobs": 21}, "top_logprobs must be from 0 to 20"),
    ({"include": "message.output_text.logprobs"}, "include must be a list of strings"),
    ({"max_output_tokens": 0}, "max_output_tokens must be"),
    ({"tools": False}, "tools must be a list of at most 128 tools"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name must be a name of its own"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice.name must be the name of one",
    ),
    (
        {"tools": [TOOL], "tool_choice": "any"},
        "tool_choice must be auto, none, required or the name",
    ),
    (
        {"text": {"format": {"type": "xml"}}},
        "text.format.type must be one of text, json_object, json_schema",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "n"}}},
        "text.format.schema must be a JSON schema",
    ),
    ({"reasoning": {"effort": 5}}, "reasoning.effort must be a string"),
    ({"metadata": "x"}, "metadata must be an object"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
def test_a_refusal_names_the_field_as_the_client_wrote_it(
    fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)

    assert said in str(caught.value)


@pytest.mark.parametrize("num_levels", [240, 251, 252, 253, 254, 300])
@pytest.mark.parametrize(
    "field", ["metadata", "text", "tool_choice", "reasoning", "prompt_cache_key"]
)
def test_what_a_response_repeats_can_be_written_however_deep_it_is(
    field: str, num_levels: int
) -> None:
    deep = b'{"type": "function", "name": "f", "summary": %b{}%b}' % (
        b'{"a": ' * num_levels,
        b"}" * num_levels,
    )
    body = b'{"input": "Hi", "tools": [{"name": "f"}], "%b": %b}' % (field.encode(), deep)
    try:
        format: Any = RESPONSES.parse(RESPONSES.read(body, None, MODEL)).format
    except InvalidRequest as error:
        assert field in str(error)
    else:
        assert format.state.event("response.created", response=format.state.response("in_progress"))


def test_long_texts_of_results_are_no_reason_to_refuse_a_body() -> None:
    long = RESULT | {"output": "x" * MAX_VALUES_BYTES}
    assert chat(input=[USER, CALL, long], instructions="y" * MAX_VALUES_BYTES)
    assert chat(input="x" * MAX_VALUES_BYTES * 2)


def test_a_thought_without_text_does_not_reach_the_template() -> None:
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "7"},
    ]
    called, _ = chat(input=items).messages

    assert "reasoning_content" not in called and called["tool_calls"][0]["function"]["name"] == "f"
