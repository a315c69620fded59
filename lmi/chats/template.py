"""Renders messages to a prompt, with the model's Jinja template.

The sandbox, filters and globals are those of transformers' `apply_chat_template`, and so is the result. A template is
code from the model folder, so its time and memory have limits (`limits.py`).
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from lmi import errors
from lmi.chats.filters import BoundedTree, Filters
from lmi.chats.limits import ASKING, BoundedFormatter, Budget, OutOfRoom, check_method, num_units
from lmi.chats.prompts import MAX_TEMPLATE_CHARS
from lmi.types import Chat

MAX_PROMPT_CHARS = 64 << 20
MAX_RENDER_S = 2.0
MAX_COPIES = 16  # that a template may make of its messages; a template that makes more is at fault itself
PROBE = "Is this text there?"  # written by a template that takes the form of a content
END = "\ufdd1 "  # of a message that is continued: a noncharacter, and a space that is lost where a template trims
MAX_SHORT_CHARS = 1000  # of a form of dates, and of the message of an exception

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """One or more templates of a model. With tools `tool_use` is rendered, else `default`."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        source: str = "chat template",
        max_render_s: float = MAX_RENDER_S,
        max_prompt_chars: int = MAX_PROMPT_CHARS,
    ) -> None:
        self._environment = TemplateEnvironment(max_render_s, max_prompt_chars)
        self._max_prompt_chars = max_prompt_chars
        self._special_tokens = dict(special_tokens)
        self._may_take_parts = any("type" in text for text in templates.values())
        try:
            self._templates = {name: self._environment.compile_bounded(text) for name, text in templates.items()}
        except jinja2.TemplateError as error:
            place = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise errors.ModelUnusable(f"{source}: {errors.cause_line(error)}{place}") from error
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            raise errors.ModelUnusable(f"{source}: too deep or too large: {errors.cause_line(error)}") from error

    def render(self, chat: Chat, image_placeholder: str = "") -> str:
        """Return the prompt. An image is written by the template, or else `image_placeholder` stands for it.

        Where it refuses a late message of the system, or a second one of the user, the message before says the same.
        Raises InvalidRequest if the template refuses the messages, and GenerationFailed if it exceeds a limit.
        """
        messages = chat.messages
        if chat.continue_final_message:
            said = messages[-1]["content"]
            messages = [*messages[:-1], {**messages[-1], "content": said + ([END] if isinstance(said, list) else END)}]
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
        """Return the messages with contents that are texts, or lists of parts, as the template takes them."""
        takes_texts, takes_parts = self._forms
        has_images = any(isinstance(message.get("content"), list) for message in messages)
        if takes_parts and (has_images or not takes_texts):
            return of_parts(messages)
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
        template = template or self._templates.get("default") or next(iter(self._templates.values()))
        known = {"messages": chat.messages, "tools": chat.tools, "add_generation_prompt": chat.add_generation_prompt}
        try:
            return self._write(template, {**chat.variables, **self._special_tokens, "documents": None, **known})
        except OutOfRoom as error:
            if _is_large((chat.messages, chat.tools, chat.variables), self._max_prompt_chars // MAX_COPIES):
                raise errors.InvalidRequest(f"the messages are too long for the chat template: {error}") from error
            raise
        except errors.GenerationFailed:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            fault = errors.cause_line(error)
            raise errors.InvalidRequest(f"the chat template does not take these messages: {fault}") from error
        except (RecursionError, MemoryError) as error:
            raise errors.GenerationFailed("the chat template used up the stack or the memory") from error

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


def are_in_turns(messages: Messages) -> bool:
    """Whether the system speaks only at the beginning, and the user once in each turn."""
    roles = [message.get("role") for message in messages]
    return "system" not in roles[1:] and ("user", "user") not in itertools.pairwise(roles)


def in_turns(messages: Messages, refused: Container[str]) -> Messages:
    """Return the messages without late ones of the system and second ones of the user, if these are `refused`.

    The message before says the same, so that the prompt grows at its end alone. After an answer the user says it.
    """
    said: list[Mapping[str, Any]] = []
    for message in messages:
        role, last = message["role"], said[-1]["role"] if said else None
        if role == "system" and last is not None and role in refused:
            role, is_joined = "user", last != "assistant"
        else:
            is_joined = role == last == "user" and role in refused
        if is_joined:
            said[-1] = {**said[-1], "content": _joined(said[-1].get("content"), message.get("content"))}
        else:
            said.append({**message, "role": role})
    return said


def _joined(first: object, second: object) -> object:
    both: list[Any] = [part for each in (first, second) for part in (each if isinstance(each, list) else [each or ""])]
    return both if isinstance(first, list) or isinstance(second, list) else "\n".join(both)


def of_parts(messages: Messages) -> Messages:
    """Return messages whose contents are lists of parts, as templates of models with images take them."""
    return [{**message, "content": parts(message.get("content"))} for message in messages]


def parts(content: object) -> list[dict[str, str]]:
    said = content if isinstance(content, list) else [content or ""]
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in said]


