"""Renders messages to a prompt, with the model's Jinja template.

The sandbox, filters and globals are those of transformers' `apply_chat_template`, and so is the
result. A template is code from the model folder, so its time and memory have limits (`limits.py`).
"""

import itertools
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jinja2

from lmi import errors
from lmi.chats import tools
from lmi.chats.limits import Budget, OutOfRoom
from lmi.chats.sandbox import TemplateEnvironment
from lmi.types import Chat

MAX_PROMPT_CHARS = 64 << 20
MAX_RENDER_S = 2.0
MAX_COPIES = (
    16  # that a template may make of its messages; a template that makes more is at fault itself
)
PROBE = "Is this text there?"  # written by a template that takes the form of a content
# of a message that is continued: a noncharacter, and a space that is lost where a template trims
END = "\ufdd1 "

REASONING = re.compile(
    r"\breasoning\b"
)  # vLLM's name of thoughts; messages have DeepSeek's, reasoning_content

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """One or more templates of a model. With tools `tool_use` is rendered, else `default`.

    With `tells_tools` the messages tell of tools, because the templates do not.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        source: str = "chat template",
        tells_tools: bool = False,
        max_render_s: float = MAX_RENDER_S,
        max_prompt_chars: int = MAX_PROMPT_CHARS,
    ) -> None:
        self._environment = TemplateEnvironment(max_render_s, max_prompt_chars)
        self._max_prompt_chars = max_prompt_chars
        self._tells_tools = tells_tools
        self._special_tokens = dict(special_tokens)
        self._may_take_parts = any("type" in text for text in templates.values())
        self._reads_reasoning = any(REASONING.search(text) for text in templates.values())
        try:
            self._templates = {
                name: self._environment.compile_bounded(text) for name, text in templates.items()
            }
        except jinja2.TemplateError as error:
            place = (
                f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            )
            raise errors.ModelUnusable(f"{source}: {errors.cause_line(error)}{place}") from error
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            raise errors.ModelUnusable(
                f"{source}: too deep or too large: {errors.cause_line(error)}"
            ) from error

    def render(self, chat: Chat, image_placeholder: str = "") -> str:
        """Return the prompt. An image is written by the template, or else `image_placeholder`
        stands for it.

        Where it refuses a late message of the system, or a second one of the user, the message
        before says the same. Raises InvalidRequest if the template refuses the messages, and
        GenerationFailed if it exceeds a limit.
        """
        if chat.tools and self._tells_tools:
            said = tools.in_words(chat.messages, chat.tools, takes_system=self._takes_system)
            chat = replace(chat, messages=said, tools=None)

        messages = with_reasoning(chat.messages) if self._reads_reasoning else chat.messages
        if chat.continue_final_message:
            said = messages[-1]["content"]
            messages = [
                *messages[:-1],
                {**messages[-1], "content": said + ([END] if isinstance(said, list) else END)},
            ]

        if not are_in_turns(messages):
            messages = in_turns(messages, self._refused_late)

        text = self._render(replace(chat, messages=self._in_its_form(messages, image_placeholder)))
        if not chat.continue_final_message:
            return text

        prompt, mark, behind = text.rpartition(END.strip())
        if not mark:
            rule = "false where the chat template leaves out the last message"
            raise errors.InvalidParameter("continue_final_message", rule, True)

        return prompt if behind.startswith(" ") else prompt.rstrip()

    def _in_its_form(self, messages: Messages, placeholder: str) -> Messages:
        """Return the messages with contents that are texts, or lists of parts, as the template
        takes them.
        """
        takes_texts, takes_parts = self._forms
        has_images = any(isinstance(message.get("content"), list) for message in messages)
        if takes_parts and (has_images or not takes_texts):
            return [{**message, "content": parts(message.get("content"))} for message in messages]

        if not has_images:
            return messages

        if not placeholder:
            raise errors.Unsupported("messages", "the chat template takes no images")

        return of_texts(messages, placeholder)

    @cached_property
    def _forms(self) -> tuple[bool, bool]:
        """Whether the template writes a content that is a text, and one that is a list of parts."""
        if not self._may_take_parts:
            return True, False

        def is_written(content: object) -> bool:
            text = self._try([{"role": "user", "content": content}]) or ""
            return PROBE in text and "'text'" not in text  # else it wrote the list itself

        return is_written(PROBE), is_written(parts(PROBE))

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the template writes what the system says at the beginning."""
        messages = [{"role": "system", "content": PROBE}, {"role": "user", "content": "Hi"}]
        return PROBE in (self._try(self._in_its_form(messages, "")) or "")

    @cached_property
    def _refused_late(self) -> set[str]:
        """Whose message the template refuses between the user's and an answer."""

        def is_refused(role: str) -> bool:
            said = [{"role": each, "content": "Hi"} for each in ("user", role, "assistant", "user")]
            return self._try(self._in_its_form(said, "")) is None

        return {role for role in ("system", "user") if is_refused(role)}

    def _try(self, messages: Messages) -> str | None:
        """Return the text of some messages, or None if the template does not take them."""
        try:
            return self._render(Chat(messages=messages))
        except errors.LmiError:
            return None

    def _render(self, chat: Chat) -> str:
        template = self._templates.get("tool_use") if chat.tools else None
        template = (
            template or self._templates.get("default") or next(iter(self._templates.values()))
        )
        known = {
            "messages": chat.messages,
            "tools": chat.tools,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            return self._write(
                template, {**chat.variables, **self._special_tokens, "documents": None, **known}
            )
        except (OutOfRoom, RecursionError, MemoryError) as error:
            if _is_large(
                (chat.messages, chat.tools, chat.variables), self._max_prompt_chars // MAX_COPIES
            ):
                raise errors.InvalidRequest(
                    f"the messages are too long or deep for the template: {error}"
                ) from error

            if isinstance(error, OutOfRoom):
                raise

            raise errors.GenerationFailed(
                "the chat template used up the stack or the memory"
            ) from error
        except errors.GenerationFailed:
            raise
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            fault = errors.cause_line(error)
            raise errors.InvalidRequest(
                f"the chat template does not take these messages: {fault}"
            ) from error

    def _write(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        self._environment.begin()
        chunks: list[str] = []
        num_chars = 0
        for chunk in template.generate(variables):  # by name, `self` would be its own argument
            num_chars += len(chunk)
            if num_chars > self._max_prompt_chars:
                raise OutOfRoom(f"the chat template wrote over {self._max_prompt_chars} characters")

            chunks.append(chunk)

        return "".join(chunks)


def with_reasoning(messages: Messages) -> Messages:
    """Return the messages with their thoughts under a second name."""
    return [
        {**message, "reasoning": message["reasoning_content"]}
        if "reasoning_content" in message
        else message
        for message in messages
    ]


def are_in_turns(messages: Messages) -> bool:
    """Whether the system speaks only at the beginning, and the user once in each turn."""
    roles = [message.get("role") for message in messages]
    return "system" not in roles[1:] and ("user", "user") not in itertools.pairwise(roles)


def in_turns(messages: Messages, refused: Container[str]) -> Messages:
    """Return the messages without late ones of the system and second ones of the user, if these are
    `refused`.

    The message before says the same, so that the prompt grows at its end alone. After an answer the
    user says it.
    """
    said: list[Mapping[str, Any]] = []
    for message in messages:
        role = message["role"]
        last = said[-1]["role"] if said else None
        if role == "system" and last is not None and role in refused:
            role = "user"
            is_joined = last != "assistant"
        else:
            is_joined = role == last == "user" and role in refused

        if is_joined:
            said[-1] = {
                **said[-1],
                "content": _joined(said[-1].get("content"), message.get("content")),
            }
        else:
            said.append({**message, "role": role})

    return said


def _joined(first: object, second: object) -> object:
    both: list[Any] = [
        part
        for each in (first, second)
        for part in (each if isinstance(each, list) else [each or ""])
    ]
    return both if isinstance(first, list) or isinstance(second, list) else "\n".join(both)


def parts(content: object) -> list[dict[str, str]]:
    said = content if isinstance(content, list) else [content or ""]
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in said
    ]


def of_texts(messages: Messages, placeholder: str) -> Messages:
    """Return messages whose contents are texts, with a placeholder for each image."""
    numbers = itertools.count(1)

    def text(content: object) -> object:
        if not isinstance(content, list):
            return content

        return "\n".join(
            each if isinstance(each, str) else placeholder.replace("{n}", str(next(numbers)))
            for each in content
        )

    return [{**message, "content": text(message.get("content"))} for message in messages]


def _is_large(values: object, max_units: int) -> bool:
    """Whether a request's own values would fill a budget."""
    try:
        Budget(MAX_RENDER_S, max_units).size(values)
    except (OutOfRoom, RecursionError):
        return True

    return False
