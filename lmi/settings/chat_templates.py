"""Finds a model's chat templates, and by a plain look at their text the forms of the calls and
thoughts in answers.

A template is a stranger's file. So the look is bounded, and nothing in it is run or parsed: it asks
which marks stand in the text, and whether the template's code reads `tools`. Sources: the chat
templates that the makers of models publish, and the example templates of vLLM 0.32.
"""

import json
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lmi.errors import BadConfiguration, ModelUnusable, cause_line
from lmi.settings.values import Values
from lmi.shared.model_files import read_bounded

MAX_TEMPLATE_CHARS = 256 << 10
TEMPLATE = "option.chat_template"
TOOL_CALLS = "option.tool_call_parser"
REASONING = "option.reasoning_parser"
GENERIC = "generic"  # the form of calls that the server itself asks for
OWN_WORDS = (
    None,
    "none",
    GENERIC,
    "hermes",
)  # forms that agree with the words in which the server tells of tools

# The first row of which all marks stand in a template names its form.
TOOL_CALL_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_xml", ("<tool_call>", "<function=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>",)),
    ("granite", ("<|tool_call|>",)),
    ("jamba", ("<tool_calls>",)),
    ("granite-20b-fc", ("<function_call>",)),
    ("phi4_mini_json", ("functools",)),
    ("json", ('"parameters": dictionary of argument name',)),  # the words of Llama 3 and 4
    ("json", ("<|python_tag|>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
)
REASONING_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("think", ("<think>",)),
    ("think", ("</think>",)),
)
BRACKETS = re.compile(r"(\{\{|\{%|\{#|\}\}|%\}|#\})")  # around the code of a template
# Possessive, and one without an end matches too: so a hostile text costs no more than its length.
STRINGS = re.compile(r"'(?:[^'\\]|\\.)*+'?|\"(?:[^\"\\]|\\.)*+\"?", re.DOTALL)
TOOLS = re.compile(r"(?<![.\w])tools\b")


class AnswerForms(NamedTuple):
    """What the text of a model's templates says. A form is None where no mark of one is found."""

    tool_calls: str | None
    reasoning: str | None
    shows_tools: bool

    @classmethod
    def of(cls, templates: Collection[str]) -> "AnswerForms":
        texts = [template[:MAX_TEMPLATE_CHARS] for template in templates]
        whole = "\n".join(texts)
        return cls(
            tool_calls=_form(whole, TOOL_CALL_MARKS),
            reasoning=_form(whole, REASONING_MARKS),
            shows_tools=any(reads_tools(text) for text in texts),
        )


def _form(text: str, rows: tuple[tuple[str, tuple[str, ...]], ...]) -> str | None:
    forms = (form for form, marks in rows if all(mark in text for mark in marks))
    return next(forms, None)


def reads_tools(template: str) -> bool:
    """Whether the code of a template has the variable `tools`, outside of its strings
    and comments.
    """
    opening = ""
    for piece in BRACKETS.split(template):
        if piece in ("{{", "{%", "{#"):
            opening = opening or piece
        elif piece == {"{{": "}}", "{%": "%}", "{#": "#}"}.get(opening):
            opening = ""
        elif opening in ("{{", "{%") and TOOLS.search(STRINGS.sub("''", piece)):
            return True

    return False


def choose_forms(values: Values, folder: Path) -> bool:
    """Choose the forms of calls and thoughts that were not given, and say which.

    Return whether the server itself tells the model of tools, because its template does not.
    """
    templates: dict[str, str] = {}
    with suppress(BadConfiguration, ModelUnusable):  # whoever loads them reports it
        templates, _ = find_templates(folder, values.final(TEMPLATE))

    if not templates:
        return bool(values.final(TOOL_CALLS) == GENERIC)

    forms = AnswerForms.of(templates.values())
    found = {
        TOOL_CALLS: forms.tool_calls if forms.shows_tools else GENERIC,
        REASONING: forms.reasoning,
    }
    for key, form in found.items():
        if form is not None:
            values.choose(key, form, "the chat template")

    chosen = [
        f"{key}={form}" for key, form in found.items() if form is not None and key not in values
    ]
    if chosen:
        values.note(f"found in the chat template: {', '.join(chosen)}")

    if values.final(TOOL_CALLS) is None and forms.shows_tools:
        values.note(
            f"the chat template's form of tool calls is not known: tool_choice auto needs "
            f"{TOOL_CALLS}"
        )

    tool_calls = values.final(TOOL_CALLS)
    tells_tools = tool_calls == GENERIC or (not forms.shows_tools and tool_calls in OWN_WORDS)
    if not forms.shows_tools:
        instead = (
            "a text of the system does"
            if tells_tools
            else f"and with {TOOL_CALLS}={tool_calls} nothing does"
        )
        values.note(f"the chat template does not show tools to the model, {instead}")

    return tells_tools


def find_templates(folder: Path, override: str | None) -> tuple[dict[str, str], str]:
    """Return templates by name, and what an error calls their source. Raises BadConfiguration or
    ModelUnusable.

    `override` (a file, or the template itself) goes before chat_template.jinja, and that before
    tokenizer_config.json.
    """
    if override is not None:
        if "{{" in override or "{%" in override or "\n" in override:
            return {"default": override}, TEMPLATE

        file = next((file for file in (folder / override, Path(override)) if file.is_file()), None)
        if file is None:
            raise BadConfiguration(f"{TEMPLATE}: neither a template nor a file: {override}")

        return {"default": _read_text(file)}, str(file)

    file = folder / "chat_template.jinja"
    if file.is_file():
        named = {
            extra.stem: _read_text(extra)
            for extra in sorted(folder.glob("additional_chat_templates/*.jinja"))
        }
        return named | {"default": _read_text(file)}, str(file)

    for file in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        try:
            config = json.loads(read_bounded(file)) if file.is_file() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise ModelUnusable(f"{file}: {cause_line(error)}") from error

        value = config.get("chat_template") if isinstance(config, dict) else None
        if isinstance(value, str):
            return {"default": value}, str(file)

        if isinstance(value, list) and value:
            try:
                return {str(item["name"]): str(item["template"]) for item in value}, str(file)
            except (KeyError, TypeError):
                raise ModelUnusable(
                    f"{file}: chat_template: each one has a name and a template"
                ) from None

    return {}, ""


def _read_text(file: Path) -> str:
    try:
        text = read_bounded(file).decode().replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{file}: {cause_line(error)}") from error

    if len(text) > MAX_TEMPLATE_CHARS:
        raise ModelUnusable(f"{file}: over {MAX_TEMPLATE_CHARS} characters")

    return text
