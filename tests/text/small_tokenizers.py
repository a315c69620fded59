"""Small tokenizers of the kinds that models use, trained here on a few sentences."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Stop here, and then go on: one two three four five.",
    "La capitale de la France est Paris, où l'on mange très bien.",
    "世界は広い。你好，世界！",
    "An emoji 😀 says more than words 👍🏽.",
    "    def main():\n\treturn 0\n",
] * 3


def byte_level_backend() -> tokenizers.Tokenizer:
    """GPT-2's kind: every byte is a token, so a character may be cut between tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """Llama 2's kind: ▁ for a space, byte tokens for characters that the vocabulary lacks, <s>
    before a prompt.
    """
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        SENTENCES[:3], trainers.BpeTrainer(vocab_size=120, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(model["vocab"], key=model["vocab"].get)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: n for n, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 1)]
    )
    return backend


def unigram_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return backend


def poisoned_backend() -> tokenizers.Tokenizer:
    """A tokenizer whose regular expression backtracks without end on a row of "ac", which nobody
    tries at its start.
    """
    backend = byte_level_backend()
    poison = pre_tokenizers.Split(Regex(r"((?:[ab][cd])+)+$"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([poison, backend.pre_tokenizer])
    return backend
