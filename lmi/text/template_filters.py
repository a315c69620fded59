"""The filters and tests of chat templates under the limits of `template_limits.py`.

Each is Jinja's own, after what it may take was spent. Those that take long, and that no chat template uses, are away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import pass_context

from lmi.errors import GenerationFailed
from lmi.text.template_limits import (
    MAX_BITS,
    Budget,
    check_count,
    check_names,
    check_search,
    num_units,
    replaced,
)
from lmi.text.template_tree import CLOCK, CONCAT, LISTED, MADE, PART

if TYPE_CHECKING:
    from lmi.text.template_sandbox import TemplateEnvironment

WITHOUT = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")  # filters that take long and no chat template uses
MEASURED = ("capitalize", "e", "escape", "forceescape", "lower", "string", "upper")
HEAVY = "dictsort filesizeformat groupby max min random sort title truncate unique urlencode wordcount".split()
NAMING = ("attr", "map", "reject", "rejectattr", "select", "selectattr")
TIMED_TESTS = "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper".split()
OF_NUMBERS = ("divisibleby", "even", "odd")

Filter = Callable[..., Any]


class Filters:
    """The filters and tests of one environment."""

    def __init__(self, environment: TemplateEnvironment) -> None:
        self._environment = environment

    @property
    def budget(self) -> Budget:
        return self._environment.budget

    def install(self) -> None:
        """Put the filters and tests of the environment under the limits."""
        self._bound_filters()
        tests: dict[str, Any] = self._environment.tests
        tests.update({name: self._timed(tests[name]) for name in TIMED_TESTS})
        tests.update({name: _of_number(tests[name]) for name in OF_NUMBERS})

    def _bound_filters(self) -> None:
        for name in WITHOUT:
            del self._environment.filters[name]
        filters: dict[str, Any] = self._environment.filters
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
                value = map(jinja2.filters.make_attrgetter(self._environment, attribute), value)
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
            return self._environment.concat(encoder.iterencode(value))
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
        return self._environment.concat([value if isinstance(value, str) else str(value) for value in values])


def _of_number(function: Filter) -> Filter:
    """Return a test that is false for what is no number, whose `%` would write a text."""

    @wraps(function)
    def bounded(value: Any, *args: Any) -> bool:
        return isinstance(value, int | float) and bool(function(value, *args))

    return bounded
