"""Every field that clients send is known: read, refused by name, or listed as one that changes no
answer.

What vLLM's server takes is compared with its request classes in tests/handlers/vllm/test_fields.py.
"""

import importlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lmi.apis.anthropic.api import ANTHROPIC, COUNT_TOKENS
from lmi.apis.anthropic.schema import CANNOT_ANSWER, MESSAGES, SILENT
from lmi.apis.base.api import AnyApi
from lmi.apis.base.body import Parsed
from lmi.apis.base.parameters import ParameterTable
from lmi.apis.embeddings import schema as embeddings
from lmi.apis.embeddings.api import EMBEDDINGS
from lmi.apis.openai import chat_schema, fields, schema
from lmi.apis.openai.api import OPENAI_CHAT, OPENAI_COMPLETIONS
from lmi.apis.responses import schema as responses
from lmi.apis.responses.api import RESPONSES
from lmi.errors import InvalidRequest, Unsupported
from lmi.pipeline import adds_special_tokens
from lmi.settings.config import ModelConfig

MODEL = ModelConfig(path="demo", name="demo")
USER = [{"role": "user", "content": "Hi"}]
Ask = Callable[..., Parsed[Any]]


def asking(api: AnyApi, **body: Any) -> Ask:
    def ask(**more: Any) -> Parsed[Any]:
        return api.parse(api.read(json.dumps(body | more).encode(), None, MODEL))

    return ask


TABLES: dict[str, ParameterTable] = {
    "chats": chat_schema.CHAT,
    "completions": schema.COMPLETION,
    "responses": responses.RESPONSES,
    "messages": MESSAGES,
    "embeddings": embeddings.PARAMETERS,
}
APIS: dict[str, Ask] = {
    "chats": asking(OPENAI_CHAT, messages=USER),
    "completions": asking(OPENAI_COMPLETIONS, prompt="Hi"),
    "responses": asking(RESPONSES, input="Hi"),
    "messages": asking(ANTHROPIC, messages=USER, max_tokens=9),
    "embeddings": asking(EMBEDDINGS, input="Hi"),
}
REFUSED = {
    "chats": chat_schema.CANNOT_CHAT,
    "completions": fields.CANNOT,
    "responses": responses.CANNOT_RESPOND,
    "messages": CANNOT_ANSWER,
    "embeddings": embeddings.CANNOT_EMBED,
}
HARMLESS = {
    "chats": chat_schema.SILENT,
    "completions": fields.WITHOUT_EFFECT,
    "responses": responses.SILENT,
    "messages": SILENT,
    "embeddings": fields.WITHOUT_EFFECT,
}
# What clients are known to send, by client and API: from their types, or read from their traffic.
SENT = {
    ("anthropic 2.14.0", "messages"): """
        max_tokens messages model cache_control container diagnostics inference_geo metadata
        output_config service_tier speed stop_sequences system thinking tool_choice tools
        user_profile_id workspace_id billing_policy compaction context_management
        fallback_credit_token fallbacks mcp_servers thread betas stream temperature top_p top_k
        output_format
    """,
    ("openai 3.54.0", "chats"): """
        audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens
        max_tokens messages metadata modalities model moderation n parallel_tool_calls prediction
        presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention
        reasoning_effort response_format safety_identifier seed service_tier stop store stream
        stream_options temperature tool_choice tools top_logprobs top_p user verbosity
        web_search_options
    """,
    ("openai 3.54.0", "completions"): """
        best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty
        prompt seed stop stream stream_options suffix temperature top_p user
    """,
    ("openai 3.54.0", "responses"): """
        access_programs background background_options context_management conversation image include
        input instructions max_output_tokens max_tool_calls metadata model moderation
        parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_options
        prompt_cache_retention reasoning safety_identifier service_tier store stream stream_options
        temperature text tool_choice tools top_logprobs top_p truncation user personality
    """,
    ("openai 3.54.0", "embeddings"): "dimensions encoding_format input model user",
    ("outlines 1.3.3 for SGLang", "chats"): "regex ebnf json_schema",
    ("trustedrouter-provider-check", "chats"): "reasoning thinking",
    ("guidellm 0.8.1", "responses"): "ignore_eos",
    (
        "Claude Code 2.1.332",
        "messages",
    ): "context_management metadata output_config thinking betas speed diagnostics",
    ("codex 0.171.0", "responses"): "client_metadata include prompt_cache_key store text reasoning",
    ("SGLang's server", "chats"): """
        regex ebnf no_stop_trim stop_regex stop_token_ids min_tokens ignore_eos lora_path
        session_params rid extra_key separate_reasoning stream_reasoning chat_template_kwargs
        return_hidden_states custom_logit_processor custom_params repetition_penalty min_p top_k
        skip_special_tokens continue_final_message cache_salt bootstrap_host bootstrap_port
        bootstrap_room data_parallel_rank return_routed_experts priority
    """,
    ("vLLM 0.33's server", "chats"): """
        return_weight_versions thinking_token_budget logprob_token_ids return_token_offsets
        return_prompt_text repetition_detection stream_interval routed_experts_prompt_start
    """,
    ("llama-server", "chats"): """
        grammar json_schema cache_prompt id_slot timings_per_token n_predict repeat_penalty mirostat
        dry_multiplier xtc_probability dynatemp_range min_p top_k
    """,
}


