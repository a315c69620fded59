"""The text of a guide that llguidance reads, which has been tried."""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

from handlers.guides.ebnf import read_grammar
from handlers.guides.json_schemas.keywords import ANY_OBJECT
from handlers.guides.json_schemas.reader import read_schema
from handlers.guides.lark import lark_of_ebnf
from handlers.guides.lark_grammars import check_lark, is_lark
from handlers.guides.matcher import NO_TEXT, new_matcher, reason_of
from handlers.guides.rust_regex import rust_regex
from handlers.guides.tokenizer import new_tokenizer
from lmi.executor import GuidedDecodingParams, GuideType

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from handlers.guides.process import Start

# The empty regular expression. Two slashes would begin a comment of Lark.
EMPTY = "(?:)"
# The processor time of a mask.
MAX_MASK_S = 0.05
# So many masks of a guide are tried.
NUM_TRIED = 4
TOO_SLOW = f"to follow it takes more than {MAX_MASK_S * 1000:g} ms for a token"
# What may stand between two values of JSON. A model that goes on writing spaces would never end.
SPACES = r"[\x20\x0A\x0D\x09]{1,16}"
JSON_OPTIONS: "JsonCompileOptions" = {
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
    # Without \u, a name cannot be written in another form.
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}


def new_compile(start: "Start") -> Callable[[GuidedDecodingParams], str]:
    """Return what makes texts of guides, with the vocabulary of `start`."""
    tokenizer = new_tokenizer(start.config, start.vocab_size)
    return partial(text_of, tokenizer, is_compact=start.is_compact)


def text_of(tokenizer: LLTokenizer, params: GuidedDecodingParams, *, is_compact: bool) -> str:
    """The text of a guide that llguidance can follow. Raises ValueError."""
    error: ValueError | None = None
    has_places = params.guide_type is GuideType.EBNF_GRAMMAR and is_lark(params.guide or "")
    for text in _texts_of(params, is_compact=is_compact):
        try:
            _try(new_matcher(tokenizer, text, has_places=has_places))
            return text
        except ValueError as raised:
            error = error or raised

    assert error is not None
    raise error


def _try(matcher: LLMatcher) -> None:
    """Compute the first masks, because they may explode too. Raises ValueError if one allows no
    token or is slow.
    """
    for _ in range(NUM_TRIED):
        started_s = time.thread_time()
        mask = matcher.compute_bitmask()
        spent_s = time.thread_time() - started_s
        if matcher.is_error():
            raise ValueError(reason_of(matcher))

        if spent_s > MAX_MASK_S:
            raise ValueError(TOO_SLOW)

        if matcher.is_stopped() or matcher.is_accepting():
            return

        matcher.consume_token(_first_token_in(mask))


def _first_token_in(mask: bytes) -> int:
    """The lowest id that a mask, with a bit for each token, allows."""
    for number, bits in enumerate(mask):
        if bits:
            lowest = bits & -bits
            return 8 * number + lowest.bit_length() - 1

    raise ValueError(NO_TEXT)


def _texts_of(params: GuidedDecodingParams, *, is_compact: bool) -> list[str]:
    """The texts of a guide for llguidance, of one meaning, the quickest first. Raises ValueError
    for a wrong guide.

    JSON that is compact has no spaces between its values.
    """
    guide = params.guide or ""
    if params.guide_type is GuideType.JSON:
        return [_text_of_schema(ANY_OBJECT, is_compact=is_compact)]

    if params.guide_type is GuideType.JSON_SCHEMA:
        return [_text_of_schema(guide, is_compact=is_compact)]

    if params.guide_type is GuideType.REGEX:
        return [LLMatcher.grammar_from_regex(rust_regex(guide) or EMPTY)]

    if is_lark(guide):
        check_lark(guide)
        return [LLMatcher.grammar_from_lark(guide)]

    rules = read_grammar(guide)
    with_lexemes = lark_of_ebnf(rules, has_lexemes=True)
    by_characters = lark_of_ebnf(rules, has_lexemes=False)
    different_larks = dict.fromkeys((with_lexemes, by_characters))
    return [LLMatcher.grammar_from_lark(lark) for lark in different_larks]


def _text_of_schema(schema: str, *, is_compact: bool) -> str:
    options: JsonCompileOptions = {
        **JSON_OPTIONS,
        "whitespace_flexible": not is_compact,
        "whitespace_pattern": None if is_compact else SPACES,
    }
    return LLMatcher.grammar_from_json_schema(read_schema(schema), overrides=options)
