"""`unevaluatedProperties` and `unevaluatedItems`, where no other schema evaluates any."""

from handlers.guides.json_schemas.fault import SchemaFault
from handlers.guides.json_schemas.keywords import COMBINED
from handlers.guides.json_schemas.subschema import Schema


def schema_of_others(keywords: Schema, explicit: object, keyword: str) -> object:
    """The schema of what has no other: the explicit one, or that of `keyword` if nothing is
    evaluated elsewhere.
    """
    if explicit is not None or keywords.get(keyword) in (None, True, {}):
        return explicit

    if keywords.keys() & set(COMBINED):
        raise SchemaFault(keyword)

    return keywords[keyword]
