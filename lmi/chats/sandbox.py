"""The environment in which the templates of chats are compiled and run: Jinja's sandbox under
`limits.py` and `method_costs.py`.

Each filter and test is Jinja's own, after what it may take was spent. Those that take long, and
that no chat template uses, are away. `bounded_tree.py` puts others where a template makes values or
takes time.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import ext, filters as plain, nodes, runtime, sandbox, utils
from jinja2.parser import Parser

from lmi.chats import limits, method_costs
from lmi.chats.bounded_tree import (
    CLOCK,
    CONCAT,
    LISTED,
    MADE,
    PART,
    BoundedTree,
    check_branches,
)
from lmi.chats.limits import Budget, bytes_of, check_count, check_names, text_of
from lmi.errors import GenerationFailed
from lmi.settings.chat_templates import MAX_TEMPLATE_CHARS

# The characters of a form of dates, and of the message of an exception.
MAX_SHORT_CHARS = 1000
# These filters take long, and no chat template uses them.
WITHOUT = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
# The result of these is spent when it is made.
MEASURED = ("capitalize", "e", "escape", "forceescape", "lower", "string", "upper")
# These sort or compare what they are given, or read all of it.
HEAVY = (
    "dictsort",
    "filesizeformat",
    "groupby",
    "max",
    "min",
    "random",
    "sort",
    "title",
    "truncate",
    "unique",
    "urlencode",
    "wordcount",
)
# These read an attribute, or call a filter or a test, by a name that the template gives.
NAMING = ("attr", "map", "reject", "rejectattr", "select", "selectattr")
# These compare values, which may be large.
TIMED_TESTS = (
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "eq",
    "equalto",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "le",
    "lessthan",
    "lower",
    "lt",
    "ne",
    "upper",
)
# These compute with `%`, which writes a text if their value is one.
TESTS_OF_NUMBERS = ("divisibleby", "even", "odd")
Filter = Callable[..., Any]


class TemplateEnvironment(sandbox.ImmutableSandboxedEnvironment):
    """The environment of one model's templates, which may render in several threads.

    No expression is computed when a template is compiled. Each loop, macro, call and comparison
    looks at the clock. What makes a text, a list or a number from others spends from the
    rendering's budget first: operators, literals, slices, methods, and the filters, some of which
    chat templates do not have here.
    """

    intercepted_binops = frozenset(sandbox.ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, max_render_s: float, max_units: int) -> None:
        extensions = [_GenerationTag, ext.loopcontrols]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False
        )
        self._limits = max_render_s, max_units
        self._local = threading.local()
        self.globals.update(
            namespace=_Namespace, raise_exception=raise_exception, strftime_now=strftime_now
        )
        del self.globals["lipsum"]
        self._bound_filters()

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
        tree = self.parse(text)
        check_branches(tree)
        tree = BoundedTree().visit(tree)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    # What a template's code calls.

    def call(self, context: runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = self.budget
        budget.check_time()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and function.__name__ == "join" and len(args) == 1:
            args = (budget.joined(args[0], owner),)
        elif isinstance(function, BuiltinMethodType) or isinstance(owner, str):
            method_costs.spend_method(budget, owner, function.__name__, (*args, *kwargs.values()))
        else:
            for value in (*args, *kwargs.values()):
                budget.size(value)

        result = super().call(context, function, *args, **kwargs)

        # The text of a function, and what a method only asks for, was there before.
        if owner is None:
            was_there = isinstance(result, str)
        else:
            was_there = function.__name__ in method_costs.ASKING

        return result if was_there else budget.made(result)

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        result = self.budget.operate(operator, left, right)
        if result is not None:
            return result

        return self.binop_table[operator](left, right)

    def concat(self, texts: Iterable[str]) -> str:
        """Join the pieces of a macro or a block."""
        pieces = []
        for text in texts:
            self.budget.spend(bytes_of(text))
            pieces.append(text)

        return "".join(pieces)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, BuiltinMethodType | MethodType):
            return None

        form = value.__self__
        if not isinstance(form, str) or value.__name__ not in ("format", "format_map"):
            return None

        is_map = value.__name__ == "format_map"

        def write(*args: Any, **kwargs: Any) -> str:
            formatter = _Formatter(self, self.budget)
            if is_map:
                (kwargs,) = args
                args = ()

            self.budget.spend(bytes_of(form))
            return type(form)(formatter.vformat(form, args, kwargs))

        return write

    # The filters and tests.

    def _bound_filters(self) -> None:
        """Put the filters and tests under the limits."""
        filters: dict[str, Any] = self.filters
        for name in WITHOUT:
            del filters[name]

        for name in MEASURED:
            filters[name] = self._measured(filters[name])

        for name in HEAVY:
            filters[name] = self._heavy(filters[name])

        for name in NAMING:
            filters[name] = self._naming(filters[name])

        for name in vars(TemplateEnvironment):
            if name.startswith("do_"):
                filters[name.removeprefix("do_")] = getattr(self, name)

        filters[CLOCK] = _in_context(self._in_time)
        filters[MADE] = _in_context(lambda value: self.budget.made(value))
        filters[PART] = _in_context(lambda value, *ends: self.budget.made(value[slice(*ends)]))
        filters[CONCAT] = _in_context(lambda *values: self.concat(list(map(text_of, values))))
        filters[LISTED] = _in_context(lambda values: self.budget.listed(values))

        tests: dict[str, Any] = self.tests
        for name in TIMED_TESTS:
            tests[name] = self._measured(tests[name])

        for name in TESTS_OF_NUMBERS:
            tests[name] = _of_number(tests[name])

    def _in_time(self, value: Any) -> Any:
        self.budget.check_time()
        return value

    def _measured(self, function: Filter) -> Filter:
        """Return a filter or a test after which the clock is looked at and the result is spent."""

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            return self.budget.made(function(*args, **kwargs))

        return bounded

    def _heavy(self, function: Filter) -> Filter:
        """Return a filter that refuses too much to sort or compare."""

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            values = [self._at_hand(value) for value in args]
            self.budget.check_heavy([*values, *kwargs.values()])
            check_names(kwargs.values())
            return self.budget.made(function(*values, **kwargs))

        return bounded

    def _naming(self, function: Filter) -> Filter:
        """Return a filter that refuses a long name."""

        @wraps(function)
        def bounded(context: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            self.budget.check_time()
            check_names((*args[:1], kwargs.get("attribute")))
            return function(context, values, *args, **kwargs)

        return bounded

    def _at_hand(self, value: Any) -> Any:
        """Return the values of an iterator as a list, and anything else as it is."""
        return self.budget.listed(value) if isinstance(value, Iterator) else value

    # Each of these is the filter of its name, as in Jinja.

    @jinja2.pass_environment
    def do_sum(self, environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, int | float):
            raise GenerationFailed("the chat template gives sum a start that is no number")

        return self._heavy(plain.sync_do_sum)(environment, iterable, attribute, start)

    def do_batch(self, value: Any, linecount: int, fill_with: Any = None) -> Iterator[Any]:
        check_count(linecount)
        return map(self.budget.made, plain.do_batch(value, linecount, fill_with))

    def do_slice(self, value: Any, slices: int, fill_with: Any = None) -> Iterator[Any]:
        check_count(slices)
        values = self.budget.listed(value)
        return map(self.budget.made, plain.sync_do_slice(values, slices, fill_with))

    @jinja2.pass_eval_context
    def do_join(self, eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> str:
        check_names((attribute,))
        if attribute is not None:
            value = map(plain.make_attrgetter(self, attribute), value)

        return plain.sync_do_join(eval_ctx, self.budget.joined(value, str(d)), d)

    def do_indent(
        self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        text = text_of(s)
        check_count(width)
        self.budget.spend(bytes_of(text))

        num_lines = len(text.splitlines()) + 1
        units_a_line = bytes_of(width) if isinstance(width, str) else width
        self.budget.spend(num_lines * units_a_line)
        return plain.do_indent(text, width, first, blank)

    @jinja2.pass_eval_context
    def do_replace(
        self, eval_ctx: Any, s: Any, old: Any, new: Any, count: int | None = None
    ) -> str:
        text = text_of(s)
        old = text_of(old)
        new = text_of(new)
        args = (old, new) if count is None else (old, new, count)
        method_costs.spend_replacement(self.budget, text, args)
        return str(self.budget.made(plain.do_replace(eval_ctx, text, old, new, count)))

    def do_center(self, value: Any, width: int = 80) -> str:
        check_count(width)
        return str(self.budget.made(plain.do_center(value, width)))

    def do_format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        self.budget.spend_format(text_of(value), kwargs or args)
        return plain.do_format(value, *args, **kwargs)

    def do_trim(self, value: Any, chars: str | None = None) -> str:
        text = text_of(value)
        method_costs.check_search(self.budget, text, (chars,))
        return str(self.budget.made(plain.do_trim(text, chars)))

    def do_round(self, value: float, precision: int = 0, method: Any = "common") -> float:
        if isinstance(precision, int) and abs(precision) > limits.MAX_BITS // 4:
            raise GenerationFailed(
                f"the chat template rounds to over {limits.MAX_BITS // 4} places"
            )

        return plain.do_round(value, precision, method)

    def do_int(self, *args: Any, **kwargs: Any) -> Any:
        number = plain.do_int(*args, **kwargs)
        if number.bit_length() > limits.MAX_BITS:
            raise GenerationFailed(
                f"the chat template reads a number of over {limits.MAX_BITS} bits"
            )

        return number

    def do_reverse(self, value: Any) -> Any:
        return self.budget.made(plain.do_reverse(self._at_hand(value)))

    def do_list(self, values: Any) -> Any:
        return self.budget.made(self.budget.listed(values))

    def do_tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Write JSON without HTML escapes, which Jinja's filter would write."""
        self.budget.check_time()
        self.budget.size(value)
        check_count(indent)
        check_names((indent, *(separators or ())))
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is not None:
            return self.concat(encoder.iterencode(value))

        return str(self.budget.made(encoder.encode(value)))


