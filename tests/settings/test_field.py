"""Settings of users of djl-serving and of AWS's newer images: each class starts, or stops with a
line that names the remedy.

The classes are those of several hundred public configurations; the rows are written for these
tests. Each is resolved on a machine with eight GPUs and vLLM, and on one with neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lmi.errors import BadConfiguration
from lmi.settings.resolve import Resolved
from lmi.shared.machine import Machine
from tests.settings import settling
from tests.settings.settling import CPU

EIGHT_GPUS = Machine(num_cores=96, gpus=tuple("01234567"))
SERVICE = "option.entryPoint=djl_python.lmi_vllm.vllm_async_service"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings, and their expected result on either machine: an engine, or a part of the refusal.

    `warned`: a part of each warning, in order.
    """

    text: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    gpus: str = "vllm"
    cpu: str = "lmi-dist"
    refused: str = ""  # on both machines
    refused_on_cpu: str = ""
    warned: tuple[str, ...] = ()
    # Where it differs from `warned`
    warned_on_cpu: tuple[str, ...] | None = None
    name: str = "tiny"
    is_dynamic: bool = False


USES_NOT = "lmi-dist does not use it"
DEGREE = "more with option.rolling_batch=vllm"
CASES = {
    # They start and have their usual meaning.
    "nothing": Case(),
    "engine and task of every notebook": Case(
        text="engine=MPI\noption.task=text-generation\noption.rolling_batch=auto\noption.dtype=fp16"
    ),
    "async mode": Case(text="engine=Python\noption.async_mode=true\noption.rolling_batch=disable"),
    "async mode and its entry point": Case(
        text=f"{SERVICE}\noption.async_mode=true\noption.rolling_batch=disable\noption.tensor_parallel_degree=max"
    ),
    "async service without the word": Case(text=f"{SERVICE}\noption.rolling_batch=disable"),
    "async mode in the environment": Case(
        environ={
            "OPTION_ASYNC_MODE": "TRUE",
            "OPTION_ROLLING_BATCH": "disable",
            "OPTION_ENTRYPOINT": "djl_python.lmi_vllm.vllm_async_service",
        }
    ),
    "dynamic batch": Case(
        text="option.rolling_batch=disable\nbatch_size=8\nmax_batch_delay=50", is_dynamic=True
    ),
    "several workers": Case(
        text="minWorkers=1\nmaxWorkers=1\njob_queue_size=500\nmax_idle_time=600"
    ),
    "time limits of the images": Case(
        environ={
            "PREDICT_TIMEOUT": "3600",
            "MODEL_LOADING_TIMEOUT": "1800",
            "SERVING_JOB_QUEUE_SIZE": "100",
        }
    ),
    "no retries": Case(environ={"SERVING_RETRY_THRESHOLD": "0", "SERVING_FAIL_FAST": "true"}),
    "no retries in the file": Case(text="retry_threshold=0"),
    "a container of TGI": Case(
        environ={
            "SM_NUM_GPUS": "1",
            "MAX_INPUT_LENGTH": "2048",
            "MAX_TOTAL_TOKENS": "4096",
            "MAX_BATCH_PREFILL_TOKENS": "8192",
            "MAX_CONCURRENT_REQUESTS": "128",
            "HF_TASK": "text-generation",
        }
    ),
    "TGI's own names": Case(
        environ={
            "NUM_SHARD": "1",
            "MAX_BATCH_TOTAL_TOKENS": "8192",
            "HF_MODEL_REVISION": "main",
            "CORS_ALLOW_ORIGIN": "https://app.example",
            "WAITING_SERVED_RATIO": "0.3",
            "QUANTIZE": "awq",
        },
        warned=("QUANTIZE: has no effect here, HF_MODEL_QUANTIZE is the method",),
    ),
    "variables for the worker": Case(text="option.env=NCCL_DEBUG=INFO,VLLM_LOGGING_LEVEL=DEBUG"),
    "Neuron's keys beside others": Case(text="option.n_positions=4096\noption.batch_size=4"),
    "attention by pages": Case(text="option.paged_attention=true\noption.device_map=auto"),
    "an LMI endpoint of JumpStart": Case(
        environ={
            "SAGEMAKER_ENV": "1",
            "SAGEMAKER_PROGRAM": "inference.py",
            "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/model/code",
            "SAGEMAKER_CONTAINER_LOG_LEVEL": "20",
            "SAGEMAKER_MODEL_SERVER_WORKERS": "1",
            "SAGEMAKER_MODEL_SERVER_TIMEOUT": "3600",
            "SAGEMAKER_ENABLE_LOAD_AWARE": "1",
            "MODEL_CACHE_ROOT": "/opt/ml/model",
            "OPTION_ROLLING_BATCH": "disable",
            "OPTION_ASYNC_MODE": "true",
            "OPTION_ENTRYPOINT": "djl_python.lmi_vllm.vllm_async_service",
            "OPTION_SERVED_MODEL_NAME": "model",
            "OPTION_TENSOR_PARALLEL_DEGREE": "max",
            "OPTION_MAX_MODEL_LEN": "8192",
        },
        name="model",
    ),
    "AWS's vLLM image": Case(
        environ={
            "SM_VLLM_MAX_MODEL_LEN": "8192",
            "SM_VLLM_MAX_NUM_SEQS": "32",
            "SM_VLLM_DTYPE": "bfloat16",
            "SM_VLLM_SERVED_MODEL_NAME": "/opt/ml/model",
            "SM_VLLM_ENABLE_AUTO_TOOL_CHOICE": "true",
            "SM_VLLM_TOOL_CALL_PARSER": "hermes",
            "SM_VLLM_REASONING_PARSER": "qwen3",
            "SM_VLLM_TRUST_REMOTE_CODE": "true",
            "SM_VLLM_ENABLE_LORA": "true",
        },
        name="/opt/ml/model",
        warned_on_cpu=("code that comes with a model is never run",),
    ),
    "AWS's vLLM image over GPUs": Case(
        environ={"SM_VLLM_TENSOR_PARALLEL_SIZE": "8"}, refused_on_cpu=DEGREE
    ),
    "what is vLLM's own in AWS's image": Case(
        environ={
            "SM_VLLM_ENABLE_CHUNKED_PREFILL": "true",
            "SM_VLLM_GPU_MEMORY_UTILIZATION": "0.9",
            "SM_VLLM_KV_CACHE_DTYPE": "fp8",
        },
        warned_on_cpu=(USES_NOT,) * 3,
    ),
    "adapters of AWS's vLLM image": Case(
        environ={"SM_VLLM_LORA_MODULES": '[{"name": "poet", "path": "/opt/ml/poet"}]'},
        warned=("in adapters/ beside the model, or registered at /adapters",),
    ),
    "AWS's SGLang image": Case(
        environ={
            "SM_SGLANG_CONTEXT_LENGTH": "8192",
            "SM_SGLANG_DTYPE": "bfloat16",
            "SM_SGLANG_SERVED_MODEL_NAME": "fox",
            "SM_SGLANG_TRUST_REMOTE_CODE": "true",
        },
        name="fox",
        warned_on_cpu=("code that comes with a model is never run",),
    ),
    "keys of newer LMI": Case(
        text="option.generation_config=auto\noption.no_enable_prefix_caching=true"
    ),
    "keys of other servers": Case(
        text="option.max_seq_len=64\noption.context_length=64\noption.lmcache_auto_config=true",
        warned=(
            "option.max_model_len is the context",
            "option.max_model_len is the context",
            "option.kv_transfer_config names LMCache's connector",
        ),
    ),
    # They are served under the given name.
    "the name of a start string": Case(
        environ={"SERVING_LOAD_MODELS": "test::MPI=/nowhere/model"}, name="test"
    ),
    "a served name": Case(text="option.served_model_name=llama-3", name="llama-3"),
    "several served names": Case(text="option.served_model_name=org/llama llama", name="org/llama"),
    # Forms of answers.
    "tools of Llama": Case(
        text="option.enable_auto_tool_choice=true\noption.tool_call_parser=llama3_json"
    ),
    "thoughts of DeepSeek": Case(
        text="option.enable_reasoning=true\noption.reasoning_parser=deepseek_r1"
    ),
    "thoughts and tools of Qwen": Case(
        text="option.reasoning_parser=qwen3\noption.tool_call_parser=qwen"
    ),
    "tools of Mistral": Case(text="option.tool_call_parser=mistral"),
    "tools of Kimi": Case(text="option.tool_call_parser=kimi_k2"),
    "tools of Qwen's coder": Case(text="option.tool_call_parser=qwen3_coder"),
    "tools of Step": Case(
        text="option.tool_call_parser=step3p5", warned=("this form stays plain text",)
    ),
    # They start with a warning of what differs.
    "lmi-dist over GPUs": Case(
        text="option.rolling_batch=lmi-dist\noption.tensor_parallel_degree=4",
        warned=("lmi-dist runs on one device, so the engine is vllm",),
        refused_on_cpu=DEGREE,
    ),
    "lmi-dist over all GPUs": Case(
        environ={"OPTION_ROLLING_BATCH": "lmi-dist", "TENSOR_PARALLEL_DEGREE": "max"},
        warned=("lmi-dist runs on one device, so the engine is vllm",),
        warned_on_cpu=(),
    ),
    "auto over GPUs": Case(text="option.tensor_parallel_degree=8", refused_on_cpu=DEGREE),
    "the scheduler": Case(text="option.rolling_batch=scheduler", gpus="lmi-dist"),
    "adapters with lmi-dist": Case(
        text="option.rolling_batch=lmi-dist\noption.enable_lora=true",
        gpus="lmi-dist",
    ),
    "adapters": Case(text="option.enable_lora=true\noption.max_loras=4\noption.max_lora_rank=64"),
    "scaled adapters, which vLLM has no more": Case(
        text="option.long_lora_scaling_factors=4.0\noption.lmcache_config_file=lmcache.yaml",
        warned=(
            "vllm does not use it, an adapter's own",
            "vllm does not use it, option.env=LMCACHE_CONFIG_FILE=",
        ),
        warned_on_cpu=(f"{USES_NOT}, an adapter's own", USES_NOT),
    ),
    "the usual folder of adapters": Case(text="option.adapters=adapters/"),
    "another folder of adapters": Case(
        text="option.adapters=lora", warned=("in the folder adapters/ beside the model",)
    ),
    "adapters by list": Case(
        text="option.adapter_ids=a/b,c/d\noption.adapter_names=one,two",
        warned=("registered at /adapters",) * 2,
    ),
    "lengths of TensorRT-LLM": Case(
        text="option.max_input_len=1024\noption.max_output_len=512",
        warned=("option.max_model_len sets", "max_new_tokens of a request bounds its answer"),
    ),
    "arguments of vLLM": Case(
        text="option.gpu_memory_utilization=0.9\noption.disable_custom_all_reduce=true\noption.enforce_eager=true",
        warned_on_cpu=(USES_NOT,) * 3,
    ),
    "tasks that generate text": Case(text="option.task=Text_Generation"),
    "a task of embeddings": Case(environ={"HF_TASK": "feature-extraction"}),
    "images and text": Case(
        environ={"HF_TASK": "image-text-to-text"},
        refused_on_cpu="image-text-to-text with option.rolling_batch=vllm",
    ),
    "images and text, as the SDK writes it": Case(
        text="option.task=Image-Text-to-Text",
        refused_on_cpu="image-text-to-text with option.rolling_batch=vllm",
    ),
    "images and text on lmi-dist": Case(
        text="option.rolling_batch=lmi-dist\noption.task=image_text_to_text",
        warned=("lmi-dist reads no images, so the engine is vllm",),
        refused_on_cpu="image-text-to-text with option.rolling_batch=vllm",
    ),
    "text to text": Case(environ={"HF_TASK": "text2text-generation"}),
    "a slip of the pen": Case(
        environ={"OPTION_ROLLING_BACK": "auto"},
        warned=("the closest known key is option.rolling_batch",),
    ),
    "a key of requests": Case(text="option.max_new_tokens=256", warned=("among its parameters",)),
    "an entry point of Neuron": Case(
        text="option.entryPoint=djl_python.transformers-neuronx",
        warned=("Neuron devices are not served here",),
    ),
    "several models": Case(
        environ={"SERVING_LOAD_MODELS": "a=/nowhere/a,b=/nowhere/b"},
        name="a",
        warned=("one model is served",),
    ),
    # They stop with what to write instead.
    "another task": Case(
        environ={"HF_TASK": "fill-mask"},
        refused="option.task='fill-mask' (HF_TASK): allowed is auto, text-generation,",
    ),
    "another task in the file": Case(
        text="option.task=text-classification",
        refused="engines here generate text or give embeddings",
    ),
    "TensorRT-LLM": Case(
        text="engine=MPI\noption.rolling_batch=trtllm\noption.tensor_parallel_degree=4",
        refused="(trtllm: the library tensorrt_llm is not installed)",
    ),
    "DeepSpeed": Case(
        text="engine=DeepSpeed", refused="what runs the model is option.rolling_batch (auto, vllm,"
    ),
    "FasterTransformer": Case(
        text="engine=FasterTransformer",
        refused="what runs the model is option.rolling_batch (auto, vllm,",
    ),
    "PyTorch": Case(
        text="engine=PyTorch", refused="what runs the model is option.rolling_batch (auto, vllm,"
    ),
    "Rust": Case(
        text="engine=Rust", refused="what runs the model is option.rolling_batch (auto, vllm,"
    ),
    "an entry point that is not there": Case(
        text="option.entryPoint=inference.py", refused="a Python file in the model's folder"
    ),
    "DeepSpeed in a start string": Case(
        environ={"SERVING_LOAD_MODELS": "test::DeepSpeed=/opt/ml/model"},
        refused="what runs the model is option.rolling_batch (auto, vllm,",
    ),
    "DeepSpeed's rolling batch": Case(
        text="option.rolling_batch=deepspeed", refused="auto chooses lmi-dist or vllm ("
    ),
    "Neuron's rolling batch": Case(
        text="option.rolling_batch=neuronx", refused="auto chooses lmi-dist or vllm ("
    ),
    "images": Case(
        text="option.entryPoint=djl_python.stable-diffusion", refused="images are not made here"
    ),
    "AWQ on lmi-dist": Case(
        text="option.rolling_batch=lmi-dist\noption.quantize=awq",
        warned=(
            (
                "option.quantize=awq (serving.properties:2): lmi-dist quantises by int4 and int8 alone, so the "  # noqa: E501
                "engine is vllm"
            ),
        ),
        refused_on_cpu="more with option.rolling_batch=vllm",
    ),
    "GPTQ on lmi-dist, in TGI's words": Case(
        environ={"OPTION_ROLLING_BATCH": "lmi-dist", "HF_MODEL_QUANTIZE": "gptq"},
        warned=("lmi-dist quantises by int4 and int8 alone, so the engine is vllm",),
        refused_on_cpu="more with option.rolling_batch=vllm",
    ),
    "int8 on lmi-dist": Case(
        text="option.rolling_batch=lmi-dist\noption.quantize=int8", gpus="lmi-dist"
    ),
    "vLLM where it is not": Case(
        text="option.rolling_batch=vllm", refused_on_cpu="(vllm: the library vllm is not installed)"
    ),
}


