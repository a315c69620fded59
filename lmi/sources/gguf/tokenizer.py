"""Writes tokenizer.json of the vocabulary in a GGUF file, and what stands beside it.

Two kinds are read. `gpt2` is byte-level BPE, whose merges are in the file, and whose rule for
cutting a text into words has only a name there. `llama` is SentencePiece's BPE: the merges follow
from the scores, since it always joins the pair of neighbours whose union scores best. Source:
`src/llama-vocab.cpp` of llama.cpp, and for the expressions the tokenizer.json of each maker.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from lmi.sources.gguf.values import GgufValues

Part = dict[str, Any]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"  # SentencePiece's letter for a space
MAX_SPLITTING = 1 << 31  # characters that are looked at to find merges: a second per 2^27
HUGGING_FACE = "tokenizer.huggingface.json"

NAMED_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # their spelling
    "pad_token": "tokenizer.ggml.padding_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
END_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
# An answer ends with a token of one of these texts, whatever else the file says.
END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)

CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CAPITALISED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+"
CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"

LLAMA3 = rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{REST}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = rf"{CAPITALISED}|{CAPITALS}|\p{{N}}|{REST_WITH_SLASH}"
O200K = rf"{CAPITALISED}{CONTRACTIONS}?|{CAPITALS}{CONTRACTIONS}?|\p{{N}}{{1,3}}|{REST_WITH_SLASH}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
BLOOM = (r" ?[^(\s|.,!?…。，、।۔،)]+",)
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class Words:
    """How a text is cut before BPE: each expression cuts what the former ones have left."""

    patterns: tuple[str, ...]
    ignores_merges: bool = False  # a word that is a token is taken as it is
    adds_bos: bool = False  # where the file does not say it


WORDS_BY_NAME: Mapping[str, Words] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"),
        Words((LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Words((LLAMA3,))),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), Words((QWEN2,))),
    "qwen35": Words((QWEN35,)),
    "tekken": Words((TEKKEN,), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Words((O200K,))),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat"), Words((GPT2,))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell"), Words((r"\p{N}", GPT2))
    ),
    "deepseek-coder": Words(DEEPSEEK_CODER),
    "deepseek-v3": Words(DEEPSEEK_V3),
    "falcon": Words(FALCON),
    **dict.fromkeys(("bloom", "poro-chat"), Words(BLOOM)),
    "default": Words(DEFAULT),
}


@dataclass(frozen=True, slots=True)
class OpenedTokenizer:
    """What the text machinery of a model's folder reads."""

    tokenizer: Part | str  # the content of tokenizer.json, or its text
    config: Part  # of tokenizer_config.json
    end_ids: list[int]
    warnings: list[str] = field(default_factory=list)


def tokenizer_of(values: GgufValues) -> OpenedTokenizer:
    """Raises ModelUnusable for a vocabulary that is broken, or of a kind that is not read."""
    vocabulary = _Vocabulary(values)
    named = {
        name: vocabulary.tokens[token_id]
        for name, key in NAMED_TOKENS.items()
        if (token_id := vocabulary.id_of(key)) is not None
    }
    config: Part = {**named, "clean_up_tokenization_spaces": False}
    if HUGGING_FACE in values:
        text = values.text(HUGGING_FACE)
        return OpenedTokenizer(text, config, vocabulary.end_ids())

    kind = values.text("tokenizer.ggml.model")
    if kind == "gpt2":
        pre = values.text("tokenizer.ggml.pre", "default")
        tokenizer = _byte_level(vocabulary, pre)
        warnings = (
            [
                f"{values.file}: it does not say how its tokenizer cuts words, so it may do "
                "it otherwise than its maker's"
            ]
            if pre == "default"
            else []
        )
        return OpenedTokenizer(tokenizer, config, vocabulary.end_ids(), warnings)
    if kind == "llama":
        return OpenedTokenizer(_sentence_piece(vocabulary), config, vocabulary.end_ids())
    raise values.fault("tokenizer.ggml.model", "gpt2 or llama", kind)


