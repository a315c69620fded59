"""Readers of the structure that an answer must have, for each name under which a client may ask for
it.

A JSON schema that refers to another document is refused, because nothing is fetched, and that part
would be left without structure.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NamedTuple
from urllib.parse import unquote

import orjson

from lmi.apis.base.parameters import Parameter, named
from lmi.apis.base.readers import MAX_WORDS, Reader, boolean, checked, choice, strings, takes, text
from lmi.errors import InvalidParameter, Unsupported, shorten
from lmi.executor import GuidedDecodingParams, GuideType
from lmi.shared.json_references import inner_schemas, with_pointers

SPECIAL = re.compile(r"([\\.^$*+?{}\[\]|()])")
MAX_REFERENCES_IN_A_ROW = 100
INSIDE = "begins with # or with an $id of the schema"
REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
NAMES_OF_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
# The types of TGI's grammars.
GRAMMARS = ("json", "json_object", "json_schema", "regex")
read_grammar = choice(GRAMMARS)
read_format_type = choice(("text", "json_object", "json_schema"))
CONTRACT_NAME = "guided_decoding_params"
DATA = ("const", "enum", "default", "examples")
log = logging.getLogger(__name__)
MAX_MISSPELT = 4
MAX_LETTERS = 40
# A word counts as a misspelt keyword if difflib finds it at least so similar to one.
LIKENESS = 0.88
KEYWORDS = frozenset(
    (
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$ref",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
        "$vocabulary",
        "$comment",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "type",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "if",
        "then",
        "else",
        "pattern",
        "format",
        "minLength",
        "maxLength",
        "multipleOf",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "items",
        "prefixItems",
        "additionalItems",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "minItems",
        "maxItems",
        "unevaluatedItems",
        "properties",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "required",
        "minProperties",
        "maxProperties",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedProperties",
        "nullable",
    )
)

an_object = checked(
    {"type": "object"}, lambda value: "" if isinstance(value, dict) else "an object"
)


class AskedGuide(NamedTuple):
    """The guide that a request asks for, or None. `field_names` maps the guide's name in the
    contract to the field that asked for it, which errors name.
    """

    params: GuidedDecodingParams | None
    field_names: dict[str, str]


def json_schema(name: str, value: object) -> GuidedDecodingParams:
    """Read a JSON schema, given as an object or as its text."""
    if isinstance(value, str):
        with suppress(orjson.JSONDecodeError):
            value = orjson.loads(value)

    if not isinstance(value, dict):
        raise InvalidParameter(name, "a JSON schema", value)

    check_levels(name, value)
    schema = checked_references(name, value)
    _log_misspelt_words(name, schema)
    guide = check_levels(name, schema)
    return GuidedDecodingParams(GuideType.JSON_SCHEMA, guide.decode())


def _log_misspelt_words(name: str, schema: dict[str, Any]) -> None:
    words = misspelt_words(schema)
    if not words:
        return

    pairs = [f"{shorten(word)} (perhaps {keyword})" for word, keyword in words.items()]
    message = "%s: words that are no keywords of JSON Schema have no effect: %s"
    log.info(message, name, ", ".join(pairs))


def misspelt_words(schema: dict[str, Any]) -> dict[str, str]:
    """The first words of a schema that are no keywords but nearly so, each with the keyword that it
    is like.
    """
    words: dict[str, str] = {}
    pending: list[Any] = [schema]
    while pending and len(words) < MAX_MISSPELT:
        inner = pending.pop()
        if not isinstance(inner, dict):
            continue

        pending += (part for _, part in inner_schemas(inner))
        for word in inner.keys() - KEYWORDS:
            if len(word) > MAX_LETTERS:
                continue

            keywords = get_close_matches(word, KEYWORDS, 1, LIKENESS)
            if keywords:
                words[word] = keywords[0]

    return words


def check_levels(name: str, value: dict[str, Any]) -> bytes:
    """Return the JSON of an object. Raises InvalidParameter if it has too many levels."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        # The object has more than 254 levels.
        raise InvalidParameter(name, "an object of fewer levels", value) from None


