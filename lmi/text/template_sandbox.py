"""Jinja as transformers sets it up for chat templates, under the limits of `template_limits.py`.

No expression is computed when a template is compiled. Each loop, macro, call and comparison looks at the clock. What
makes a text, a list or a number from others spends from the rendering's budget first: operators, literals, slices,
methods, and the filters, some of which chat templates do not have here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes, pass_context
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from lmi.errors import GenerationFailed
from lmi.text.template_limits import (
    ASKING,
    MAX_BITS,
    BoundedFormatter,
    Budget,
    check_count,
    check_method,
    check_names,
    check_search,
    num_units,
    replaced,
)

MAX_TEMPLATE_CHARS = 256 << 10
MAX_SHORT_CHARS = 1000  # of a form of dates, and of the message of an exception
WITHOUT = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")  # filters that take long and no chat template uses
MEASURED = ("capitalize", "e", "escape", "forceescape", "lower", "string", "upper")
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
NAMING = ("attr", "map", "reject", "rejectattr", "select", "selectattr")
TIMED_TESTS: tuple[str, ...] = (
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
)
TIMED_TESTS += ("lower", "lt", "ne", "upper")
OF_NUMBERS = ("divisibleby", "even", "odd")
CLOCK, MADE, PART, CONCAT, LISTED = (
    " clock",
    " made",
    " part",
    " concat",
    " listed",
)  # filters that the code of a template calls

Filter = Callable[..., Any]


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
        self._bound_filters()
        self._bound_tests()

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
        tree = _Bounds().visit(self.parse(text))
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

    # Filters and tests.

    def _bound_filters(self) -> None:
        for name in WITHOUT:
            del self.filters[name]
        filters: dict[str, Any] = self.filters
        for names, bound in ((MEASURED, self._measured), (HEAVY, self._heavy), (NAMING, self._naming)):
            filters.update({name: bound(filters[name]) for name in names})
        own = (
            self._batch,
            self._slice,
            self._join,
            self._indent,
            self._replace,
            self._center,
            self._format,
            self._trim,
            self._round,
            self._int,
            self._sum,
        )
        for bound in own:
            name = bound.__name__.removeprefix("_")
            filters[name] = bound(filters[name])
        filters["list"] = lambda values: self.budget.made(self.budget.listed(values))
        filters["reverse"] = self._reverse(filters["reverse"])
        filters["tojson"] = self._to_json
        filters.update(
            {CLOCK: self._clock, MADE: self._made, PART: self._part, CONCAT: self._concat, LISTED: self._listed}
        )

    def _bound_tests(self) -> None:
        tests: dict[str, Any] = self.tests
        tests.update({name: self._timed(tests[name]) for name in TIMED_TESTS})
        tests.update({name: _of_number(tests[name]) for name in OF_NUMBERS})

    def _timed(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.budget.check_time()
            return function(*args, **kwargs)

        return bounded

    def _measured(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            return self.budget.made(function(*args, **kwargs))

        return bounded

    def _heavy(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            given = [self._at_hand(value) for value in args]
            self.budget.check_heavy([*given, *kwargs.values()])
            check_names(kwargs.values())
            return self.budget.made(function(*given, **kwargs))

        return bounded

    def _sum(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(eval_ctx: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
            if not isinstance(start, int | float):
                raise GenerationFailed("the chat template gives sum a start that is no number")
            return self._heavy(function)(eval_ctx, iterable, attribute, start)

        return bounded

    def _at_hand(self, value: Any) -> Any:
        """Return the values of an iterator as a list, and anything else as it is."""
        return self.budget.listed(value) if isinstance(value, Iterator) else value

    def _naming(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(context: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            self.budget.check_time()
            check_names((*args[:1], kwargs.get("attribute")))
            return function(context, values, *args, **kwargs)

        return bounded

    def _batch(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(value: Any, linecount: int, fill_with: Any = None) -> Iterator[Any]:
            check_count(linecount)
            return map(self.budget.made, function(value, linecount, fill_with))

        return bounded

    def _slice(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(eval_ctx: Any, value: Any, slices: int, fill_with: Any = None) -> Iterator[Any]:
            check_count(slices)
            return map(self.budget.made, function(eval_ctx, self.budget.listed(value), slices, fill_with))

        return bounded

    def _join(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> str:
            check_names((attribute,))
            if attribute is not None:
                value = map(jinja2.filters.make_attrgetter(self, attribute), value)
            text: str = function(eval_ctx, self.budget.joined(value, str(d)), d)
            return text

        return bounded

    def _indent(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
            s = s if isinstance(s, str) else str(s)
            check_count(width)
            self.budget.spend(num_units(s))
            self.budget.spend((len(s.splitlines()) + 1) * (num_units(width) if isinstance(width, str) else width))
            text: str = function(s, width, first, blank)
            return text

        return bounded

    def _replace(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(eval_ctx: Any, s: Any, old: Any, new: Any, count: int | None = None) -> str:
            s, old, new = (value if isinstance(value, str) else str(value) for value in (s, old, new))
            replaced(self.budget, s, (old, new) if count is None else (old, new, count))
            return str(self.budget.made(function(eval_ctx, s, old, new, count)))

        return bounded

    def _center(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(value: Any, width: int = 80) -> str:
            check_count(width)
            return str(self.budget.made(function(value, width)))

        return bounded

    def _format(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(value: Any, *args: Any, **kwargs: Any) -> str:
            self.budget.check_format(value if isinstance(value, str) else str(value), kwargs or args)
            text: str = function(value, *args, **kwargs)
            return text

        return bounded

    def _trim(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(value: Any, chars: str | None = None) -> str:
            value = value if isinstance(value, str) else str(value)
            check_search(value, (chars,))
            return str(self.budget.made(function(value, chars)))

        return bounded

    def _round(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(value: float, precision: int = 0, method: Any = "common") -> float:
            if isinstance(precision, int) and abs(precision) > MAX_BITS // 4:
                raise GenerationFailed(f"the chat template rounds to over {MAX_BITS // 4} places")
            number: float = function(value, precision, method)
            return number

        return bounded

    def _int(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> int:
            number: int = function(*args, **kwargs)
            if isinstance(number, int) and number.bit_length() > MAX_BITS:
                raise GenerationFailed(f"the chat template reads a number of over {MAX_BITS} bits")
            return number

        return bounded

    def _reverse(self, function: Filter) -> Filter:
        @wraps(function)
        def bounded(value: Any) -> Any:
            return self.budget.made(function(self._at_hand(value)))

        return bounded

    def _to_json(
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
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        if indent is not None:
            return self.concat(encoder.iterencode(value))
        return str(self.budget.made(encoder.encode(value)))

    @pass_context
    def _clock(self, context: Any, value: Any) -> Any:
        self.budget.check_time()
        return value

    @pass_context
    def _made(self, context: Any, value: Any) -> Any:
        return self.budget.made(value)

    @pass_context
    def _part(self, context: Any, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return self.budget.made(value[start:stop:step])

    @pass_context
    def _listed(self, context: Any, values: Any) -> list[Any]:
        return self.budget.listed(values)

    @pass_context
    def _concat(self, context: Any, *values: Any) -> str:
        return self.concat([value if isinstance(value, str) else str(value) for value in values])


class _Bounds(NodeTransformer):
    """Puts the calls of the limits into a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _look_at_clock(node.lineno))
        if node.test is not None:
            node.test = nodes.And(_filtered(nodes.Const(True), CLOCK), node.test).set_lineno(node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _look_at_clock(node.lineno))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self.visit_Macro(node)  # type: ignore[arg-type]  # it has a body too

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node.nodes[0], CONCAT, *node.nodes[1:])

    def visit_List(self, node: nodes.List | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if _is_const(node) else _filtered(node, MADE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_List(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return _filtered(self.generic_visit(node), MADE)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        part = node.arg
        if not isinstance(part, nodes.Slice):
            return node
        ends = (nodes.Const(None) if end is None else end for end in (part.start, part.stop, part.step))
        return _filtered(node.node, PART, *ends)

    def generic_visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(node, nodes.Call | nodes.Filter | nodes.Test) and node.dyn_args is not None:
            node.dyn_args = _filtered(node.dyn_args, LISTED)
        return super().generic_visit(node, *args, **kwargs)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Leave a comparison with a constant, which takes no longer than the constant is long."""
        self.generic_visit(node)
        is_short = len(node.ops) == 1 and (
            _is_const(node.ops[0].expr) or (_is_const(node.expr) and node.ops[0].op not in ("in", "notin"))
        )
        return node if is_short else _filtered(node, CLOCK)


def _filtered(node: nodes.Node, name: str, *args: nodes.Node) -> nodes.Expr:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _is_const(node: nodes.Node) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_const, node.items))
    return isinstance(node, nodes.Const)


def _look_at_clock(lineno: int) -> nodes.Node:
    return nodes.ExprStmt(_filtered(nodes.Const(None), CLOCK)).set_lineno(lineno)


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


def _of_number(function: Filter) -> Filter:
    """Return a test that is false for what is no number, whose `%` would write a text."""

    @wraps(function)
    def bounded(value: Any, *args: Any) -> bool:
        return isinstance(value, int | float) and bool(function(value, *args))

    return bounded


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message)[:MAX_SHORT_CHARS])


def _strftime_now(form: str) -> str:
    if len(form) > MAX_SHORT_CHARS:
        raise GenerationFailed(f"the chat template writes a date in a form of over {MAX_SHORT_CHARS} characters")
    return datetime.now().strftime(form)
