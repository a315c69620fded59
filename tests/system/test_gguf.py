"""Servers of GGUF files: real ones answer, and broken ones end the start in one line."""

import json
from pathlib import Path

import pytest

from lmi.errors import ModelUnusable
from tests.gguf_files import gemma3_file, smollm2_file
from tests.served import launch, serve
from tests.system.container import START_TIMEOUT_S


def test_a_real_file_answers_a_chat_with_its_own_template(tmp_path: Path) -> None:
    settings = ("option.model_name=smollm2", f"download_dir={tmp_path}", "frontend_workers=1")
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "smollm2", "messages": [question], "temperature": 0, "max_tokens": 24}
    with serve(smollm2_file(), *settings) as server:
        idle_bytes = sum(map(proportional_bytes, server.pids()))
        answer = json.loads(server.request("POST", "/v1/chat/completions", body).body)
        info = json.loads(server.request("GET", "/server_info").body)

    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"

    weight_bytes = smollm2_file().stat().st_size
    print(f"all processes have {idle_bytes / 1e6:.0f} MB, the file {weight_bytes / 1e6:.0f} MB")
    assert idle_bytes <= 1.25 * weight_bytes + 120e6
    [engine] = info["models"]["smollm2"]["loaded"]
    memory = engine["memory"]
    assert 0.95 * weight_bytes < memory["weights_bytes"] < 1.1 * weight_bytes
    assert 0 < memory["rest_bytes"] < 120e6


def test_a_base_model_with_windows_and_k_quants_continues_a_text(tmp_path: Path) -> None:
    settings = (f"download_dir={tmp_path}", "frontend_workers=1")
    body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 4}}
    with serve(gemma3_file(), *settings) as server:
        answer = json.loads(server.request("POST", "/invocations", body).body)
    # As llama.cpp has it.
    assert answer["generated_text"] == " the capital of the"


def proportional_bytes(pid: int) -> int:
    """The memory of a process, with its share of what several have in common."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("Pss:")]
    return 1024 * int(line.split()[1])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GGUF" + bytes(3), "it ends within its head"),
        (b"<html>" + bytes(100), "is not a GGUF file"),
    ],
)
def test_a_broken_file_ends_the_start_with_one_line(data: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with launch(file, {"SERVING_DOWNLOAD_DIR": str(tmp_path / "cache")}) as server:
        assert server.wait(START_TIMEOUT_S) == ModelUnusable.exit_code
        last = server.last_words()
    assert str(file) in str(last) and says in str(last)
