"""Bounds of numbers, and sizes of strings, arrays and objects."""

from fractions import Fraction

from handlers.guides.json_schemas.fault import SchemaFault
from handlers.guides.json_schemas.subschema import Schema
from handlers.guides.json_schemas.values import check_value
from lmi.errors import shorten

MAX_MULTIPLE = 10_000
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def bounds_of(keywords: Schema) -> Schema:
    """The bounds and sizes, checked, with exclusive bounds as newer drafts write them."""
    bounds: Schema = {}
    for name in (*BOUNDS, *SIZES, "multipleOf"):
        if name in keywords and not _is_flag(name, keywords[name]):
            bounds[name] = _bound(name, keywords[name])

    for name, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if keywords.get(exclusive) is True and name in bounds:
            bounds[exclusive] = bounds.pop(name)

    if "multipleOf" in bounds:
        _check_multiple(bounds["multipleOf"])

    return bounds


def _is_flag(name: str, value: object) -> bool:
    """Whether it says how the bound beside it is meant, as in draft 4."""
    return isinstance(value, bool) and name.startswith("exclusive")


def _bound(name: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SchemaFault(f"{name} of a wrong type")

    check_value(value)
    if name not in SIZES:
        return value

    if value < 0 or value != int(value):
        raise SchemaFault(f"{name} {shorten(value)}")

    return int(value)


def _check_multiple(step: int | float) -> None:
    is_small = step > 0 and Fraction(repr(step)).numerator <= MAX_MULTIPLE
    if not is_small:
        raise SchemaFault(f"multipleOf {step}, beyond {MAX_MULTIPLE},")
