"""Which parts of a tokenizer are known to take a time, and to make a text, in proportion to the
text that they get.

A tokenizer comes with a model and is a stranger's file: the regular expressions in it may backtrack
without end, its replacements may make a text a million times as long, and the library does all of
it at once. So a tokenizer with a part that is not known here encodes in a process of its own
(`confined.py`), and a decoder must be known.

The expressions are those of tokenizers that the makers of models publish. Most are alternatives, in
one order or another, that several families share, so it is these that are listed.
"""

import json
from base64 import b64decode
from collections.abc import Iterator
from typing import Any, NamedTuple

import tokenizers

from lmi.errors import shorten

# So many normalizers, pre-tokenizers or decoders may follow each other.
MAX_PARTS = 24
# All that the tokenizer replaces makes a text at most so many times as long.
MAX_GROWTH = 64
# A normalizer may put so many characters before a text.
MAX_ADDED_CHARS = 64
# A post-processor may put so many tokens around a text.
MAX_ADDED_TOKENS = 64
# The longest JSON of a part.
MAX_STATE_CHARS = 4 << 20

# A word costs WordPiece the square of its characters, and a character Unigram the characters of the
# longest token.
MAX_WORD_CHARS = 200
MAX_UNIGRAM_CHARS = 256

CONTRACTIONS = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
    "'(?i:[sdmt]|ll|ve|re)",
    "'s",
    "'t",
    "'re",
    "'ve",
    "'m",
    "'ll",
    "'d",
)
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
# The letters of scripts that have capitals, as DeepSeek LLM lists them.
CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽ"
    "ᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ί"
    "ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇ"
    "Ꞌ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
ENDINGS = ("", *(f"{contraction}?" for contraction in CONTRACTIONS[:2]))
CAPITALISED = tuple(f"{BEFORE_WORD}{UPPER}*{LOWER}+{ending}" for ending in ENDINGS)
CAPITALS = tuple(f"{BEFORE_WORD}{UPPER}+{LOWER}*{ending}" for ending in ENDINGS)
LINE_ENDS = (r"\s*[\r\n]+", r"\s*[\r\n]", r"\s*\n+", r"\s*\n")
SPACES = r"\s+"

# An alternative of these takes all that it has looked at, or looks at a few characters.
ALTERNATIVES = (
    *CONTRACTIONS,
    # Words.
    r"\p{L}+",
    r" ?\p{L}+",
    r"\s?\p{L}+",
    r"[\p{L}]+",
    rf"\s?[{CASED_LETTERS}]+",
    rf"{BEFORE_WORD}\p{{L}}+",
    rf"{BEFORE_WORD}+\p{{L}}+",
    rf"{BEFORE_WORD}[\p{{L}}\p{{M}}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    # Numbers.
    r"\p{N}",
    r"[\p{N}]",
    r"\p{N}{1}",
    r"\p{N}{1,2}",
    r"\p{N}{1,3}",
    r"\p{N}+",
    r" ?\p{N}+",
    r"\d",
    r"\d{1,3}",
    r"\d+",
    r"[0-9]",
    r"[0-9]{3}",
    r"[0-9][0-9][0-9]",
    r"[0-9]+",
    # What is neither.
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]++",
    r"[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}\r\n]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    r" ?[\p{P}\p{S}]+",
    r"\s?\p{P}+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
    r"[\p{P}\$\+<=>\^~\|`]+",
    r"[\p{P}\$\+<=>\^~\|]+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r" ?[^(\s|.,!?…。，、।۔،)]+",
    r"[\p{P}!-/:-@\[-`{-~]",
    # Chinese, Japanese, Korean.
    "[一-龥]+",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[一-龥ࠀ-一가-퟿]+",
    r"[一-龥ࠀ-一가-퟿&&\S]+",
    r"[\p{Han}]+",
    r"\p{Han}+",
    "[가-힣ㄱ-ㆎ]+",
    "[！…“”‘’—：；，、-〿︰-﹏]+",
    "[ㄅ-ㄯ]+",
    # Spaces and lines.
    SPACES,
    r"\s+(?!\S)",
    r"(?<!\s)\s++\z",
    r"[\r\n]",
    r"[\r\n]+",
    r"[^\n]+",
    r"[\n]+",
    r"\n",
    r"\n+",
    " ",
    " +",
    " {2,}",
    r"\s{2,}",
    "▁",
    "▁+",
    "▁{2,}",
)
# One of these may look at a long row in vain. The alternative that takes such a row must be there
# too.
TAKEN_BY = {
    **dict.fromkeys(LINE_ENDS, (SPACES,)),
    **dict.fromkeys(CAPITALISED, CAPITALS),
    **dict.fromkeys(CAPITALS, CAPITALISED),
}
LONGEST_FIRST = tuple(sorted({*ALTERNATIVES, *TAKEN_BY}, key=len, reverse=True))

