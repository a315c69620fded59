from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lmi.errors import BadConfiguration, GenerationFailed, InvalidRequest, ModelUnusable
from lmi.text.chat_template import ChatTemplate
from tests.text.small_tokenizers import byte_level_backend

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
ALTERNATING = """
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}
{% endif %}
[{{ message.role }}] {{ message.content }}{{ eos_token if loop.last else '' }}
{% endfor %}
"""
TOOLS = """
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}|{{ tool | tojson(indent=2) }}{% endfor %}{% endif %}
{%- for message in messages %}
  {%- if message.role == 'system' %}{% continue %}{% endif %}
  {%- if loop.index > 3 %}{% break %}{% endif %}
  {%- generation %}{% set shown = message.content %}{{ shown }}{% endgeneration %}
  {{- '!' if shown is defined else '?' }}
{%- endfor %}
{%- macro twice(text) %}{{ text ~ text }}{% endmacro %}{{ twice('<é>') }}
{%- set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}
{{ ns.n }}{{ documents }}{{ mood }}
"""
MESSAGES = [
    {"role": "user", "content": " Hi <b> "},
    {"role": "assistant", "content": "世界 😀"},
    {"role": "user", "content": "Bye"},
]
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}


def compiled(text: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, SPECIAL)


@pytest.mark.parametrize(
    "template", [CHATML, ALTERNATING, TOOLS, "{{ strftime_now('%Y') }}", "a\n{% if true %}\nb\n{% endif %}"]
)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "description": "<&é>"}}]])
def test_a_template_renders_as_in_transformers(template: str, tools: list[dict[str, Any]] | None) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), **SPECIAL).apply_chat_template(
        MESSAGES, chat_template=template, tools=tools, tokenize=False, add_generation_prompt=True, mood="calm"
    )
    assert compiled(template).render(MESSAGES, tools=tools, variables={"mood": "calm"}) == theirs


def test_messages_that_the_template_refuses_are_the_clients_fault() -> None:
    with pytest.raises(InvalidRequest, match="Roles must alternate"):
        compiled(ALTERNATING).render(MESSAGES[1:])
    with pytest.raises(InvalidRequest, match="content"):
        compiled("{{ messages[0].content + 'a' }}").render([{"role": "user"}])


@pytest.mark.parametrize(
    "attack",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_a_template_stays_in_its_sandbox(attack: str) -> None:
    try:
        text = compiled(attack).render(MESSAGES)
    except InvalidRequest as error:
        text = str(error)
    assert "class 'object'" not in text
    assert "builtins" not in text
    assert len(MESSAGES) == 3


@pytest.mark.parametrize(
    "attack",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_cannot_run_for_ever(attack: str) -> None:
    with pytest.raises(GenerationFailed, match="chat template"):
        ChatTemplate({"default": attack}, SPECIAL, max_render_s=0.1).render(MESSAGES)


def test_a_template_cannot_write_for_ever() -> None:
    attack = "{% for a in range(99999) %}{{ 'a' * 100000 }}{% endfor %}"
    with pytest.raises(GenerationFailed, match="1048576 characters"):
        ChatTemplate({"default": attack}, SPECIAL, max_prompt_chars=1 << 20).render(MESSAGES)


def test_one_template_renders_in_many_threads() -> None:
    template, texts = compiled(CHATML), []
    threads = [threading.Thread(target=lambda: texts.append(template.render(MESSAGES))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(texts) == {template.render(MESSAGES)}
    assert len(texts) == 8


def test_a_template_is_found_where_models_keep_it(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path, {}) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "of the config"}))
    assert render(tmp_path) == "of the config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert (render(tmp_path), render(tmp_path, tools=[{}])) == ("plain", "with tools")
    (tmp_path / "chat_template.jinja").write_text("of its own file")
    assert render(tmp_path) == "of its own file"


def test_the_option_overrides_the_model(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("of the model")
    (tmp_path / "other.jinja").write_text("other")
    assert render(tmp_path, override="other.jinja") == "other"
    assert render(tmp_path, override=str(tmp_path / "other.jinja")) == "other"
    assert render(tmp_path, override="{{ 'inline' }}") == "inline"
    with pytest.raises(BadConfiguration, match=r"nowhere\.jinja"):
        render(tmp_path, override="nowhere.jinja")


def test_a_broken_template_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("a\n{% for %}")
    with pytest.raises(ModelUnusable, match=r"chat_template\.jinja: .*line 2"):
        render(tmp_path)


def render(folder: Path, override: str | None = None, tools: list[dict[str, Any]] | None = None) -> str:
    template = ChatTemplate.load(folder, SPECIAL, override)
    assert template is not None
    return template.render(MESSAGES, tools=tools)