def checked_references(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A schema in which each reference is a pointer, whatever names the client's schema gave to its
    parts.

    Raises InvalidParameter if one of REFERENCES points outside the schema.
    """
    schema = with_pointers(schema)
    pending: list[Any] = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value

        if not isinstance(value, dict):
            continue

        for key in REFERENCES & value.keys():
            if not str(value[key]).startswith("#"):
                rule = f"a JSON schema in which every {key} {INSIDE}"
                raise InvalidParameter(name, rule, value[key])

        check_end(name, schema, value)
        for key, inner in value.items():
            if key in NAMES_OF_SCHEMAS and isinstance(inner, dict):
                pending += inner.values()
            elif key not in DATA:
                pending.append(inner)

    return schema


def check_end(name: str, schema: dict[str, Any], value: Any) -> None:
    """Raise InvalidParameter if a $ref leads to nothing but further ones: no text fits such a
    schema, and an engine that followed its references might never end.
    """
    reference = None
    for _ in range(MAX_REFERENCES_IN_A_ROW):
        if not isinstance(value, dict) or not isinstance(value.get("$ref"), str):
            return

        reference = value["$ref"]
        value = _at(schema, reference)

    raise InvalidParameter(name, "a JSON schema in which no $ref leads back to itself", reference)


def _at(schema: dict[str, Any], reference: str) -> Any:
    """Return what a JSON pointer such as #/$defs/a points at, None for nothing. Source:
    RFC 6901.
    """
    if reference != "#" and not reference.startswith("#/"):
        return None

    value: Any = schema
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and re.fullmatch("[0-9]{1,9}", key) and int(key) < len(value):
            value = value[int(key)]
        else:
            value = None

    return value


def _of_text(kind: GuideType) -> Callable[[str, object], GuidedDecodingParams]:
    @takes({"type": "string"})
    def read(name: str, value: object) -> GuidedDecodingParams:
        return GuidedDecodingParams(kind, text(name, value))

    return read


def choices(name: str, value: object) -> GuidedDecodingParams:
    words = WORDS(name, value)
    if not words:
        raise InvalidParameter(name, "a list of at least one string", value)

    patterns = [SPECIAL.sub(r"\\\1", word) for word in words]
    return GuidedDecodingParams(GuideType.REGEX, "|".join(patterns))


def json_object(name: str, value: object) -> GuidedDecodingParams | None:
    return GuidedDecodingParams(GuideType.JSON) if boolean(name, value) else None


@takes({"type": "object"})
def structured_outputs(name: str, value: object) -> GuidedDecodingParams | None:
    """Read vLLM's field, an object with one kind of guide."""
    fields = an_object(name, value)
    if fields.get("structural_tag") is not None:
        reason = "guides hold for a whole answer, not between tags"
        raise Unsupported(f"{name}.structural_tag", reason)

    guides = []
    for kind, read_guide in KINDS.items():
        if fields.get(kind) is None:
            continue

        guide = read_guide(f"{name}.{kind}", fields[kind])
        if guide is not None:
            guides.append(guide)

    if len(guides) > 1:
        raise InvalidParameter(name, "of one kind", value)

    return guides[0] if guides else None


@takes(
    {
        "type": "object",
        "required": ["type", "value"],
        "properties": {"type": {"enum": list(GRAMMARS)}},
    }
)
def tgi_grammar(name: str, value: object) -> GuidedDecodingParams:
    """Read TGI's grammar, such as `{"type": "regex", "value": "..."}`."""
    if not isinstance(value, dict) or "value" not in value:
        raise InvalidParameter(name, "an object with type and value", value)

    kind = read_grammar(f"{name}.type", value.get("type"))
    guide = value["value"]
    if kind == "regex":
        return regex(f"{name}.value", guide)

    if kind == "json_schema" and isinstance(guide, dict):
        guide = guide.get("schema")

    return json_schema(f"{name}.value", guide)


@takes({"type": "object"})
def response_format(name: str, value: object) -> GuidedDecodingParams | None:
    """Read OpenAI's field, or TGI's grammar, which has a `value`. The type `text` asks for no
    guide.
    """
    form = an_object(name, value)
    if form.get("value") is not None:
        check_members(name, form, ("type", "value"))
        return tgi_grammar(name, form)

    kind = read_format_type(f"{name}.type", form.get("type", "text"))
    if kind != "json_schema":
        check_members(name, form, ("type",))
        return GuidedDecodingParams(GuideType.JSON) if kind == "json_object" else None

    check_members(name, form, ("type", "json_schema"))
    schema = an_object(f"{name}.json_schema", form.get("json_schema"))
    check_members(f"{name}.json_schema", schema, ("name", "description", "schema", "strict"))
    return json_schema(f"{name}.json_schema.schema", schema.get("schema", {}))


def guide_of_format(name: str, value: object, read_type: Reader = read_format_type) -> AskedGuide:
    """Read a format whose schema stands beside its type, which `read_type` reads."""
    form = an_object(name, value)
    kind = read_type(f"{name}.type", form.get("type"))
    if kind == "text":
        return AskedGuide(None, {})

    if kind == "json_object":
        guide = GuidedDecodingParams(GuideType.JSON)
    else:
        guide = json_schema(f"{name}.schema", form.get("schema"))

    return AskedGuide(guide, {CONTRACT_NAME: name})


def check_members(name: str, value: dict[str, Any], known_members: Sequence[str]) -> None:
    """Raise InvalidParameter for a member that is not known: without it the answer might lack its
    structure.
    """
    for member in value:
        if member not in known_members and value[member] is not None:
            rule = f"an object of {' and '.join(known_members)} alone"
            raise InvalidParameter(name, rule, member)


def any_grammar(name: str, value: object) -> GuidedDecodingParams:
    """Read a grammar as its text, or TGI's, which is an object."""
    if isinstance(value, dict):
        return tgi_grammar(name, value)

    return grammar(name, value)


WORDS = strings(MAX_WORDS)
regex = _of_text(GuideType.REGEX)
grammar = _of_text(GuideType.EBNF_GRAMMAR)
OF_KIND: dict[str, Reader] = {
    "json": json_schema,
    "regex": regex,
    "choice": choices,
    "grammar": grammar,
}
KINDS = OF_KIND | {"json_object": json_object}
HELP = "The structure that the answer must have."
GUIDED = named(
    Parameter("response_format", response_format, HELP),
    *(Parameter(f"guided_{kind}", read_guide, HELP) for kind, read_guide in OF_KIND.items()),
)
# SGLang and llama-server have these names.
OTHER_GUIDES = named(
    Parameter("regex", regex, HELP),
    Parameter("ebnf", grammar, HELP),
    Parameter("grammar", any_grammar, HELP),
    Parameter("json_schema", json_schema, HELP),
)


def asked_guide(values: Mapping[str, Any], prefix: str = "") -> AskedGuide:
    """Return the guide among checked fields.

    `prefix` begins a field's name in an error. Raises InvalidParameter if several fields ask for a
    guide.
    """
    names = []
    for name in (*GUIDED, *OTHER_GUIDES, "structured_outputs"):
        if values.get(name) is not None:
            names.append(name)

    if not names:
        return AskedGuide(None, {})

    if len(names) > 1:
        raise InvalidParameter(prefix + names[1], f"left out beside {prefix}{names[0]}", "both")

    return AskedGuide(values[names[0]], {CONTRACT_NAME: prefix + names[0]})