class _Formatter(sandbox.SandboxedFormatter):
    """`str.format`, whose fields are looked up as the template's own attributes."""

    def __init__(self, environment: TemplateEnvironment, budget: Budget) -> None:
        super().__init__(environment)
        self._budget = budget

    def format_field(self, value: Any, spec: str) -> str:
        check_count(max(map(int, re.findall(r"\d{1,12}", spec)), default=0))
        field = str(super().format_field(value, spec))
        self._budget.spend(bytes_of(field))
        return field


class _Namespace(utils.Namespace):
    """A namespace that does not write its attributes, which may refer to others without end."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationTag(ext.Extension):
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
        raise GenerationFailed(
            f"the chat template writes a date in a form of over {MAX_SHORT_CHARS} characters"
        )

    return datetime.now().strftime(form)


def _in_context(function: Filter) -> Filter:
    """Return a filter that needs a rendering, so that it is not computed when a template is
    compiled.
    """

    @jinja2.pass_context
    def bounded(context: Any, *args: Any) -> Any:
        return function(*args)

    return bounded


def _of_number(function: Filter) -> Filter:
    """Return a test that is false for what is no number, whose `%` would write a text."""

    @wraps(function)
    def bounded(value: Any, *args: Any) -> bool:
        return isinstance(value, int | float) and bool(function(value, *args))

    return bounded
