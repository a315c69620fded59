"""The rules of arrays."""

from typing import Any, NamedTuple

from handlers.guides.json_schemas.disjoint import TYPES, Resolve, listed_values
from handlers.guides.json_schemas.fault import SchemaFault
from handlers.guides.json_schemas.negations import Negations, any_of
from handlers.guides.json_schemas.subschema import ReadSchema, Schema, Subschema
from handlers.guides.json_schemas.unevaluated import schema_of_others
from handlers.guides.json_schemas.unique_items import are_unique, with_unique_items

# So many items may have to fit `contains`.
MAX_CONTAINED = 16
# So many items may stand before the first of them.
MAX_BEFORE = 8
NO_ARRAY = {"type": sorted(TYPES - {"array"})}


class Items(NamedTuple):
    """The schemas of an array's items: of the first, one each, and of all others. None where
    nothing is said of them.
    """

    first: list[Any] | None
    others: object


class NumContained(NamedTuple):
    """How many items fit `contains`."""

    least: int
    most: int | None


class ArrayReader:
    """`is_old_draft`: the schema's draft has no `minContains`."""

    def __init__(
        self, read: ReadSchema, resolve: Resolve, negations: Negations, *, is_old_draft: bool
    ) -> None:
        self._read = read
        self._resolve = resolve
        self._negations = negations
        self._is_old_draft = is_old_draft

    def add_rules(self, subschema: Subschema, followed: Schema) -> list[Schema | bool]:
        """Add the rules of arrays to `followed`, which has those of sizes. Return schemas that a
        value must fit besides.
        """
        keywords = subschema.keywords
        items = _items_of(keywords)
        besides: list[Schema | bool] = []

        must_be_unique = keywords.get("uniqueItems") not in (None, False)
        if must_be_unique and followed.get("maxItems", 2) > 1:
            unique = self._unique(keywords, items, followed)
            if "enum" in unique:
                besides.append({"anyOf": [NO_ARRAY, unique]})
            else:
                followed |= unique

        if "contains" in keywords:
            besides += self._contains(keywords, subschema.pointer)

        self._add_items(items, followed, subschema.pointer)
        return besides

    def _add_items(self, items: Items, followed: Schema, pointer: str) -> None:
        if items.first is not None:
            followed["prefixItems"] = [
                self._read(schema, f"{pointer}/prefixItems/{number}", is_alone=True)
                for number, schema in enumerate(items.first)
            ]

        if items.others is not None:
            followed["items"] = self._read(items.others, f"{pointer}/items", is_alone=True)

    def _unique(self, keywords: Schema, items: Items, followed: Schema) -> Schema:
        """A rule of arrays whose items are not equal."""
        if listed_values(keywords) is not None:
            values = [keywords["const"]] if "const" in keywords else keywords["enum"]
            return {"enum": [value for value in values if are_unique(value)]}

        least = followed.get("minItems", 0)
        most = followed.get("maxItems")
        try:
            return with_unique_items(items.first or [], items.others, least, most, self._resolve)
        except ValueError as error:
            raise SchemaFault(str(error)) from None

    def _contains(self, keywords: Schema, pointer: str) -> list[Schema | bool]:
        """Rules of arrays with the items that `contains` wants."""
        number = NumContained(1, None) if self._is_old_draft else _num_contained(keywords)
        if number == NumContained(0, None):
            return []

        arrays = self._arrays_with(keywords["contains"], number)
        choices = [self._read(array, f"{pointer}/contains", is_alone=False) for array in arrays]
        return [{"anyOf": [NO_ARRAY, *choices]}]

    def _arrays_with(self, contained: object, number: NumContained) -> list[Schema]:
        """Arrays with so many items that fit `contained`. They may leave out other arrays."""
        negations = self._negations.of(contained, {})
        if max(number.least, number.most or 0) > MAX_CONTAINED:
            raise SchemaFault(f"contains with more than {MAX_CONTAINED} items")

        if number.most is None:
            return _arrays_with_at_least(contained, number.least)

        if number.least > number.most:
            return []

        array: Schema = {
            "type": "array",
            "minItems": number.least,
            "prefixItems": [contained] * number.most,
            "items": any_of(negations) if negations else False,
        }
        return [array]


def _items_of(keywords: Schema) -> Items:
    first = keywords.get("prefixItems")
    others = keywords.get("items")
    # In older drafts `items` may list the schemas of the first items.
    if isinstance(others, list):
        first = others
        others = keywords.get("additionalItems")

    return Items(first, schema_of_others(keywords, others, "unevaluatedItems"))


def _num_contained(keywords: Schema) -> NumContained:
    least = _checked_number(keywords, "minContains", default=1)
    most = _checked_number(keywords, "maxContains", default=None)
    return NumContained(least or 0, most)


def _checked_number(keywords: Schema, name: str, *, default: int | None) -> int | None:
    number = keywords.get(name, default)
    if number is None:
        return None

    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or number < 0 or number != int(number):
        raise SchemaFault(f"{name} of a wrong type")

    return int(number)


def _arrays_with_at_least(contained: object, least: int) -> list[Schema]:
    """Arrays whose items that fit stand together, one alone at one of several places."""
    num_places = MAX_BEFORE if least == 1 else 1
    arrays: list[Schema] = []
    for place in range(num_places):
        items = [*[True] * place, *[contained] * least]
        arrays.append({"type": "array", "minItems": len(items), "prefixItems": items})

    return arrays
