"""The texts of tokens, read from a model's files, and what of them llguidance gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from handlers.guides.tokenizer import new_tokenizer
from handlers.guides.tokenizer_files import read_vocabulary
from lmi.executor import GuidedDecodingConfig

DEMO = Path("handlers/lmi_dist/demo/tokenizer.json")


def test_tokens_that_only_the_tokenizers_config_has_are_among_the_texts(tmp_path: Path) -> None:
    (tmp_path / DEMO.name).write_bytes(DEMO.read_bytes())
    before = read_vocabulary(tmp_path).encoded_vocab
    added_tokens = {
        "9": {"content": before[9]},
        "5000": {"content": "<more>", "special": True, "normalized": False},
    }
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added_tokens, "eos_token": "<more>"})
    )
    config = read_vocabulary(tmp_path)

    assert config.encoded_vocab == [*before, "<more>"]
    assert config.stop_token_ids == [len(before)]


@pytest.mark.parametrize(
    ("decoder", "written"),
    [
        ({"type": "ByteFallback"}, [b" a", b"\n"]),
        (
            {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Metaspace"}]},
            [b" a", b"\n"],
        ),
        ({"type": "Fuse"}, ["\u2581a".encode(), b"<0x0A>"]),
        (None, ["\u2581a".encode(), b"<0x0A>"]),
    ],
)
def test_a_decoder_that_llguidance_does_not_know_says_whether_texts_are_words(
    decoder: object, written: list[bytes]
) -> None:
    described = {"decoder": decoder, "added_tokens": [{"id": 0, "special": True}]}
    config = GuidedDecodingConfig(["<end>", "\u2581a", "<0x0A>"], json.dumps(described), [0])
    tokenizer = new_tokenizer(config, 3)

    assert [tokenizer.decode_bytes([token_id]) for token_id in (1, 2)] == written