@pytest.mark.parametrize(("client", "api"), SENT)
def test_every_field_that_a_client_sends_is_read_refused_or_listed_as_harmless(
    client: str, api: str
) -> None:
    assert set(SENT[client, api].split()) - TABLES[api].known_names == set()


@pytest.mark.parametrize(
    ("module", "kind", "api"),
    [
        ("openai.types.chat.completion_create_params", "CompletionCreateParamsBase", "chats"),
        ("openai.types.completion_create_params", "CompletionCreateParamsBase", "completions"),
        ("openai.types.responses.response_create_params", "ResponseCreateParamsBase", "responses"),
        ("openai.types.embedding_create_params", "EmbeddingCreateParams", "embeddings"),
    ],
)
def test_every_field_of_the_openai_client_that_is_installed_is_known(
    module: str, kind: str, api: str
) -> None:
    pytest.importorskip("openai")
    names = getattr(importlib.import_module(module), kind).__annotations__
    assert set(names) - TABLES[api].known_names == set()


def rows(table: dict[str, Any]) -> list[tuple[str, str]]:
    return [(api, name) for api in APIS for name in table[api]]


@pytest.mark.parametrize(("api", "name"), rows(REFUSED))
def test_a_field_that_binds_prompt_or_answer_is_refused_by_name(api: str, name: str) -> None:
    for value in ("x", 7, [1], {"a": 1}):
        with pytest.raises(Unsupported, match=f"^{name} is not supported here: "):
            APIS[api](**{name: value})


@pytest.mark.parametrize(("api", "name"), rows(REFUSED))
def test_a_refused_field_that_asks_for_nothing_changes_nothing(api: str, name: str) -> None:
    for value in (None, *fields.ASKS_NOTHING.get(name, fields.NOTHING)):
        assert ask_without_state(api, {name: value}) == ask_without_state(api, {})


@pytest.mark.parametrize(("api", "name"), rows(HARMLESS))
def test_a_harmless_field_changes_nothing_and_is_not_logged(api: str, name: str) -> None:
    for value in ("x", 7, [1], {"a": 1}, True):
        assert ask_without_state(api, {name: value}) == ask_without_state(api, {})


def ask_without_state(api: str, more: dict[str, Any]) -> tuple[Any, ...]:
    parsed = APIS[api](**more)
    return parsed.requests, parsed.ignored


