"""Writes a guide as the text that llguidance reads, and tries whether it can be followed.

This runs in the process that compiles guides, under limits of time and memory.
"""

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
# How much processor time llguidance may take for a mask, which a step waits for.
MAX_MASK_S = 0.05
# How many masks of a guide are tried, from its beginning on.
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
    """Return the function that writes guides for the vocabulary of `start`."""
    tokenizer = new_tokenizer(start.config, start.vocab_size)
    return partial(text_of, tokenizer, is_compact=start.is_compact)


def text_of(tokenizer: LLTokenizer, params: GuidedDecodingParams, *, is_compact: bool) -> str:
    """Return a guide as a text that llguidance can follow.

    Raises ValueError for a wrong guide, or one that llguidance does not follow in time.
    """
    first_error: ValueError | None = None
    is_clients_lark = params.guide_type is GuideType.EBNF_GRAMMAR and is_lark(params.guide or "")
    for text in _texts_of(params, is_compact=is_compact):
        try:
            _try(new_matcher(tokenizer, text, has_places=is_clients_lark))
            return text
        except ValueError as error:
            first_error = first_error or error

    assert first_error is not None
    raise first_error


def _try(matcher: LLMatcher) -> None:
    """Compute the first masks, since a guide that compiles quickly may still have slow ones.

    Raises ValueError if one is slow or allows no token.
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
    """Return the lowest token id that a mask allows. A mask has a bit for each token.

    Raises ValueError if it allows none.
    """
    for index, bits in enumerate(mask):
        if bits:
            lowest_bit = bits & -bits
            return 8 * index + lowest_bit.bit_length() - 1

    raise ValueError(NO_TEXT)


def _texts_of(params: GuidedDecodingParams, *, is_compact: bool) -> list[str]:
    """Return the texts that mean a guide, those first whose masks are quickest.

    `is_compact` keeps JSON without spaces between its values. Raises ValueError for a wrong guide.
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
    grammars = [with_lexemes]
    if by_characters != with_lexemes:
        grammars.append(by_characters)

    return [LLMatcher.grammar_from_lark(grammar) for grammar in grammars]


def _text_of_schema(schema: str, *, is_compact: bool) -> str:
    options: JsonCompileOptions = {
        **JSON_OPTIONS,
        "whitespace_flexible": not is_compact,
        "whitespace_pattern": None if is_compact else SPACES,
    }
    return LLMatcher.grammar_from_json_schema(read_schema(schema), overrides=options)