def of_texts(messages: Messages, placeholder: str) -> Messages:
    """Return messages whose contents are texts, with a placeholder for each image."""
    numbers = itertools.count(1)

    def text(content: object) -> object:
        if not isinstance(content, list):
            return content
        return "\n".join(
            each if isinstance(each, str) else placeholder.replace("{n}", str(next(numbers))) for each in content
        )

    return [{**message, "content": text(message.get("content"))} for message in messages]


def _is_large(values: object, max_units: int) -> bool:
    """Whether a request's own values would fill a budget."""
    try:
        Budget(math.inf, max_units).size(values)
    except OutOfRoom:
        return True
    return False


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one model's templates, which may render in several threads.

    No expression is computed when a template is compiled. Each loop, macro, call and comparison looks at the clock.
    What makes a text, a list or a number from others spends from the rendering's budget first: operators, literals,
    slices, methods, and the filters, some of which chat templates do not have here.
    """

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, max_render_s: float, max_units: int) -> None:
        extensions = [_GenerationTag, jinja2.ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self._limits = max_render_s, max_units
        self._local = threading.local()
        self.globals.update(namespace=_Namespace, raise_exception=raise_exception, strftime_now=strftime_now)
        del self.globals["lipsum"]
        Filters(self).install()

    @property
    def budget(self) -> Budget:
        """What is left for the rendering in this thread."""
        budget: Budget = self._local.budget
        return budget

    def begin(self) -> None:
        """Begin a rendering in this thread."""
        self._local.budget = Budget(*self._limits)

    def compile_bounded(self, text: str) -> jinja2.Template:
        if len(text) > MAX_TEMPLATE_CHARS:
            raise jinja2.TemplateError(f"over {MAX_TEMPLATE_CHARS} characters")
        self.begin()
        tree = BoundedTree().visit(self.parse(text))
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    # What a template's code calls.

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = self.budget
        budget.check_time()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and function.__name__ == "join" and len(args) == 1:
            args = (budget.joined(args[0], owner),)
        elif isinstance(function, BuiltinMethodType) or isinstance(owner, str):
            check_method(budget, owner, function.__name__, (*args, *kwargs.values()))
        else:
            for value in (*args, *kwargs.values()):
                budget.size(value)
        result = super().call(context, function, *args, **kwargs)
        is_there = isinstance(result, str) if owner is None else function.__name__ in ASKING
        return result if is_there else budget.made(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        result = self.budget.operate(operator, left, right)
        return self.binop_table[operator](left, right) if result is None else result

    def concat(self, texts: Iterable[str]) -> str:  # of the pieces of a macro or a block
        found = []
        for text in texts:
            self.budget.spend(num_units(text))
            found.append(text)
        return "".join(found)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, BuiltinMethodType | MethodType) or not isinstance(value.__self__, str):
            return None
        if value.__name__ not in ("format", "format_map"):
            return None
        form, is_map = value.__self__, value.__name__ == "format_map"

        def write(*args: Any, **kwargs: Any) -> str:
            formatter = BoundedFormatter(self.budget, SandboxedFormatter(self))
            if is_map:
                (kwargs,), args = args, ()
            self.budget.spend(num_units(form))
            return type(form)(formatter.vformat(form, args, kwargs))

        return write


class _Namespace(Namespace):
    """A namespace that does not write its attributes, which may refer to others without end."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the model's text for training. Here the block is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


def raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message)[:MAX_SHORT_CHARS])


def strftime_now(form: str) -> str:
    if len(form) > MAX_SHORT_CHARS:
        raise errors.GenerationFailed(f"the chat template writes a date in a form of over {MAX_SHORT_CHARS} characters")
    return datetime.now().strftime(form)
