"""The OpenAI API over real sockets: streams, calls, structures, errors before and in a stream,
clients that leave.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmi.executor import DEFAULT_PRIORITY, GuideType
from lmi.shared.state import Phase
from tests.scripted import CAPABILITIES, CONTEXT, END_ID, Host, host, wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LAST_SAID = "{{ messages[-1].content }}"
ABLE = msgspec.structs.replace(
    CAPABILITIES, guided_decoding=tuple(GuideType), embedding_bias=True, priority=True
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = 'say I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def able(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """An engine that can guide decoding, behind a template that writes the last message."""
    settings: dict[str, object] = {
        "chat_template": LAST_SAID,
        "tool_call_parser": "hermes",
        "reasoning_parser": "think",
        "aliases": ("gpt-x",),
        "sources": ("/opt/ml/model", "owner/gpt"),
    }
    with host(tmp_path_factory.mktemp("able"), model=settings, capabilities=ABLE) as served:
        yield served


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """An engine that cannot guide decoding, and a model without a template."""
    with host(tmp_path_factory.mktemp("plain")) as served:
        yield served


@pytest.fixture(scope="module")
def unable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """An engine that lacks some capabilities, as the front end knows."""
    lacks = msgspec.structs.replace(
        CAPABILITIES, min_p=False, prompt_log_probs=False, max_top_log_probs=3
    )
    with host(tmp_path_factory.mktemp("unable"), capabilities=lacks) as served:
        yield served


Ask = Callable[..., tuple[int, Any]]


def chat(server: Host, said: str, **fields: Any) -> tuple[int, Any]:
    response, body = server.post({"messages": [{"role": "user", "content": said}], **fields}, CHAT)
    return response.status, events(body) if fields.get(
        "stream"
    ) and response.status == 200 else json.loads(body)


def complete(server: Host, prompt: Any, **fields: Any) -> tuple[int, Any]:
    response, body = server.post({"prompt": prompt, **fields}, COMPLETIONS)
    return response.status, events(body) if fields.get(
        "stream"
    ) and response.status == 200 else json.loads(body)


def events(body: bytes) -> list[dict[str, Any]]:
    """The objects of a stream that ends with its end mark."""
    *records, tail = body.split(b"\n\n")
    assert tail == b"" and records.pop() == b"data: [DONE]"
    assert all(record.startswith(b"data: ") for record in records)
    return [json.loads(record.removeprefix(b"data: ")) for record in records]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for choice in choices
    )


def last_request(server: Host) -> Any:
    return server.executor.requests[-1]


@pytest.mark.parametrize("said", ["Hello", "two\nlines \u2028 and ½ 🦙", ""])
def test_a_stream_says_what_the_whole_answer_says(able: Host, said: str) -> None:
    _, whole = chat(able, f"say {said}")
    _, chunks = chat(able, f"say {said}", stream=True)

    assert whole["choices"][0]["message"]["content"] == said == text_of(chunks)

    _, whole = complete(able, f"say {said}", max_tokens=50)
    _, chunks = complete(able, f"say {said}", max_tokens=50, stream=True)

    assert whole["choices"][0]["text"] == said == text_of(chunks)


def test_a_stream_of_a_chat_tells_role_text_reason_and_usage_in_this_order(able: Host) -> None:
    response, body = able.post(
        {
            "messages": [{"role": "user", "content": "say ab"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        CHAT,
    )
    assert response.getheader("content-type") == "text/event-stream"

    role, *text_chunks, end, usage = events(body)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(text_chunks) == "ab" and all(
        chunk["usage"] is None for chunk in (role, *text_chunks, end)
    )
    assert end["choices"][0] == {
        "index": 0,
        "delta": {"content": ""},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert (usage["choices"], usage["usage"]["prompt_tokens"]) == ([], 6)
    assert (
        usage["usage"]["completion_tokens"] == 3
        and len({chunk["id"] for chunk in (role, end, usage)}) == 1
    )


@pytest.mark.parametrize("ask", [chat, complete])
def test_each_chunk_tells_the_numbers_so_far_where_that_is_asked_for(able: Host, ask: Ask) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = ask(able, "say abc", stream=True, stream_options=options)
    usages = [chunk["usage"] for chunk in chunks]

    assert all(usage["prompt_tokens"] == len("say abc") for usage in usages)
    assert all(
        usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        for usage in usages
    )

    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == ([0] if ask is chat else []) + [1, 2, 3, 4, 4], (
        "the role, three letters, the end, all"
    )


def test_running_numbers_are_those_of_a_choice_and_its_prompt(able: Host) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = complete(able, ["say a", "say bcd"], stream=True, stream_options=options)
    last = {choice["index"]: chunk["usage"] for chunk in chunks for choice in chunk["choices"]}

    assert [(last[n]["prompt_tokens"], last[n]["completion_tokens"]) for n in (0, 1)] == [
        (5, 2),
        (7, 4),
    ]
    assert chunks[-1]["usage"]["total_tokens"] == 5 + 2 + 7 + 4


def test_without_include_usage_no_chunk_has_numbers(able: Host) -> None:
    for fields in ({}, {"stream_options": {"continuous_usage_stats": True}}):
        _, chunks = chat(able, "say abc", stream=True, **fields)
        assert not any("usage" in chunk for chunk in chunks)


def test_a_whole_answer_has_null_for_what_typed_clients_of_vllm_read(able: Host) -> None:
    _, answer = complete(able, "say ab")
    [choice] = answer["choices"]

    assert [choice[name] for name in ("token_ids", "prompt_token_ids", "prompt_logprobs")] == [
        None
    ] * 3

    _, answer = chat(able, "say ab")
    assert (
        answer["choices"][0]["token_ids"]
        is answer["prompt_token_ids"]
        is answer["prompt_logprobs"]
        is None
    )

    _, chunks = chat(able, "say ab", stream=True)
    assert not any("token_ids" in choice for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize(
    ("side", "kept"), [("left", "say bc"), (None, "say bc"), ("right", "say ab")]
)
def test_a_prompt_is_cut_at_the_side_that_is_asked_for(
    able: Host, side: str | None, kept: str
) -> None:
    prompt = "say absay bc"
    fields = {"truncate_prompt_tokens": 6, "truncation_side": side, "return_token_ids": True}
    _, of_text = complete(able, prompt, **fields)
    _, of_ids = complete(able, list(prompt.encode()), **fields)
    _, of_chat = chat(able, prompt, **fields)
    prompt_ids = [
        of_text["choices"][0]["prompt_token_ids"],
        of_ids["choices"][0]["prompt_token_ids"],
    ]
    assert [*prompt_ids, of_chat["prompt_token_ids"]] == [list(kept.encode())] * 3

    _, answer = able.post(
        {"inputs": prompt, "parameters": {"truncate": 6, "truncation_side": side}}
    )

    assert json.loads(answer) == {"generated_text": kept.removeprefix("say ")}


ROLE_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'document', 'ipython') %}{{ raise_exception('no role ' ~ m.role) "
    "}}{% endif %}"
    "{{ m.role }}: {{ m.content }};{% endfor %}"
)


def test_a_role_of_the_model_s_own_reaches_its_template_which_may_refuse_it(tmp_path: Path) -> None:
    with host(tmp_path, model={"chat_template": ROLE_TEMPLATE}) as server:
        messages = [{"role": "document", "content": "a"}, {"role": "user", "content": "b"}]
        _, tokens = server.post({"messages": messages}, "/tokenize")

        assert bytes(json.loads(tokens)["tokens"]) == b"document: a;user: b;"

        response, body = server.post({"messages": [{"role": "wizard", "content": "a"}]}, CHAT)
        assert response.status == 400 and "no role wizard" in json.loads(body)["error"]["message"]


def test_a_message_is_continued_where_its_content_ends(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}.{% endfor %}{{ '>' if add_generation_prompt }}"
    )
    with host(tmp_path, model={"chat_template": template}) as server:
        for fields, prompt in (({"continue_final_message": True}, b"say ab"), ({}, b"say ab.>")):
            assert chat(server, "say ab", **fields)[0] == 200
            assert bytes(last_request(server).input_token_ids) == prompt

        status, answer = chat(server, "ab", continue_final_message=True, add_generation_prompt=True)
        assert (status, answer["error"]["param"]) == (400, "continue_final_message")


def test_a_chat_without_a_limit_may_fill_the_context(able: Host) -> None:
    _, answer = chat(able, "run abc")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == able.executor.info.max_sequence_length


@pytest.mark.parametrize(
    ("num", "counted"), [(300, "'300 tokens'"), (3000, "'at least 600 tokens (3000 characters, ")]
)
def test_a_prompt_over_the_context_is_refused_with_its_tokens(
    able: Host, num: int, counted: str
) -> None:
    opening = f"This model's maximum context length is {CONTEXT} tokens. However, "
    expected = f"must be shorter than the model's context of {CONTEXT} tokens, given {counted}"
    for name, (status, answer) in {
        "messages": chat(able, "a" * num),
        "prompt": complete(able, "a" * num),
    }.items():
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (400, name, "context_length_exceeded")
        assert error["message"].startswith(f"{opening}{name} {expected}")


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (
            "/v1/responses",
            {"input": "a" * 300},
            "this model's maximum context length is 200 tokens. however, input ",
        ),
        (
            "/invocations",
            {"messages": [{"role": "user", "content": "a" * 300}]},
            "this model's maximum context length",
        ),
        (
            "/invocations",
            {"prompt": "a" * 300},
            "this model's maximum context length is 200 tokens. however, prompt ",
        ),
        (
            "/invocations",
            {"inputs": "a" * 300},
            "`inputs` tokens + `max_new_tokens` must be <= 200: inputs ",
        ),
        (
            "/generate",
            {"inputs": "a" * 300},
            "`inputs` tokens + `max_new_tokens` must be <= 200: inputs ",
        ),
    ],
)
def test_a_prompt_over_the_context_is_refused_in_words_that_clients_know(
    able: Host, path: str, fields: dict[str, Any], words: str
) -> None:
    """litellm looks for them in lower case, so that it asks a model with a longer context."""
    response, body = able.post(fields, path)
    assert 400 <= response.status < 500
    answer = json.loads(body)
    error = answer["error"]
    message = error["message"] if isinstance(error, dict) else error
    assert words in message.lower(), message


def test_a_prompt_of_token_ids_over_the_context_is_refused_with_its_tokens(able: Host) -> None:
    status, answer = complete(able, [97] * 300)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["message"].endswith(f"context of {CONTEXT} tokens, given '300 tokens'")


def test_a_completion_has_sixteen_tokens_and_is_cut_at_a_stop_string(able: Host) -> None:
    _, answer = complete(able, "run abc")
    assert answer["usage"]["completion_tokens"] == 16

    _, answer = complete(able, "run abc", stop="ca", max_tokens=50)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("ab", "stop")


def test_prompts_are_answered_together_whatever_their_form(able: Host) -> None:
    prompts = ["say one", list(b"say two"), "say three"]
    _, answer = complete(able, prompts)

    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "one"),
        (1, "two"),
        (2, "three"),
    ]

    _, chunks = complete(able, prompts, stream=True)
    assert [text_of([c for c in chunks if c["choices"][0]["index"] == n]) for n in range(3)] == [
        "one",
        "two",
        "three",
    ]


@pytest.mark.parametrize("path", [COMPLETIONS, "/invocations"])
def test_one_prompt_of_several_that_is_refused_begins_none_of_them(able: Host, path: str) -> None:
    num_before = len(able.executor.requests)
    for _ in range(5):
        response, body = able.post({"prompt": ["run a", "say " + "x" * 300], "stream": True}, path)
        assert (
            response.status == 400
            and json.loads(body)["error"]["code"] == "context_length_exceeded"
        )

    assert len(able.executor.requests) == num_before


def test_a_log_prob_s_token_is_what_it_spells_though_a_stop_string_holds_its_text_back(
    able: Host,
) -> None:
    plain = {"max_tokens": 50, "logprobs": 1}
    stop = {"stop": ["bad times"]}
    _, expected = complete(able, "say bad tea", **plain)
    _, answer = complete(able, "say bad tea", **plain, **stop)
    _, chunks = complete(able, "say bad tea", **plain, **stop, stream=True)
    assert answer["choices"] == expected["choices"]
    spelled = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert "".join(spelled) == "bad tea<end>"
    assert text_of(chunks) == "bad tea"


def test_token_ids_are_those_of_the_engine_however_they_are_asked_for(able: Host) -> None:
    prompt = list(b"say \xc3\xa9!")
    token_ids = [*b"\xc3\xa9!", END_ID]
    fields = {"max_tokens": 50, "return_token_ids": True}
    _, answer = complete(able, prompt, **fields)

    assert (answer["choices"][0]["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (
        prompt,
        token_ids,
    )

    _, chunks = complete(able, prompt, **fields, stream=True)
    choices = [chunk["choices"][0] for chunk in chunks]

    assert [choice.get("prompt_token_ids") for choice in choices] == [prompt] + [None] * (
        len(choices) - 1
    )
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == token_ids

    _, answer = chat(able, "say é!", **fields)
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (prompt, token_ids)

    _, chunks = chat(able, "say é!", **fields, stream=True)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt] + [None] * (
        len(chunks) - 1
    )
    assert [
        token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", [])
    ] == token_ids


@pytest.mark.parametrize(
    "fields", [{}, {"stop_token_ids": [ord("x")]}], ids=["end token", "stop token"]
)
def test_lists_of_log_probs_are_as_long_as_those_of_ids_and_as_the_usage(
    able: Host, fields: dict[str, Any]
) -> None:
    request_fields = {"max_tokens": 50, "return_token_ids": True, **fields}
    streamed = {**request_fields, "stream": True, "stream_options": {"include_usage": True}}
    last = "x" if fields else "<end>"

    _, answer = complete(able, "say éx", logprobs=0, **request_fields)
    [choice] = answer["choices"]
    assert choice["logprobs"]["tokens"] == ["", "é", *(() if fields else ("x",)), last]

    for values in choice["logprobs"].values():
        assert len(values) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]

    assert choice["logprobs"]["text_offset"][-1] == len(choice["text"])

    _, chunks = complete(able, "say éx", logprobs=0, **streamed)
    for chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])

    assert chunks[-2]["choices"][0]["logprobs"]["tokens"][-1] == last

    _, answer = chat(able, "say éx", logprobs=True, **request_fields)
    [choice] = answer["choices"]

    assert (
        len(choice["logprobs"]["content"])
        == len(choice["token_ids"])
        == answer["usage"]["completion_tokens"]
    )
    assert choice["logprobs"]["content"][-1]["token"] == last

    _, chunks = chat(able, "say éx", logprobs=True, **streamed)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    content = [
        token for choice in choices for token in (choice["logprobs"] or {"content": []})["content"]
    ]

    assert [token["token"] for token in content][-1] == last
    assert len(content) == chunks[-1]["usage"]["completion_tokens"]
    assert choices[-1]["logprobs"]["content"][0]["token"] == last, (
        "the end is told with the reason, as in vLLM"
    )


def test_each_token_comes_first_among_the_best_in_its_place(able: Host) -> None:
    _, answer = complete(able, "say ab", echo=True, logprobs=2, max_tokens=2)
    log_probs = answer["choices"][0]["logprobs"]

    assert log_probs["top_logprobs"][0] is None
    assert [next(iter(top)) for top in log_probs["top_logprobs"][1:]] == log_probs["tokens"][1:]

    _, answer = complete(able, "say ab", echo=True, logprobs=0, max_tokens=2)
    log_probs = answer["choices"][0]["logprobs"]
    pairs = zip(log_probs["tokens"], log_probs["token_logprobs"], strict=True)

    assert log_probs["top_logprobs"] == [
        None,
        *({token: number} for token, number in list(pairs)[1:]),
    ]


def test_a_prompt_and_its_answer_are_decoded_by_one_rule_and_have_offsets_into_the_text(
    able: Host,
) -> None:
    _, answer = complete(able, "say 😀x", echo=True, logprobs=0, max_tokens=50)
    [choice] = answer["choices"]
    log_probs = choice["logprobs"]

    assert choice["text"] == "say 😀x😀x"
    assert log_probs["tokens"] == [*"say ", "", "", "", "😀", "x", "", "", "", "😀", "x", "<end>"]

    for token, offset in zip(log_probs["tokens"][:-1], log_probs["text_offset"], strict=False):
        assert choice["text"].startswith(token, offset)


@pytest.mark.parametrize(("side", "offsets"), [("left", range(6, 12)), ("right", range(6))])
def test_the_offsets_of_a_prompt_that_is_cut_are_those_of_what_is_kept(
    able: Host, side: str, offsets: range
) -> None:
    cut = {"truncate_prompt_tokens": 6, "truncation_side": side}
    _, answer = complete(able, "say absay bc", echo=True, logprobs=0, max_tokens=1, **cut)
    assert answer["choices"][0]["logprobs"]["text_offset"][:6] == list(offsets)


def test_echo_gives_back_a_prompt_of_token_ids_as_text(able: Host) -> None:
    _, answer = complete(able, list(b"say two"), echo=True)
    assert answer["choices"][0]["text"] == "say twotwo"
    _, chunks = complete(able, list(b"say two"), echo=True, stream=True)
    assert text_of(chunks) == "say twotwo"


def test_the_prompt_alone_is_scored_without_a_token_of_an_answer(able: Host) -> None:
    _, answer = complete(able, "say two", echo=True, logprobs=1, max_tokens=0)
    [choice] = answer["choices"]

    assert choice["text"] == "say two" and "".join(choice["logprobs"]["tokens"]) == "say two"
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.25] * 6
    assert answer["usage"]["completion_tokens"] == 0


def test_a_prompt_is_scored_beside_its_answer(able: Host) -> None:
    scored = [
        None,
        *(
            {str(byte): {"logprob": -0.25, "rank": None, "decoded_token": chr(byte)}}
            for byte in b"ay ab"
        ),
    ]
    _, answer = complete(able, "say ab", prompt_logprobs=0)

    assert (
        answer["choices"][0]["prompt_logprobs"] == scored and answer["choices"][0]["text"] == "ab"
    )

    _, answer = chat(able, "say ab", prompt_logprobs=0)
    assert answer["prompt_logprobs"] == scored


def test_the_prompt_alone_ends_with_its_length_however_it_is_asked_for(able: Host) -> None:
    _, chunks = complete(able, "say ", echo=True, max_tokens=0, stream=True)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"


def test_log_probs_of_a_chat_spell_its_text_and_the_end_token(able: Host) -> None:
    _, answer = chat(able, "say é!", logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]

    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "é!<end>"
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] == -0.5 for token in content)


def test_biases_and_structures_reach_the_engine(able: Host) -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    status, _ = chat(able, "say {}", logit_bias={"7": -1}, response_format=form)

    assert status == 200 and last_request(able).embedding_bias == ((7, -1.0),)
    assert json.loads(last_request(able).guided_decoding_params.guide) == schema


STRUCTURES: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"',
    "structured_outputs": {"regex": "a+"},
}


def test_what_an_engine_lacks_is_refused_in_the_api_s_words(plain: Host) -> None:
    for name, value in ({"logit_bias": {"7": 1}} | STRUCTURES).items():
        status, answer = complete(plain, "say a", **{name: value})
        assert (status, answer["error"]["param"]) == (400, name)
        assert answer["error"]["message"].startswith(
            f"{name} is not supported here: scripted has no "
        )

    status, answer = complete(plain, "say a", logprobs=6)
    assert (status, answer["error"]["message"]) == (400, "logprobs must be at most 5, given 6")


def test_a_call_cannot_be_forced_where_the_engine_cannot_guide(tmp_path: Any) -> None:
    with host(tmp_path, model={"chat_template": LAST_SAID}) as server:
        status, answer = chat(server, "say a", tools=[TOOL], tool_choice="required")
        assert status == 400 and answer["error"]["message"].startswith(
            "tool_choice is not supported here: scripted has no such guide"
        )
        assert answer["error"]["param"] == "tool_choice"

        for name, value in STRUCTURES.items():
            status, answer = chat(server, "say a", **{name: value})
            assert (status, answer["error"]["param"]) == (400, name)

        status, answer = chat(server, "say a", tools=[TOOL])
        assert status == 400 and "option.tool_call_parser" in answer["error"]["message"]


def test_a_call_is_found_in_the_text(able: Host) -> None:
    _, answer = chat(able, CALL, tools=[TOOL])
    [choice] = answer["choices"]
    [call] = choice["message"]["tool_calls"]

    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I look.")
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"a": 1}'})


def test_the_arguments_of_a_call_are_streamed_as_they_come(able: Host) -> None:
    _, chunks = chat(able, CALL, tools=[TOOL], stream=True)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    begin, *more = [call for delta in deltas for call in delta.get("tool_calls", ())]

    assert begin["id"].startswith("call_") and begin["function"] == {"name": "f", "arguments": ""}
    assert "".join(call["function"]["arguments"] for call in more) == '{"a": 1}' and len(more) > 3
    assert (
        text_of(chunks) == "I look." and chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    )


def test_without_tools_a_call_is_text(able: Host) -> None:
    _, answer = chat(able, CALL)
    assert answer["choices"][0]["message"]["content"] == CALL.removeprefix("say ")


def test_a_named_function_s_arguments_are_guided(able: Host) -> None:
    choice_of_tool = {"type": "function", "function": {"name": "f"}}
    _, answer = chat(able, 'say {"a": 2}', tools=[TOOL], tool_choice=choice_of_tool)
    [call] = answer["choices"][0]["message"]["tool_calls"]

    assert call["function"] == {"name": "f", "arguments": '{"a": 2}'}
    assert last_request(able).guided_decoding_params.guide_type is GuideType.JSON_SCHEMA


def test_a_thought_stands_apart_from_the_answer(able: Host) -> None:
    text = "say <think>\nhm\n</think>\n\nYes"
    _, answer = chat(able, text)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes")

    _, chunks = chat(able, text, stream=True)
    thoughts = [
        choice["delta"].get("reasoning_content", "")
        for chunk in chunks
        for choice in chunk["choices"]
    ]

    assert ("".join(thoughts), text_of(chunks)) == ("hm", "Yes")


def test_thoughts_are_left_out_or_stay_in_the_text_where_a_client_says_so(able: Host) -> None:
    text = "say <think>\nhm\n</think>\n\nYes"

    for fields, content in (
        ({"include_reasoning": False}, "Yes"),
        ({"separate_reasoning": False}, text.removeprefix("say ")),
    ):
        _, answer = chat(able, text, **fields)
        message = answer["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (None, content)

        _, chunks = chat(able, text, stream=True, **fields)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]

        assert not any("reasoning_content" in delta for delta in deltas)
        assert text_of(chunks) == content


def test_an_error_before_the_first_token_has_a_status(able: Host) -> None:
    for is_streaming in (False, True):
        status, answer = complete(able, "fail", stream=is_streaming)
        assert (status, answer["error"]["code"]) == (500, "generation_failed")
        status, answer = complete(able, "oom", stream=is_streaming)
        assert (status, answer["error"]["type"]) == (507, "server_error")


def test_an_error_in_a_stream_is_an_event_before_the_end(able: Host) -> None:
    status, chunks = chat(able, "fail abc", stream=True)
    assert status == 200 and text_of(chunks[:-1]) == "abc"
    assert chunks[-1]["error"]["message"] == "the script says so"


def test_a_prompt_that_is_too_long_has_openai_s_code(able: Host) -> None:
    for status, answer in (chat(able, "x" * 300), complete(able, "x" * 300)):
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    assert answer["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("field", "asked", "param"),
    [
        ("guided_decoding_params", {"guided_regex": "a+"}, "guided_regex"),
        ("embedding_bias", {"logit_bias": {"1": 2}}, "logit_bias"),
        ("min_p", {"min_p": 0.5}, "min_p"),
        ("priority", {"priority": -1}, "priority"),
        ("num_top_log_probs", {"logprobs": 4}, "logprobs"),
        ("num_prompt_log_probs", {"logprobs": 1, "echo": True}, "logprobs"),
        ("num_prompt_log_probs", {"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_a_refusal_names_the_same_field_whoever_refused(
    unable: Host, able: Host, field: str, asked: dict[str, Any], param: str
) -> None:
    status, by_front_end = complete(unable, "say a", **asked)
    assert (status, by_front_end["error"]["param"]) == (400, param)
    # When the request comes to the engine, and in its first step
    for order in (
        "refuse",
        "reject",
    ):
        status, by_engine = complete(able, f"{order} {field}", **asked)
        assert (status, by_engine["error"]["param"]) == (400, param)
        assert by_engine["error"]["message"].startswith(f"{param} must be ")


def test_a_priority_reaches_an_engine_that_has_them_and_zero_any_engine(
    able: Host, unable: Host
) -> None:
    for ask in (chat, complete):
        urgencies = []
        for rank in (-1, 0, 1):
            assert ask(able, "say a", priority=rank)[0] == 200
            urgencies.append(last_request(able).priority)

        assert (
            urgencies == sorted(set(urgencies), reverse=True) and urgencies[1] == DEFAULT_PRIORITY
        )

    assert complete(unable, "say a", priority=0)[0] == 200


def test_a_prompt_that_is_too_long_for_the_engine_has_the_code_of_one_that_is_for_the_front_end(
    able: Host,
) -> None:
    status, by_front_end = complete(able, "say " + "a" * CONTEXT)
    assert (status, by_front_end["error"]["code"]) == (400, "context_length_exceeded")
    status, by_engine = complete(able, "refuse inputs")
    assert status == 400
    assert [by_engine["error"][key] for key in ("code", "param")] == [
        "context_length_exceeded",
        "prompt",
    ]


def test_an_engine_that_stumbles_over_a_request_refuses_that_one_alone(able: Host) -> None:
    with socket.create_connection(("127.0.0.1", able.port), timeout=60) as neighbour:
        body = b'{"prompt": "hang a", "stream": true}'
        neighbour.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )

        assert neighbour.recv(100).startswith(b"HTTP/1.1 200 ")
        assert complete(able, "trip")[0] == 503
        assert able.executor.num_active == 1, "the neighbour still runs"

    wait_until(lambda: able.executor.num_active == 0)


def test_an_empty_prompt_is_not_called_too_long(able: Host) -> None:
    status, answer = chat(able, "")
    assert (status, answer["error"]["code"]) == (400, "invalid_parameter")


def test_a_chat_needs_a_template(plain: Host) -> None:
    status, answer = chat(plain, "say a")
    assert (status, answer["error"]["param"]) == (
        400,
        "messages",
    ) and "option.chat_template" in str(answer)


def test_a_template_s_refusal_is_the_client_s_fault(tmp_path: Any) -> None:
    with host(tmp_path, model={"chat_template": "{{ raise_exception('no such role') }}"}) as server:
        status, answer = chat(server, "say a")
        assert status == 400 and "no such role" in answer["error"]["message"]


def test_models_are_listed_and_found_by_name(able: Host) -> None:
    response, body = able.send("GET", "/v1/models")
    cards = json.loads(body)["data"]

    assert (response.status, [card["id"] for card in cards]) == (200, ["scripted", "gpt-x"])
    assert all(card["object"] == "model" and card["created"] > 0 for card in cards)
    assert all((card["root"], card["parent"]) == (able.config.model.path, None) for card in cards)

    response, body = able.send("GET", "/v1/models/gpt-x")
    assert (response.status, json.loads(body)["id"]) == (200, "gpt-x")


def test_the_list_says_which_models_can_chat(able: Host, plain: Host) -> None:
    for server, can in ((able, True), (plain, False)):
        cards = json.loads(server.send("GET", "/v1/models")[1])["data"]
        assert {card["has_chat_template"] for card in cards} == {can}


@pytest.mark.parametrize("path", ["/v1/models/gpt-4", "/v1/models/org/gpt-4"])
def test_a_model_that_is_not_served_is_not_found(able: Host, path: str) -> None:
    response, body = able.send("GET", path)
    assert (response.status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
    assert "'scripted', 'gpt-x' (option.served_model_name" in body.decode()
    status, answer = complete(able, "say a", model=path)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "'scripted', 'gpt-x' (option.served_model_name" in answer["error"]["message"]


@pytest.mark.parametrize("name", ["", "model", "scripted", "gpt-x", None])
def test_every_name_of_the_model_is_served_and_its_own_is_answered(
    able: Host, name: str | None
) -> None:
    assert complete(able, "say a", model=name)[1]["model"] == "scripted"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/audio/speech", "(lmi has no audio: docs/scope.md)"),
        ("/v1/images/generations", "(lmi has no images as answers: docs/scope.md)"),
        ("/v1/files", "(lmi has no kept files: docs/scope.md)"),
        ("/v1/responses/resp_1", "(lmi has no kept responses: docs/scope.md)"),
        ("/v1/chat/completions/", "(a path here has single slashes, and none at its end)"),
        ("/v1/audiobooks", "POST '/v1/audiobooks'"),
    ],
)
def test_a_route_that_is_not_here_says_why(able: Host, path: str, words: str) -> None:
    response, body = able.post({}, path)
    assert response.status == 404 and json.loads(body)["error"]["message"].endswith(words)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", CHAT, 405), ("POST", "/v1/models", 405), ("GET", "/v1/x", 404)],
)
def test_what_is_not_there_is_told_as_an_error_object(
    able: Host, method: str, path: str, status: int
) -> None:
    response, body = able.send(method, path)
    assert response.status == status
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_full_server_says_429_and_a_draining_one_503(tmp_path: Any) -> None:
    with host(tmp_path, server={"job_queue_size": 1}) as server:
        server.block.frontends[0].num_sequences += 1 + server.block.engines[0].max_num_sequences
        response, body = server.post({"prompt": "say a"}, COMPLETIONS)

        assert (response.status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(response.getheader("retry-after") or 0) >= 1

        server.server_block.supervisor.phase = Phase.DRAINING
        response, body = server.post({"prompt": "say a"}, COMPLETIONS)

        assert (response.status, json.loads(body)["error"]["type"]) == (503, "server_error")


def test_each_prompt_counts_among_the_requests_in_flight(tmp_path: Any) -> None:
    with host(tmp_path, server={"job_queue_size": 1}) as server:
        num = 1 + server.block.engines[0].max_num_sequences
        body = json.dumps({"prompt": ["hang a"] * num}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(
                body
            )
            connection.sendall(head + body)
            wait_until(lambda: server.server_block.frontends[0].num_sequences == num)
            response, _ = server.post({"prompt": "say a"}, COMPLETIONS)

            assert response.status == 429

        wait_until(lambda: server.server_block.frontends[0].num_sequences == 0)


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_client_that_leaves_ends_every_sequence_of_its_request(
    able: Host, is_streaming: bool
) -> None:
    num_cancelled = len(able.executor.cancelled)
    body = json.dumps({"prompt": ["hang a", "hang b"], "stream": is_streaming}).encode()
    with socket.create_connection(("127.0.0.1", able.port), timeout=60) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        wait_until(lambda: able.executor.num_active == 2)

    wait_until(
        lambda: len(able.executor.cancelled) == num_cancelled + 2 and able.executor.num_active == 0
    )


def cached(usage: dict[str, Any]) -> int:
    """The cached tokens of a usage, whose other fields must fit."""
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"].keys() == {"cached_tokens"}
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_usage_tells_the_tokens_of_the_prompt_that_were_cached(able: Host) -> None:
    prompt = "say How many of these are cached?"
    cold, warm = (chat(able, prompt)[1]["usage"] for _ in range(2))

    assert cached(cold) < len("say How")
    assert cached(warm) == warm["prompt_tokens"] - 1, "the last one is always computed"
    assert cached(complete(able, prompt, max_tokens=4)[1]["usage"]) == warm["prompt_tokens"] - 1


@pytest.mark.parametrize("ask", [chat, complete])
def test_the_last_chunk_of_a_stream_tells_the_cached_tokens_too(able: Host, ask: Any) -> None:
    prompt = f"say The cache of a stream of {ask.__name__}"
    for _ in range(2):
        _, chunks = ask(able, prompt, stream=True, stream_options={"include_usage": True})

    assert cached(chunks[-1]["usage"]) == len(prompt) - 1


def test_cached_tokens_are_those_of_all_prompts_together(able: Host) -> None:
    prompts = ["say first of two", "say and the second"]
    complete(able, prompts)
    assert cached(complete(able, prompts)[1]["usage"]) == sum(len(prompt) - 1 for prompt in prompts)


@pytest.mark.parametrize("ask", [chat, complete])
def test_prompts_of_different_salts_share_no_cache(able: Host, ask: Any) -> None:
    prompt = "say A secret of one user"
    alice = f"{ask.__name__}-alice"
    bob = f"{ask.__name__}-bob"
    usages = [ask(able, prompt, cache_salt=salt)[1]["usage"] for salt in (alice, bob, alice)]
    assert [cached(usage) for usage in usages[:2]] == [0, 0] and cached(usages[2]) == len(
        prompt
    ) - 1
    assert last_request(able).cache_salt == alice


def test_with_the_scope_of_a_request_no_two_requests_share_cache(tmp_path: Path) -> None:
    prompt = "say A secret of one user"
    with host(tmp_path, model={"prefix_cache_scope": "request"}) as server:
        alone = [
            complete(server, prompt, cache_salt=salt)[1]["usage"]
            for salt in (None, None, "alice", "alice")
        ]
        both = complete(server, [prompt, prompt])[1]["usage"]
        salts = [request.cache_salt for request in server.executor.requests]

    assert [cached(usage) for usage in alone] == [0] * 4
    assert cached(both) == len(prompt) - 1, "the prompts of one request share it"
    assert len({*salts[:-1]}) == 5 and salts[-1] == salts[-2] and None not in salts


def test_metrics_and_the_log_tell_how_much_of_the_prompts_was_cached(
    able: Host, caplog: pytest.LogCaptureFixture
) -> None:
    def counted() -> tuple[float, float]:
        lines = able.send("GET", "/metrics")[1].decode().splitlines()
        names = ("lmi_prompt_tokens_total", "lmi_prompt_tokens_cached_total")
        return tuple(
            float(line.split()[-1])
            for name in names
            for line in lines
            if line.startswith(name + "{")
        )

    chat(able, "say It is counted.")
    before = counted()
    with caplog.at_level("INFO", "lmi.access"):
        chat(able, "say It is counted.")
        # The line is written after the answer
        wait_until(lambda: caplog.records)

    num = len("say It is counted.")
    assert counted() == (before[0] + num, before[1] + num - 1)

    [line] = [record for record in caplog.records if record.name == "lmi.access"]
    assert (line.prompt_tokens, line.cached_tokens) == (num, num - 1)
    assert (line.getMessage(), line.status, line.model, line.client) == (
        "POST " + CHAT,
        200,
        "scripted",
        "127.0.0.1",
    )
    assert (
        0 < line.ttft_ms <= line.duration_ms and line.generated_tokens == len("It is counted.") + 1
    )


def test_a_line_of_the_log_without_an_answer_tells_no_tokens(
    able: Host, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "lmi.access"):
        chat(able, "say a", temperature=-1)
        able.send("GET", "/v1/models")
        # A line is written after the answer
        wait_until(lambda: len(caplog.records) == 2)

    lines = [record for record in caplog.records if record.name == "lmi.access"]
    assert len(lines) == 2 and not any(hasattr(line, "prompt_tokens") for line in lines)


MESSAGES = {"messages": [{"role": "user", "content": "say a"}]}
NAMING_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, MESSAGES),
    "chat at /invocations": ("/invocations", MESSAGES),
    "completion": (COMPLETIONS, {"prompt": "say a"}),
    "completion at /invocations": ("/invocations", {"prompt": "say a"}),
    "message": ("/v1/messages", MESSAGES | {"max_tokens": 4}),
    "response": ("/v1/responses", {"input": "say a"}),
    "tokens": ("/tokenize", {"prompt": "say a"}),
}


@pytest.mark.parametrize("door", NAMING_BODIES)
@pytest.mark.parametrize(
    "name", ["/opt/ml/model", "/opt/ml/model/", "owner/gpt", "", "gpt-x", "model"]
)
def test_a_body_may_name_the_model_by_its_folder_and_its_id_at_the_hub(
    able: Host, door: str, name: str
) -> None:
    path, body = NAMING_BODIES[door]
    response, answer = able.post(body | {"model": name}, path)
    assert response.status == 200, answer
    assert json.loads(answer).get("model", "scripted") == "scripted"


@pytest.mark.parametrize("name", ["/opt/ml", "/opt/ml/model/x", "gpt", "other/gpt", "/"])
def test_a_body_that_names_another_folder_or_id_is_refused(able: Host, name: str) -> None:
    status, answer = chat(able, "say a", model=name)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_the_model_is_shown_under_its_folder_and_its_id_at_the_hub(able: Host) -> None:
    for name in ("/opt/ml/model", "owner/gpt"):
        response, answer = able.send("GET", f"/v1/models/{name}")
        assert (response.status, json.loads(answer)["id"]) == (200, name)
