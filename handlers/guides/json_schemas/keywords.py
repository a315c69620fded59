"""Keywords of JSON schemas, by what they say."""

# The schema of a guide that asks for JSON and gives none.
ANY_OBJECT = '{"type": "object"}'

# Those that say nothing of a value by themselves.
NO_RULES = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$dynamicAnchor",
        "$id",
        "$recursiveAnchor",
        "$schema",
        "$vocabulary",
        "additionalItems",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "else",
        "example",
        "examples",
        "id",
        "maxContains",
        "minContains",
        "nullable",
        "readOnly",
        "then",
        "title",
        "unevaluatedItems",
        "unevaluatedProperties",
        "writeOnly",
    }
)

# The keywords of an object that has one property and then needs something else.
DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")

# The keywords that apply other schemas to the same value.
COMBINED = ("$ref", "anyOf", "oneOf", "allOf", "if", *DEPENDENT)
APPLIED = frozenset({*COMBINED, "then", "else", "not"})
