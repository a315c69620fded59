"""Why TensorRT-LLM does not start, in one line, with what helps."""

import re
from collections.abc import Callable
from typing import NamedTuple

from handlers.driven.arguments import first_line, named, refusal
from lmi.errors import ModelUnusable, NoMemory, StartError
from lmi.settings.config import EngineConfig

OUT_OF_MEMORY = (
    "set option.kv_cache_free_gpu_mem_fraction, option.max_rolling_batch_prefill_tokens, "
    "option.max_model_len or option.max_rolling_batch_size lower, or "
    "option.tensor_parallel_degree higher"
)
FROM_THE_IMAGE = "serve from the image of target trtllm"
# Patterns of what errors say, the most telling first, and what helps.
ADVICE = {
    r"Unknown architecture for|architecture \S+ is not supported": (
        "its PyTorch engine has no such model: take option.rolling_batch=vllm, or a newer "
        "TensorRT-LLM"
    ),
    r"Only \d+ GPUs are available": (
        "set option.tensor_parallel_degree or option.pipeline_parallel_degree lower, or make more "
        "GPUs visible"
    ),
    "insufficient GPU memory|out of memory|OutOfMemory": OUT_OF_MEMORY,
    "no CUDA-capable device|No CUDA GPUs are available|Found no NVIDIA driver|not compiled with "
    "CUDA": (
        "TensorRT-LLM runs on an NVIDIA GPU: give the container one (docker run --gpus all), or "
        "take another engine"
    ),
    "libmpi|mpi4py|MPI_Init|orted|prte": (
        f"install Open MPI (apt-get install libopenmpi-dev openmpi-bin), or {FROM_THE_IMAGE}"
    ),
    r"named 'tensorrt_llm(\.llmapi)?'|cannot import name 'LLM'": (
        f"the package is not whole: its wheel on PyPI is a stub that fetches the real one; "
        f"{FROM_THE_IMAGE}"
    ),
    r"cannot import name .*tensorrt_llm|named 'tensorrt_llm\.": (
        f"this TensorRT-LLM has it elsewhere or no longer: {FROM_THE_IMAGE}"
    ),
    "cannot open shared object|undefined symbol": (
        f"TensorRT-LLM needs its own CUDA libraries: {FROM_THE_IMAGE}"
    ),
}


def explained(error: BaseException, model: str, config: EngineConfig) -> StartError:
    """Return the error that explains `error`, which ended the start.

    The telling one may be among its causes: a process of TensorRT-LLM reports its error so.
    """
    if isinstance(error, StartError):
        return error

    bad_values = refusal(error, lambda place: named(config, ".".join(map(str, place))))
    if bad_values is not None:
        return bad_values

    chain = _linked(error, lambda later: later.__cause__ or later.__context__)
    reason = _known_reason(chain)
    if reason is None:
        root = _linked(error, lambda later: later.__cause__)[-1]
        return ModelUnusable(f"{model}: TensorRT-LLM cannot start: {first_line(_text(root))}")

    kind = NoMemory if reason.advice is OUT_OF_MEMORY else ModelUnusable
    return kind(f"{model}: TensorRT-LLM cannot start: {first_line(reason.line)}; {reason.advice}")


class _Reason(NamedTuple):
    """The telling line of an error, and what helps."""

    line: str
    advice: str


def _known_reason(chain: list[BaseException]) -> _Reason | None:
    """Return the reason in the most telling of the errors, or None if there is no advice for
    any.
    """
    for pattern, advice in ADVICE.items():
        for linked in chain:
            text = _text(linked)
            match = re.search(pattern, text, re.I)
            if match is not None:
                telling = match[0].partition("\n")[0]
                line = next(line for line in text.splitlines() if telling in line)
                return _Reason(line, advice)

    return None


def _linked(
    error: BaseException, before: Callable[[BaseException], BaseException | None]
) -> list[BaseException]:
    """Return the error and those that led to it, each behind the one that it caused.

    `before` says which error has caused one.
    """
    chain: list[BaseException] = []
    earlier: BaseException | None = error
    while earlier is not None and earlier not in chain:
        chain.append(earlier)
        earlier = before(earlier)

    return chain


def _text(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__
