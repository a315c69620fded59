"""A folder and an environment that were made for another image of AWS start here unchanged. What
is not read of them is said, in one line each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gguf_files import smollm2_file
from tests.served import Server
from tests.system.sagemaker.entry_points import started
from tests.tiny_models import tiny_model

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is"}]
GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def chat(server: Server, model: str, path: str = "/invocations") -> dict[str, Any]:
    answer = server.post({"model": model, "messages": MESSAGES, **GREEDY}, path)
    assert answer.status == 200, answer.body
    body: dict[str, Any] = json.loads(answer.body)
    return body


def num_tokens_at_most(server: Server) -> int:
    """Return the tokens of a chat that wants more than the context has room for."""
    body = {"messages": MESSAGES, **GREEDY, "max_tokens": 100}
    answer = server.post(body, CHAT)
    num_tokens: int = json.loads(answer.body)["usage"]["total_tokens"]
    return num_tokens


def assert_warned_once(server: Server, names: Sequence[str]) -> None:
    """Assert that each name has one line of warning, and that no other line is one."""
    warnings = [line for line in server.log_lines() if line.get("level") == "WARNING"]
    messages = [str(line["message"]) for line in warnings]
    for name in names:
        assert len([message for message in messages if name in message]) == 1, (name, messages)

    assert len(messages) == len(names), messages


def empty_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def test_an_environment_of_the_vllm_image_starts_unchanged(tmp_path: Path) -> None:
    model = tiny_model("llama")
    environ = {
        "SM_VLLM_MODEL": str(model),
        "SM_VLLM_SERVED_MODEL_NAME": '["fox", "org/fox"]',
        "SM_VLLM_MAX_MODEL_LEN": "64",
        "SM_VLLM_MAX_NUM_SEQS": "2",
        "SM_VLLM_TENSOR_PARALLEL_SIZE": "1",
        "SM_VLLM_DTYPE": "float32",
        "SM_VLLM_TRUST_REMOTE_CODE": "false",
        "SM_VLLM_ENABLE_AUTO_TOOL_CHOICE": "true",
        "SM_VLLM_TOOL_CALL_PARSER": "hermes",
        "SM_VLLM_GPU_MEMORY_UTILIZATION": "0.9",
        "SM_VLLM_MIDDLEWARE": "sagemaker_serve.SageMakerRouteMiddleware",
        "HF_MODEL_ID": "owner/not-served",
    }
    with started(empty_folder(tmp_path), ["serve"], **environ) as server:
        server.wait_ready()

        for name in ("fox", "org/fox", str(model), ""):
            assert chat(server, name)["model"] == "fox"

        assert num_tokens_at_most(server) == 64
        names = ["SM_VLLM_GPU_MEMORY_UTILIZATION", "SM_VLLM_MIDDLEWARE", "HF_MODEL_ID"]
        assert_warned_once(server, names)


def test_an_environment_of_the_sglang_image_starts_unchanged(tmp_path: Path) -> None:
    environ = {
        "SM_SGLANG_MODEL_PATH": str(tiny_model("llama")),
        "SM_SGLANG_SERVED_MODEL_NAME": "fox",
        "SM_SGLANG_HOST": "127.0.0.1",
        "SM_SGLANG_CONTEXT_LENGTH": "64",
        "SM_SGLANG_MAX_RUNNING_REQUESTS": "2",
        "SM_SGLANG_TP": "1",
        "SM_SGLANG_DTYPE": "float32",
        "SM_SGLANG_DISABLE_RADIX_CACHE": "true",
        "SM_SGLANG_ATTENTION_BACKEND": "flashinfer",
        "SM_SGLANG_LORA_PATHS": "pirate=/opt/ml/pirate",
    }
    with started(empty_folder(tmp_path), ["serve"], **environ) as server:
        server.wait_ready()

        assert chat(server, "fox", CHAT)["model"] == "fox"
        assert num_tokens_at_most(server) == 64
        assert_warned_once(server, ["SM_SGLANG_ATTENTION_BACKEND", "SM_SGLANG_LORA_PATHS"])


def test_an_environment_of_the_llama_cpp_image_starts_unchanged(tmp_path: Path) -> None:
    models = tmp_path / "models" / "fox"
    models.mkdir(parents=True)
    (models / "fox-Q8_0.gguf").symlink_to(smollm2_file())
    environ = {
        "SM_LLAMA_CPP_MODEL_DIR": str(models.parent),
        "SM_LLAMA_CPP_CTX_SIZE": "64",
        "SM_LLAMA_CPP_N_GPU_LAYERS": "99",
        "SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"),
    }
    with started(empty_folder(tmp_path), ["serve"], **environ) as server:
        server.wait_ready()

        body = {"prompt": "What is", **GREEDY}
        answer = server.post(body, "/v1/completions")
        assert (answer.status, json.loads(answer.body)["usage"]["completion_tokens"]) == (200, 6)
        assert_warned_once(server, ["SM_LLAMA_CPP_N_GPU_LAYERS"])


def test_a_folder_and_an_environment_of_lmi_28_start_unchanged(tmp_path: Path) -> None:
    folder = empty_folder(tmp_path)
    lines = [
        "engine=Python",
        f"option.model_id={tiny_model('llama')}",
        "option.async_mode=true",
        "option.rolling_batch=disable",
        "option.entryPoint=djl_python.lmi_vllm.vllm_async_service",
        "option.tensor_parallel_degree=max",
        "option.max_model_len=64",
        "option.max_rolling_batch_size=2",
        "option.long_lora_scaling_factors=4.0",
    ]
    (folder / "serving.properties").write_text("\n".join(lines) + "\n")
    environ = {
        "OPTION_MODEL_LOADING_TIMEOUT": "240",
        "OPTION_PREDICT_TIMEOUT": "60",
        "SERVING_MIN_WORKERS": "1",
        "SERVING_MAX_WORKERS": "1",
        "SAGEMAKER_MODEL_SERVER_WORKERS": "1",
    }
    with started(folder, ["djl-serving", "-s", "."], **environ) as server:
        server.wait_ready()

        parameters = {"max_new_tokens": 6, "ignore_eos_token": True}
        answer = server.post({"inputs": "What is", "parameters": parameters})
        assert answer.status == 200 and json.loads(answer.body)["generated_text"]
        assert chat(server, "")["choices"][0]["finish_reason"] == "length"
        assert_warned_once(server, ["option.long_lora_scaling_factors"])
