"""The fields by which a client asks for a guide, the structure that the answer must have: the
reader of each, and their table.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

from lmi.apis.base.parameters import Parameter, named
from lmi.apis.base.readers import (
    MAX_WORDS,
    Reader,
    an_object,
    boolean,
    check_levels,
    choice,
    strings,
    takes,
    text,
)
from lmi.apis.guides.misspelt_keywords import log_misspelt_keywords
from lmi.apis.guides.references import checked_references
from lmi.errors import InvalidParameter, Unsupported
from lmi.executor import GuidedDecodingParams, GuideType

# The name of a guide in the contract with engines.
CONTRACT_NAME = "guided_decoding_params"
HELP = "The structure that the answer must have."
# The types of TGI's grammars.
GRAMMARS = ("json", "json_object", "json_schema", "regex")
# The characters of a regular expression that do not stand for themselves.
SPECIAL = re.compile(r"([\\.^$*+?{}\[\]|()])")
read_grammar_type = choice(GRAMMARS)
read_format_type = choice(("text", "json_object", "json_schema"))
read_words = strings(MAX_WORDS)


class AskedGuide(NamedTuple):
    """The guide that a request asks for, and the field that asks for it. Both are None if there is
    none.
    """

    params: GuidedDecodingParams | None
    field: str | None

    @property
    def field_names(self) -> dict[str, str]:
        """The client's name of the field by that of the contract, for errors of an engine that
        refuses the guide.
        """
        if self.field is None:
            return {}

        return {CONTRACT_NAME: self.field}


NO_GUIDE = AskedGuide(None, None)


def json_schema(name: str, value: object) -> GuidedDecodingParams:
    """Read a JSON schema, an object or its text."""
    if isinstance(value, str):
        with suppress(orjson.JSONDecodeError):
            value = orjson.loads(value)

    if not isinstance(value, dict):
        raise InvalidParameter(name, "a JSON schema", value)

    # What follows walks through all levels, so their number is checked first.
    check_levels(name, value)
    schema = checked_references(name, value)
    log_misspelt_keywords(name, schema)
    schema_json = check_levels(name, schema)
    return GuidedDecodingParams(GuideType.JSON_SCHEMA, schema_json.decode())


def _reader_of_text(kind: GuideType) -> Callable[[str, object], GuidedDecodingParams]:
    """Return the reader of a guide that is a text."""

    @takes({"type": "string"})
    def read(name: str, value: object) -> GuidedDecodingParams:
        return GuidedDecodingParams(kind, text(name, value))

    return read


regex = _reader_of_text(GuideType.REGEX)
grammar = _reader_of_text(GuideType.EBNF_GRAMMAR)


def choices(name: str, value: object) -> GuidedDecodingParams:
    """Read a list of texts. The answer must be one of them."""
    words = read_words(name, value)
    if not words:
        raise InvalidParameter(name, "a list of at least one string", value)

    patterns = [SPECIAL.sub(r"\\\1", word) for word in words]
    return GuidedDecodingParams(GuideType.REGEX, "|".join(patterns))


def json_object(name: str, value: object) -> GuidedDecodingParams | None:
    """Read whether the answer must be an object of JSON."""
    if not boolean(name, value):
        return None

    return GuidedDecodingParams(GuideType.JSON)


# The readers of the kinds of guides that vLLM's `structured_outputs` may have.
READERS_BY_KIND: dict[str, Reader] = {
    "json": json_schema,
    "regex": regex,
    "choice": choices,
    "grammar": grammar,
    "json_object": json_object,
}


@takes({"type": "object"})
def structured_outputs(name: str, value: object) -> GuidedDecodingParams | None:
    """Read vLLM's field, an object with one kind of guide."""
    fields = an_object(name, value)
    if fields.get("structural_tag") is not None:
        reason = "guides hold for a whole answer, not between tags"
        raise Unsupported(f"{name}.structural_tag", reason)

    guides = []
    for kind, read_guide in READERS_BY_KIND.items():
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

    kind = read_grammar_type(f"{name}.type", value.get("type"))
    guide = value["value"]
    if kind == "regex":
        return regex(f"{name}.value", guide)

    if kind == "json_schema" and isinstance(guide, dict):
        guide = guide.get("schema")

    return json_schema(f"{name}.value", guide)


def any_grammar(name: str, value: object) -> GuidedDecodingParams:
    """Read a grammar: the text of one, or TGI's object."""
    if isinstance(value, dict):
        return tgi_grammar(name, value)

    return grammar(name, value)


def check_members(name: str, value: dict[str, Any], known_members: Sequence[str]) -> None:
    """Raise InvalidParameter for a member that is not known.

    If it were ignored, the answer might have another structure than the client expects.
    """
    for member in value:
        if member not in known_members and value[member] is not None:
            rule = f"an object of {' and '.join(known_members)} alone"
            raise InvalidParameter(name, rule, member)


@takes({"type": "object"})
def response_format(name: str, value: object) -> GuidedDecodingParams | None:
    """Read OpenAI's field, or TGI's grammar in its place, which has a `value`.

    Returns None for the type `text`, which asks for no guide.
    """
    format = an_object(name, value)
    if format.get("value") is not None:
        check_members(name, format, ("type", "value"))
        return tgi_grammar(name, format)

    kind = read_format_type(f"{name}.type", format.get("type", "text"))
    if kind == "json_schema":
        check_members(name, format, ("type", "json_schema"))
        schema = an_object(f"{name}.json_schema", format.get("json_schema"))
        check_members(f"{name}.json_schema", schema, ("name", "description", "schema", "strict"))
        return json_schema(f"{name}.json_schema.schema", schema.get("schema", {}))

    check_members(name, format, ("type",))
    if kind == "json_object":
        return GuidedDecodingParams(GuideType.JSON)

    return None


def guide_of_format(name: str, value: object, read_type: Reader = read_format_type) -> AskedGuide:
    """Read a format whose schema stands beside its type. `read_type` reads the type."""
    format = an_object(name, value)
    kind = read_type(f"{name}.type", format.get("type"))
    if kind == "text":
        return NO_GUIDE

    if kind == "json_object":
        guide = GuidedDecodingParams(GuideType.JSON)
    else:
        guide = json_schema(f"{name}.schema", format.get("schema"))

    return AskedGuide(guide, name)


GUIDED = {
    "response_format": Parameter("response_format", response_format, HELP),
    "guided_json": Parameter("guided_json", json_schema, HELP),
    "guided_regex": Parameter("guided_regex", regex, HELP),
    "guided_choice": Parameter("guided_choice", choices, HELP),
    "guided_grammar": Parameter("guided_grammar", grammar, HELP),
}
# SGLang and llama-server have these names.
OTHER_GUIDES = named(
    Parameter("regex", regex, HELP),
    Parameter("ebnf", grammar, HELP),
    Parameter("grammar", any_grammar, HELP),
    Parameter("json_schema", json_schema, HELP),
)


def asked_guide(values: Mapping[str, Any], prefix: str = "") -> AskedGuide:
    """Return the guide among checked fields. Raises InvalidParameter if several fields ask for one.

    `prefix` stands before a field's name in errors.
    """
    names = []
    for name in (*GUIDED, *OTHER_GUIDES, "structured_outputs"):
        if values.get(name) is not None:
            names.append(name)

    if not names:
        return NO_GUIDE

    if len(names) > 1:
        raise InvalidParameter(prefix + names[1], f"left out beside {prefix}{names[0]}", "both")

    return AskedGuide(values[names[0]], prefix + names[0])
