"""Compares the parameters of a call with the service model that botocore ships, before anything is
sent.

botocore itself checks names, types and minima. Its models also hold patterns, maxima and lists of
allowed values.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import botocore.session
from botocore import __version__
from botocore.model import Shape
from botocore.validate import ParamValidator

from lmi.gateway.members import spelled

# What Java writes in a class of characters, as Python does. AWS names letters and numbers together,
# so Python's \w, which is both, stands for each. The pairs of surrogates are a range, and
# \p{Print}+ stands outside of a class.
JAVA_CLASSES = {
    r"\p{L}": r"\w",
    r"\p{N}": r"\w",
    r"\p{Z}": r" \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
    r"\uD800\uDC00-\uDBFF\uDFFF": r"\U00010000-\U0010ffff",
    r"\p{Print}+": r"[\x20-\x7e]+",
}


@dataclass(frozen=True)
class Fault:
    """A value that breaks a rule. Where AWS may be ahead of this botocore, it is not certain."""

    text: str
    is_certain: bool = True


def faults(service: str, operation: str, parameters: dict[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each rule that a parameter breaks."""
    shape = _model(service).operation_model(operation).input_shape
    report = ParamValidator().validate(parameters, shape)
    if report.has_errors():
        yield Fault(" ".join(f"{operation}: {report.generate_report()}".split()))
    else:
        yield from _walk(shape, parameters, operation)


@cache
def _model(service: str) -> Any:
    return botocore.session.get_session().get_service_model(service)


def _walk(shape: Shape, value: Any, path: str) -> Iterator[Fault]:
    yield from _check(shape, value, path)
    if shape.type_name == "structure":
        for name, member in value.items():
            yield from _walk(shape.members[name], member, f"{path}.{name}")
    elif shape.type_name == "list":
        for index, member in enumerate(value):
            yield from _walk(shape.member, member, f"{path}[{index}]")
    elif shape.type_name == "map":
        for key, member in value.items():
            yield from _walk(shape.key, key, f"{path} key")
            yield from _walk(shape.value, member, f"{path}.{key}")


def _check(shape: Shape, value: Any, path: str) -> Iterator[Fault]:
    rules = shape.metadata
    amount = value if isinstance(value, int | float) else len(value)
    if not rules.get("min", amount) <= amount <= rules.get("max", amount):
        allowed = f"{rules.get('min', 'any')} to {rules.get('max', 'any')}"
        unit = "" if amount is value else " bytes" if shape.type_name == "blob" else " in length"
        # The greatest body of a request is larger in AWS's guide than in its model.
        yield Fault(f"{path} is {amount}{unit}, allowed is {allowed}", shape.type_name != "blob")

    if "pattern" in rules and not re.fullmatch(_as_python(rules["pattern"]), value):
        yield Fault(f"{path} is {value!r}, its pattern is {rules['pattern']}")

    if "enum" in rules and value not in rules["enum"]:
        yield Fault(
            f"{path} is {value!r}, which botocore {__version__} does not know", is_certain=False
        )


def _as_python(pattern: str) -> str:
    for java, python in JAVA_CLASSES.items():
        pattern = pattern.replace(java, python)

    return spelled(pattern)
