"""Finds a model's chat templates, and in their text the forms that calls and thoughts have in
answers.

A template is a stranger's file. So only a beginning of bounded length is searched, and nothing in
it is run or parsed: only for marks of the forms, and for code that reads `tools`. Sources: the chat
templates that the makers of models publish, and the example templates of vLLM 0.32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lmi.errors import BadConfiguration, ModelUnusable, cause_line
from lmi.shared.model_files import read_bounded

# A front end reads templates too, and resolves no settings.
if TYPE_CHECKING:
    from lmi.settings.steps import Resolution
    from lmi.settings.values import Values

MAX_TEMPLATE_CHARS = 256 << 10
TEMPLATE = "option.chat_template"
TOOL_CALLS = "option.tool_call_parser"
REASONING = "option.reasoning_parser"
# The form of calls that the server itself asks for.
GENERIC = "generic"
# Forms that agree with the words in which the server itself tells the model of tools.
OWN_WORDS = (
    None,
    "none",
    GENERIC,
    "hermes",
)

# The form of a template is that of the first row whose marks all stand in it.
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
    # The words of Llama 3 and 4.
    ("json", ('"parameters": dictionary of argument name',)),
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
# The brackets around the code and the comments of a template: how each that opens is closed.
CLOSINGS = {
    "{{": "}}",
    "{%": "%}",
    "{#": "#}",
}
COMMENT = "{#"
BRACKETS = re.compile(r"(\{\{|\{%|\{#|\}\}|%\}|#\})")
# The strings in code, also one without an end. The quantifiers are possessive, so that a hostile
# text takes no longer than its length.
STRINGS = re.compile(r"'(?:[^'\\]|\\.)*+'?|\"(?:[^\"\\]|\\.)*+\"?", re.DOTALL)
TOOLS = re.compile(r"(?<![.\w])tools\b")


class AnswerForms(NamedTuple):
    """What the text of a model's templates says. A form is None if no mark of one is found."""

    tool_calls: str | None
    reasoning: str | None
    # Whether a template shows the tools to the model.
    shows_tools: bool

    @classmethod
    def of(cls, templates: Collection[str]) -> AnswerForms:
        """Find the forms in the templates of a model."""
        texts = [template[:MAX_TEMPLATE_CHARS] for template in templates]
        text = "\n".join(texts)
        return cls(
            tool_calls=_form(text, TOOL_CALL_MARKS),
            reasoning=_form(text, REASONING_MARKS),
            shows_tools=any(reads_tools(text) for text in texts),
        )


def _form(text: str, rows: tuple[tuple[str, tuple[str, ...]], ...]) -> str | None:
    """Return the form of the first row whose marks all stand in the text."""
    for form, marks in rows:
        if all(mark in text for mark in marks):
            return form

    return None


def reads_tools(template: str) -> bool:
    """Whether the code of a template has the variable `tools`, outside of strings and comments."""
    # The bracket that was opened, and not closed yet.
    opening = ""
    for piece in BRACKETS.split(template):
        if not opening:
            if piece in CLOSINGS:
                opening = piece
        elif piece == CLOSINGS[opening]:
            opening = ""
        elif opening != COMMENT and TOOLS.search(STRINGS.sub("''", piece)):
            return True

    return False


def choose_forms(resolution: Resolution) -> None:
    """Choose the forms of calls and thoughts that were not given, if the model's files are here,
    and whether the server itself tells the model of tools, because no template does.
    """
    resolution.tells_tools = False
    if resolution.is_model_here and not resolution.is_user_code:
        resolution.tells_tools = _choose_forms(resolution.values, resolution.path)


def _choose_forms(values: Values, folder: Path) -> bool:
    """Choose the forms, and note them. Returns whether the server itself tells of tools."""
    templates: dict[str, str] = {}
    # Who loads the templates reports their faults.
    with suppress(BadConfiguration, ModelUnusable):
        templates, _ = find_templates(folder, values.final(TEMPLATE))

    if not templates:
        return bool(values.final(TOOL_CALLS) == GENERIC)

    forms = AnswerForms.of(templates.values())
    _choose_forms_of(values, forms)

    tool_calls = values.final(TOOL_CALLS)
    if forms.shows_tools:
        if tool_calls is None:
            values.note(
                f"the chat template's form of tool calls is not known: tool_choice auto needs "
                f"{TOOL_CALLS}"
            )

        return bool(tool_calls == GENERIC)

    tells_tools = tool_calls == GENERIC or tool_calls in OWN_WORDS
    instead = f"and with {TOOL_CALLS}={tool_calls} nothing does"
    if tells_tools:
        instead = "a text of the system does"

    values.note(f"the chat template does not show tools to the model, {instead}")
    return tells_tools


def _choose_forms_of(values: Values, forms: AnswerForms) -> None:
    """Choose the forms that the templates have, if no option gives another one. Where no template
    shows the tools, the server asks for calls in a form of its own.
    """
    form_by_key = {
        TOOL_CALLS: forms.tool_calls if forms.shows_tools else GENERIC,
        REASONING: forms.reasoning,
    }
    notes: list[str] = []
    for key, form in form_by_key.items():
        if form is None:
            continue

        values.choose(key, form, "the chat template")
        if key not in values:
            notes.append(f"{key}={form}")

    if notes:
        values.note(f"found in the chat template: {', '.join(notes)}")


def find_templates(folder: Path, override: str | None) -> tuple[dict[str, str], str]:
    """Return the templates by name, and what errors call the file with them. Raises
    BadConfiguration or ModelUnusable.

    The first that is there counts: `override`, which is a file or the template itself,
    chat_template.jinja, and tokenizer_config.json.
    """
    if override is not None:
        return _named_template(folder, override)

    file = folder / "chat_template.jinja"
    if file.is_file():
        templates: dict[str, str] = {}
        for extra in sorted(folder.glob("additional_chat_templates/*.jinja")):
            templates[extra.stem] = _read_text(extra)

        templates["default"] = _read_text(file)
        return templates, str(file)

    for file in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        templates = _templates_of_config(file)
        if templates:
            return templates, str(file)

    return {}, ""


def _named_template(folder: Path, override: str) -> tuple[dict[str, str], str]:
    """Return the template that an option has, or the file that it names."""
    if "{{" in override or "{%" in override or "\n" in override:
        return {"default": override}, TEMPLATE

    for file in (folder / override, Path(override)):
        if file.is_file():
            return {"default": _read_text(file)}, str(file)

    raise BadConfiguration(f"{TEMPLATE}: neither a template nor a file: {override}")


def _templates_of_config(file: Path) -> dict[str, str]:
    """Return the templates that a JSON file has under `chat_template`: one, or a list of them."""
    try:
        config = json.loads(read_bounded(file)) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnusable(f"{file}: {cause_line(error)}") from error

    value = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(value, str):
        return {"default": value}

    if not isinstance(value, list):
        return {}

    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (KeyError, TypeError):
        raise ModelUnusable(f"{file}: chat_template: each one has a name and a template") from None


def _read_text(file: Path) -> str:
    try:
        text = read_bounded(file).decode().replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{file}: {cause_line(error)}") from error

    if len(text) > MAX_TEMPLATE_CHARS:
        raise ModelUnusable(f"{file}: over {MAX_TEMPLATE_CHARS} characters")

    return text