# What such users set, once without a word here
TOLD = """
ENDPOINT_SERVER_TIMEOUT MAX_NUM_SEQS MESSAGES_API_ENABLED MMS_DEFAULT_RESPONSE_TIMEOUT
MODEL_CACHE_ROOT PORT SAGEMAKER_ENABLE_LOAD_AWARE SAGEMAKER_ENV SAGEMAKER_MODEL_SERVER_WORKERS
SAGEMAKER_PROGRAM SGLANG_DISABLE_CUDNN_CHECK SGLANG_DSV4_FP4_EXPERTS
SGLANG_JIT_DEEPGEMM_PRECOMPILE TIKTOKEN_ENCODINGS_BASE TS_DEFAULT_RESPONSE_TIMEOUT USE_HF_TRANSFER
VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_ATTENTION_BACKEND VLLM_ENABLE_CUDA_COMPATIBILITY
VLLM_ENGINE_READY_TIMEOUT_S VLLM_USE_FLASHINFER_MOE_FP4 VLLM_USE_V2_MODEL_RUNNER
"""


def settle(case: Case, folder: Path, machine: Machine) -> Resolved:
    return settling.settle(folder, case.text, case.environ, machine=machine)


def check(case: Case, resolved: Resolved, engine: str, warned: tuple[str, ...]) -> None:
    config = resolved.config
    assert (config.engine.handler, config.model.name) == (engine, case.name)
    assert config.model.dynamic_batch == case.is_dynamic
    assert len(resolved.warnings) == len(warned), resolved.warnings
    for words, part in zip(resolved.warnings, warned, strict=True):
        assert part in words


