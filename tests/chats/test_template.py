from __future__ import annotations

import threading
import tracemalloc
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lmi.chats.template import ChatTemplate
from lmi.errors import (
    GenerationFailed,
    InvalidParameter,
    InvalidRequest,
    ModelUnusable,
    Unsupported,
)
from lmi.types import Chat
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
"""  # noqa: E501
EXPRESSIONS = """
{{ messages[1:] | map(attribute='role') | join(', ') }}|{{ messages[::-1][0].content }}|{{ 'abc'[1:] ~ 7 ~ [1, 'a'] }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ messages | rejectattr('role', 'in', ['user']) | list }}
{{ {'b': 1, 'a': [1, 2.5, none, true]} | dictsort }}|{{ {'b': {'a': []}} | tojson(indent=2) }}
{{ {'b': 1}.items() | list }}
{{ [3, 1, 2] | sort(reverse=true) }}|{{ ['b', 'A', 'b'] | unique | list }}|{{ messages | groupby('role') | length }}
{{ [1, 2, 3] | batch(2, 'x') | list }}|{{ [1, 2, 3] | slice(2) | list }}|{{ [1, 2, 3] | sum }}|{{ [1, 4] | max }}
{{ 'a-b-c'.split('-', 1) }}|{{ 'a-b-c'.rsplit('-', maxsplit=1) }}|{{ '--a--'.strip('-') }}
{{ 'ab'.replace('a', 'x') }}|{{ ', '.join(['a', 'b']) }}|{{ messages | reverse | join(',', attribute='role') }}
{{ '%s has %5.2f' % ('it', 1) }}|{{ '%s'|format('x') }}|{{ '{:>5}|{a[b]}'.format(7, a={'b': 1}) }}
{{ 'x'.center(5) }}|{{ 'x' | center(5) }}
{{ 'a\nb' | indent(2, true) }}|{{ 'aXa' | replace('a', 'b', 1) }}|{{ '<a>' | e }}|{{ 'a b' | title }}
{{ '  a ' | trim | upper }}
{{ 7 // 2 }}|{{ 2 ** 10 }}|{{ -7 % 3 }}|{{ 1 / 4 }}|{{ 'ab' * 3 }}|{{ [0] * 2 + [1] }}|{{ 2.567 | round(1) }}
{{ '12' | int + 1 }}
{%- macro f(x) %}{{ x }}{{ varargs }}{{ kwargs }}{{ caller() if caller else '' }}{% endmacro %}
{{ f(1, 2, y=3) }}{% call f(*[1, 2], **{'z': 1}) %}in{% endcall %}{% set block %}a{{ 1 }}{% endset %}{{ block ~ block }}
{%- filter upper %}up{% endfilter %}{% for x in [[1, [2]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}
{%- for key, value in {'a': 1}.items() if value is odd and value in [1] and key != value %}
{{ key }}{{ loop.cycle('x', 'y') }}{% endfor %}
{{ 4 is even }}{{ 4 is divisibleby(2) }}{{ 'a' in 'abc' and 'd' not in 'abc' }}{{ 1 < 2 <= messages | length }}
{{ namespace(a=1).a }}
"""  # noqa: E501
MESSAGES = [
    {"role": "user", "content": " Hi <b> "},
    {"role": "assistant", "content": "世界 😀"},
    {"role": "user", "content": "Bye"},
]
TALK = Chat(messages=MESSAGES)
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}


def compiled(text: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, SPECIAL)


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        ALTERNATING,
        TOOLS,
        EXPRESSIONS,
        "{{ strftime_now('%Y') }}",
        "a\n{% if true %}\nb\n{% endif %}",
    ],
)
@pytest.mark.parametrize(
    "tools", [None, [{"type": "function", "function": {"name": "f", "description": "<&é>"}}]]
)
def test_a_template_renders_as_in_transformers(
    template: str, tools: list[dict[str, Any]] | None
) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), **SPECIAL
    ).apply_chat_template(
        MESSAGES,
        chat_template=template,
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
        mood="calm",
    )

    assert (
        compiled(template).render(Chat(messages=MESSAGES, tools=tools, variables={"mood": "calm"}))
        == theirs
    )


@pytest.mark.parametrize("template", [CHATML, ALTERNATING])
@pytest.mark.parametrize("said", ["", "世界 😀", " The capital ", "two\n\n"])
def test_a_message_is_continued_as_in_transformers(template: str, said: str) -> None:
    messages = [MESSAGES[0], {"role": "assistant", "content": said}]
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), **SPECIAL
    ).apply_chat_template(
        messages, chat_template=template, tokenize=False, continue_final_message=True
    )
    our_text = compiled(template).render(
        Chat(messages=messages, add_generation_prompt=False, continue_final_message=True)
    )
    assert our_text == theirs and our_text.rstrip().endswith(said.strip())


def test_a_last_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    with pytest.raises(InvalidParameter, match="continue_final_message"):
        compiled("{{ messages[0].content }}").render(
            Chat(messages=MESSAGES, continue_final_message=True)
        )


def test_messages_that_the_template_refuses_are_the_clients_fault() -> None:
    with pytest.raises(InvalidRequest, match="Roles must alternate"):
        compiled(ALTERNATING).render(Chat(messages=MESSAGES[1:]))

    with pytest.raises(InvalidRequest, match="content"):
        compiled("{{ messages[0].content + 'a' }}").render(Chat(messages=[{"role": "user"}]))


@pytest.mark.parametrize(
    "attack",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_a_template_stays_in_its_sandbox(attack: str) -> None:
    try:
        text = compiled(attack).render(TALK)
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
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",  # noqa: E501
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_cannot_run_for_ever(attack: str) -> None:
    with pytest.raises(GenerationFailed, match="chat template"):
        ChatTemplate({"default": attack}, SPECIAL, max_render_s=0.1).render(TALK)


def test_a_variable_of_a_client_replaces_neither_the_template_nor_its_messages() -> None:
    variables = {
        "chat_template": "{{ 7 * 7 }}",
        "messages": [],
        "tools": ["x"],
        "add_generation_prompt": False,
    }
    template = ChatTemplate({"default": "{{ bos_token }}" + CHATML}, SPECIAL)
    assert template.render(
        Chat(messages=MESSAGES, variables=variables | {"bos_token": "x"})
    ) == template.render(TALK)


@pytest.mark.parametrize(
    "name", ["self", "args", "kwargs", "context", "environment", "loop", "a b", ""]
)
def test_a_variable_of_a_client_may_have_any_name(name: str) -> None:
    chat = Chat(messages=MESSAGES, variables={name: "x"})
    assert compiled(CHATML).render(chat) == compiled(CHATML).render(TALK)


NESTINGS = [
    "(ns.x,)",
    "[ns.x]",
    "{'a': ns.x}",
    "{'a': [ns.x]}.items() | list",
    "[1] + [ns.x]",
    "[ns.x] * 2 if loop.last else [ns.x]",
    "[ns.x][0:]",
    "dict(a=ns.x)",
    "dict([('a', ns.x)])",
    "[ns.x] | batch(1) | list",
    "[ns.x] | slice(1) | list",
    "[ns.x] | list",
    "[ns.x] | reverse | list",
    "cycler(ns.x).items",
    "[{'a': ns.x}] | map(attribute='a') | list",
    "made(ns.x)",
    "named(x=ns.x)",
]


@pytest.mark.parametrize("nesting", NESTINGS)
def test_no_list_lies_deep_in_others(nesting: str) -> None:
    macros = (
        "{% macro made() %}{% set ns.x = varargs %}{% endmacro %}"
        "{% macro named() %}{% set ns.x = kwargs %}{% endmacro %}"
    )

    template = compiled(
        "{% set ns = namespace(x=()) %}" + macros + "{% for i in range(2000) %}"
        f"{{% set x = {nesting} %}}{{% if x is iterable and x is not string %}}{{% set ns.x = x "
        f"%}}{{% endif %}}"
        "{% endfor %}{{ ns.x | length }}"
    )
    with pytest.raises(GenerationFailed, match="over 200 lists in each other"):
        template.render(TALK)


@pytest.mark.parametrize("num_levels", [300, 900, 5000])
def test_a_client_s_own_values_that_lie_too_deep_are_the_client_s_fault(num_levels: int) -> None:
    deep: list[Any] = []
    for _ in range(num_levels):
        deep = [deep]

    with pytest.raises(InvalidRequest, match="too long or deep"):
        compiled("{{ [tools] | length }}").render(Chat(messages=MESSAGES, tools=[{"deep": deep}]))


def test_a_template_cannot_write_for_ever() -> None:
    attack = "{% for a in range(99999) %}{{ 'a' * 100000 }}{% endfor %}"
    with pytest.raises(GenerationFailed, match="1048576 characters"):
        ChatTemplate({"default": attack}, SPECIAL, max_prompt_chars=1 << 20).render(TALK)


GROW = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor "
    "%%}{{ ns.x }}"
)
GROWTHS = [
    ("'a'", "ns.x + ns.x"),
    ("'a'", "ns.x ~ ns.x"),
    ("'a'", "[ns.x, ns.x] | join"),
    ("'a'", "ns.x.join([ns.x, ns.x])"),
    ("'a'", "ns.x.replace('a', 'aa')"),
    ("'a'", "ns.x | replace('a', 'aa')"),
    ("'a'", "'%s%s' % (ns.x, ns.x)"),
    ("'a'", "'{0}{0}'.format(ns.x)"),
    ("'a'", "'{x}{x}'.format_map({'x': ns.x})"),
    ("['a']", "ns.x + ns.x"),
    ("['a']", "[ns.x, ns.x]"),
    ("['a']", "(ns.x, ns.x)"),
    ("['a']", "{'a': ns.x, 'b': ns.x}"),
    ("['a']", "dict(a=ns.x, b=ns.x).items()"),
    ("3", "ns.x * ns.x"),
]
EXPLOSIONS = [
    *(GROW % growth for growth in GROWTHS),
    "{{ 'a' * 3000000000 }}",
    "{% set n = 9 %}{{ n ** (n ** n) }}",
    "{{ '%3000000000d' % 1 }}",
    "{{ '%*d' % (3000000000, 1) }}",
    "{{ '%(a(b))3000000000d' | format(**{'a(b)': 1}) }}",
    "{{ '{:{}d}'.format(1, 3000000000) }}",
    "{{ 'a' | center(3000000000) }}",
    "{{ 'a'.ljust(3000000000) }}",
    "{{ '\\t'.expandtabs(tabsize=3000000000) }}",
    "{{ ('a\\n' * 100000) | indent(100000) }}",
    "{{ [1] | tojson(indent=3000000000) }}",
    "{{ ['a'] | batch(3000000000, 'b') | list }}",
    "{{ ['a'] | slice(3000000000) | list | length }}",
    "{% set b = 'a' * 1000000 %}{{ range(9999) | map(attribute='q', default=b) | join }}",
    "{{ 1 | round(1000000000, 'ceil') }}",
    "{{ ('f' * 4000) | int(base=16) // 3 }}",
    "{{ (1).to_bytes(3000000000, 'big') }}",
    "{{ dict.fromkeys(range(99999), 'a') }}",
    "{% set a = 'a' * 1000000 %}{{ a.rfind('b' + 'a' * 500000) }}",
    "{% set a = 'a' * 1000000 %}{{ a.strip('b' * 1000000) }}",
    "{% set a = ['a' * 9000000 ~ 'b', 'a' * 9000000 ~ 'c'] %}{{ (a * 1000) | sort | length }}",
    "{{ ([[1]] * 9999) | sum(start=[]) }}",
    (
        "{% macro m(n) %}{{ m(n - 1, varargs, varargs) if n else varargs }}{% endmacro %}{{ m(60, "
        "'a', "
        "'b') }}"
    ),
    "{% set b = 'a' * 30000000 %}{% set c = b[1:] %}{% set d = b[1:] %}",
    "{% set s %}" + "{{ 'a' * 600000 }}" * 500 + "{% endset %}",
    "{% set x = cycler(*('a' * 60000000)) %}",
    "{{ strftime_now('%Y' * 1000000) }}",
    "{{ 3000000000 * 'a' }}",
    "{{ '\\t'.expandtabs(3000000000) }}",
    "{% set a = 'a' * 9000000 %}{{ [a, a] | sort | length }}",
    "{{ [{}] | map(attribute='a' * 1000) | list }}",
]


@pytest.mark.parametrize("attack", EXPLOSIONS)
def test_no_expression_takes_long_or_much_memory(attack: str) -> None:
    template = compiled(attack)
    tracemalloc.start()
    try:
        with pytest.raises(GenerationFailed, match="^the chat template (?!used up)"):
            template.render(TALK)

        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


def test_nothing_of_a_template_is_computed_when_it_is_compiled() -> None:
    for attack in (
        "{{ 'a' * 3000000000 }}",
        "{% autoescape 'a' | center(3000000000) %}{% endautoescape %}",
    ):
        compiled(attack)


def test_a_namespace_that_refers_to_itself_is_not_written() -> None:
    text = compiled("{% set n = namespace() %}{% set n.a = [n] %}{{ n.a }}").render(TALK)
    assert text == "[<Namespace>]"


def test_a_test_of_numbers_writes_no_text() -> None:
    assert compiled("{{ '%3000000000d' is odd }}").render(TALK) == "False"


@pytest.mark.parametrize(
    "text", ["{{" + "(" * 100_000, "{% if x %}" * 20_000, "x" * 300_000, "{{ 'a' | wordwrap }}"]
)
def test_a_template_that_cannot_be_compiled_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(ModelUnusable, match="chat template: (too deep|over|No filter)"):
        compiled(text)


def test_a_template_that_takes_long_to_compile_is_refused_at_the_start() -> None:
    names = "".join(f"{{% set a{number} = 1 %}}" for number in range(6000))
    with pytest.raises(ModelUnusable, match="over 1000000 names in branches: 6001 x 6000"):
        compiled(names + "{% if x %}{% endif %}" * 6000)


def test_messages_that_fill_the_limit_alone_are_the_client_s_fault() -> None:
    template = ChatTemplate({"default": CHATML}, SPECIAL, max_prompt_chars=1 << 20)
    with pytest.raises(InvalidRequest, match="messages are too long"):
        template.render(Chat(messages=[{"role": "user", "content": "a" * (1 << 20)}]))


def test_one_template_renders_in_many_threads() -> None:
    template = compiled(CHATML)
    texts = []
    threads = [
        threading.Thread(target=lambda: texts.append(template.render(TALK))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join()

    assert set(texts) == {template.render(TALK)}
    assert len(texts) == 8


# Any part that is no text
IMAGE = object()
OF_PARTS = (
    "{% for m in messages %}[{% for p in m.content %}{{ p.text if p.type == 'text' else '<i>' }}{% "
    "endfor %}]"
    "{% endfor %}"
)
OF_BOTH = (
    "{% for m in messages %}{{ m.content if m.content is string else m.content | "
    "map(attribute='type') | list }}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "contents", "text"),
    [
        (OF_PARTS, [["a", IMAGE, "b"], "c"], "[a<i>b][c]"),
        (OF_PARTS, ["a", ""], "[a][]"),
        (OF_BOTH, ["a", "b"], "ab"),
        (
            "{% for m in messages %}[{{ m.content }}]{% endfor %}",
            [["a", IMAGE], "b", [IMAGE]],
            "[a\n<1>][b][<2>]",
        ),
    ],
    ids=["parts", "parts without an image", "either form", "texts"],
)
def test_a_template_gets_contents_in_the_form_that_it_takes(
    template: str, contents: list[Any], text: str
) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    assert compiled(template).render(Chat(messages=messages), "<{n}>") == text


def test_a_message_with_an_image_can_be_continued() -> None:
    messages = [{"role": "user", "content": ["a", IMAGE]}]
    assert (
        compiled(OF_PARTS).render(
            Chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
        )
        == "[a<i>"
    )


def test_images_need_a_template_that_writes_them_or_a_placeholder() -> None:
    with pytest.raises(
        Unsupported, match="messages is not supported here: the chat template takes no images"
    ):
        compiled(CHATML).render(Chat(messages=[{"role": "user", "content": [IMAGE]}]))


def told(*said: str) -> Chat:
    """Messages of the system, the user, the assistant and a tool, named by their first letters."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return Chat(messages=[{"role": roles[turn[0]], "content": turn} for turn in said])


WRITTEN = "[{{ m.role }} {{ m.content }}]"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (["s1", "u1", "s2", "a1", "u2"], "[system s1][user u1\ns2][assistant a1][user u2]"),
        (["u1", "s2"], "[user u1\ns2]"),
        (["s1", "s2", "s3", "u1"], "[system s1\ns2\ns3][user u1]"),
        (["u1", "a1", "t1", "s2"], "[user u1][assistant a1][tool t1\ns2]"),
        (["u1", "a1", "s2", "u2", "s3"], "[user u1][assistant a1][user s2][user u2\ns3]"),
        (["u1", "a1", "s2"], "[user u1][assistant a1][user s2]"),
    ],
)
def test_the_message_before_says_what_a_template_refuses_from_the_system(
    said: list[str], text: str
) -> None:
    refusing = (
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('not at the "
        "beginning') }}{% endif %}"
    )
    assert (
        compiled(f"{{% for m in messages %}}{refusing}{WRITTEN}{{% endfor %}}").render(told(*said))
        == text
    )


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (["u1", "u2", "s3", "a1", "u3", "u4"], "[user u1\nu2\ns3][assistant a1][user u3\nu4]"),
        (["u1", "a1", "s2", "u2"], "[user u1][assistant a1][user s2\nu2]"),
    ],
)
def test_roles_alternate_where_the_template_wants_it(said: list[str], text: str) -> None:
    refusing = (
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('not in "
        "turns') }}{% endif %}"
    )
    assert (
        compiled(f"{{% for m in messages %}}{refusing}{WRITTEN}{{% endfor %}}").render(told(*said))
        == text
    )


def test_a_template_that_refuses_no_order_gets_messages_as_they_are() -> None:
    template = compiled(f"{{% for m in messages %}}{WRITTEN}{{% endfor %}}")
    assert template.render(told("u1", "s2", "u2", "u3")) == "[user u1][system s2][user u2][user u3]"
    assert compiled("{{ messages[-1].content }}").render(told("u1", "s2", "u2", "u3")) == "u3"


def test_images_stay_where_they_are_when_a_late_message_of_the_system_joins_them() -> None:
    strict = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% "
        "endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": ["a", IMAGE]}, {"role": "system", "content": "s"}]
    assert compiled(strict + OF_PARTS).render(Chat(messages=messages)) == "[a<i>s]"


@pytest.mark.parametrize(
    ("name", "said"),
    [("reasoning_content", "hm|"), ("reasoning", "hm|"), ("reasoning_effort", "|")],
)
def test_thoughts_reach_a_template_under_the_name_that_it_reads(name: str, said: str) -> None:
    past = {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}
    template = ChatTemplate(
        {"default": f"{{% for message in messages %}}{{{{ message.{name} }}}}|{{% endfor %}}"}, {}
    )

    assert template.render(Chat(messages=[past])) == said


def test_a_template_that_reads_no_thoughts_gets_no_second_name_of_them() -> None:
    past = {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}
    template = ChatTemplate({"default": "{{ messages[0].keys() | list }}"}, {})

    assert template.render(Chat(messages=[past])) == "['role', 'content', 'reasoning_content']"
