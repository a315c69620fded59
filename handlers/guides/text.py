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
from handlers.guides.json_schemas.keywords import ANY_OBJECT
from handlers.guides.json_schemas.reader import read_schema
from handlers.guides.lark import lark_of_ebnf, rust_regex
from handlers.guides.lark_grammars import check_lark, is_lark
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams, GuideType

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from handlers.guides.process import Start

# llguidance's word for it.
DEAD_END = "NoExtension"
NO_TEXT = "no text of this vocabulary fits it"
# A place in a text of Lark, which the client knows only if it wrote it.
PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# It marks the begin of a word.
WORD = "\u2581"
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
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=30_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    # Else an error would show the answer.
    verbose_errors=False,
)


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
        options: JsonCompileOptions = {**JSON_OPTIONS, **spaces}
        return [LLMatcher.grammar_from_json_schema(read_schema(schema), overrides=options)]

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
    lines = []
    for line in matcher.get_error().splitlines():
        if line.strip() and "<non-verbose/>" not in line:
            lines.append(line)

    first_line = lines[0] if lines else ""
    if first_line.startswith(DEAD_END):
        return NO_TEXT

    place = PLACE.match(first_line)
    where = ""
    if place is not None and has_places:
        where = f"line {place[1]}, column {place[2]}: "

    for line in lines:
        if line.startswith("error: "):
            return f"{where}its regular expression: {line.removeprefix('error: ')}"

    return where + PLACE.sub("", first_line)


def new_tokenizer(config: GuidedDecodingConfig, vocab_size: int) -> LLTokenizer:
    """`vocab_size` is the width of the logits, which may be wider than the vocabulary. It may also
    be narrower.
    """
    num_texts = len(config.encoded_vocab)
    stop_ids = config.stop_token_ids or ()
    end_ids = [token_id for token_id in stop_ids if 0 <= token_id < num_texts] or None

    num_tokens = max(vocab_size, num_texts)
    if config.tokenizer_str is not None:
        # llguidance may not know the tokenizer's decoder.
        with suppress(ValueError):
            return LLTokenizer(config.tokenizer_str, n_vocab=num_tokens, eos_token=end_ids)

    greedy = _Greedy(config, end_ids)
    return LLTokenizer(TokenizerWrapper(greedy), n_vocab=num_tokens, eos_token=end_ids)


class _Greedy:
    """A tokenizer of which only the texts of tokens are known. It takes the longest token each
    time.
    """

    bos_token_id = None

    def __init__(self, config: GuidedDecodingConfig, end_ids: list[int] | None) -> None:
        tokenizer = json.loads(config.tokenizer_str or "{}")
        special = set(end_ids or ())
        for token in tokenizer.get("added_tokens", ()):
            if token["special"]:
                special.add(token["id"])

        decoder = json.dumps(tokenizer.get("decoder"))
        has_words = re.search('"type": "(Metaspace|ByteFallback)"', decoder) is not None

        self.tokens: list[bytes] = []
        for token_id, text in enumerate(config.encoded_vocab):
            is_special = token_id in special
            self.tokens.append(b"" if is_special else _bytes_of(text, has_words=has_words))

        self.special_token_ids = sorted(special)
        if end_ids:
            self.eos_token_id = end_ids[0]
        else:
            self.eos_token_id = self.tokens.index(b"") if b"" in self.tokens else 0

        self._ids = {text: token_id for token_id, text in enumerate(self.tokens) if text}
        self._max_bytes = max(map(len, self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        ids = []
        begin = 0
        while begin < len(text):
            ends = range(min(len(text), begin + self._max_bytes), begin, -1)
            end = next((end for end in ends if text[begin:end] in self._ids), None)
            if end is None:
                break

            ids.append(self._ids[text[begin:end]])
            begin = end

        return ids


def _bytes_of(text: str, *, has_words: bool) -> bytes:
    """What a token writes."""
    if not has_words:
        return text.encode("utf-8", "ignore")

    byte = BYTE.fullmatch(text)
    if byte is not None:
        return bytes.fromhex(byte[1])

    return text.replace(WORD, " ").encode()
