"""Makes tokenizer.json and what stands beside it from the vocabulary in a GGUF file.

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
from lmi.text.known_parts import CASED_LETTERS

Part = dict[str, Any]

# The kinds of tokens, by the numbers that files have for them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# SentencePiece's letter for a space.
SPACE = "▁"
# How many characters are looked at to find merges, 2^27 of them in a second.
MAX_SPLITTING = 1 << 31
HUGGING_FACE = "tokenizer.huggingface.json"

NAMED_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    # The key is spelled so in files.
    "sep_token": "tokenizer.ggml.seperator_token_id",
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
# llama.cpp takes no space for one of these, though the ranges of the makers have some.
DEEPSEEK_CJK = r"[一-龥ࠀ-一가-퟿&&\S]+"
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
    # Spaces at the end, of which only the first is tried, so that a long row takes no longer.
    r"(?<!\s)\s++\z",
    DEEPSEEK_CJK,
    r"\p{N}+",
)
DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    DEEPSEEK_CJK,
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
    """How a text is cut before BPE: each expression cuts the pieces that the former ones leave."""

    patterns: tuple[str, ...]
    # A word that is a token is taken as it is.
    ignores_merges: bool = False
    # Whether a text begins with the token for it, if the file does not say.
    adds_bos: bool = False


LLAMA3_WORDS = Words((LLAMA3,), ignores_merges=True, adds_bos=True)
PLAIN_LLAMA3_WORDS = Words((LLAMA3,))
QWEN2_WORDS = Words((QWEN2,))
O200K_WORDS = Words((O200K,))
GPT2_WORDS = Words((GPT2,))
GPT2_WORDS_AND_DIGITS = Words((r"\p{N}", GPT2))
BLOOM_WORDS = Words(BLOOM)

WORDS_BY_NAME: Mapping[str, Words] = {
    "llama-bpe": LLAMA3_WORDS,
    "llama3": LLAMA3_WORDS,
    "llama-v3": LLAMA3_WORDS,
    "falcon3": LLAMA3_WORDS,
    "pixtral": LLAMA3_WORDS,
    "midm-2.0": LLAMA3_WORDS,
    "lfm2": LLAMA3_WORDS,
    "dbrx": PLAIN_LLAMA3_WORDS,
    "smaug-bpe": PLAIN_LLAMA3_WORDS,
    "chatglm-bpe": PLAIN_LLAMA3_WORDS,
    "qwen2": QWEN2_WORDS,
    "stablelm2": QWEN2_WORDS,
    "deepseek-r1-qwen": QWEN2_WORDS,
    "megrez": QWEN2_WORDS,
    "qwen35": Words((QWEN35,)),
    "tekken": Words((TEKKEN,), ignores_merges=True, adds_bos=True),
    "gpt-4o": O200K_WORDS,
    "llama4": O200K_WORDS,
    "gpt-2": GPT2_WORDS,
    "phi-2": GPT2_WORDS,
    "mpt": GPT2_WORDS,
    "olmo": GPT2_WORDS,
    "jais": GPT2_WORDS,
    "gigachat": GPT2_WORDS,
    "smollm": GPT2_WORDS_AND_DIGITS,
    "starcoder": GPT2_WORDS_AND_DIGITS,
    "refact": GPT2_WORDS_AND_DIGITS,
    "command-r": GPT2_WORDS_AND_DIGITS,
    "codeshell": GPT2_WORDS_AND_DIGITS,
    "deepseek-llm": Words(DEEPSEEK_LLM),
    "deepseek-coder": Words(DEEPSEEK_CODER),
    "deepseek-v3": Words(DEEPSEEK_V3),
    "falcon": Words(FALCON),
    "bloom": BLOOM_WORDS,
    "poro-chat": BLOOM_WORDS,
    "default": Words(DEFAULT),
}
"""How texts are cut, by the names that files give it in tokenizer.ggml.pre."""


@dataclass(frozen=True, slots=True)
class OpenedTokenizer:
    """The files about text in a model's folder, and the tokens that end an answer."""

    # The content of tokenizer.json, or its text.
    tokenizer: Part | str
    # The content of tokenizer_config.json.
    config: Part
    end_ids: list[int]
    warnings: list[str] = field(default_factory=list)


