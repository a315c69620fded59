from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

from lmi.errors import GenerationFailed, InvalidParameter, ModelUnusable, PromptTooLong
from lmi.text import convert
from lmi.text.tokenizer import Tokenizer
from lmi.text.turn_budget import MAX_INLINE_CHARS
from tests.text.small_tokenizers import (
    byte_level_backend,
    poisoned_backend,
    sentencepiece_backend,
    unigram_backend,
)

TEXTS = [
    "Hello world",
    " leading",
    "世界 😀\n\n",
    "<|im_start|>user<tool></s>",
    "a  b\tc",
    "é" * 30,
]
BACKENDS = [byte_level_backend, sentencepiece_backend, unigram_backend]


def save(folder: Path, backend: tokenizers.Tokenizer, **files: dict[str, Any]) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))

    return folder


@pytest.mark.parametrize("make", BACKENDS)
def test_a_folder_saved_by_transformers_gives_the_same_ids(
    tmp_path: Path, make: Callable[[], tokenizers.Tokenizer]
) -> None:
    PreTrainedTokenizerFast(
        tokenizer_object=make(), eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert [tokenizer.encode(text) for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]
    assert tokenizer.eos_ids == (theirs.eos_token_id,)
    assert tokenizer.vocab_size == len(theirs)
    assert tokenizer.special_ids >= set(theirs.all_special_ids)


CONFIGS: list[dict[str, Any]] = [
    {},
    {
        "bos_token": "<|im_start|>",
        "eos_token": "<|endoftext|>",
        "add_bos_token": True,
        "add_eos_token": True,
    },
    {"bos_token": "<|im_start|>", "add_bos_token": False},
    {
        "eos_token": {
            "__type": "AddedToken",
            "content": "<|im_end|>",
            "lstrip": False,
            "rstrip": False,
        }
    },
    {"eos_token": "The", "unk_token": "<tool>"},
    {"pad_token": "[PAD]", "additional_special_tokens": ["user", "<tool>"]},
    {"extra_special_tokens": ["<new>"]},
    {"extra_special_tokens": {"image_token": "<tool>"}},
    {
        "added_tokens_decoder": {
            "400": {"content": "user", "lstrip": False, "normalized": False, "special": False}
        }
    },
    {"added_tokens_decoder": {"340": {"content": "<tool>", "normalized": False, "special": True}}},
    {"split_special_tokens": True},
    {"model_max_length": 4},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_tokenizer_config_means_what_it_means_to_transformers(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = save(tmp_path, byte_level_backend(), tokenizer_config=config)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    assert [tokenizer.encode(text) for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]
    hidden = {i for i in range(len(theirs)) if not theirs.decode([i], skip_special_tokens=True)}
    assert (
        {i for i in range(tokenizer.vocab_size) if not tokenizer.token_texts_without_special[i]}
        == hidden
        == tokenizer.special_ids
    )


def test_truncation_and_padding_in_the_file_do_not_touch_a_prompt(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    text = "The quick brown fox jumps"
    assert (
        Tokenizer.load(save(tmp_path, backend)).encode(text)
        == byte_level_backend().encode(text).ids
    )


def test_end_tokens_come_from_every_file_that_names_one(tmp_path: Path) -> None:
    folder = save(
        tmp_path,
        byte_level_backend(),
        tokenizer_config={"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"},
        generation_config={"eos_token_id": [5, 0]},
        config={"eos_token_id": 9},
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_ids == (5, 0, 2)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}


@pytest.mark.parametrize(
    ("config", "eos_ids"),
    [({"eos_token_id": 3}, (3,)), ({"text_config": {"eos_token_id": [3, 4]}}, (3, 4)), ({}, ())],
)
def test_end_tokens_of_config_json(
    tmp_path: Path, config: dict[str, Any], eos_ids: tuple[int, ...]
) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, byte_level_backend(), config=config))
    assert tokenizer.eos_ids == eos_ids


@pytest.mark.parametrize(
    "name", ["tokenizer", "tokenizer_config", "config", "generation_config", "special_tokens_map"]
)
@pytest.mark.parametrize("content", ["{", "[1]", "", "\x00"])
def test_a_broken_file_is_named_in_one_line(tmp_path: Path, name: str, content: str) -> None:
    file = save(tmp_path, byte_level_backend()) / f"{name}.json"
    file.write_text(content)
    with pytest.raises(ModelUnusable) as caught:
        Tokenizer.load(tmp_path)

    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": {}}},
        {"added_tokens_decoder": [1]},
        {"eos_token": 5},
        {"bos_token": {"a": 1}},
    ],
)
def test_a_config_of_odd_types_is_named_in_one_line(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ModelUnusable, match="tokenizer_config.json"):
        Tokenizer.load(save(tmp_path, byte_level_backend(), tokenizer_config=config))


