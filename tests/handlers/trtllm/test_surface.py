"""Whatever a package has otherwise than the facts say is named; what only the package has is no
difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import pydantic
import pytest

from tests.handlers.trtllm.facts import Callable, Class, Fact, Facts
from tests.handlers.trtllm.surface import (
    class_differences,
    enum_differences,
    export_differences,
    function_differences,
)

# This module is the package that is compared
HERE = __name__
KEYWORD = "keyword_only"
EITHER = "positional_or_keyword"
SELF = Fact("self", EITHER)


@dataclass(kw_only=True)
class Params:
    max_tokens: int = 32
    seed: int | None = None


class Cache(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    fraction: float = 0.9
    dtype: str = "auto"


class Engine:
    def __init__(self, model: str, /, **more: object) -> None:
        self.queue = (model, more)

    def submit(
        self, inputs: object, *, streaming: bool = False, salt: str | None = None
    ) -> None: ...

    async def wait(self, timeout: float | None = None) -> None: ...


class Reason(Enum):
    END = 1


def make(folder: str) -> None: ...


def of(*parameters: Fact, methods: dict[str, Callable] | None = None, **others: object) -> Class:
    defaults = {"attributes": [], "extra": None, "bases": [], **others}
    return Class(HERE, 0, list(parameters), methods or {}, **defaults)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("Params", of(Fact("max_tokens", KEYWORD, 32), attributes=["seed"])),
        ("Params", of(Fact("seed", KEYWORD, {"repr": "some expression"}))),
        (
            "Cache",
            of(
                Fact("fraction", KEYWORD, 0.9),
                extra="forbid",
                bases=["BaseModel"],
                attributes=["dtype"],
            ),
        ),
        (
            "Engine",
            of(
                Fact("model", "positional_only"),
                Fact("dtype", KEYWORD, "auto"),
                attributes=["queue"],
            ),
        ),
        (
            "Engine",
            of(methods={"wait": Callable([SELF, Fact("timeout", KEYWORD, None)], is_async=True)}),
        ),
    ],
)
def test_a_class_that_is_as_the_facts_say_has_no_difference(name: str, fact: Class) -> None:
    assert list(class_differences(f"{HERE}.{name}", fact)) == []


@pytest.mark.parametrize(
    ("name", "fact", "difference"),
    [
        ("Params", of(Fact("best_of", KEYWORD, None)), "has no parameter best_of"),
        ("Params", of(Fact("max_tokens", KEYWORD, 16)), "max_tokens is 32 by default, not 16"),
        (
            "Params",
            of(Fact("max_tokens", "positional_only", 32)),
            "max_tokens is keyword_only, not positional_only",
        ),
        ("Params", of(attributes=["logprobs"]), "has no attribute logprobs"),
        ("Params", of(bases=["BaseModel"]), "is no BaseModel"),
        ("Cache", of(Fact("host_size", KEYWORD, None)), "has no field host_size"),
        ("Cache", of(Fact("fraction", KEYWORD, 0.5)), "fraction is 0.9 by default, not 0.5"),
        ("Engine", of(methods={"abort": Callable([SELF])}), "has no method abort"),
        ("Engine", of(methods={"wait": Callable([SELF])}), "wait is a coroutine function"),
        ("Engine", of(methods={"submit": Callable([SELF])}), "submit also needs inputs"),
    ],
)
def test_a_difference_of_a_class_is_named(name: str, fact: Class, difference: str) -> None:
    assert [
        difference in class_difference
        for class_difference in class_differences(f"{HERE}.{name}", fact)
    ] == [True]


def facts(**parts: object) -> Facts:
    return Facts(
        **{
            "version": "1",
            "sources": [],
            "classes": {},
            "functions": {},
            "enums": {},
            "exports": {},
        }
        | parts  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            export_differences(facts(exports={HERE: ["Params", "Absent"]})),
            [f"{HERE} has no Absent"],
        ),
        (
            enum_differences(facts(enums={f"{HERE}.Reason": ["END", "LENGTH"]})),
            [f"{HERE}.Reason has no LENGTH"],
        ),
        (
            function_differences(
                facts(functions={f"{HERE}.make": Callable([Fact("path", EITHER)])})
            ),
            [f"{HERE}.make has no parameter path", f"{HERE}.make also needs folder"],
        ),
    ],
)
def test_a_difference_of_what_a_module_has_is_named(
    found: Iterator[str], expected: list[str]
) -> None:
    assert list(found) == expected
