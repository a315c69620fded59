"""Jinja as transformers sets it up for chat templates, under the limits of `template_limits.py`.

No expression is computed when a template is compiled. Each loop, macro, call and comparison looks at the clock. What
makes a text, a list or a number from others spends from the rendering's budget first: operators, literals, slices,
methods, and the filters, some of which chat templates do not have here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from lmi.errors import GenerationFailed
from lmi.text.template_filters import Filters
from lmi.text.template_limits import (
    ASKING,
    BoundedFormatter,
    Budget,
    check_method,
    num_units,
)
from lmi.text.template_tree import BoundedTree

MAX_TEMPLATE_CHARS = 256 << 10
MAX_SHORT_CHARS = 1000  # of a form of dates, and of the message of an exception


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one model's templates, which may render in several threads."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, max_render_s: float, max_units: int) -> None:
        extensions = [_GenerationTag, jinja2.ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self._limits = max_render_s, max_units
        self._local = threading.local()
        self.globals.update(namespace=_Namespace, raise_exception=_raise_exception, strftime_now=_strftime_now)
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


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message)[:MAX_SHORT_CHARS])


def _strftime_now(form: str) -> str:
    if len(form) > MAX_SHORT_CHARS:
        raise GenerationFailed(f"the chat template writes a date in a form of over {MAX_SHORT_CHARS} characters")
    return datetime.now().strftime(form)
