"""The settings of the engine replicas of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from lmi.settings import kinds
from lmi.settings.kinds import choice, integer, matching
from lmi.settings.option import PICKLES, REMOTE_CODE, SCRIPTS, Option, option


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine replicas. None means that the engine chooses."""

    num_engines: int = 1
    ports: tuple[int, ...] = ()  # TCP ports of all replicas in turn, by Handler.port_variables; (): any free ones
    device_ids: tuple[str, ...] = ()  # GPUs of all replicas in turn, as CUDA_VISIBLE_DEVICES names them; () on a CPU
    max_queue_size: int | None = None  # requests an Executor holds before Overloaded; None: the front end bounds it
    options: dict[str, str] = field(default_factory=dict)  # every other option.*, for engines that know more
    option_sources: dict[str, str] = field(default_factory=dict, compare=False)  # where each option.* was given

    trust_remote_code: bool = option(
        False,
        kinds.BOOLEAN,
        "run Python code that comes with the model (vllm, trtllm)",
        env=("HF_MODEL_TRUST_REMOTE_CODE", "HF_TRUST_REMOTE_CODE"),
        otherwise="code that comes with a model is never run",
        refused_by=REMOTE_CODE,
    )
    install_requirements: ClassVar = Option(
        True,
        kinds.BOOLEAN,
        "install the model's requirements.txt for its own code; nothing: true",
        env=("STANDARD_AUTO_INSTALL_REQ",),
    )
    allow_pickle: bool = option(False, kinds.BOOLEAN, "load pickled weights, which can run code", refused_by=PICKLES)
    handler: str = option("auto", kinds.HANDLER, f"engine: {', '.join(kinds.HANDLERS)}", key="option.rolling_batch")
    async_mode: ClassVar = Option(
        None,
        kinds.BOOLEAN,
        "with option.rolling_batch=disable: the engine of auto, in-flight batching, the LMI schema",
        has_flag=False,
    )
    dtype: str = option("auto", kinds.DTYPE, "type of the weights: auto, fp32, bf16, fp16")
    quantize: str | None = option(
        None,
        matching("the name of a method, such as int8", r"[A-Za-z0-9_-]{1,64}"),
        "quantise the weights at load; int8 on the embedded engine needs its native kernels",
        aliases=("option.quantization",),
        env=("HF_MODEL_QUANTIZE",),
    )
    device: str = option("auto", choice("auto", "cpu", "cuda"), "auto: cuda where a GPU is visible")
    max_num_sequences: int | None = option(
        None,
        integer(1, 65536),
        "sequences that run at once",
        key="option.max_rolling_batch_size",
        aliases=("option.max_num_seqs",),
        env=("MAX_BATCH_SIZE",),
    )
    max_prefill_tokens: int | None = option(
        None,
        integer(1),
        "prompt tokens of one step",
        key="option.max_rolling_batch_prefill_tokens",
        aliases=("option.max_num_batched_tokens",),
        env=("MAX_BATCH_PREFILL_TOKENS",),
    )
    batch_size: ClassVar = Option(
        None,
        integer(1, 65536),
        "sequences that run at once with option.rolling_batch=disable",
        aliases=("max_dynamic_batch_size",),
        key="batch_size",
    )
    max_batch_delay: ClassVar = Option(
        None, integer(0), "milliseconds to wait for a batch; accepted, nothing waits", key="max_batch_delay"
    )
    max_step_ms: float | None = option(
        None,
        kinds.MILLISECONDS,
        "longest step of the embedded engine that takes prompt tokens beside answers; nothing: it measures and chooses",
        otherwise="option.max_rolling_batch_prefill_tokens bounds a step",
    )
    max_kv_cache_tokens: int | None = option(None, integer(1), "size of the KV cache in tokens")
    max_sequence_length: int | None = option(
        None,
        kinds.LENGTH,
        "longest prompt and answer together, as in 4096 or 32k; auto: as long as the engine can",
        key="option.max_model_len",
        env=("MAX_TOTAL_TOKENS",),
    )
    max_beam_width: int = option(
        8,
        integer(1, 256),
        "widest beam search that a request may ask for, at most option.max_rolling_batch_size; 1: none",
    )
    request_stats_max_iterations: int = option(
        0, integer(0), "steps of which an engine keeps each request's statistics"
    )
    additional_outputs: tuple[str, ...] = option(
        (),
        kinds.OUTPUTS,
        "tensors of the model that requests may ask for, NAME or NAME:context, which has the prompt's rows too",
    )
    logits_post_processors: str | None = option(
        None,
        kinds.PYTHON_FILE,
        "Python file with functions that change logits; it runs in the engine's own process",
        refused_by=SCRIPTS,
    )
    enable_prefix_caching: bool | None = option(
        None,
        kinds.BOOLEAN,
        "prompts that begin alike share cached keys and values; nothing: the engine chooses, as a rule true",
    )
    speculative: str | None = option(
        None,
        choice("ngram"),
        "the embedded engine guesses tokens ahead, which changes no answer: ngram, from what the sequence holds",
        otherwise="nothing is guessed ahead",
    )
    tensor_parallel_degree: int = option(
        1,
        kinds.DEGREE,
        "GPUs that share each layer, or groups of cores on a CPU (vllm); max: all GPUs",
        aliases=("option.tensor_parallel_size",),
        env=("TENSOR_PARALLEL_DEGREE", "SM_NUM_GPUS", "TENSOR_PARALLEL_SIZE"),
    )
    pipeline_parallel_degree: int = option(
        1,
        integer(1, 1024),
        "GPUs that share the layers in turn",
        aliases=("option.pipeline_parallel_size",),
        env=("PIPELINE_PARALLEL_DEGREE",),
    )
    environ: dict[str, str] = option(
        {},
        kinds.VARIABLES,
        "environment of engines and of the model's own code, as A=1,B=2",
        key="option.env",
        is_safe=False,  # PYTHONPATH and LD_PRELOAD run code
    )
    num_threads: int | None = option(None, integer(1, 1024), "threads of an engine on a CPU")
    bind_cores: bool = option(
        True, kinds.BOOLEAN, "keep an engine on a CPU to its cores and front ends to the rest, where both have enough"
    )
    min_workers: ClassVar = Option(
        None, integer(1, 1024), "least number of replicas", key="minWorkers", platform=("SAGEMAKER_NUM_MODEL_WORKERS",)
    )
    max_workers: ClassVar = Option(
        None, integer(1, 1024), "most replicas", key="maxWorkers", platform=("SAGEMAKER_NUM_MODEL_WORKERS",)
    )
    load_on_devices: ClassVar = Option(None, kinds.DEVICES, "GPUs to use, as in 0;1", key="load_on_devices")
    step_timeout_s: float = option(
        60.0,
        kinds.SECONDS,
        "seconds without a step while work waits: the engine hangs",
        key="step_timeout",
        aliases=("option.step_timeout",),
    )
    first_step_timeout_s: float = option(
        300.0, kinds.SECONDS, "the same for an engine's first step", key="first_step_timeout"
    )
    model_loading_timeout_s: float = option(
        1200.0,
        kinds.SECONDS,
        "seconds for loading the model",
        key="model_loading_timeout",
        aliases=("option.model_loading_timeout",),
        env=("MODEL_LOADING_TIMEOUT",),
        platform=("SAGEMAKER_STARTUP_TIMEOUT",),
    )
    retry_threshold: int = option(
        3,
        integer(0, 1000),
        "deaths of an engine in retry_window, then the server ends, if no other replica serves; 0 as 1: the first one",
        aliases=("option.retry_threshold",),
        env=("PROCESS_MAX_START_RETRIES",),
        key="retry_threshold",
    )
    retry_window_s: float = option(
        600.0, kinds.SECONDS, "seconds in which those deaths are counted", key="retry_window"
    )
    strict: bool = option(False, kinds.BOOLEAN, "an unknown option.* stops the start")
    engine: ClassVar = Option(None, kinds.ENGINE, "accepted, means nothing", has_flag=False, key="engine")
    entry_point: ClassVar = Option(
        None,
        kinds.ENTRY_POINT,
        "Python file whose function handle is the model; djl_python.… means nothing",
        key="option.entryPoint",
        env=("DJL_ENTRY_POINT",),
        is_path=True,
        refused_by=SCRIPTS,
        harmless=kinds.is_built_in,
    )
    task: ClassVar = Option(
        None,
        kinds.TEXT,
        "what the model is for; anything but generating text and embeddings is refused",
        env=("HF_TASK",),
        has_flag=False,
    )
    handler_function: ClassVar = Option(
        None, kinds.FUNCTION, "the function of entryPoint, instead of handle", key="option.handler", refused_by=SCRIPTS
    )
