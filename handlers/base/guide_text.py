"""The text of a guide for llguidance, and the matchers that follow it under the limits of every guide."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits

from handlers.base.ebnf import read_grammar
from handlers.base.ebnf_lark import lark_of_ebnf
from handlers.base.guide_protocol import ANY_OBJECT
from handlers.base.json_schemas import read_schema
from handlers.base.regex_text import lark_of_regex
from lmi.executor import GuidedDecodingParams, GuideType

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

DEAD_END = "NoExtension"  # llguidance's word for it
NO_TEXT = "no text of this vocabulary fits it"
PLACE = re.compile(r"^at \d+\(\d+\): ")  # in Lark, which the client does not know
MAX_SPACES = 16  # between two values of JSON: a model that goes on writing spaces would never end
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=30_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,  # else an error would show the answer
)


def texts_of(params: GuidedDecodingParams, *, is_compact: bool) -> list[str]:
    """The texts of a guide for llguidance, of one meaning, the quickest first. Raises ValueError for a wrong guide.

    JSON that is compact has no spaces between its values.
    """
    guide = params.guide or ""
    if params.guide_type in (GuideType.JSON, GuideType.JSON_SCHEMA):
        schema = ANY_OBJECT if params.guide_type is GuideType.JSON else guide
        return [LLMatcher.grammar_from_json_schema(read_schema(schema), overrides=_json_options(is_compact))]
    if params.guide_type is GuideType.REGEX:
        return [LLMatcher.grammar_from_lark(lark_of_regex(guide))]
    rules = read_grammar(guide)
    larks = [lark_of_ebnf(rules, has_lexemes=has_lexemes) for has_lexemes in (True, False)]
    return [LLMatcher.grammar_from_lark(lark) for lark in dict.fromkeys(larks)]


def new_matcher(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Raises ValueError if llguidance cannot follow the text."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise ValueError(reason_of(matcher))
    return matcher


def reason_of(matcher: LLMatcher) -> str:
    """Why a matcher has failed, without the lines that show the client's text or llguidance's form of it."""
    lines = [line for line in matcher.get_error().splitlines() if line.strip() and "<non-verbose/>" not in line]
    if lines and lines[0].startswith(DEAD_END):
        return NO_TEXT
    of_regex = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    return PLACE.sub("", lines[0] if lines else "") if of_regex is None else f"its regular expression: {of_regex}"


def _json_options(is_compact: bool) -> JsonCompileOptions:
    spaces = None if is_compact else rf"[\x20\x0A\x0D\x09]{{1,{MAX_SPACES}}}"
    return {
        "whitespace_flexible": not is_compact,
        "whitespace_pattern": spaces,
        "item_separator": ",",
        "key_separator": ":",
        "coerce_one_of": False,
        "lenient": False,
        "json_allowed_escapes": 'nrbtf\\"',  # without \u, a name cannot be written in another form
        "json_allow_general_unicode_escapes": False,
    }
