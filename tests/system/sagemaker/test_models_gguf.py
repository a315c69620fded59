"""GGUF files among several models: POST /models takes the path of one, or of a folder with one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gguf_files import LETTERS, SMALL_MODEL
from tests.system.sagemaker.several import SeveralServer, error_of, several_models
from tests.tiny_gguf import write_tiny_gguf

# The tiny model has tokens for more letters than there are.
TOKENS = [*LETTERS, *(f"[{number}]" for number in range(320 - len(LETTERS)))]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * len(TOKENS),
    "tokenizer.ggml.merges": SMALL_MODEL["tokenizer.ggml.merges"],
    "tokenizer.ggml.bos_token_id": len(LETTERS),
    "tokenizer.ggml.eos_token_id": len(LETTERS) + 1,
}


@pytest.fixture(scope="module")
def server() -> Iterator[SeveralServer]:
    with several_models() as running:
        yield running


@pytest.fixture(scope="module")
def file(server: SeveralServer) -> Path:
    file = server.store / "files" / "fox.gguf"
    file.parent.mkdir()
    return write_tiny_gguf("llama", file, TOKENIZER)


def test_a_gguf_file_is_loaded_by_its_path_or_its_folder_and_answers(
    server: SeveralServer, file: Path
) -> None:
    for name, url in (("by-file", file), ("by-folder", file.parent), ("again", file)):
        loaded = server.load(name, str(url))
        assert loaded.status == 200, loaded.body
        assert server.described(name)["modelUrl"] == str(url)
        answer = server.invoke(name)
        assert answer.status == 200 and json.loads(answer.body)["generated_text"]
        assert server.unload(name).status == 200


def test_a_gguf_file_that_cannot_be_read_is_the_clients_fault(server: SeveralServer) -> None:
    broken = server.store / "broken.gguf"
    broken.write_bytes(b"<html>" + bytes(100))
    refused = server.load("broken", str(broken))
    assert refused.status == 400
    assert "is not a GGUF file" in error_of(refused)
    assert server.folders() == []


def test_a_gguf_file_outside_of_the_store_is_refused(
    server: SeveralServer, file: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside.gguf"
    shutil.copyfile(file, outside)
    (server.store / "link.gguf").symlink_to(outside)
    folder = server.store / "named"
    folder.mkdir()
    (folder / "serving.properties").write_text(f"option.model_id={outside}\n")

    for url in (outside, server.store / "link.gguf", folder):
        refused = server.load("outside", str(url))
        assert refused.status == 400, refused.body
        assert "below model_store" in error_of(refused)

    missing = server.load("missing", str(server.store / "nothing.gguf"))
    assert (missing.status, "does not exist" in error_of(missing)) == (400, True)