def refusal(case: Case, folder: Path, machine: Machine) -> str:
    with pytest.raises(BadConfiguration) as caught:
        settle(case, folder, machine)

    return str(caught.value)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("name", CASES)
def test_settings_of_the_field_on_gpus(folder: Path, name: str) -> None:
    case = CASES[name]
    if case.refused:
        assert case.refused in refusal(case, folder, EIGHT_GPUS)
    else:
        check(case, settle(case, folder, EIGHT_GPUS), case.gpus, case.warned)


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize("name", CASES)
def test_settings_of_the_field_on_a_cpu(folder: Path, name: str) -> None:
    case = CASES[name]
    if words := case.refused or case.refused_on_cpu:
        assert words in refusal(case, folder, CPU)
    else:
        warned = case.warned if case.warned_on_cpu is None else case.warned_on_cpu
        check(case, settle(case, folder, CPU), case.cpu, warned)


@pytest.mark.usefixtures("no_vllm")
def test_a_variable_of_the_field_that_is_not_read_has_one_line(folder: Path) -> None:
    names = TOLD.split()
    resolved = settle(Case(environ=dict.fromkeys(names, "1")), folder, CPU)
    lines = [*resolved.warnings, *resolved.notes]
    for name in names:
        assert len([line for line in lines if re.search(rf"\b{name}\b", line)]) == 1, (name, lines)