STEADY_NORMALIZERS = {
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Lowercase",
    "Strip",
    "StripAccents",
    "BertNormalizer",
    "ByteLevel",
}
STEADY_PRE_TOKENIZERS = {
    "ByteLevel",
    "BertPreTokenizer",
    "CharDelimiterSplit",
    "Digits",
    "Metaspace",
    "Punctuation",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
}
STEADY_DECODERS = {
    "BPEDecoder",
    "ByteFallback",
    "ByteLevel",
    "CTC",
    "Fuse",
    "Metaspace",
    "Strip",
    "WordPiece",
}
STEADY_PROCESSORS = {"BertProcessing", "ByteLevel", "RobertaProcessing"}

Part = dict[str, Any]


class UnknownPart(NamedTuple):
    """A part of a tokenizer in words, and the regular expression in it, if it has one."""

    what: str
    pattern: str = ""


def unknown_parts(backend: tokenizers.Tokenizer, max_token_chars: int) -> list[UnknownPart]:
    """Return what of a tokenizer is not known to encode in proportion to the text; nothing if all
    is.
    """
    return [
        *_unknown_normalizers(_parts_of(backend.normalizer, "normalizers")),
        *_unknown_pre_tokenizers(_parts_of(backend.pre_tokenizer, "pretokenizers")),
        *_unknown_of_model(backend.model, max_token_chars),
        *_unknown_processors(_parts_of(backend.post_processor, "processors")),
    ]


def unknown_decoders(backend: tokenizers.Tokenizer) -> list[UnknownPart]:
    """Return what of a tokenizer is not known to decode in proportion to the tokens."""
    parts = _parts_of(backend.decoder, "decoders")
    faults = _fault_of_number("decoder", parts)
    growth = 1.0
    for part in parts:
        if part["type"] == "Replace":
            growth *= _growth_of_replacing(part)
            faults += _fault_of_pattern("decoder", part)
        elif part["type"] not in STEADY_DECODERS:
            faults.append(UnknownPart(f"a decoder of type {part['type']}"))

    return faults + _fault_of_growth("decoder", growth)


def is_known_pattern(pattern: str) -> bool:
    """Whether a regular expression is made of alternatives that are known to take no longer than a
    text is long.
    """
    alternatives: list[str] = []
    remainder = f"{pattern}|"
    while remainder:
        alternative = _first_alternative(remainder)
        if alternative is None:
            return False

        alternatives.append(alternative)
        remainder = remainder[len(alternative) + 1 :]

    for alternative in alternatives:
        takers = TAKEN_BY.get(alternative, (alternative,))
        if not any(taker in alternatives for taker in takers):
            return False

    return True


def _first_alternative(pattern: str) -> str | None:
    """Return the longest known alternative that a pattern begins with, or None."""
    for alternative in LONGEST_FIRST:
        if pattern.startswith(f"{alternative}|"):
            return alternative

    return None


def _parts_of(part: Any, name_of_parts: str) -> list[Part]:
    """Return a part of a tokenizer as JSON has it, a sequence as its parts."""
    if part is None:
        return []

    state = bytes(part.__getstate__())
    if len(state) > MAX_STATE_CHARS:
        return [{"type": f"over {MAX_STATE_CHARS} characters"}]

    return list(_flat(json.loads(state), name_of_parts))


def _flat(part: Part, name_of_parts: str) -> Iterator[Part]:
    if part["type"] != "Sequence":
        yield part
        return

    for inner in part[name_of_parts]:
        yield from _flat(inner, name_of_parts)


