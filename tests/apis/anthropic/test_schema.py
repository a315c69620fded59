"""Bodies of Anthropic's Messages become requests: blocks, tools, thoughts, defaults, and every
refusal.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from lmi.apis.anthropic.api import ANTHROPIC, COUNT_TOKENS
from lmi.apis.base.body import MAX_VALUES_BYTES, Parsed
from lmi.errors import InvalidRequest, LmiError, MalformedRequest
from lmi.executor import GuidedDecodingParams, GuideType, SamplingConfig
from lmi.settings.config import ModelConfig
from lmi.types import AnswerEnd, Chat, Delta, GenerationRequest, Token

MODEL = ModelConfig(path="demo", name="demo", tool_call_parser="hermes", reasoning_parser="think")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {
    "name": "f",
    "description": "d",
    "input_schema": SCHEMA,
    "cache_control": {"type": "ephemeral"},
}
USER = {"role": "user", "content": "Hi"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "12 °C"}


def parse(model: ModelConfig = MODEL, /, **fields: Any) -> Parsed[Any]:
    body = json.dumps({"max_tokens": 9, "messages": [USER], **fields}).encode()
    return ANTHROPIC.parse(ANTHROPIC.read(body, "application/json", model))


def chat(**fields: Any) -> Chat:
    asked_chat = parse(**fields).request.chat
    assert asked_chat is not None
    return asked_chat


def test_the_least_message_is_sampled_and_has_its_limit() -> None:
    parsed = parse(ModelConfig(path="demo", name="demo"))
    expected = GenerationRequest(
        chat=Chat(messages=[USER]), max_new_tokens=9, sampling=SamplingConfig()
    )
    assert (parsed.request, parsed.ignored, parsed.format.model) == (expected, (), "demo")


def test_what_clients_of_anthropic_send_beside_is_no_cause_of_a_warning() -> None:
    beside: dict[str, Any] = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": []},
        "cache_control": {"type": "ephemeral"},
    }
    assert parse(**beside) == parse()
    assert parse(betray=1).ignored == ("'betray': unknown",)


@pytest.mark.parametrize(
    "system", ["a\nb", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]]
)
def test_the_system_prompt_is_the_first_message(system: object) -> None:
    assert chat(system=system).messages == [{"role": "system", "content": "a\nb"}, USER]


BILLING = "x-anthropic-billing-header: cc_version=2.1.197.c40; cc_entrypoint=sdk-cli;"


@pytest.mark.parametrize(
    "block", [BILLING, BILLING + "\nMore.", "x-anthropic-billing-header: cch=00000;"]
)
def test_what_claude_code_writes_for_billing_is_not_in_front_of_the_prompt(block: str) -> None:
    blocks = [{"type": "text", "text": text} for text in (block, "You are an agent.", "Be brief.")]
    assert chat(system=blocks).messages == [
        {"role": "system", "content": "You are an agent.\nBe brief."},
        USER,
    ]
    assert chat(system=blocks[:1]).messages == [USER]


def test_a_text_about_the_billing_header_stays() -> None:
    text = f"The first block is `{BILLING}`."
    assert chat(system=[{"type": "text", "text": text}]).messages[0]["content"] == text


def test_a_wrong_block_behind_that_of_billing_is_refused_by_its_own_place() -> None:
    with pytest.raises(LmiError, match=r"^system\[1\]"):
        parse(system=[{"type": "text", "text": BILLING}, {"type": "image"}])


def test_results_of_tools_are_messages_of_their_own_before_the_text_beside_them() -> None:
    image_free = {
        "type": "tool_result",
        "tool_use_id": "toolu_2",
        "content": [{"type": "text", "text": "b"}],
    }
    content = [RESULT, image_free, {"type": "text", "text": "and now?"}]
    assert chat(messages=[{"role": "user", "content": content}]).messages == [
        {"role": "tool", "content": "12 °C", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "b", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "and now?"},
    ]


def test_thoughts_and_calls_of_an_earlier_answer_are_fields_of_its_message() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    content = [
        thought,
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        CALL,
    ]
    chat_of_answer = chat(
        messages=[
            USER,
            {"role": "assistant", "content": content},
            {"role": "user", "content": [RESULT]},
        ]
    )

    assert chat_of_answer.messages[1] == {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        ],
        "reasoning_content": "hm",
    }
    assert chat_of_answer.messages[2]["role"] == "tool" and len(chat_of_answer.messages) == 3


def test_tools_reach_the_template_in_the_form_that_templates_expect() -> None:
    function = {"name": "f", "description": "d", "parameters": SCHEMA}
    assert chat(tools=[TOOL]).tools == [{"type": "function", "function": function}]
    assert chat(tools=[TOOL], tool_choice={"type": "none"}).tools is None


def guide(**fields: Any) -> Any:
    guide_params = parse(tools=[TOOL], **fields).request.guided_decoding
    assert (
        isinstance(guide_params, GuidedDecodingParams)
        and guide_params.guide_type is GuideType.JSON_SCHEMA
    )
    return json.loads(str(guide_params.guide))


def test_a_call_that_must_come_guides_the_answer() -> None:
    assert guide(tool_choice={"type": "tool", "name": "f"}) == SCHEMA
    assert (
        guide(tool_choice={"type": "any"})["items"]["anyOf"][0]["properties"]["arguments"] == SCHEMA
    )
    assert guide(tool_choice={"type": "any", "disable_parallel_tool_use": True})["maxItems"] == 1
    assert parse(tools=[TOOL], tool_choice={"type": "auto"}).request.guided_decoding is None


def test_a_structure_and_an_effort_are_asked_for_in_the_output_config() -> None:
    parsed = parse(
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}
    )
    assert parsed.request.guided_decoding == GuidedDecodingParams(
        GuideType.JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":"))
    )
    assert parsed.request.chat is not None and parsed.request.chat.variables == {
        "reasoning_effort": "low"
    }
    assert parsed.format.field_names == {"guided_decoding_params": "output_config.format"}


def test_a_structure_may_be_asked_for_by_its_first_name() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    parsed = parse(output_format=form)
    assert parsed.request == parse(output_config={"format": form}).request
    assert parsed.format.field_names == {"guided_decoding_params": "output_format"}
    with pytest.raises(
        InvalidRequest, match=r"^output_format must be left out beside output_config\.format"
    ):
        parse(output_format=form, output_config={"format": form})


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        (None, {}),
    ],
)
def test_whether_the_model_thinks_is_told_to_its_template(
    thinking: object, variables: dict[str, object]
) -> None:
    assert chat(thinking=thinking).variables == variables


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens must be an integer of at least 1, given null"),
    ({"max_tokens": 0}, "max_tokens must be"),
    ({"messages": []}, "messages must be a non-empty list of messages"),
    ({"messages": ["Hi"]}, "messages[0] must be an object"),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].role must be one of user, assistant, system",
    ),
    (
        {"messages": [{"role": "user", "content": 5}]},
        "messages[0].content must be a string or a list of blocks",
    ),
    (
        {"messages": [{"role": "user", "content": [CALL]}]},
        "a message of the user has blocks of the types text, image, tool_result, "
        "given one of type 'tool_use'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": []}]}]},
        "messages[0].content[0] is not supported here",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [RESULT | {"content": [{"type": "image", "source": {}}]}],
                }
            ]
        },
        (
            "messages[0].content[0].content[0].source.type is not supported here: this server fetches "  # noqa: E501
            "no image"
        ),
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": "The"}]},
        "messages is not supported here: an answer begins",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": [CALL | {"input": "x"}]}]},
        "messages[1].content[0].input",
    ),
    ({"system": 5}, "system must be"),
    (
        {
            "messages": [
                {"role": "user", "content": [RESULT | {"content": [{"type": "tool_reference"}]}]}
            ]
        },
        "messages[0].content[0].content[0].tool_name must be a string",
    ),
    ({"tools": {"a": 1}}, "tools must be a list"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name must be a string"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name must be a name of its own"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type is not supported here",
    ),
    (
        {"tools": [{"name": "f", "input_schema": {"$ref": "http://127.0.0.1/x"}}]},
        "tools[0].input_schema must be",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        "tool_choice.name must be the name of one of",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "required"}},
        "tool_choice.type must be one of auto, any, none, tool",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice must be given together with tools"),
    ({"thinking": {"type": "long"}}, "thinking.type must be one of"),
    ({"output_format": {"type": "xml"}}, "output_format.type must be one of json_schema"),
    (
        {"compaction": {"type": "auto"}},
        "compaction is not supported here: no conversation is shortened here",
    ),
    (
        {"output_config": {"format": {"type": "xml"}}},
        "output_config.format.type must be one of json_schema",
    ),
    (
        {"output_config": {"format": {"type": "json_schema"}}},
        "output_config.format.schema must be a JSON schema",
    ),
    ({"mcp_servers": [{"url": "http://127.0.0.1"}]}, "mcp_servers is not supported here"),
    ({"stop_sequences": "END"}, "stop_sequences must be a list of strings"),
    ({"temperature": 3}, "temperature must be"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
def test_a_refusal_names_the_field_as_the_client_wrote_it(
    fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)

    assert said in str(caught.value)


def test_a_tool_that_is_found_later_is_described_where_a_result_first_refers_to_it() -> None:
    later = {"name": "g", "input_schema": {}, "defer_loading": True}
    function = {"name": "g", "parameters": {}}
    references = [{"type": "tool_reference", "tool_name": name} for name in ("g", "f", "g", "gone")]
    result_message = {"role": "user", "content": [RESULT | {"content": references}]}
    called = {"role": "assistant", "content": [CALL]}
    parsed = parse(tools=[TOOL, later], messages=[USER, called, result_message])
    asked_chat = parsed.request.chat
    assert asked_chat is not None and [
        tool["function"]["name"] for tool in asked_chat.tools or ()
    ] == ["f"]

    description, *further_lines = asked_chat.messages[-1]["content"].split("\n")
    assert json.loads(description) == {
        "type": "function",
        "function": function,
    } and further_lines == [
        "f",
        "g",
        "gone",
    ]
    assert set(parsed.format.tools) == {"f", "g"}


def test_tools_that_the_server_does_not_look_for_are_refused_with_the_option() -> None:
    with pytest.raises(LmiError, match="option.tool_call_parser"):
        parse(ModelConfig(path="demo", name="demo"), tools=[TOOL])


def test_tokens_are_counted_of_a_conversation_without_a_limit_whoever_spoke_last() -> None:
    body = json.dumps({"messages": [USER, {"role": "assistant", "content": "Hello"}]}).encode()
    assert COUNT_TOKENS.parse(COUNT_TOKENS.read(body, None, MODEL)).request.chat is not None


def test_long_texts_of_results_are_no_reason_to_refuse_a_body_but_many_values_are() -> None:
    long = RESULT | {"content": [{"type": "text", "text": "x" * MAX_VALUES_BYTES}]}
    assert chat(messages=[{"role": "user", "content": [long]}], system="y" * MAX_VALUES_BYTES)

    many = CALL | {"input": {"a": [0] * (MAX_VALUES_BYTES // 2)}}
    with pytest.raises(MalformedRequest, match="all but the texts"):
        parse(messages=[USER, {"role": "assistant", "content": [many]}, USER])


@pytest.mark.parametrize("num_levels", [240, 250, 252, 254, 300])
def test_a_call_s_arguments_can_be_written_however_deep_the_model_nests_them(
    num_levels: int,
) -> None:
    formatter = ANTHROPIC.formatter(parse(tools=[TOOL], tool_choice={"type": "tool", "name": "f"}))
    arguments = '{"a": ' * num_levels + "{}" + "}" * num_levels
    [body] = formatter.feed(Delta([Token(5, arguments)], AnswerEnd.EOS_TOKEN))

    assert arguments.replace(" ", "").encode() in body.replace(b" ", b"").replace(b'\\"', b'"')


def test_a_call_whose_arguments_come_between_tags_is_a_block_of_a_whole_message() -> None:
    model = ModelConfig(path="demo", name="demo", tool_call_parser="qwen3_xml")
    text = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    [body] = ANTHROPIC.formatter(parse(model, tools=[TOOL])).feed(
        Delta([Token(5, text)], AnswerEnd.EOS_TOKEN)
    )
    answer = json.loads(body)
    assert [block["input"] for block in answer["content"]] == [{"a": 1}]
    assert answer["stop_reason"] == "tool_use"


def test_a_thought_without_text_does_not_reach_the_template() -> None:
    thought = {"type": "thinking", "thinking": "", "signature": ""}
    messages = [
        USER,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes"}]},
        USER,
    ]

    assert chat(messages=messages).messages[1] == {"role": "assistant", "content": "Yes"}
