"""LoRA adapters on a server with a real engine: beside the model, registered while it runs, and
used at every API.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.handlers.vllm.small_adapters import merged, write_adapter
from tests.served import Server, serve
from tests.system.container import wait_until
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(300)

PROMPT = "The quick"
NUM_TOKENS = 12
MAX_LORAS = 2
MAX_RANK = 8
STATIC = ("formal", "rude")
HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
# Two log-probs this close count as equal
TIE = 1e-4
VLLM = ("option.rolling_batch=vllm", "option.enforce_eager=true")
LMI_DIST = ("option.rolling_batch=lmi-dist",)
# What each engine says of an adapter whose rank is too high, and of one whose weights are cut off.
REASONS = {
    "vllm": ("LoRA rank 16 is greater than max_lora_rank 8", "vLLM cannot load this adapter: "),
    "lmi-dist": ("rank 16 is over option.max_lora_rank=8", "lmi-dist cannot load this adapter: "),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two adapters beside it, and others further down."""
    folder = tmp_path_factory.mktemp("adapted") / "model"
    shutil.copytree(tiny_model("llama_wide"), folder)
    for seed, name in enumerate(STATIC):
        write_adapter(folder / "adapters" / name, seed)

    write_adapter(folder / "more" / "third", seed=3)
    write_adapter(folder / "more" / "wide", seed=4, rank=2 * MAX_RANK)
    return folder


