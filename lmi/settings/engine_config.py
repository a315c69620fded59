"""The settings of the engine replicas of a model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from lmi.settings import annexes
from lmi.settings.kinds import LARGEST, MILLISECONDS, Kind, TooLarge, choice, integer, matching, several, word
from lmi.settings.option import PICKLES, REMOTE_CODE, option
from lmi.user_code.options import UserCodeOptions

LENGTH_UNITS = {"": 1, "k": 10**3, "m": 10**6, "K": 1 << 10, "M": 1 << 20}


def _length(number: str, unit: str) -> int:
    """Return a length like vLLM: k and m are decimal, K and M binary."""
    length = round(float(number) * LENGTH_UNITS[unit])
    if length < 1:
        raise ValueError
    if length > LARGEST:
        raise TooLarge(f"at most {LARGEST} tokens, or auto")
    return length


def _variables(text: str) -> dict[str, str]:
    """Parse NAME=VALUE pairs. A comma ends a value only if a name and `=` follow, so a value may hold commas."""
    variables = {}
    for pair in re.split(r"[;,](?=\s*[A-Za-z_]\w*=)", text):
        name, equals, value = pair.strip().partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or not equals or "\0" in value:
            raise ValueError
        variables[name] = value
    return variables


LENGTH = matching("", r"([0-9]{1,100}(?:\.[0-9]{1,6}(?=[km]))?)([kmKM]?)", _length)
LENGTH_OR_AUTO = Kind(
    "a whole number of at least 1, as in 4096, 32k (32000) or 32K (32768), or auto",
    word({"auto": None, "-1": None}, LENGTH.parse),
    unit="TOKENS|auto",
)
DEGREE = Kind("a whole number 1..1024, or max", word({"max": "max"}, integer(1, 1024).parse), unit="N|max")
DEVICE = matching("a number", "[0-9]{1,4}")
DEVICES = Kind("* or GPU numbers with ; between", word({"*": None}, several("", DEVICE, once=str).parse), unset="*")
VARIABLES = Kind("NAME=VALUE, several with , between", _variables, unit="NAME=VALUE")
DTYPE = choice(
    "auto", "fp32", "bf16", "fp16", float32="fp32", float="fp32", bfloat16="bf16", float16="fp16", half="fp16"
)
HANDLERS = ("auto", "lmi-dist", "vllm", "trtllm", "scheduler", "disable")
HANDLER = Kind(f"{', '.join(HANDLERS)}, or the name of another engine", str, words=HANDLERS)


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig:
    """Where the replicas run, and how long they may take."""

    tensor_parallel_degree: int = option(
        1, DEGREE, names="option.tensor_parallel_size TENSOR_PARALLEL_DEGREE SM_NUM_GPUS TENSOR_PARALLEL_SIZE"
    )
    """GPUs that share each layer, or groups of cores on a CPU (vllm); max: all GPUs"""
    pipeline_parallel_degree: int = option(
        1, integer(1, 1024), names="option.pipeline_parallel_size PIPELINE_PARALLEL_DEGREE"
    )
    """GPUs that share the layers in turn"""
    environ: dict[str, str] = option({}, VARIABLES, key="option.env", is_safe=False)  # LD_PRELOAD runs code
    """environment of engines and of the model's own code, as A=1,B=2"""
    num_threads: int | None = option(None, integer(1, 1024))
    """threads of an engine on a CPU"""
    bind_cores: bool = option(True)
    """keep an engine on a CPU to its cores and front ends to the rest, where both have enough"""
    min_workers: ClassVar = option(None, integer(1, 1024), key="minWorkers", names="SAGEMAKER_NUM_MODEL_WORKERS")
    """least number of replicas"""
    max_workers: ClassVar = option(None, integer(1, 1024), key="maxWorkers", names="SAGEMAKER_NUM_MODEL_WORKERS")
    """most replicas"""
    load_on_devices: ClassVar = option(None, DEVICES, key="load_on_devices")
    """GPUs to use, as in 0;1"""
    step_timeout_s: float = option(60.0, key="step_timeout", names="option.step_timeout")
    """seconds without a step while work waits: the engine hangs"""
    first_step_timeout_s: float = option(300.0, key="first_step_timeout")
    """the same for an engine's first step"""
    model_loading_timeout_s: float = option(
        1200.0,
        key="model_loading_timeout",
        names="option.model_loading_timeout MODEL_LOADING_TIMEOUT SAGEMAKER_STARTUP_TIMEOUT",
    )
    """seconds for loading the model"""
    retry_threshold: int = option(
        3, integer(0, 1000), key="retry_threshold", names="option.retry_threshold PROCESS_MAX_START_RETRIES"
    )
    """deaths of an engine in retry_window, then the server ends, if no other replica serves; 0 as 1: the first one"""
    retry_window_s: float = option(600.0, key="retry_window")
    """seconds in which those deaths are counted"""
    strict: bool = option(False)
    """an unknown option.* stops the start"""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(annexes.AbilitiesConfig, ReplicasConfig, UserCodeOptions):
    """Settings of the engine replicas. None means that the engine chooses."""

    num_engines: int = 1
    ports: tuple[int, ...] = ()  # TCP ports of all replicas in turn, by Handler.port_variables; (): any free ones
    device_ids: tuple[str, ...] = ()  # GPUs of all replicas in turn, as CUDA_VISIBLE_DEVICES names them; () on a CPU
    max_queue_size: int | None = None  # requests an Executor holds before Overloaded; None: the front end bounds it
    options: dict[str, str] = field(default_factory=dict)  # every other option.*, for engines that know more
    option_sources: dict[str, str] = field(default_factory=dict, compare=False)  # where each option.* was given

    trust_remote_code: bool = option(
        False,
        names="HF_MODEL_TRUST_REMOTE_CODE HF_TRUST_REMOTE_CODE",
        otherwise="code that comes with a model is never run",
        refused_by=REMOTE_CODE,
    )
    """run Python code that comes with the model (vllm, trtllm)"""
    install_requirements: ClassVar[bool | None] = option(True, names="STANDARD_AUTO_INSTALL_REQ")
    """install the model's requirements.txt for its own code; nothing: true"""
    allow_pickle: bool = option(False, refused_by=PICKLES)
    """load pickled weights, which can run code"""
    handler: str = option("auto", HANDLER, key="option.rolling_batch")
    """engine: auto, lmi-dist, vllm, trtllm, scheduler, disable"""
    async_mode: ClassVar[bool | None] = option(None, has_flag=False)
    """with option.rolling_batch=disable: the engine of auto, in-flight batching, the LMI schema"""
    dtype: str = option("auto", DTYPE)
    """type of the weights: auto, fp32, bf16, fp16"""
    quantize: str | None = option(
        None,
        matching("the name of a method, such as int8", r"[A-Za-z0-9_-]{1,64}"),
        names="option.quantization HF_MODEL_QUANTIZE",
    )
    """quantise the weights at load; int8 on the embedded engine needs its native kernels"""
    device: str = option("auto", choice("auto", "cpu", "cuda"))
    """auto: cuda where a GPU is visible"""
    max_num_sequences: int | None = option(
        None, integer(1, 65536), key="option.max_rolling_batch_size", names="option.max_num_seqs MAX_BATCH_SIZE"
    )
    """sequences that run at once"""
    max_prefill_tokens: int | None = option(
        None,
        key="option.max_rolling_batch_prefill_tokens",
        names="option.max_num_batched_tokens MAX_BATCH_PREFILL_TOKENS",
    )
    """prompt tokens of one step"""
    batch_size: ClassVar = option(None, integer(1, 65536), key="batch_size", names="max_dynamic_batch_size")
    """sequences that run at once with option.rolling_batch=disable"""
    max_batch_delay: ClassVar = option(None, integer(0), key="max_batch_delay")
    """milliseconds to wait for a batch; accepted, nothing waits"""
    max_step_ms: float | None = option(
        None, MILLISECONDS, otherwise="option.max_rolling_batch_prefill_tokens bounds a step"
    )
    """longest step of the embedded engine that takes prompt tokens beside answers; nothing: it measures and chooses"""
    max_kv_cache_tokens: int | None = option(None)
    """size of the KV cache in tokens"""
    max_sequence_length: int | None = option(None, LENGTH_OR_AUTO, key="option.max_model_len", names="MAX_TOTAL_TOKENS")
    """longest prompt and answer together, as in 4096 or 32k; auto: as long as the engine can"""
    max_beam_width: int = option(8, integer(1, 256))
    """widest beam search that a request may ask for, at most option.max_rolling_batch_size; 1: none"""