def _unknown_normalizers(parts: list[Part]) -> list[UnknownPart]:
    faults = _fault_of_number("normalizer", parts)
    growth = 1.0
    for part in parts:
        match part["type"]:
            case "Replace":
                growth *= _growth_of_replacing(part)
                faults += _fault_of_pattern("normalizer", part)
            case "Precompiled":
                growth *= _growth_of_map(part["precompiled_charsmap"])
            case "Prepend":
                if len(part["prepend"]) > MAX_ADDED_CHARS:
                    faults.append(
                        UnknownPart(f"a normalizer that adds {len(part['prepend'])} characters")
                    )
            case kind if kind not in STEADY_NORMALIZERS:
                faults.append(UnknownPart(f"a normalizer of type {kind}"))

    return faults + _fault_of_growth("normalizer", growth)


def _unknown_pre_tokenizers(parts: list[Part]) -> list[UnknownPart]:
    faults = _fault_of_number("pre-tokenizer", parts)
    for part in parts:
        if part["type"] == "Split":
            faults += _fault_of_pattern("pre-tokenizer", part)
        elif part["type"] not in STEADY_PRE_TOKENIZERS:
            faults.append(UnknownPart(f"a pre-tokenizer of type {part['type']}"))

    return faults


def _unknown_of_model(model: Any, max_token_chars: int) -> list[UnknownPart]:
    kind = type(model).__name__
    if kind == "WordPiece" and model.max_input_chars_per_word > MAX_WORD_CHARS:
        return [UnknownPart(f"WordPiece for words of {model.max_input_chars_per_word} characters")]

    if kind == "Unigram" and max_token_chars > MAX_UNIGRAM_CHARS:
        return [UnknownPart(f"Unigram with a token of {max_token_chars} characters")]

    return []


def _unknown_processors(parts: list[Part]) -> list[UnknownPart]:
    faults = _fault_of_number("post-processor", parts)
    for part in parts:
        if part["type"] == "TemplateProcessing":
            faults += _fault_of_template(part)
        elif part["type"] not in STEADY_PROCESSORS:
            faults.append(UnknownPart(f"a post-processor of type {part['type']}"))

    return faults


def _fault_of_template(part: Part) -> list[UnknownPart]:
    num_texts = sum("Sequence" in piece for piece in part["single"])
    num_special_tokens = sum(len(token["ids"]) for token in part["special_tokens"].values())
    num_tokens = len(part["single"]) + num_special_tokens
    if num_texts <= 1 and num_tokens <= MAX_ADDED_TOKENS:
        return []

    output = f"writes the text {num_texts} times, and {num_tokens} tokens"
    return [UnknownPart(f"a post-processor that {output}")]


def _fault_of_number(role: str, parts: list[Part]) -> list[UnknownPart]:
    if len(parts) <= MAX_PARTS:
        return []

    return [UnknownPart(f"{len(parts)} {role}s")]


def _fault_of_growth(role: str, growth: float) -> list[UnknownPart]:
    if growth <= MAX_GROWTH:
        return []

    return [UnknownPart(f"a {role} that makes a text {growth:g} times as long")]


def _fault_of_pattern(role: str, part: Part) -> list[UnknownPart]:
    pattern = part["pattern"].get("Regex")
    if pattern is None or is_known_pattern(pattern):
        return []

    return [UnknownPart(f"a {role} with the pattern {shorten(pattern)}", pattern)]


def _growth_of_replacing(part: Part) -> float:
    """Return how many times as long a text may become. What a regular expression finds may be one
    character.
    """
    content = part["content"]
    pattern = part["pattern"].get("String")
    if pattern is None:
        return max(1.0, float(len(content)))

    if not pattern:
        return float("inf")

    return max(1.0, len(content) / len(pattern))


def _growth_of_map(charsmap: str | list[int] | None) -> float:
    """Return the bytes of the longest text that one character may become.

    SentencePiece's map has the size of a trie, the trie, and the texts in it, each with a zero byte
    at its end.
    """
    data = b64decode(charsmap) if isinstance(charsmap, str) else bytes(charsmap or ())
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return float(max(map(len, texts.split(b"\0"))))
