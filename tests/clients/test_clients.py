"""The clients that people use, as their makers publish them, at the APIs of a whole server with a
real model.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel

from tests.clients.venvs import run
from tests.served import Server, serve
from tests.tiny_models import embedding_model

# Including the installation of a venv
pytestmark = pytest.mark.timeout(500)
PROMPT = "The quick brown"
NUM_TOKENS = 8


@pytest.fixture(scope="package")
def said(demo: Server) -> str:
    """The model's greedy answer, as a bare HTTP client gets it."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": NUM_TOKENS}}
    answer = demo.post(body)
    assert answer.status == 200
    text = json.loads(answer.body)["generated_text"]
    assert text
    return str(text)


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_huggingface_hub(demo: Server, said: str) -> None:
    results = run("current", "hub.py", url(demo))
    assert results["plain"] == said
    assert "".join(results["streamed"]) == said and len(results["streamed"]) > 1

    details = results["details"]["details"]
    assert results["details"]["generated_text"] == said
    assert details["generated_tokens"] == len(details["tokens"]) == NUM_TOKENS
    assert "".join(token["text"] for token in details["tokens"]) == said
    assert details["finish_reason"] == "length" and details["prefill"]

    last = results["last_event"]
    assert last["generated_text"] == said and last["details"]["generated_tokens"] == NUM_TOKENS
    assert "temperature" in results["refusal"]

    chat = results["chat"]
    assert chat["whole"] and chat["whole"] == chat["streamed"]
    assert chat["num_tokens"] <= NUM_TOKENS and chat["finish_reason"] in ("stop", "length")

    answer = json.loads(chat["in_its_form"])
    assert list(answer) == ["ok"] and isinstance(answer["ok"], bool)


def test_text_generation(demo: Server, said: str) -> None:
    results = run("text-generation", "tgi.py", url(demo))
    assert results["plain"] == results["streamed"] == results["last_text"] == said
    assert results["num_tokens"] == NUM_TOKENS and results["num_prompt_tokens"] > 0
    assert results["finish_reason"] == "length"
    assert "best_of" in results["refusal"]


def test_openai(demo: Server, said: str) -> None:
    results = run("current", "openai_client.py", url(demo), "demo")
    assert results["models"] == ["demo"]

    completions = results["completions"]
    assert completions["whole"] == completions["streamed"] == "".join(completions["tokens"]) == said
    assert completions["num_tokens"] == len(completions["log_probs"]) == NUM_TOKENS
    assert completions["indexes"] == [0, 1, 2, 3]

    chat = results["chat"]
    assert chat["whole"] and chat["whole"] == chat["streamed"]
    assert chat["finish_reason"] in ("stop", "length") and 0 < chat["usage"] <= NUM_TOKENS

    responses = results["responses"]
    assert responses["whole"] and responses["whole"] == responses["streamed"] == responses["last"]
    assert (
        set(responses["statuses"]) <= {"completed", "incomplete"}
        and len(set(responses["num_tokens"])) == 1
    )

    tools = results["response_tools"]
    assert tools["arguments"][0] == tools["arguments"][1] and tools["answer"]

    for said in (tools["arguments"][0], tools["in_its_form"]):
        assert json.loads(said)["city"] in ("Rome", "Oslo")

    vllm = results["fields_of_vllm"]
    assert vllm["prompt_ids"][0] == vllm["prompt_ids"][1] and vllm["num_scored"] == len(
        vllm["prompt_ids"][0]
    )
    assert vllm["ids"] and vllm["ids"] == vllm["streamed_ids"]

    refused, unknown, previous = results["refusals"]
    assert "max_tokens" in refused and "nobody" in unknown and "previous_response_id" in previous


def test_openai_at_an_embedding_model_gets_what_transformers_computes(tmp_path: Path) -> None:
    folder = embedding_model(tmp_path / "embedder", "qwen3", is_matryoshka=True)
    with serve(
        folder, "option.model_name=embedder", "option.dtype=fp32", "frontend_workers=1"
    ) as server:
        results = run("current", "openai_embeddings.py", url(server), "embedder")

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def expected(ids: list[int], size: int | None = None) -> list[float]:
        with torch.inference_mode():
            state = model(torch.tensor([ids])).last_hidden_state[0, -1, :size]

        return torch.nn.functional.normalize(state, dim=0).tolist()  # type: ignore[no-any-return]

    texts = [tokenizer.encode(text).ids for text in results["texts"]]
    for got, ids in zip(
        results["whole"] + results["of_ids"], [*texts, [5, 6, 7], [8]], strict=True
    ):
        assert got == pytest.approx(expected(ids), abs=2e-5)

    assert results["as_numbers"] == results["whole"] and results["num_tokens"] == 4
    assert results["short"][0] == pytest.approx(expected(texts[0], 8), abs=2e-5)

    generation, nothing, long = results["refusals"]
    assert (
        "embedding model" in generation
        and nothing.startswith("input ")
        and long.startswith("dimensions ")
    )


def test_anthropic(demo: Server) -> None:
    results = run("current", "anthropic_client.py", url(demo), "demo")
    text = results["text"]

    assert text["whole"] and text["whole"] == text["streamed"] == text["joined"]
    assert (
        set(text["stop_reasons"]) <= {"max_tokens", "end_turn"}
        and len(set(text["num_tokens"])) == 1
    )
    assert len(set(text["num_prompt_tokens"])) == 1

    tools = results["tools"]
    assert tools["inputs"][0] == tools["inputs"][1] and tools["inputs"][0]["city"] in (
        "Rome",
        "Oslo",
    )
    assert tools["stop_reasons"] == ["tool_use", "tool_use"] and tools["answer"]

    first, second = results["loop"]
    # The whole conversation comes again, not the result alone
    assert second > first

    image, unknown = results["refusals"]
    assert image.startswith("invalid_request_error: messages[0].content[0]") and "image" in image
    assert unknown.startswith("not_found_error: ") and "nobody" in unknown


def test_langchain_openai(demo: Server, said: str) -> None:
    results = run("current", "langchain.py", url(demo), "demo")
    assert results["text"] == results["text_streamed"] == said
    assert results["chat"] and results["chat"] == results["chat_streamed"]


def test_litellm(demo: Server, said: str) -> None:
    results = run("litellm", "litellm_client.py", url(demo), "demo")
    assert results["triton"] == {"plain": said, "streamed": said}
    assert results["sagemaker"] == {"plain": said}
    assert (
        results["openai"]["plain"] and results["openai"]["plain"] == results["openai"]["streamed"]
    )
    assert results["too_long"] == "ContextWindowExceededError"
