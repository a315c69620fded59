"""The budget of a rendering: what is left of it never grows."""

from contextlib import suppress

import pytest

from lmi.chats.limits import Budget, OutOfRoom
from lmi.chats.method_costs import METHODS, spend_method
from lmi.chats.sandbox import TemplateEnvironment
from lmi.errors import GenerationFailed

MAX_UNITS = 1_000_000
TEXT = "a\tb\nc\td"
# Widths and counts of methods and filters, also behind the texts that `replace` takes.
NEGATIVE_ARGS = (
    (-(10**9),),
    (-90_000,),
    (-90_000, "x"),
    ("a", -90_000),
    ("a", "b", -90_000),
)
METHOD_CALLS = [f"text.{name}" for name in sorted(METHODS[str])]
FILTER_CALLS = [
    f"text|{name}" for name in sorted(TemplateEnvironment(5, 1).filters) if name.isidentifier()
]


@pytest.mark.parametrize("name", sorted(METHODS[str]))
def test_no_method_s_rule_gives_room_back(name: str) -> None:
    for args in NEGATIVE_ARGS:
        budget = Budget(5, MAX_UNITS)

        with suppress(GenerationFailed):
            spend_method(budget, TEXT, name, args)

        with pytest.raises(OutOfRoom):
            budget.spend(MAX_UNITS + 1)


def test_no_expression_of_a_template_gives_room_back() -> None:
    environment = TemplateEnvironment(5, MAX_UNITS)
    for call in METHOD_CALLS + FILTER_CALLS:
        for args in NEGATIVE_ARGS:
            written_args = ", ".join(map(repr, args))
            template = environment.compile_bounded(f"{{{{ {call}({written_args}) }}}}")
            environment.begin()

            # Most methods and filters raise an error of their own for such arguments.
            with suppress(Exception):
                template.render(text=TEXT)

            with pytest.raises(OutOfRoom):
                environment.budget.spend(MAX_UNITS + 1)
