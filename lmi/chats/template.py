"""Renders messages to a prompt, with the model's Jinja template.

The sandbox, filters and globals are those of transformers' `apply_chat_template`, and so is the
result. A template is code from the model folder, so its time and memory have limits (`limits.py`).
"""

import itertools
import re
from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
from msgspec.structs import replace

from lmi import errors
from lmi.chats import tools
from lmi.chats.limits import Budget, OutOfRoom
from lmi.chats.sandbox import TemplateEnvironment
from lmi.types import Chat

MAX_PROMPT_CHARS = 64 << 20
MAX_RENDER_S = 2.0
# A template may make so many copies of its messages. One that makes more is at fault itself.
MAX_COPIES = 16
# A template that takes a form of content writes this text if it comes in that form.
PROBE = "Is this text there?"
# The end of a message that is continued: a noncharacter, and a space that is lost where a template
# trims.
END = "\ufdd1 "

# vLLM's name of thoughts. Messages have DeepSeek's, reasoning_content.
REASONING = re.compile(r"\breasoning\b")

Messages = Sequence[Mapping[str, Any]]


class _Forms(NamedTuple):
    """Whether a template writes a content that is a text, and one that is a list of parts."""

    takes_texts: bool
    takes_parts: bool


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

        self._templates: dict[str, jinja2.Template] = {}
        try:
            for name, text in templates.items():
                self._templates[name] = self._environment.compile_bounded(text)
        except jinja2.TemplateError as error:
            fault = errors.cause_line(error)
            if isinstance(error, jinja2.TemplateSyntaxError):
                fault += f", line {error.lineno}"

            raise errors.ModelUnusable(f"{source}: {fault}") from error
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            fault = errors.cause_line(error)
            raise errors.ModelUnusable(f"{source}: too deep or too large: {fault}") from error

    def render(self, chat: Chat, image_placeholder: str = "") -> str:
        """Return the prompt. An image is written by the template, or else `image_placeholder`
        stands for it.

        Where the template refuses a late message of the system, or a second one of the user in a
        row, its text is joined to the message before, or becomes the user's. Raises InvalidRequest
        if the template refuses the messages, and GenerationFailed if it exceeds a limit.
        """
        # Whole messages come and go first, and their contents get the template's form last.
        if chat.tools and self._tells_tools:
            messages = tools.in_words(chat.messages, chat.tools, takes_system=self._takes_system)
            chat = replace(chat, messages=messages, tools=None)

        messages = chat.messages
        if self._reads_reasoning:
            messages = with_reasoning(messages)

        if chat.continue_final_message:
            messages = [*messages[:-1], _with_end(messages[-1])]

        if not are_in_turns(messages):
            messages = in_turns(messages, self._refused_late)

        messages = self._in_its_form(messages, image_placeholder)
        text = self._render(replace(chat, messages=messages))
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
        forms = self._forms
        has_images = any(isinstance(message.get("content"), list) for message in messages)
        if forms.takes_parts and (has_images or not forms.takes_texts):
            return [
                {**message, "content": typed_parts(message.get("content"))} for message in messages
            ]

        if not has_images:
            return messages

        if not placeholder:
            raise errors.Unsupported("messages", "the chat template takes no images")

        return with_placeholders(messages, placeholder)

    @cached_property
    def _forms(self) -> _Forms:
        if not self._may_take_parts:
            return _Forms(takes_texts=True, takes_parts=False)

        return _Forms(self._writes(PROBE), self._writes(typed_parts(PROBE)))

    def _writes(self, content: object) -> bool:
        """Whether the template writes the text of a content, and not the list that it is."""
        text = self._try([{"role": "user", "content": content}]) or ""
        return PROBE in text and "'text'" not in text

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the template writes what the system says at the beginning."""
        messages = [{"role": "system", "content": PROBE}, {"role": "user", "content": "Hi"}]
        return PROBE in (self._try(self._in_its_form(messages, "")) or "")

    @cached_property
    def _refused_late(self) -> set[str]:
        """Whose message the template refuses between the user's and an answer."""
        return {role for role in ("system", "user") if self._refuses_late(role)}

    def _refuses_late(self, late_role: str) -> bool:
        roles = ("user", late_role, "assistant", "user")
        messages = [{"role": role, "content": "Hi"} for role in roles]
        return self._try(self._in_its_form(messages, "")) is None

    def _try(self, messages: Messages) -> str | None:
        """Return the text of some messages, or None if the template does not take them."""
        try:
            return self._render(Chat(messages=messages))
        except errors.LmiError:
            return None

    def _render(self, chat: Chat) -> str:
        variables = {
            **chat.variables,
            **self._special_tokens,
            "documents": None,
            "messages": chat.messages,
            "tools": chat.tools,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            return self._write(self._template_of(chat), variables)
        except (OutOfRoom, RecursionError, MemoryError) as error:
            values = (chat.messages, chat.tools, chat.variables)
            if _is_large(values, self._max_prompt_chars // MAX_COPIES):
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

    def _template_of(self, chat: Chat) -> jinja2.Template:
        """Return the template for tools if there are some, else the default, else the first one."""
        if chat.tools and "tool_use" in self._templates:
            return self._templates["tool_use"]

        if "default" in self._templates:
            return self._templates["default"]

        return next(iter(self._templates.values()))

    def _write(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        self._environment.begin()
        chunks: list[str] = []
        num_chars = 0
        # By name, a variable `self` would be an argument of `generate` itself.
        for chunk in template.generate(variables):
            num_chars += len(chunk)
            if num_chars > self._max_prompt_chars:
                raise OutOfRoom(f"the chat template wrote over {self._max_prompt_chars} characters")

            chunks.append(chunk)

        return "".join(chunks)


def _with_end(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message that is continued with END behind its content."""
    content = message["content"]
    end = [END] if isinstance(content, list) else END
    return {**message, "content": content + end}


def with_reasoning(messages: Messages) -> Messages:
    """Return the messages with their thoughts under a second name."""
    with_both_names = []
    for message in messages:
        if "reasoning_content" in message:
            message = {**message, "reasoning": message["reasoning_content"]}

        with_both_names.append(message)

    return with_both_names


def are_in_turns(messages: Messages) -> bool:
    """Whether the system speaks only at the beginning, and the user once in each turn."""
    roles = [message.get("role") for message in messages]
    return "system" not in roles[1:] and ("user", "user") not in itertools.pairwise(roles)


def in_turns(messages: Messages, refused: Container[str]) -> Messages:
    """Return the messages without late ones of the system and second ones of the user, if these are
    `refused`.

    The text of such a message is joined to the message before, so that a longer chat changes only
    the end of the prompt. Behind an answer it becomes the user's.
    """
    turns: list[Mapping[str, Any]] = []
    for message in messages:
        role = message["role"]
        last_role = turns[-1]["role"] if turns else None
        is_late_system = role == "system" and last_role is not None and role in refused
        is_second_user = role == last_role == "user" and role in refused

        if is_second_user or (is_late_system and last_role != "assistant"):
            content = _joined(turns[-1].get("content"), message.get("content"))
            turns[-1] = {**turns[-1], "content": content}
        elif is_late_system:
            turns.append({**message, "role": "user"})
        else:
            turns.append(message)

    return turns


def _joined(first: Any, second: Any) -> object:
    """Return two contents as one text, or as a list of texts and images if one of them is one."""
    if not isinstance(first, list) and not isinstance(second, list):
        return "\n".join([first or "", second or ""])

    return [*_as_list(first), *_as_list(second)]


def _as_list(content: object) -> list[Any]:
    return content if isinstance(content, list) else [content or ""]


def typed_parts(content: object) -> list[dict[str, str]]:
    """Return a content as the list of parts that templates read, each with its type."""
    parts = []
    for part in _as_list(content):
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        else:
            parts.append({"type": "image"})

    return parts


def with_placeholders(messages: Messages, placeholder: str) -> Messages:
    """Return messages whose contents are texts, with a placeholder for each image. `{n}` in it is
    the number of the image, from 1.
    """
    numbers = itertools.count(1)

    def as_text(content: object) -> object:
        if not isinstance(content, list):
            return content

        texts = []
        for part in content:
            if not isinstance(part, str):
                part = placeholder.replace("{n}", str(next(numbers)))

            texts.append(part)

        return "\n".join(texts)

    return [{**message, "content": as_text(message.get("content"))} for message in messages]


def _is_large(values: object, max_units: int) -> bool:
    """Whether a request's own values would fill a budget."""
    try:
        Budget(MAX_RENDER_S, max_units).size(values)
    except (OutOfRoom, RecursionError):
        return True

    return False