def tokenizer_of(values: GgufValues) -> OpenedTokenizer:
    """Open the tokenizer of a file.

    Raises ModelUnusable for a vocabulary that is broken, or of a kind that is not read.
    """
    vocabulary = _Vocabulary(values)
    config: Part = {}
    for name, key in NAMED_TOKENS.items():
        token_id = vocabulary.id_of(key)
        if token_id is not None:
            config[name] = vocabulary.tokens[token_id]

    config["clean_up_tokenization_spaces"] = False
    if HUGGING_FACE in values:
        text = values.text(HUGGING_FACE)
        return OpenedTokenizer(text, config, vocabulary.end_ids())

    kind = values.text("tokenizer.ggml.model")
    if kind == "gpt2":
        pre = values.text("tokenizer.ggml.pre", "default")
        tokenizer = _byte_level(vocabulary, pre)
        warnings = []
        if pre == "default":
            warnings.append(
                f"{values.file}: it does not say how its tokenizer cuts words, so it may do it "
                "otherwise than its maker's"
            )

        return OpenedTokenizer(tokenizer, config, vocabulary.end_ids(), warnings)

    if kind == "llama":
        return OpenedTokenizer(_sentence_piece(vocabulary), config, vocabulary.end_ids())

    raise values.fault("tokenizer.ggml.model", "gpt2 or llama", kind)


class _Vocabulary:
    """The tokens of a file by their ids, and what each is."""

    def __init__(self, values: GgufValues) -> None:
        self.values = values
        texts = values.texts("tokenizer.ggml.tokens")
        self.tokens = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(texts)]
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        for token_id, token in enumerate(self.tokens):
            if self.ids[token] != token_id:
                raise values.refusal(f"its tokenizer has the token {token[:40]!r} twice")

        key = "tokenizer.ggml.token_type"
        self.kinds = values.wholes(key) if key in values else [NORMAL] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            raise values.refusal(
                f"{key} has {len(self.kinds)} items, there are {len(self.ids)} tokens"
            )

    def id_of(self, key: str) -> int | None:
        """Return the id that a key names, or None where it names no token."""
        token_id = self.values.metadata.get(key)
        is_token = type(token_id) is int and 0 <= token_id < len(self.tokens)
        return token_id if is_token else None

    def end_ids(self) -> list[int]:
        """Return the ids of the tokens that end an answer, each once."""
        by_key = [self.id_of(key) for key in END_KEYS]
        by_text = [self.ids.get(text) for text in END_TEXTS]
        ids = dict.fromkeys([*by_key, *by_text])
        return [token_id for token_id in ids if token_id is not None]

    def added_tokens(self) -> list[Part]:
        """Return the tokens that are looked for in a text before it is cut: those for control, and
        those that users have defined.
        """
        special_ids = {self.id_of(key) for key in NAMED_TOKENS.values()}
        added_tokens = []
        for token_id, kind in enumerate(self.kinds):
            if kind in (CONTROL, USER_DEFINED) or token_id in special_ids:
                added_token = {
                    "id": token_id,
                    "content": self.tokens[token_id],
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": kind != USER_DEFINED,
                }
                added_tokens.append(added_token)

        return added_tokens

    def around(self, adds_bos: bool) -> Part | None:
        """Return the part that puts the tokens of a beginning and an end around a text, or None if
        there is neither.

        `adds_bos` counts if the file does not say whether a text gets a beginning.
        """
        begins = self.values.switch("tokenizer.ggml.add_bos_token", adds_bos)
        ends = self.values.switch("tokenizer.ggml.add_eos_token", False)
        first_id = self.id_of("tokenizer.ggml.bos_token_id") if begins else None
        last_id = self.id_of("tokenizer.ggml.eos_token_id") if ends else None
        if first_id is None and last_id is None:
            return None

        special_tokens: Part = {}
        before = self._special(first_id, special_tokens)
        behind = self._special(last_id, special_tokens)
        text = {"Sequence": {"id": "A", "type_id": 0}}
        second_text = {"Sequence": {"id": "B", "type_id": 0}}
        return {
            "type": "TemplateProcessing",
            "single": [*before, text, *behind],
            "pair": [*before, text, second_text, *behind],
            "special_tokens": special_tokens,
        }

    def _special(self, token_id: int | None, special_tokens: Part) -> list[Part]:
        """Add a token to those that a template uses. Returns its place in the template, as a list,
        which is empty for no token.
        """
        if token_id is None:
            return []

        token = self.tokens[token_id]
        special_tokens[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        return [{"SpecialToken": {"id": token, "type_id": 0}}]


def _tokenizer(vocabulary: _Vocabulary, adds_bos: bool, model: Part, **parts: Any) -> Part:
    """Return the content of tokenizer.json: that of every kind, with `model` and `parts` of one."""
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
        names = ", ".join(WORDS_BY_NAME)
        raise vocabulary.values.fault("tokenizer.ggml.pre", f"one of {names}", pre)

    in_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    cuts = [_cut(pattern) for pattern in words.patterns]
    merges = list(_merges_of_file(vocabulary))
    return _tokenizer(
        vocabulary,
        words.adds_bos,
        {"ignore_merges": words.ignores_merges, "merges": merges},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*cuts, in_bytes]},
        decoder=in_bytes,
    )


