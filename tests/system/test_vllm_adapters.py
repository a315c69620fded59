"""LoRA adapters on a server with the real vLLM, by name at every API."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.handlers.vllm.small_adapters import write_adapter
from tests.served import Server, serve
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPT = "The quick"
NUM_TOKENS = 12
NAMES = ("formal", "rude")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("adapted") / "model"
    shutil.copytree(tiny_model("llama_wide"), folder)
    for seed, name in enumerate(NAMES):
        write_adapter(folder / "adapters" / name, seed)
    engine = ("option.rolling_batch=vllm", "option.dtype=fp32", "option.max_kv_cache_tokens=8192")
    lora = ("option.enable_lora=true", "option.max_loras=2", "option.max_lora_rank=8")
    with serve(folder, *engine, *lora, "frontend_workers=2", "option.enforce_eager=true") as server:
        yield server


def lmi(server: Server, adapter: Any) -> str:
    parameters = {"max_new_tokens": NUM_TOKENS}
    answer = server.post({"inputs": PROMPT, "parameters": parameters, "adapters": adapter})
    assert answer.status == 200, answer.body
    return str(json.loads(answer.body)["generated_text"])


def tgi(server: Server, adapter: str) -> str:
    parameters = {"max_new_tokens": NUM_TOKENS, "adapter_id": adapter}
    answer = server.post({"inputs": PROMPT, "parameters": parameters}, "/generate")
    assert answer.status == 200, answer.body
    return str(json.loads(answer.body)["generated_text"])


def openai(server: Server, adapter: str) -> str:
    body = {"model": adapter, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    answer = server.post(body, "/v1/completions")
    assert answer.status == 200, answer.body
    completion = json.loads(answer.body)
    assert completion["model"] == adapter
    return str(completion["choices"][0]["text"])


def triton(server: Server, adapter: str) -> str:
    body = {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "lora_name": adapter}
    answer = server.post(body, "/v2/models/model/generate")
    assert answer.status == 200, answer.body
    return str(json.loads(answer.body)["text_output"])


def test_every_api_takes_an_adapter_by_its_name(server: Server) -> None:
    base = lmi(server, None)
    said = {name: lmi(server, name) for name in NAMES}
    assert len({base, *said.values()}) == 3
    for name, text in said.items():
        assert text == lmi(server, [name]) == tgi(server, name) == openai(server, name) == triton(server, name)
    assert base == lmi(server, "")


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/invocations", {"adapters": "poetic"}, 424, "adapters must be one of the loaded adapters"),
        ("/generate", {"parameters": {"adapter_id": "poetic"}}, 422, "parameters.adapter_id must be one of the loaded"),
        ("/v1/completions", {"model": "poetic", "prompt": "a"}, 404, "the model 'poetic' does not exist"),
        (
            "/v2/models/model/generate",
            {"text_input": "a", "lora_name": "poetic"},
            400,
            "input 'lora_name' must be one of",
        ),
    ],
)
def test_an_unknown_adapter_is_refused_with_those_that_are_loaded(
    server: Server, path: str, body: dict[str, Any], status: int, sentence: str
) -> None:
    answer = server.post({"inputs": PROMPT, **body}, path)
    assert answer.status == status, answer.body
    assert sentence in answer.body.decode() and "formal, rude" in answer.body.decode()
