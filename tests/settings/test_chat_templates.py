"""What a plain look at a chat template finds: the forms of calls and thoughts, and whether it shows
tools.
"""

import json
import time
from pathlib import Path

import pytest

from lmi.settings.annexes import REASONING_FORMS, TOOL_CALL_FORMS
from lmi.settings.chat_templates import (
    MAX_TEMPLATE_CHARS,
    REASONING_MARKS,
    TOOL_CALL_MARKS,
    AnswerForms,
    reads_tools,
)
from lmi.settings.config import ModelConfig
from lmi.settings.resolve import Resolved, resolve_folder

SHOWS = "{% if tools %}{{ tools | tojson }}{% endif %}"
TALK = "{{ messages[-1]['content'] }}"
THINKING = "{% if '</think>' in content %}{{ content.split('</think>')[-1] }}{% endif %}"

# Pieces of the templates that the makers of these models publish.
PIECES = {
    "Qwen 2.5": ("within <tool_call></tool_call> XML tags", ("hermes", None)),
    "Qwen 3": ("<tool_call>\\n{% endif %}<think>\\n", ("hermes", "think")),
    "Qwen 3 coder": (
        "<tool_call>\n<function=example_function_name>\n<parameter=p>",
        ("qwen3_xml", None),
    ),
    "GLM 4.5": (
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> <think></think>",
        ("glm45", "think"),
    ),
    "Mistral": ('{{- "[TOOL_CALLS] [" }}', ("mistral", None)),
    "Magistral": ("[TOOL_CALLS] [THINK]", ("mistral", "mistral")),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", ("openai", "openai")),
    "MiniMax M2": ('<minimax:tool_call>\n<invoke name="f"> <think>', ("minimax_m2", "think")),
    "Seed OSS": ("<seed:tool_call>\n<function=f> <seed:think>", ("seed_oss", "seed_oss")),
    "DeepSeek V3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json",
        ("deepseek_v3", None),
    ),
    "DeepSeek V3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜></think>",
        ("deepseek_v31", "think"),
    ),
    "Kimi K2": ("<|tool_calls_section_begin|><|tool_call_begin|>", ("kimi_k2", None)),
    "Llama 3.1": (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name',
        ("json", None),
    ),
    "Llama 3.1, its tag": ('{{- "<|python_tag|>" }}', ("json", None)),
    "Llama 4": ("<|python_start|>[f(a=1)]<|python_end|>", ("pythonic", None)),
    "Llama 3.2 of vLLM": ("[func_name1(params_name1=params_value1)]", ("pythonic", None)),
    "Granite 3": ("<|tool_call|>", ("granite", None)),
    "Granite 20B": ("<function_call>", ("granite-20b-fc", None)),
    "Jamba": ("<tool_calls>", ("jamba", None)),
    "LFM 2": ("<|tool_call_start|>[", ("lfm2", None)),
    "Phi 4 mini": ("functools[", ("phi4_mini_json", None)),
    "unknown": ("<my:call>", (None, None)),
}


def settle(folder: Path, template: str, **flags: str) -> Resolved:
    (folder / "chat_template.jinja").write_text(template)
    options = {f"option.{name}": text for name, text in flags.items()}
    return resolve_folder(str(folder), {}, {"option.rolling_batch": "echo", **options})


def forms_of(model: ModelConfig) -> tuple[str | None, str | None, bool]:
    return model.tool_call_parser, model.reasoning_parser, model.tells_tools


@pytest.mark.parametrize("name", PIECES)
def test_a_template_names_the_forms_of_calls_and_thoughts(folder: Path, name: str) -> None:
    piece, (tool_calls, reasoning) = PIECES[name]
    model = settle(folder, SHOWS + TALK + piece).config.model

    assert forms_of(model) == (tool_calls, reasoning, False)


def test_each_form_that_has_marks_is_found_by_them() -> None:
    unmarked = {"generic", "text", "none"}
    assert {form for form, _ in TOOL_CALL_MARKS} == set(TOOL_CALL_FORMS) - unmarked
    assert {form for form, _ in REASONING_MARKS} == set(REASONING_FORMS) - {"none"}


@pytest.mark.parametrize(
    ("flags", "forms"),
    [
        ({}, ("hermes", "think", False)),
        ({"tool_call_parser": "none"}, ("none", "think", False)),
        ({"reasoning_parser": "none"}, ("hermes", "none", False)),
        (
            {"tool_call_parser": "llama3_json", "reasoning_parser": "mistral"},
            ("json", "mistral", False),
        ),
        ({"tool_call_parser": "text"}, ("text", "think", False)),
        ({"tool_call_parser": "generic"}, ("generic", "think", True)),
    ],
)
def test_an_option_overrules_what_the_template_says(
    folder: Path, flags: dict[str, str], forms: tuple[str | None, str | None, bool]
) -> None:
    resolved = settle(folder, SHOWS + "<tool_call>" + THINKING, **flags)

    assert forms_of(resolved.config.model) == forms


