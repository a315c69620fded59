"""Explains why TensorRT-LLM did not start, in one line that says what to change. It does not import tensorrt_llm.

The words are those of its published sources (py_executor_creator, modeling_auto, llm), of PyTorch, and of the dynamic
linker.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pydantic import ValidationError

from handlers.base.engine_arguments import first_line, named, refused
from lmi.errors import ModelUnusable, NoMemory, StartError
from lmi.settings.config import EngineConfig

OUT_OF_MEMORY = (
    "set option.kv_cache_free_gpu_mem_fraction, option.max_rolling_batch_prefill_tokens, option.max_model_len or "
    "option.max_rolling_batch_size lower, or option.tensor_parallel_degree higher"
)
# What the most telling error in a chain says, in the order in which they are looked for, and what helps.
ADVICE = (
    (
        re.compile(r"Unknown architecture for|architecture \S+ is not supported", re.I),
        "its PyTorch engine has no such model: take option.rolling_batch=vllm, or a newer TensorRT-LLM",
    ),
    (
        re.compile(r"Only \d+ GPUs are available", re.I),
        "set option.tensor_parallel_degree or option.pipeline_parallel_degree lower, or make more GPUs visible",
    ),
    (re.compile(r"insufficient GPU memory|out of memory|OutOfMemory", re.I), OUT_OF_MEMORY),
    (
        re.compile(r"no CUDA-capable device|No CUDA GPUs are available|Found no NVIDIA driver|not compiled with CUDA"),
        "TensorRT-LLM runs on an NVIDIA GPU: give the container one (docker run --gpus all), or take another engine",
    ),
    (
        re.compile(r"libmpi|mpi4py|MPI_Init|orted|prte", re.I),
        "install Open MPI (apt-get install libopenmpi-dev openmpi-bin), or serve from the image of target trtllm",
    ),
    (
        re.compile(r"named 'tensorrt_llm(\.llmapi)?'|cannot import name 'LLM'"),
        "the package is not whole: its wheel on PyPI is a stub that fetches the real one; serve from the image of "
        "target trtllm",
    ),
    (
        re.compile(r"cannot import name .*tensorrt_llm|named 'tensorrt_llm\."),
        "this TensorRT-LLM has it elsewhere or no longer: serve from the image of target trtllm",
    ),
    (
        re.compile(r"cannot open shared object|undefined symbol"),
        "TensorRT-LLM needs its own CUDA libraries: serve from the image of target trtllm",
    ),
)


def explained(error: BaseException, model: str, config: EngineConfig) -> StartError:
    """Explain `error`, which ended the start. A process of TensorRT-LLM reports its own as the cause of another."""
    if isinstance(error, StartError):
        return error
    if isinstance(error, ValidationError):
        return refused(error, lambda place: named(config, ".".join(map(str, place))))
    chain = _linked(error, lambda each: each.__cause__ or each.__context__)
    for pattern, advice in ADVICE:
        for each in chain:
            if found := pattern.search(_text(each)):
                line = next(line for line in _text(each).splitlines() if found[0].partition("\n")[0] in line)
                kind = NoMemory if advice is OUT_OF_MEMORY else ModelUnusable
                return kind(f"{model}: TensorRT-LLM cannot start: {first_line(line)}; {advice}")
    root = _linked(error, lambda each: each.__cause__)[-1]
    return ModelUnusable(f"{model}: TensorRT-LLM cannot start: {first_line(_text(root))}")


def _linked(error: BaseException, before: Callable[[BaseException], BaseException | None]) -> list[BaseException]:
    """The error and those that led to it, each after the one that it caused."""
    chain: list[BaseException] = []
    earlier: BaseException | None = error
    while earlier is not None and earlier not in chain:
        chain.append(earlier)
        earlier = before(earlier)
    return chain


def _text(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__