def test_a_folder_without_a_tokenizer_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)

    with pytest.raises(ModelUnusable, match="no such folder"):
        Tokenizer.load(tmp_path / "nowhere")


def test_a_slow_tokenizer_is_converted_in_a_process_of_its_own(tmp_path: Path) -> None:
    byte_level_backend().model.save(str(tmp_path))  # vocab.json, merges.txt
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = GPT2Tokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)

    assert [tokenizer.encode(text) for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]
    assert tokenizer.eos_ids == (0,)


def test_a_slow_tokenizer_that_cannot_be_converted_names_the_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no sentencepiece")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    # As the program sets it for its process
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit, match=r"^[^\n]*packages that may be needed: sentencepiece"):
        convert.main(str(tmp_path))


def test_the_file_is_named_where_the_program_that_converts_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").touch()
    (tmp_path / "transformers.py").write_text("raise ImportError('is not installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        ModelUnusable,
        match=r"tokenizer\.model: cannot be .*: needs the package transformers .is not",
    ):
        Tokenizer.load(tmp_path)


def test_neither_torch_nor_transformers_is_loaded(tmp_path: Path) -> None:
    folder = save(tmp_path, sentencepiece_backend())
    script = (
        "import sys; from lmi.chats import template; from lmi.text import answer, tokenizer; "
        "tokenizer.Tokenizer.load(sys.argv[1]); print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, folder], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_a_text_too_long_for_any_tokens_is_refused_before_it_is_read() -> None:
    tokenizer = Tokenizer(poisoned_backend())
    limit = 10 * tokenizer.max_token_chars
    assert asyncio.run(tokenizer.encode_prompt("a" * limit, max_tokens=10))
    with pytest.raises(
        InvalidParameter, match=rf"inputs .* 11 tokens.*at least 11 tokens .{limit + 1} characters"
    ):
        asyncio.run(tokenizer.encode_prompt("a" * (limit + 1), max_tokens=10))


@pytest.mark.parametrize("text", ["one two three four five six seven", "a" * 3000])
def test_truncate_keeps_the_first_tokens_where_the_right_end_is_cut(
    byte_level: Tokenizer, text: str
) -> None:
    ids = asyncio.run(
        byte_level.encode_prompt(text, max_tokens=16, truncate=5, truncation_side="right")
    )
    assert ids == byte_level.encode(text)[:5]


def test_truncate_keeps_the_last_tokens(byte_level: Tokenizer) -> None:
    text = "one two three four " * 200
    ids = asyncio.run(byte_level.encode_prompt(text, max_tokens=16, truncate=5))
    assert ids == byte_level.encode(text)[-5:]
    assert asyncio.run(
        byte_level.encode_prompt("one", max_tokens=16, truncate=5)
    ) == byte_level.encode("one")


class CountingTokenizer(Tokenizer):
    """It knows how many characters it has encoded at once."""

    most_chars = 0

    def encode(self, text: str, **options: Any) -> list[int]:
        self.most_chars = max(self.most_chars, len(text))
        return super().encode(text, **options)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", BACKENDS)
def test_a_long_text_is_encoded_no_farther_than_its_tokens_are_kept(
    make: Callable[[], tokenizers.Tokenizer], side: str
) -> None:
    tokenizer = CountingTokenizer(make())
    text = "".join(f"{number} towns and 世界 rivers " for number in range(10_000))
    expected = tokenizer.encode(text)
    tokenizer.most_chars = 0
    ids = asyncio.run(
        tokenizer.encode_prompt(text, max_tokens=100_000, truncate=900, truncation_side=side)
    )
    assert ids == (expected[:900] if side == "right" else expected[-900:])
    assert tokenizer.most_chars < len(text) / 10


def test_a_long_text_with_too_many_tokens_is_refused_before_it_is_encoded_whole() -> None:
    tokenizer = CountingTokenizer(byte_level_backend())
    text = "The quick brown fox " * 10_000
    with pytest.raises(
        PromptTooLong, match=r"context of 20001 tokens.*more than 20000 tokens .200000 characters"
    ):
        asyncio.run(tokenizer.encode_prompt(text, max_tokens=20_000))

    assert tokenizer.most_chars < len(text) / 10
    num_tokens = len(tokenizer.encode(text))
    assert len(asyncio.run(tokenizer.encode_prompt(text, max_tokens=num_tokens))) == num_tokens


def test_a_prompt_without_tokens_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="at least one token"):
        asyncio.run(byte_level.encode_prompt("", max_tokens=16))


