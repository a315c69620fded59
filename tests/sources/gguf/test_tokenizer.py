"""A tokenizer that is made of a GGUF file gives the ids that llama.cpp gives.

`llama_cpp_ids.json` has the ids of llama-cpp-python 0.3.36, with the beginning and special tokens
in the text, for 160 of 10,000 random texts, all of which were equal.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmi.errors import ModelUnusable
from lmi.shared.gguf_file import read_model
from lmi.sources.gguf.folder import open_into
from lmi.sources.gguf.tokenizer import WORDS_BY_NAME, tokenizer_of
from lmi.sources.gguf.values import GgufValues
from lmi.text.known_parts import is_known_pattern
from lmi.text.tokenizer import Tokenizer
from tests.gguf_files import LETTERS, SMALL_MODEL, floats, gemma3_file, smollm2_file, write_gguf

IDS = json.loads(Path(__file__).with_name("llama_cpp_ids.json").read_text())


def opened(folder: Path, changes: dict[str, Any]) -> Path:
    metadata = {key: value for key, value in (SMALL_MODEL | changes).items() if value is not None}
    file = write_gguf(
        folder / "m.gguf", metadata, {"token_embd.weight": floats([[0.0] * 32] * 260)}
    )
    (folder / "model").mkdir()
    open_into(file, folder / "model")
    return folder / "model"


@pytest.mark.parametrize(
    ("real_file", "name"), [(smollm2_file, "smollm2"), (gemma3_file, "gemma3")]
)
def test_ids_are_those_of_llama_cpp(
    real_file: Callable[[], Path], name: str, tmp_path: Path
) -> None:
    open_into(real_file(), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer._confined is None
    assert [tokenizer.encode(text) for text in IDS["texts"]] == IDS[name]


@pytest.mark.parametrize("pre", WORDS_BY_NAME)
def test_every_rule_for_words_is_one_that_needs_no_process_of_its_own(pre: str) -> None:
    assert all(is_known_pattern(pattern) for pattern in WORDS_BY_NAME[pre].patterns)


def test_a_folder_has_the_end_ids_the_templates_and_the_advice_of_its_file(tmp_path: Path) -> None:
    folder = opened(tmp_path, {})
    end_ids = [len(LETTERS) + 1, len(LETTERS) + 2]

    assert json.loads((folder / "generation_config.json").read_text()) == {
        "temperature": 0.5,
        "top_k": 7,
        "eos_token_id": end_ids,
    }
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert [file.name for file in (folder / "additional_chat_templates").iterdir()] == [
        "tool_use.jinja"
    ]
    assert (folder / "m.gguf").resolve() == (tmp_path / "m.gguf").resolve()


def test_control_tokens_are_special_and_what_users_defined_is_found_as_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(opened(tmp_path, {}))
    first, tool, merged = len(LETTERS) + 1, len(LETTERS) + 3, len(LETTERS)

    assert tokenizer.encode("ab<tool>") == [first, merged, tool]
    assert tokenizer.eos_ids == (first, first + 1)
    assert first in tokenizer.special_ids and tool not in tokenizer.special_ids
    assert tokenizer.decode([merged, tool]) == "ab<tool>"


@pytest.mark.parametrize(
    ("pre", "space", "merge"),
    [
        ("deepseek-coder", "\u2028", "Ġ â"),
        ("deepseek-llm", "\u2028", "Ġ â"),
        ("deepseek-llm", "\u3000", "Ġ ã"),
    ],
)
def test_a_space_beyond_ascii_is_no_letter_or_mark_of_a_range(
    pre: str, space: str, merge: str, tmp_path: Path
) -> None:
    """llama.cpp leaves both spaces in one piece, in which the merge is found."""
    merged = len(LETTERS)
    changes = {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*LETTERS, merge.replace(" ", ""), "<s>", "<|eot_id|>", "<tool>"],
        "tokenizer.ggml.merges": [merge],
    }
    assert merged in Tokenizer.load(opened(tmp_path, changes)).encode(f"1 {space}1")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model must be gpt2 or llama"),
        ({"tokenizer.ggml.pre": "newest"}, "tokenizer.ggml.pre must be one of llama-bpe"),
        ({"tokenizer.ggml.tokens": None}, "its metadata has no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "its tokenizer has the token 'a' twice"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of texts"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type has 1 items"),
        ({"tokenizer.ggml.merges": None}, "its metadata has no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token must be true or false"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [1.0]},
            "tokenizer.ggml.scores must be 260 finite numbers",
        ),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [float("nan")] * 260},
            "tokenizer.ggml.scores must be 260 finite numbers",
        ),
        (
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": ["a" * 50_000],
                "tokenizer.ggml.token_type": None,
                "tokenizer.ggml.scores": [0.0],
            },
            "its tokens are too long",
        ),
    ],
)
def test_a_broken_vocabulary_is_named(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    metadata = {key: value for key, value in (SMALL_MODEL | changes).items() if value is not None}
    file = write_gguf(tmp_path / "m.gguf", metadata)
    with pytest.raises(ModelUnusable) as raised:
        tokenizer_of(GgufValues(read_model(file)))
    assert str(raised.value).startswith(f"{file}: {says}")


def test_the_best_score_is_joined_first(tmp_path: Path) -> None:
    """▁ab is (▁, ab), because ab scores better than ▁a."""
    tokens = ["<unk>", "<s>", "▁", "a", "b", "c", "ab", "▁a", "bc", "<0x64>"]
    folder = opened(
        tmp_path,
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [2, 3, 1, 1, 1, 1, 1, 1, 1, 6],
            "tokenizer.ggml.scores": [0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, 0.0],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 0,
        },
    )
    tokenizer = Tokenizer.load(folder)

    assert [tokens[index] for index in tokenizer.encode("abcd")] == [
        *("<s>", "▁", "ab", "c", "<0x64>"),
    ]
