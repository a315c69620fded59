"""AWS's own model of its API, as botocore ships it: which operations there are, which inputs they
take, and what their answers hold.

No shape is written by hand here, so a newer botocore brings newer members. Sources of the texts:
answers of SageMaker's API.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import orjson

from lmi.errors import BadConfiguration, shorten
from lmi.gateway.errors import AwsError
from lmi.gateway.members import spelled

Members = dict[str, Any]

TARGET_PREFIX = "SageMaker."
# As many faults of one request are told.
MAX_FAULTS = 10
# The numbers that AWS's types hold.
NUM_BITS = {"integer": 32, "long": 64}
# What JSON has for the types of shapes.
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "structure": (dict,),
    "map": (dict,),
    "list": (list,),
    "string": (str,),
    "blob": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "timestamp": (int, float),
}
# Letters, digits and separators of Unicode, which Python's patterns have no names for.
UNICODE_CLASSES = {
    r"\p{L}": r"\w",
    r"\p{N}": r"\w",
    r"\p{Z}": " \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
}


def invalid(message: str) -> AwsError:
    """The request is wrong, in the class that the control plane has for it."""
    return AwsError("ValidationException", 400, message)


def unreadable(message: str) -> AwsError:
    """The body is not what the operation reads."""
    return AwsError("SerializationException", 400, message)


class ServiceModel:
    """The model of SageMaker's API. Raises BadConfiguration without botocore."""

    def __init__(self) -> None:
        try:
            import botocore.session  # type: ignore[import-untyped]
        except ModuleNotFoundError:
            raise BadConfiguration("--control-dir needs botocore: pip install boto3") from None

        self._model = botocore.session.get_session().get_service_model("sagemaker")

    def read(self, operation: str, body: bytes) -> Members:
        """Return the input of an operation.

        Raises AwsError, in AWS's words, for a body that is no object or breaks a rule of the
        operation's input.
        """
        try:
            members = orjson.loads(body or b"{}")
        except orjson.JSONDecodeError as error:
            raise unreadable(f"The body is not JSON: {error}") from None

        shape = self._model.operation_model(operation).input_shape
        if not isinstance(members, dict):
            raise unreadable(f"The body must be a JSON object, given {shorten(members)}")

        faults = []
        for fault in _faults(shape, members, ""):
            faults.append(fault)
            if len(faults) == MAX_FAULTS:
                break

        if faults:
            counted = (
                "1 validation error" if len(faults) == 1 else f"{len(faults)} validation errors"
            )
            raise invalid(f"{counted} detected: {'; '.join(faults)}")

        return members

    def answer(self, operation: str, members: Members) -> Members:
        """Return what the output of an operation holds of these members."""
        shape = self._model.operation_model(operation).output_shape
        if shape is None:
            return {}

        answer: Members = _held(shape, members)
        return answer


def _held(shape: Any, value: Any) -> Any:
    """Return what a shape holds of a value. A member that is None is none."""
    if shape.type_name == "structure":
        members = {}
        for name, member in shape.members.items():
            if value.get(name) is not None:
                members[name] = _held(member, value[name])

        return members

    if shape.type_name == "list":
        return [_held(shape.member, entry) for entry in value]

    return value


def _faults(shape: Any, value: Any, path: str) -> Iterator[str]:
    """Yield a text for each rule that a value breaks. Raises AwsError for one of another type."""
    _check_type(shape, value, path)
    rule = _broken_rule(shape, value)
    if rule:
        yield _told(value, path, rule)
        return

    if shape.type_name == "structure":
        yield from _faults_of_structure(shape, value, path)
    elif shape.type_name == "list":
        for number, entry in enumerate(value, 1):
            yield from _faults(shape.member, entry, f"{path}.{number}.member")
    elif shape.type_name == "map":
        for key, entry in value.items():
            yield from _faults(shape.key, key, f"{path}.key")
            yield from _faults(shape.value, entry, f"{path}.{shorten(key)}.member")


def _faults_of_structure(shape: Any, members: Members, path: str) -> Iterator[str]:
    # AWS passes over what it does not know. Here nothing is lost without a word.
    for name in members.keys() - shape.members.keys():
        yield f"{shorten(name)} is no member of {path or shape.name}"

    for name, member in shape.members.items():
        place = name[0].lower() + name[1:]
        if path:
            place = f"{path}.{place}"

        value = members.get(name)
        if value is not None:
            yield from _faults(member, value, place)
        elif name in shape.required_members:
            yield _told(None, place, "not be null")


def _told(value: Any, path: str, rule: str) -> str:
    text = shorten(value) if value is None or isinstance(value, str) else f"'{shorten(value)}'"
    return f"Value {text} at '{path}' failed to satisfy constraint: Member must {rule}"


def _check_type(shape: Any, value: Any, path: str) -> None:
    """Raise AwsError for a value that JSON writes in another form than this shape's."""
    kind = shape.type_name
    # For Python a bool is a number.
    is_right = isinstance(value, JSON_TYPES[kind]) and (
        kind == "boolean" or not isinstance(value, bool)
    )
    if is_right and kind in NUM_BITS:
        is_right = abs(value) < 1 << (NUM_BITS[kind] - 1)

    if not is_right:
        raise unreadable(f"'{path}' must be of the type {kind}, given {shorten(value)}")


def _broken_rule(shape: Any, value: Any) -> str:
    """Return the rule that the value itself breaks, or ""."""
    rules = shape.metadata
    is_number = isinstance(value, int | float)
    size = value if is_number else len(value)
    measure = "value" if is_number else "length"
    if size < rules.get("min", size):
        return f"have {measure} greater than or equal to {rules['min']}"

    if size > rules.get("max", size):
        return f"have {measure} less than or equal to {rules['max']}"

    if "enum" in rules and value not in rules["enum"]:
        return f"satisfy enum value set: [{', '.join(rules['enum'])}]"

    # After the length, which bounds the time that it takes.
    if "pattern" in rules and not compiled(rules["pattern"]).fullmatch(value):
        return f"satisfy regular expression pattern: {rules['pattern']}"

    return ""


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern of AWS's model as Python reads it."""
    for unicode_class, characters in UNICODE_CLASSES.items():
        pattern = pattern.replace(unicode_class, characters)

    return re.compile(spelled(pattern))
