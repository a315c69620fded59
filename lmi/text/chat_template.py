"""Renders messages to a prompt, with the model's Jinja template.

The sandbox, filters and globals are those of transformers' `apply_chat_template`, and so is the result. A template is
code from the model folder, so its time and memory have limits (`template_sandbox.py`). A rendering may take seconds up
to the limit, so callers run it in a thread. It knows no tokenizer and no wire format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jinja2

from lmi.errors import BadConfiguration, GenerationFailed, InvalidRequest, ModelUnusable, cause_line
from lmi.text.template_limits import Budget, OutOfRoom
from lmi.text.template_sandbox import MAX_TEMPLATE_CHARS, TemplateEnvironment

MAX_PROMPT_CHARS = 64 << 20
MAX_RENDER_S = 2.0
MAX_COPIES = 16  # that a template may make of its messages; a template that makes more is at fault itself


class ChatTemplate:
    """One or more templates of a model. With tools `tool_use` is rendered, else `default`."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        source: str = "",
        max_render_s: float = MAX_RENDER_S,
        max_prompt_chars: int = MAX_PROMPT_CHARS,
    ) -> None:
        self._environment = TemplateEnvironment(max_render_s, max_prompt_chars)
        self._max_prompt_chars = max_prompt_chars
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {name: self._environment.compile_bounded(text) for name, text in templates.items()}
        except jinja2.TemplateError as error:
            place = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ModelUnusable(f"{source or 'chat template'}: {cause_line(error)}{place}") from error
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            raise ModelUnusable(f"{source or 'chat template'}: too deep or too large: {cause_line(error)}") from error

    @classmethod
    def load(cls, folder: str | Path, special_tokens: Mapping[str, str], override: str | None = None) -> Self | None:
        """Load `override` (a file, or the template itself), else the model's template. Returns None without either."""
        folder = Path(folder)
        if override is not None:
            return cls({"default": _override_text(folder, override)}, special_tokens, source="option.chat_template")
        templates, file = _templates_in(folder)
        return cls(templates, special_tokens, source=str(file)) if templates else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt. `variables` are further names for the template (`enable_thinking` ...).

        Raises InvalidRequest if the template refuses the messages, and GenerationFailed if it exceeds a limit.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default") or next(iter(self._templates.values()))
        known: dict[str, Any] = {"messages": messages, "tools": tools, "documents": None}
        known["add_generation_prompt"] = add_generation_prompt
        try:
            return self._write(template, self._special_tokens | dict(variables or {}) | known)
        except OutOfRoom as error:
            if _is_large((messages, tools, variables), self._max_prompt_chars // MAX_COPIES):
                raise InvalidRequest(f"the messages are too long for the chat template: {error}") from error
            raise
        except GenerationFailed:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidRequest(f"the chat template does not take these messages: {cause_line(error)}") from error
        except (RecursionError, MemoryError) as error:
            raise GenerationFailed("the chat template used up the stack or the memory") from error

    def _write(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        self._environment.begin()
        chunks: list[str] = []
        num_chars = 0
        for chunk in template.generate(**variables):
            num_chars += len(chunk)
            if num_chars > self._max_prompt_chars:
                raise OutOfRoom(f"the chat template wrote over {self._max_prompt_chars} characters")
            chunks.append(chunk)
        return "".join(chunks)


def _is_large(values: object, max_units: int) -> bool:
    """Whether a request's own values would fill a budget."""
    try:
        Budget(math.inf, max_units).size(values)
    except OutOfRoom:
        return True
    return False


def _override_text(folder: Path, override: str) -> str:
    """Return an override that holds a Jinja tag or spans lines as it is, else the text of the file that it names."""
    if "{{" in override or "{%" in override or "\n" in override:
        return override
    file = next((file for file in (folder / override, Path(override)) if file.is_file()), None)
    if file is None:
        raise BadConfiguration(f"option.chat_template: neither a template nor a file: {override}")
    return _read_text(file)


def _templates_in(folder: Path) -> tuple[dict[str, str], Path]:
    """Return the folder's templates by name, and their file. chat_template.jinja goes before tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        named = {extra.stem: _read_text(extra) for extra in sorted(folder.glob("additional_chat_templates/*.jinja"))}
        return named | {"default": _read_text(file)}, file
    for file in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        value = _parse_object(file).get("chat_template") if file.is_file() else None
        if isinstance(value, str):
            return {"default": value}, file
        if isinstance(value, list) and value:
            return {item["name"]: item["template"] for item in value}, file
    return {}, file


def _parse_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelUnusable(f"{file}: {cause_line(error)}") from error
    return value if isinstance(value, dict) else {}


def _read_text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelUnusable(f"{file}: {cause_line(error)}") from error
    if len(text) > MAX_TEMPLATE_CHARS:
        raise ModelUnusable(f"{file}: over {MAX_TEMPLATE_CHARS} characters")
    return text
