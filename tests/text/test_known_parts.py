"""Which tokenizers are known to take no longer than a text is long."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from lmi.text.confined import probes_of
from lmi.text.known_parts import is_known_pattern, unknown_decoders, unknown_parts
from tests.text.small_tokenizers import byte_level_backend, sentencepiece_backend, unigram_backend

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CAPITALISED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
CASES = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
FAMILIES = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}",
    "qwen2": rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}",
    "o200k": f"{CAPITALISED}{CONTRACTIONS}?|{CAPITALS}{CONTRACTIONS}?|{CASES}",
    "tekken": rf"{CAPITALISED}|{CAPITALS}|\p{{N}}|{CASES}",
    "deepseek3": PUNCTUATION
    + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "digits": r"\p{N}{1,3}",
    "han": "[一-龥぀-ゟ゠-ヿ]+",
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "spaces": " {2,}",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pattern_of_a_known_family_takes_no_longer_than_a_text_is_long(name: str) -> None:
    pattern = FAMILIES[name]
    assert is_known_pattern(pattern)

    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    for text in probes_of([]):
        start_s = time.process_time()
        backend.encode(4 * text)
        assert time.process_time() - start_s < 1.0, text[:8]


@pytest.mark.parametrize(
    "pattern",
    [
        "(x+x+)+y",
        r"\s+$",
        r"\s+x",
        r"\s*[\r\n]+",
        CAPITALISED,
        rf"{CAPITALISED}|\s+",
        r"\p{L}+x",
        r"(?:\p{L}+|\s+)+x",
        "",
        "|",
        r"\p{L}+|",
    ],
)
def test_any_other_pattern_is_not_known(pattern: str) -> None:
    assert not is_known_pattern(pattern)


@pytest.mark.parametrize("make", [byte_level_backend, sentencepiece_backend, unigram_backend])
def test_usual_tokenizers_are_known(make: Callable[[], tokenizers.Tokenizer]) -> None:
    backend = make()
    assert unknown_parts(backend, 16) == [] == unknown_decoders(backend)


def charsmap(longest: int) -> str:
    """A map as SentencePiece writes it, without a trie: the texts that characters become."""
    return b64encode(bytes(4) + b"a\0" + longest * b"b" + b"\0").decode()


UNKNOWN_PARTS: list[tuple[str, Any, str]] = [
    (
        "normalizer",
        normalizers.Replace("a", 65 * "b"),
        "a normalizer that makes a text 65 times as long",
    ),
    ("normalizer", normalizers.Replace("", "b"), "inf times as long"),
    ("normalizer", normalizers.Sequence([normalizers.Replace("a", "aa")] * 7), "128 times as long"),
    ("normalizer", normalizers.Replace(Regex("(a+)+b"), ""), "the pattern '(a+)+b'"),
    ("normalizer", normalizers.Prepend(65 * "b"), "a normalizer that adds 65 characters"),
    ("normalizer", normalizers.Sequence([normalizers.NFC()] * 25), "25 normalizers"),
    (
        "pre_tokenizer",
        pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated"),
        "the pattern '(x+x+)+y'",
    ),
    ("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Digits()] * 25), "25 pre-tokenizers"),
    ("post_processor", processors.TemplateProcessing("$A $A", None, []), "writes the text 2 times"),
    (
        "post_processor",
        processors.TemplateProcessing("$A" + 65 * " a", None, [("a", 0)]),
        "67 tokens",
    ),
]


@pytest.mark.parametrize(("name", "part", "said"), UNKNOWN_PARTS)
def test_a_part_that_may_take_long_or_much_is_not_known(name: str, part: Any, said: str) -> None:
    backend = byte_level_backend()
    setattr(backend, name, part)
    [unknown] = unknown_parts(backend, 16)
    assert said in unknown.what


def test_the_longest_text_of_a_map_of_characters_counts() -> None:
    for longest, num_unknown in ((33, 0), (65, 1)):
        state = f'{{"type": "Precompiled", "precompiled_charsmap": "{charsmap(longest)}"}}'
        part = type("Part", (), {"__getstate__": lambda self, state=state: state.encode()})()
        backend: Any = type(
            "Backend", (), dict.fromkeys(("pre_tokenizer", "model", "post_processor"))
        )
        backend.normalizer = part
        assert len(unknown_parts(backend, 16)) == num_unknown


def test_words_without_an_end_are_not_known() -> None:
    backend = tokenizers.Tokenizer(
        models.WordPiece({"a": 0}, unk_token="a", max_input_chars_per_word=10_000)
    )
    assert [part.what for part in unknown_parts(backend, 16)] == [
        "WordPiece for words of 10000 characters"
    ]
    assert unknown_parts(tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a")), 16) == []
    assert [part.what for part in unknown_parts(unigram_backend(), 300)] == [
        "Unigram with a token of 300 characters"
    ]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (decoders.Replace(Regex("(a+)+b"), ""), "a decoder with the pattern '(a+)+b'"),
        (decoders.Replace("a", 65 * "b"), "a decoder that makes a text 65 times as long"),
        (decoders.Sequence([decoders.Fuse()] * 25), "25 decoders"),
    ],
)
def test_a_decoder_that_may_take_long_or_much_is_not_known(part: Any, said: str) -> None:
    backend = byte_level_backend()
    backend.decoder = part
    assert [unknown.what for unknown in unknown_decoders(backend)] == [said]
