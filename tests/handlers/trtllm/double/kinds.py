"""Which of the package's classes are text in it."""

from __future__ import annotations

import re

from tests.handlers.trtllm.facts import Class, Facts


def is_written(fact: Class) -> bool:
    """Whether a class is one of pydantic's strict models, which the package has as text."""
    return fact.extra == "forbid" and fact.module.endswith("llm_args")


def is_dataclass(facts: Facts, short_name: str) -> bool:
    """Whether a class is a plain one that a strict model names as the type of a field. It is text
    too.
    """
    matching = [fact for name, fact in facts.classes.items() if name.endswith(f".{short_name}")]
    if not matching or is_written(matching[0]) or matching[0].methods:
        return False

    types = [
        parameter.annotation or ""
        for fact in facts.classes.values()
        if is_written(fact)
        for parameter in fact.parameters
    ]
    return any(short_name in re.findall(r"\w+", text) for text in types)