@pytest.mark.parametrize("num_chars", [MAX_INLINE_CHARS, MAX_INLINE_CHARS + 1, 100_000])
def test_long_and_short_texts_take_different_ways_to_the_same_ids(
    byte_level: Tokenizer, num_chars: int
) -> None:
    text = ("The quick brown 世界 " * num_chars)[:num_chars]
    assert asyncio.run(byte_level.encode_async(text)) == byte_level.encode(text)


def test_a_long_text_does_not_hold_up_the_event_loop(byte_level: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20_000

    async def count_turns() -> int:
        work = asyncio.create_task(byte_level.encode_async(text))
        turns = 0
        while not work.done():
            await asyncio.sleep(0.001)
            turns += 1

        return turns

    assert asyncio.run(count_turns()) > 20


def test_many_short_texts_at_once_do_not_hold_up_the_event_loop(byte_level: Tokenizer) -> None:
    """Each leaves the loop's turn to others as soon as all of them together are long."""
    texts = ["The quick brown fox jumps over the lazy dog. " * 20] * 400

    async def longest_turn_s() -> float:
        work = asyncio.gather(*map(byte_level.encode_async, texts))
        longest_s = 0.0
        while not work.done():
            start_s = time.perf_counter()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.perf_counter() - start_s)

        assert await work == [byte_level.encode(texts[0])] * len(texts)

        return longest_s

    start_s = time.perf_counter()
    for text in texts:
        byte_level.encode(text)

    assert asyncio.run(longest_turn_s()) < (time.perf_counter() - start_s) / 2


@pytest.mark.parametrize("length", [60, MAX_INLINE_CHARS + 2])
def test_a_panic_of_the_library_fails_this_text_alone(length: int) -> None:
    tokenizer = Tokenizer(poisoned_backend())
    with pytest.raises(GenerationFailed, match="tokenizer gave up.*retry-limit"):
        asyncio.run(tokenizer.encode_async("ac" * (length // 2) + "!"))

    assert asyncio.run(tokenizer.encode_async("world"))


def test_a_lone_surrogate_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="surrogate"):
        byte_level.encode("a\ud800")


def test_a_token_by_itself_reads_as_it_does_inside_a_text(
    byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        ids = tokenizer.encode("The lazy dog")
        assert (
            "".join(tokenizer.token_text(i) for i in ids if i not in tokenizer.special_ids).strip()
            == "The lazy dog"
        )

    assert sentencepiece.token_text(1) == "<s>"
    assert byte_level.token_text(byte_level.encode("👀")[0]) == "\ufffd"
    assert byte_level.token_text(10_000) == ""


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "unigram"])
@pytest.mark.parametrize("word", ["dog", " dog", "lazy dog"])
def test_every_spelling_of_a_word_that_a_text_holds_is_found(
    request: pytest.FixtureRequest, kind: str, word: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    spellings = tokenizer.spellings(word)
    assert len(set(spellings)) == len(spellings)
    for text in (word, f"The {word.strip()}", f"The\n{word.strip()}"):
        ids = tokenizer.encode(text)
        assert any(spelling == tuple(ids[-len(spelling) :]) for spelling in spellings), text
