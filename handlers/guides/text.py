"""llguidance's forms of a guide and of a vocabulary, and the matchers that follow a guide within
the limits of all.
"""

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from handlers.guides.ebnf import read_grammar
from handlers.guides.json_schemas import ANY_OBJECT, read_schema
from handlers.guides.lark import lark_of_ebnf, rust_regex
from handlers.guides.lark_grammars import check_lark, is_lark
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams, GuideType

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from handlers.guides.process import Start

DEAD_END = "NoExtension"  # llguidance's word for it
NO_TEXT = "no text of this vocabulary fits it"
PLACE = re.compile(
    r"^(?:at )?(\d+)\((\d+)\): "
)  # in Lark, which the client knows only if it wrote it
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD = "\u2581"  # marks the begin of a word
EMPTY = "(?:)"  # a regular expression; two slashes would begin a comment of Lark
MAX_MASK_S = 0.05  # of processor time
NUM_TRIED = 4  # masks
TOO_SLOW = f"to follow it takes more than {MAX_MASK_S * 1000:g} ms for a token"
# between two values of JSON: a model that goes on writing spaces would never end
SPACES = r"[\x20\x0A\x0D\x09]{1,16}"
JSON_OPTIONS: "JsonCompileOptions" = {
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": 'nrbtf\\"',  # without \u, a name cannot be written in another form
    "json_allow_general_unicode_escapes": False,
}
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=30_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,  # else an error would show the answer
)


def new_compile(start: "Start") -> Callable[[GuidedDecodingParams], str]:
    return partial(
        text_of, new_tokenizer(start.config, start.vocab_size), is_compact=start.is_compact
    )


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

        byte, bits = next((number, bits) for number, bits in enumerate(mask) if bits)
        matcher.consume_token(8 * byte + (bits & -bits).bit_length() - 1)


def _texts_of(params: GuidedDecodingParams, *, is_compact: bool) -> list[str]:
    """The texts of a guide for llguidance, of one meaning, the quickest first. Raises ValueError
    for a wrong guide.

    JSON that is compact has no spaces between its values.
    """
    guide = params.guide or ""
    if params.guide_type in (GuideType.JSON, GuideType.JSON_SCHEMA):
        spaces: JsonCompileOptions = {
            "whitespace_flexible": not is_compact,
            "whitespace_pattern": None if is_compact else SPACES,
        }
        schema = ANY_OBJECT if params.guide_type is GuideType.JSON else guide
        return [
            LLMatcher.grammar_from_json_schema(
                read_schema(schema), overrides={**JSON_OPTIONS, **spaces}
            )
        ]

    if params.guide_type is GuideType.REGEX:
        return [LLMatcher.grammar_from_regex(rust_regex(guide) or EMPTY)]

    if is_lark(guide):
        check_lark(guide)
        return [LLMatcher.grammar_from_lark(guide)]

    rules = read_grammar(guide)
    larks = [lark_of_ebnf(rules, has_lexemes=has_lexemes) for has_lexemes in (True, False)]
    return [LLMatcher.grammar_from_lark(lark) for lark in dict.fromkeys(larks)]


def new_matcher(tokenizer: LLTokenizer, text: str, *, has_places: bool = False) -> LLMatcher:
    """Raises ValueError if llguidance cannot follow the text, with the place in it where the client
    wrote it.
    """
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise ValueError(reason_of(matcher, has_places=has_places))

    return matcher


def reason_of(matcher: LLMatcher, *, has_places: bool = False) -> str:
    """Why a matcher has failed, without the lines that show the client's text or llguidance's form
    of it.
    """
    lines = [
        line
        for line in matcher.get_error().splitlines()
        if line.strip() and "<non-verbose/>" not in line
    ]
    if lines and lines[0].startswith(DEAD_END):
        return NO_TEXT

    place = PLACE.match(lines[0]) if lines else None
    where = f"line {place[1]}, column {place[2]}: " if place is not None and has_places else ""
    of_regex = next(
        (line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None
    )
    if of_regex is not None:
        return f"{where}its regular expression: {of_regex}"

    return where + PLACE.sub("", lines[0] if lines else "")


def new_tokenizer(config: GuidedDecodingConfig, vocab_size: int) -> LLTokenizer:
    """`vocab_size` is the width of the logits, which may be wider than the vocabulary. It may also
    be narrower.
    """
    end_ids = [
        one for one in config.stop_token_ids or () if 0 <= one < len(config.encoded_vocab)
    ] or None
    num_tokens = max(vocab_size, len(config.encoded_vocab))
    if config.tokenizer_str is not None:
        with suppress(ValueError):  # of a decoder that llguidance does not know
            return LLTokenizer(config.tokenizer_str, n_vocab=num_tokens, eos_token=end_ids)

    greedy = _Greedy(config, end_ids)
    return LLTokenizer(TokenizerWrapper(greedy), n_vocab=num_tokens, eos_token=end_ids)


class _Greedy:
    """A tokenizer of which only the texts of tokens are known. It takes the longest token each
    time.
    """

    bos_token_id = None

    def __init__(self, config: GuidedDecodingConfig, end_ids: list[int] | None) -> None:
        described = json.loads(config.tokenizer_str or "{}")
        special = {
            token["id"] for token in described.get("added_tokens", ()) if token["special"]
        }.union(end_ids or ())
        has_words = bool(
            re.search('"type": "(Metaspace|ByteFallback)"', json.dumps(described.get("decoder")))
        )
        self.tokens = [
            b"" if token_id in special else _written(text, has_words=has_words)
            for token_id, text in enumerate(config.encoded_vocab)
        ]
        self.special_token_ids = sorted(special)
        self.eos_token_id = (
            end_ids[0]
            if end_ids
            else next((n for n, text in enumerate(self.tokens) if not text), 0)
        )
        self._ids = {text: token_id for token_id, text in enumerate(self.tokens) if text}
        self._max_bytes = max(map(len, self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        ids = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._max_bytes), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                break

            ids.append(self._ids[text[at:end]])
            at = end

        return ids


def _written(text: str, *, has_words: bool) -> bytes:
    if has_words:
        return (
            bytes.fromhex(found[1])
            if (found := BYTE.fullmatch(text))
            else text.replace(WORD, " ").encode()
        )

    return text.encode("utf-8", "ignore")