class _Vocabulary:
    """The tokens of a file by their ids, and what each is."""

    def __init__(self, values: GgufValues) -> None:
        self.values = values
        listed = values.texts("tokenizer.ggml.tokens")
        self.tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(listed)]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for i, token in enumerate(self.tokens) if self.ids[token] != i)
            raise values.refusal(f"its tokenizer has the token {twice[:40]!r} twice")

        key = "tokenizer.ggml.token_type"
        self.kinds = values.wholes(key) if key in values else [NORMAL] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            raise values.refusal(
                f"{key} has {len(self.kinds)} items, there are {len(self.ids)} tokens"
            )

    def id_of(self, key: str) -> int | None:
        """The id that a key names, or None where it names no token."""
        token_id = self.values.metadata.get(key)
        is_token = type(token_id) is int and 0 <= token_id < len(self.tokens)
        return token_id if is_token else None

    def end_ids(self) -> list[int]:
        by_key = [self.id_of(key) for key in END_KEYS]
        by_text = [self.ids.get(text) for text in END_TEXTS]
        return list(dict.fromkeys(token for token in (*by_key, *by_text) if token is not None))

    def added_tokens(self) -> list[Part]:
        """What is found in a text before all else: control tokens, and what users have defined."""
        named = {self.id_of(key) for key in NAMED_TOKENS.values()}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": index, "content": self.tokens[index], **flags, "special": kind != USER_DEFINED}
            for index, kind in enumerate(self.kinds)
            if kind in (CONTROL, USER_DEFINED) or index in named
        ]

    def around(self, adds_bos: bool) -> Part | None:
        """What puts the tokens of a beginning and an end around a text."""
        values = self.values
        begins = values.switch("tokenizer.ggml.add_bos_token", adds_bos)
        ends = values.switch("tokenizer.ggml.add_eos_token", False)
        first = self.id_of("tokenizer.ggml.bos_token_id") if begins else None
        last = self.id_of("tokenizer.ggml.eos_token_id") if ends else None
        if first is None and last is None:
            return None

        before = [_special(self.tokens[first])] if first is not None else []
        behind = [_special(self.tokens[last])] if last is not None else []
        one = {"Sequence": {"id": "A", "type_id": 0}}
        other = {"Sequence": {"id": "B", "type_id": 0}}
        used = [token for token in (first, last) if token is not None]
        return {
            "type": "TemplateProcessing",
            "single": [*before, one, *behind],
            "pair": [*before, one, other, *behind],
            "special_tokens": {
                self.tokens[token]: {
                    "id": self.tokens[token],
                    "ids": [token],
                    "tokens": [self.tokens[token]],
                }
                for token in used
            },
        }


def _special(text: str) -> Part:
    return {"SpecialToken": {"id": text, "type_id": 0}}


def _tokenizer(vocabulary: _Vocabulary, adds_bos: bool, model: Part, **parts: Any) -> Part:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": vocabulary.around(adds_bos),
        **parts,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary.ids,
            **model,
        },
    }


def _byte_level(vocabulary: _Vocabulary, pre: str) -> Part:
    words = WORDS_BY_NAME.get(pre)
    if words is None:
        known = ", ".join(WORDS_BY_NAME)
        raise vocabulary.values.fault("tokenizer.ggml.pre", f"one of {known}", pre)

    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in words.patterns
    ]
    in_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return _tokenizer(
        vocabulary,
        words.adds_bos,
        {
            "ignore_merges": words.ignores_merges,
            "merges": list(_listed_merges(vocabulary)),
        },
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*cuts, in_bytes]},
        decoder=in_bytes,
    )


def _listed_merges(vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    """The merges of the file in their order, without those that make no token."""
    ids = vocabulary.ids
    for merge in vocabulary.values.texts("tokenizer.ggml.merges"):
        place = merge.find(" ", 1)
        left = merge[:place]
        right = merge[place + 1 :]
        if place > 0 and left in ids and right in ids and left + right in ids:
            yield left, right


def _sentence_piece(vocabulary: _Vocabulary) -> Part:
    values = vocabulary.values
    has_prefix = values.switch("tokenizer.ggml.add_space_prefix", True)
    prefix = [{"type": "Prepend", "prepend": SPACE}] if has_prefix else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    cut = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    letters = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    unknown = vocabulary.id_of("tokenizer.ggml.unknown_token_id")
    return _tokenizer(
        vocabulary,
        True,
        {
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "merges": _merges_by_score(vocabulary),
        },
        normalizer={"type": "Sequence", "normalizers": [*prefix, spaces]},
        decoder={
            "type": "Sequence",
            "decoders": [letters, {"type": "ByteFallback"}, {"type": "Fuse"}, *cut],
        },
    )


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to join two tokens to a third, the best score first."""
    values = vocabulary.values
    scores = values.numbers("tokenizer.ggml.scores")
    tokens = vocabulary.tokens
    if len(scores) != len(tokens) or not all(map(isfinite, scores)):
        raise values.refusal(f"tokenizer.ggml.scores must be {len(tokens)} finite numbers")
    if sum(len(token) ** 2 for token in tokens) > MAX_SPLITTING:
        raise values.refusal("its tokens are too long for a tokenizer of SentencePiece")

    kinds = vocabulary.kinds
    joined = {
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind not in (UNKNOWN, CONTROL, BYTE)
    }
    best_first = sorted(range(len(tokens)), key=lambda index: -scores[index])
    return [pair for index in best_first for pair in _splits(tokens[index], joined)]


def _splits(token: str, joined: set[str]) -> Iterator[tuple[str, str]]:
    if token not in joined:
        return
    for place in range(1, len(token)):
        left = token[:place]
        right = token[place:]
        if left in joined and right in joined:
            yield left, right


def text_of(tokenizer: Part | str) -> str:
    """The text of tokenizer.json."""
    if isinstance(tokenizer, str):
        return tokenizer
    return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