@pytest.fixture(scope="module", params=["lmi-dist", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(folder: Path, engine: str) -> Iterator[Server]:
    settings = (
        *(VLLM if engine == "vllm" else LMI_DIST),
        "option.dtype=fp32",
        "option.max_kv_cache_tokens=8192",
    )

    lora = (
        "option.enable_lora=true",
        f"option.max_loras={MAX_LORAS}",
        f"option.max_lora_rank={MAX_RANK}",
    )
    with serve(folder, *settings, *lora, "frontend_workers=2") as server:
        yield server


def call(server: Server, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
    answer = server.request(method, path, body)
    answer_body: dict[str, Any] = json.loads(answer.body)
    return answer.status, answer_body


def register(
    server: Server, name: str, src: Path | str, **more: object
) -> tuple[int, dict[str, Any]]:
    return call(server, "POST", "/adapters", {"name": name, "src": str(src), **more})


def token_ids(server: Server, adapter: str | None) -> list[int]:
    parameters = {"max_new_tokens": NUM_TOKENS, "details": True}
    headers = {} if adapter is None else {HEADER: adapter}
    answer = server.post({"inputs": PROMPT, "parameters": parameters}, headers=headers)

    assert answer.status == 200, answer.body

    return [token["id"] for token in json.loads(answer.body)["details"]["tokens"]]


def check_merged(server: Server, model: Path, name: str | None, adapter: Path | None) -> list[int]:
    """Check that the server's greedy tokens are those of the checkpoint with the adapter's products
    added to it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = token_ids(server, name)
    prompt = AutoTokenizer.from_pretrained(model)(PROMPT).input_ids
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    reference = reference if adapter is None else merged(reference, adapter)
    with torch.inference_mode():
        rows = (
            reference(torch.tensor([[*prompt, *ids]]))
            .logits[0]
            .float()
            .log_softmax(-1)[len(prompt) - 1 : -1]
        )

    assert all(row[token_id] >= row.max() - TIE for row, token_id in zip(rows, ids, strict=True))
    return ids


def test_the_model_and_each_adapter_answer_as_a_checkpoint_with_it_merged_in(
    server: Server, folder: Path
) -> None:
    assert register(server, "third", "more/third", preload=False)[0] == 200
    places = {
        None: None,
        **{name: folder / "adapters" / name for name in STATIC},
        "third": folder / "more" / "third",
    }
    answers = [check_merged(server, folder, name, place) for name, place in places.items()]
    assert len({tuple(answer) for answer in answers}) == len(places), "an adapter changes nothing"
    assert call(server, "DELETE", "/adapters/third")[0] == 200


def text(server: Server, path: str, body: dict[str, Any]) -> str:
    answer = server.post(body, path)
    assert answer.status == 200, answer.body
    answer_body = json.loads(answer.body)
    return str(
        answer_body.get("generated_text")
        or answer_body.get("text_output")
        or answer_body["choices"][0]["text"]
    )


def test_every_api_takes_an_adapter_by_its_name(server: Server) -> None:
    short = {"max_new_tokens": NUM_TOKENS}
    for name in STATIC:
        messages = {
            text(server, "/invocations", {"inputs": PROMPT, "parameters": short, "adapters": name}),
            text(
                server, "/invocations", {"inputs": PROMPT, "parameters": short, "adapters": [name]}
            ),
            text(
                server, "/generate", {"inputs": PROMPT, "parameters": short | {"adapter_id": name}}
            ),
            text(
                server,
                "/v1/completions",
                {"model": name, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0},
            ),
            text(
                server,
                "/v2/models/model/generate",
                {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "lora_name": name},
            ),
        }

        assert len(messages) == 1


def test_an_adapter_that_the_engine_cannot_load_is_refused_with_its_reason(
    server: Server, folder: Path, engine: str
) -> None:
    too_wide, cut_off = REASONS[engine]
    for preload in (True, False):
        status, answer_body = register(server, "wide", "more/wide", preload=preload)
        assert status == 424 and too_wide in answer_body["error"]

    broken = (
        write_adapter(folder / "more" / f"broken on {engine}", seed=5) / "adapter_model.safetensors"
    )
    broken.write_bytes(broken.read_bytes()[:500])
    status, answer_body = register(server, "broken", f"more/{broken.parent.name}")

    assert (
        status == 424
        and cut_off in answer_body["error"]
        and str(folder) not in answer_body["error"]
    )
    assert [adapter["name"] for adapter in call(server, "GET", "/adapters")[1]["adapters"]] == list(
        STATIC
    )


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_re_would_never_finish_ends_neither_streams_nor_the_engine(
    server: Server, folder: Path, engine: str, field: str
) -> None:
    before = server.pid("lmi-engine-0")
    config = write_adapter(folder / "more" / f"{field} on {engine}", seed=6) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {field: {"(.*)*x": 4}}))
    parameters = {"max_new_tokens": 300, "ignore_eos_token": True, "details": True}
    with server.open({"inputs": PROMPT, "parameters": parameters, "stream": True}) as response:
        first = response.readline()
        status, answer_body = register(server, "endless", config.parent)
        last = json.loads([first, *response.readlines()][-1])

    assert last["details"]["generated_tokens"] == 300 and server.pid("lmi-engine-0") == before
    assert (
        status == 424 and f"{field} has '(.*)*x', which is more than a name" in answer_body["error"]
    )


def test_pinned_adapters_leave_a_place_for_the_others(server: Server) -> None:
    assert register(server, "third", "more/third")[0] == 200
    assert call(server, "POST", "/adapters/third/update", {"pin": True})[0] == 200
    status, answer_body = call(server, "POST", "/adapters/rude/update", {"pin": True})
    assert (status, answer_body["error"]) == (
        507,
        "2 adapters fit into a batch, and the pinned ones take all places",
    )
    assert len({tuple(token_ids(server, name)) for name in (None, "third", *STATIC)}) == 4
    assert call(server, "DELETE", "/adapters/third")[0] == 200


def test_a_stream_that_runs_with_an_adapter_goes_on_when_it_is_unregistered(server: Server) -> None:
    assert register(server, "third", "more/third")[0] == 200

    parameters = {"max_new_tokens": 60, "ignore_eos_token": True}
    alone = server.post({"inputs": PROMPT, "parameters": parameters}, headers={HEADER: "third"})
    body = {"inputs": PROMPT, "parameters": parameters, "stream": True}
    with server.open(body, headers={HEADER: "third"}) as response:
        first = response.readline()
        assert call(server, "DELETE", "/adapters/third")[0] == 200

        refused = server.post({"inputs": PROMPT}, headers={HEADER: "third"})
        assert refused.status == 424 and "Adapter third is not registered" in refused.body.decode()

        last = json.loads([first, *response.readlines()][-1])

    assert last["generated_text"] == json.loads(alone.body)["generated_text"]


def test_every_adapter_is_there_again_when_the_engine_was_killed(server: Server) -> None:
    assert register(server, "third", "more/third", pin=True)[0] == 200

    before = [token_ids(server, name) for name in (None, "third", *STATIC)]
    os.kill(engine := server.pid("lmi-engine-0"), signal.SIGKILL)
    wait_until(lambda: server.pids("lmi-engine-0") not in ([], [engine]), "there is a new engine")
    wait_until(lambda: server.ping() == 200, "it is ready", 120.0)

    assert [token_ids(server, name) for name in (None, "third", *STATIC)] == before

    description = {"name": "third", "src": "more/third", "preload": True, "pin": True}
    assert call(server, "GET", "/adapters/third") == (200, description)
    assert call(server, "DELETE", "/adapters/third")[0] == 200