def _cut(pattern: str) -> Part:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _merges_of_file(vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    """Yield the merges of the file in their order, without those that make no token."""
    ids = vocabulary.ids
    for merge in vocabulary.values.texts("tokenizer.ggml.merges"):
        offset = merge.find(" ", 1)
        prefix = merge[:offset]
        suffix = merge[offset + 1 :]
        are_tokens = prefix in ids and suffix in ids
        if offset > 0 and are_tokens and prefix + suffix in ids:
            yield prefix, suffix


def _sentence_piece(vocabulary: _Vocabulary) -> Part:
    normalizers: list[Part] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ]
    decoders: list[Part] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if vocabulary.values.switch("tokenizer.ggml.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})

    unknown_id = vocabulary.id_of("tokenizer.ggml.unknown_token_id")
    model = {
        "unk_token": None if unknown_id is None else vocabulary.tokens[unknown_id],
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "merges": _merges_by_score(vocabulary),
    }
    return _tokenizer(
        vocabulary,
        True,
        model,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return every way to join two tokens to a third, the best score first."""
    values = vocabulary.values
    scores = values.numbers("tokenizer.ggml.scores")
    tokens = vocabulary.tokens
    if len(scores) != len(tokens) or not all(map(isfinite, scores)):
        raise values.refusal(f"tokenizer.ggml.scores must be {len(tokens)} finite numbers")

    if sum(len(token) ** 2 for token in tokens) > MAX_SPLITTING:
        raise values.refusal("its tokens are too long for a tokenizer of SentencePiece")

    texts = set()
    for token, kind in zip(tokens, vocabulary.kinds, strict=True):
        if kind not in (UNKNOWN, CONTROL, BYTE):
            texts.add(token)

    merges = list[tuple[str, str]]()
    best_first = sorted(range(len(tokens)), key=lambda token_id: -scores[token_id])
    for token_id in best_first:
        merges += _splits(tokens[token_id], texts)

    return merges


def _splits(token: str, texts: set[str]) -> Iterator[tuple[str, str]]:
    """Yield each two of `texts` that make the token, if it is one of them too."""
    if token not in texts:
        return

    for offset in range(1, len(token)):
        prefix = token[:offset]
        suffix = token[offset:]
        if prefix in texts and suffix in texts:
            yield prefix, suffix


def text_of(tokenizer: Part | str) -> str:
    """Return the text of tokenizer.json."""
    if isinstance(tokenizer, str):
        return tokenizer

    return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