@pytest.mark.parametrize("api", APIS)
def test_no_field_is_both_read_and_hidden(api: str) -> None:
    hidden = [*REFUSED[api], *HARMLESS[api]]
    assert len(hidden) == len(set(hidden))
    assert set(hidden) & set(TABLES[api]) == set()


def test_a_name_that_nobody_knows_is_ignored_with_a_line() -> None:
    assert [APIS[api](frobnicate=1).ignored for api in APIS] == [("'frobnicate': unknown",)] * len(
        APIS
    )


@pytest.mark.parametrize("api", ["chats", "completions", "responses"])
@pytest.mark.parametrize(
    ("name", "alias", "value"),
    [
        ("guided_regex", "regex", r"\d{4}"),
        ("guided_grammar", "ebnf", 'root ::= "a"'),
        ("guided_grammar", "grammar", 'root ::= "a"'),
        ("guided_json", "json_schema", {"type": "object"}),
        ("include_stop_str_in_output", "no_stop_trim", True),
    ],
)
def test_names_of_other_servers_mean_what_ours_mean(
    api: str, name: str, alias: str, value: object
) -> None:
    aliased = APIS[api](**{alias: value})
    assert aliased.requests == APIS[api](**{name: value}).requests
    assert aliased.requests != APIS[api]().requests
    if name != "include_stop_str_in_output":
        assert aliased.format.field_names == {"guided_decoding_params": alias}
        with pytest.raises(InvalidRequest, match=f"^{alias} must be left out beside {name}"):
            APIS[api](**{name: value, alias: value})


def test_a_grammar_of_tgi_is_read_in_chats_too() -> None:
    parsed = APIS["chats"](grammar={"type": "regex", "value": "a+"})
    assert parsed.requests == APIS["chats"](guided_regex="a+").requests


@pytest.mark.parametrize("name", ["structured_outputs", "guided_regex", "regex"])
def test_a_response_has_one_structure(name: str) -> None:
    value: Any = {"regex": "a+"} if name == "structured_outputs" else "a+"
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    with pytest.raises(InvalidRequest, match=f"^{name} must be left out beside text.format"):
        APIS["responses"](text=form, **{name: value})


def test_tags_around_structures_are_refused() -> None:
    with pytest.raises(
        Unsupported, match=r"^structured_outputs\.structural_tag is not supported here"
    ):
        APIS["chats"](structured_outputs={"structural_tag": "{}"})


@pytest.mark.parametrize("api", ["chats", "responses", "messages"])
@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {"enable_thinking": True}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"a": 1}},
            {"enable_thinking": True, "a": 1},
        ),
    ],
)
def test_whether_a_model_thinks_reaches_the_template(api: str, given: Any, variables: Any) -> None:
    chat = APIS[api](**given).request.chat
    assert chat is not None and chat.variables == variables


def test_how_a_model_thinks_has_the_names_of_other_servers_in_chats() -> None:
    for body_fields, variables in (
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"reasoning": {"effort": "low", "exclude": True}}, {"reasoning_effort": "low"}),
    ):
        chat = APIS["chats"](**body_fields).request.chat
        assert chat is not None and chat.variables == variables


@pytest.mark.parametrize(
    ("api", "usual"),
    [("completions", True), ("embeddings", True), ("chats", False), ("responses", False)],
)
def test_a_client_may_say_whether_special_tokens_are_added(api: str, usual: bool) -> None:
    for body_fields, adds in (
        ({}, usual),
        ({"add_special_tokens": True}, True),
        ({"add_special_tokens": False}, False),
    ):
        assert adds_special_tokens(APIS[api](**body_fields).request) is adds

    with pytest.raises(InvalidRequest, match="^add_special_tokens must be true or false"):
        APIS[api](add_special_tokens="no")


def test_a_thread_is_refused_where_tokens_are_counted_too() -> None:
    count = partial(asking(COUNT_TOKENS, messages=USER))
    with pytest.raises(Unsupported, match="^thread is not supported here"):
        count(thread={"type": "create"})