@pytest.mark.parametrize(
    ("flags", "forms"),
    [
        ({}, ("generic", None, True)),
        ({"tool_call_parser": "hermes"}, ("hermes", None, True)),
        ({"tool_call_parser": "none"}, ("none", None, True)),
        ({"tool_call_parser": "mistral"}, ("mistral", None, False)),
    ],
)
def test_where_the_template_shows_no_tools_the_server_tells_of_them(
    folder: Path, flags: dict[str, str], forms: tuple[str | None, str | None, bool]
) -> None:
    resolved = settle(folder, TALK, **flags)

    assert forms_of(resolved.config.model) == forms
    assert any("does not show tools to the model" in note for note in resolved.notes)


def test_the_start_says_what_was_found_and_where(folder: Path) -> None:
    resolved = settle(folder, SHOWS + "<tool_call><think>")

    note = (
        "found in the chat template: option.tool_call_parser=hermes, option.reasoning_parser=think"
    )
    assert note in resolved.notes
    rows = {row.option: (row.value, row.source) for row in resolved.settings}
    assert rows["option.tool_call_parser"] == ("hermes", "the chat template")
    assert rows["option.reasoning_parser"] == ("think", "the chat template")


def test_the_start_says_that_a_form_is_not_known(folder: Path) -> None:
    resolved = settle(folder, SHOWS + TALK)

    assert forms_of(resolved.config.model) == (None, None, False)
    assert any("form of tool calls is not known" in note for note in resolved.notes)


def test_the_option_s_own_template_counts(folder: Path) -> None:
    resolved = settle(folder, TALK, chat_template=SHOWS + "[TOOL_CALLS]")

    assert resolved.config.model.tool_call_parser == "mistral"


def test_a_template_in_the_tokenizer_s_file_counts(folder: Path) -> None:
    templates = [
        {"name": "default", "template": TALK},
        {"name": "tool_use", "template": SHOWS + "<tool_call>"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))

    resolved = resolve_folder(str(folder), {}, {"option.rolling_batch": "echo"})

    assert forms_of(resolved.config.model) == ("hermes", None, False)


@pytest.mark.parametrize(
    "text", ["{", '{"chat_template": [1]}', '{"chat_template": [{"name": "default"}]}', "[" * 9999]
)
def test_a_broken_file_is_left_to_whoever_loads_it(folder: Path, text: str) -> None:
    (folder / "tokenizer_config.json").write_text(text)

    resolved = resolve_folder(str(folder), {}, {"option.rolling_batch": "echo"})

    assert forms_of(resolved.config.model) == (None, None, False)


@pytest.mark.parametrize(
    ("template", "is_read"),
    [
        (SHOWS, True),
        ("{%- if tools is not none -%}", True),
        ("{{- tools[0] }}", True),
        ("{% for tool in tools %}", True),
        ("tools", False),
        ("{{ 'tools' }}", False),
        ('{{ "<tools>" }}', False),
        ("{# tools #}", False),
        ("{{ message['tools'] }}{{ message.tools }}", False),
        ("{{ xml_tools }}{{ tools_of }}", False),
        ("{{ 'it\\'s' }} tools {{ content }}", False),
        ("{{ {'a': {}} }} tools", False),
    ],
)
def test_only_code_reads_tools(template: str, is_read: bool) -> None:
    assert reads_tools(template) is is_read


@pytest.mark.parametrize(
    "piece", ["{%", "{{ '", "{#", "{{ tool ", "'", '{{ "\\', "<", "{%'tools'%}"]
)
def test_a_strange_template_takes_no_long_look(piece: str) -> None:
    template = piece * (MAX_TEMPLATE_CHARS // len(piece) + 1)

    begin_s = time.process_time()
    forms = AnswerForms.of([template])

    assert forms == (None, None, False)
    assert time.process_time() - begin_s < 2


def test_a_hostile_template_is_looked_at_in_a_moment() -> None:
    """A string that never ends, of escaped quotes alone: each of them could be the beginning of
    another.
    """
    began_s = time.process_time()
    assert not reads_tools("{{ '" + r"\'" * (MAX_TEMPLATE_CHARS // 2))
    assert time.process_time() - began_s < 5
