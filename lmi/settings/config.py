"""The settings of a server, which all its processes share. The supervisor hands them to its
children as JSON.

A field with `option(...)` is an option: the text below the field is its help, and the field's
default is its default, unless the engine's `Handler` has another one. An option that is a
`ClassVar` fills no field. Other values are chosen by it while settings are resolved.
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct

from lmi.settings import annexes, kinds
from lmi.settings.kinds import Kind, choice, integer, matching
from lmi.settings.listeners import PORT, ListenersConfig
from lmi.settings.option import PICKLES, REMOTE_CODE, Choice, Settings, option
from lmi.user_code.options import FormsConfig, RequirementsConfig, UserCodeConfig, UserCodeOptions

if TYPE_CHECKING:
    from lmi.shared.machine import Machine

MEGABYTES = Kind(
    "a whole number of megabytes; 0: 1 GiB",
    lambda text: integer(0, 1 << 20).parse(text) << 20 or 1 << 30,
)
NUMBERED_LEVELS = {
    "0": "DEBUG",
    "10": "DEBUG",
    "20": "INFO",
    "30": "WARNING",
    "40": "ERROR",
    "50": "ERROR",
}
LOG_LEVEL = choice(
    "DEBUG",
    "INFO",
    "WARNING",
    "ERROR",
    **NUMBERED_LEVELS,
    **{"warn": "WARNING", "critical": "ERROR"},
)


MAX_BODY_MEMORY = 256 << 20
# Bodies may take this part of the memory, if that is less.
BODIES_PART = 8


def _part_for_bodies(machine: Machine) -> Choice | None:
    part = machine.memory_bytes // BODIES_PART
    if part >= MAX_BODY_MEMORY:
        return None

    return Choice(part, f"1/{BODIES_PART} of the memory")


class RequestsConfig(Settings):
    """How large requests may be, how long they may take, and how they are answered."""

    max_queue_wait_s: float = option(10.0)
    """seconds that a request may be expected to wait before it starts; one that would wait longer
    is refused at once (503; 429 at OpenAI's and TGI's APIs, 529 at Anthropic's). Not given, a queue
    that was long for a second lets in only who would be next. On SageMaker 60 at most, but for
    batch transforms and with buffer_streams
    """
    trust_fairness_id: bool = option(False)
    """requests with another x-llm-d-inference-fairness-id count as another client, and clients
    share the engine
    """
    max_request_sequences: int = option(512)
    """sequences of one request: its prompts times n or best_of; more are refused"""
    max_request_size: int = option(
        64 << 20,
        kinds.SIZE,
        names="SAGEMAKER_MAX_REQUEST_SIZE SAGEMAKER_MAX_PAYLOAD_IN_MB",
        own_kinds={"SAGEMAKER_MAX_PAYLOAD_IN_MB": MEGABYTES},
    )
    """bytes of a request's body; more are answered 413"""
    max_body_memory: int = option(MAX_BODY_MEMORY, kinds.SIZE, choose=_part_for_bodies)
    """bytes of all large requests in one front end: bodies, and what engines have not begun to
    answer; more are 503
    """
    predict_timeout_s: float | None = option(
        None,
        names="option.predict_timeout PREDICT_TIMEOUT SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS "
        "SAGEMAKER_MODEL_SERVER_TIMEOUT",
    )
    """seconds for a whole request, then 504"""
    drain_delay_s: float = option(0.0, kinds.DELAY)
    """seconds after SIGTERM in which requests are served although /ping says 503, so that a load
    balancer that asks it loses none; then drain_timeout begins
    """
    drain_timeout_s: float = option(25.0, names="option.shutdown_timeout")
    """seconds for open answers after SIGTERM, or after drain_delay"""
    stall_timeout_s: float = option(30.0)
    """seconds that a client may leave its answer unread"""
    stream_keepalive_s: float | None = option(10.0)
    """seconds without a token after which a stream begins and says that it waits, again and again;
    until then an error has its status; none: it begins with its first token
    """
    header_timeout_s: float = option(10.0)
    """seconds for a request's head"""
    body_timeout_s: float = option(60.0)
    """seconds for a request's body"""
    allow_multi_status: bool = option(False)
    """/ping may answer 207"""
    ascii_streams: bool = option(False)
    """records of a stream have only ASCII, \\uXXXX for the rest"""
    buffer_streams: bool = option(False)
    """a stream is sent whole, as asynchronous endpoints need"""


class LogConfig(Settings):
    """What is logged, and how."""

    log_level: str = option("INFO", LOG_LEVEL, names="SAGEMAKER_CONTAINER_LOG_LEVEL")
    """least level that is logged: DEBUG, INFO, WARNING, ERROR, or Python's numbers"""
    log_format: str = option("auto", choice("auto", "text", "json"))
    """auto: text on a terminal, else json"""
    throughput_interval_s: float | None = option(10.0, key="log_throughput_interval")
    """seconds between two lines of the log about throughput, while the engines work; none: no such
    lines
    """


HOST = matching("a host name or address", r"[A-Za-z0-9.:_-]{1,253}")


def _address_in_container(machine: Machine) -> Choice | None:
    return Choice("0.0.0.0", "this is a container") if machine.is_container else None


class AddressConfig(Settings):
    """Where the server listens."""

    host: str = option("127.0.0.1", HOST, choose=_address_in_container)
    """address to listen on; nothing: this machine only, in a container every address"""
    port: int = option(
        8080,
        integer(0, 65535),
        names="SAGEMAKER_BIND_TO_PORT",
        own_kinds={"SAGEMAKER_BIND_TO_PORT": PORT},
    )
    """port; 0: any free one"""


def _half_of_the_cores(machine: Machine) -> Choice:
    number = min(4, max(1, machine.num_cores // 2))
    return Choice(number, "half of the cores, 1 to 4")


class FrontEndsConfig(Settings):
    """How many front ends there are, and how much waits for them."""

    frontend_workers: int = option(1, integer(1, 256), choose=_half_of_the_cores)
    """front-end processes"""
    job_queue_size: int = option(1000, names="MAX_CONCURRENT_REQUESTS")
    """waiting sequences of the model; more are refused (503; 429 at OpenAI's and TGI's APIs, 529 at
    Anthropic's). For how long they may wait, max_queue_wait says
    """


class ServerConfig(
    AddressConfig,
    ListenersConfig,
    FrontEndsConfig,
    annexes.AccessConfig,
    RequestsConfig,
    annexes.TransformLimitsConfig,
    annexes.SessionsConfig,
    annexes.AdaptersConfig,
    LogConfig,
    annexes.TracingConfig,
    annexes.PurposeConfig,
    annexes.SecureModeConfig,
    annexes.StrangersConfig,
    annexes.SourcesConfig,
):
    """Settings of the front ends and the supervisor: those of the bases in their order."""

    # The flags of the command line by key, which count for each of several models.
    model_flags: dict[str, str] = field(default_factory=dict)
    # Whether the operator has not given `max_queue_wait`.
    keeps_queue_short: bool = field(default=True, compare=False)


class SamplingValues(Struct, frozen=True):
    """Values of the LMI APIs' parameters of sampling. A top_k of 0 is no limit."""

    temperature: float
    top_k: int
    top_p: float


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """The values of what an LMI request leaves out, with `do_sample: true` and without it.

    With an engine that has such defaults, top_k and top_p say whether a request samples. If both
    are 0, decoding is greedy. If one of them is 0, that one is no limit.
    """

    with_do_sample: SamplingValues
    without: SamplingValues


class GenerationDefaults(Struct, frozen=True, kw_only=True):
    """The values of what a request leaves out, at the APIs that follow OpenAI's or Anthropic's
    rule.

    None means the default that the API documents. The names are those of transformers'
    GenerationConfig. `max_new_tokens` is such a default, while `server_max_new_tokens` bounds every
    request of every API. `source` says whose values they are.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_new_tokens: int | None = None
    server_max_new_tokens: int | None = None
    source: str = ""

    @property
    def values(self) -> dict[str, float]:
        """The parameters of requests that have a default here, by name."""
        values: dict[str, float] = {}
        for name in GENERATION_NAMES:
            value = getattr(self, name)
            if value is not None:
                values[name] = value

        return values

    def __str__(self) -> str:
        """Return the values as text for people: `temperature 0.6, top_k 20`."""
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items())


GENERATION_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_new_tokens",
)


class ModelConfig(
    annexes.NamingConfig,
    FormsConfig,
    annexes.PromptsConfig,
    annexes.GenerationConfig,
    annexes.EmbeddingsConfig,
):
    """The model as clients see it. `path` is a local folder."""

    path: str
    # What clients of other servers call the model: its folder as it was named, and its id at a hub.
    sources: tuple[str, ...] = ()
    # The folders of the LoRA adapters beside the model, by name.
    adapters: dict[str, str] = field(default_factory=dict)
    version: str = "1"
    # Whether `option.rolling_batch` is `disable`.
    dynamic_batch: bool = False
    # Whether the server tells the model of tools, since the chat template does not.
    tells_tools: bool = False
    # The engine's defaults. None means greedy unless `do_sample`, without limits.
    sampling_defaults: SamplingDefaults | None = None
    # The defaults of the model's maker, or the operator's.
    generation_defaults: GenerationDefaults = GenerationDefaults()

    required_memory_mb: int | None = option(None, integer(0), key="required_memory_mb")
    """MB of memory that one of several models needs; nothing: estimated from its files"""
    model_id: ClassVar[str | None] = option(
        None,
        names="option.model HF_MODEL_ID MODEL_ID",
        platform=["SM_VLLM_MODEL", "SM_SGLANG_MODEL_PATH", "SM_SGLANG_MODEL"],
        is_path=True,
    )
    """a folder, a GGUF file, a name that lmi list shows, OWNER/NAME of a hub, OWNER/NAME:Q4_K_M or
    OWNER/NAME/FILE.gguf of it, s3://BUCKET/PREFIX, s3://BUCKET/FILE.gguf, https://HOST/FILE.gguf or
    demo; nothing: the folder of serving.properties itself
    """
    revision: str | None = option(
        None,
        names="HF_REVISION HF_MODEL_REVISION",
        platform=["SM_VLLM_REVISION", "SM_SGLANG_REVISION"],
        is_for_engine=True,
    )
    """branch, tag or commit of a model from a hub; nothing: main"""
    name: str = option("", kinds.NAME, key="option.model_name")
    """name in URLs and answers; nothing: the folder's name"""
    aliases: tuple[str, ...] = option((), kinds.NAMES, key="option.model_alias")
    """further names of the model in URLs"""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a request may have for this model. `model` is always one of them."""
        return tuple(dict.fromkeys((self.name, "model", *self.aliases)))

    def answers_to(self, name: str) -> bool:
        """Return whether this is a name of the model in a body: one of `names`, or of `sources`."""
        if name in self.names:
            return True

        source = name.rstrip("/") or name
        return source in self.sources


def _variables(text: str) -> dict[str, str]:
    """Parse pairs of NAME=VALUE with commas between. A value may hold commas too: one ends it only
    if a name and `=` follow.
    """
    variables = {}
    for pair in re.split(r"[;,](?=\s*[A-Za-z_]\w*=)", text):
        name, equals, value = pair.strip().partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or not equals or "\0" in value:
            raise ValueError

        variables[name] = value

    return variables


DEGREE = Kind(
    "a whole number 1..1024, or max",
    kinds.word({"max": "max"}, integer(1, 1024).parse),
    unit="N|max",
)
DEVICE = matching("a number", "[0-9]{1,4}")
DEVICES = Kind(
    "* or GPU numbers with ; between",
    kinds.word({"*": None}, kinds.several("", DEVICE, once=str).parse),
    unset="*",
)
VARIABLES = Kind("NAME=VALUE, several with , between", _variables, unit="NAME=VALUE")
DTYPE = choice(
    "auto",
    "fp32",
    "bf16",
    "fp16",
    float32="fp32",
    float="fp32",
    bfloat16="bf16",
    float16="fp16",
    half="fp16",
)
HANDLERS = ("auto", "lmi-dist", "vllm", "trtllm", "scheduler", "disable")
HANDLER = Kind(f"{', '.join(HANDLERS)}, or the name of another engine", str, words=HANDLERS)


class ReplicasConfig(Settings):
    """Where the replicas run, and how long they may take."""

    tensor_parallel_degree: int = option(
        1,
        DEGREE,
        names="option.tensor_parallel_size TENSOR_PARALLEL_DEGREE SM_NUM_GPUS TENSOR_PARALLEL_SIZE "
        "NUM_SHARD",
    )
    """GPUs that share each layer, or groups of cores on a CPU (vllm); max: all GPUs"""
    pipeline_parallel_degree: int = option(
        1, integer(1, 1024), names="option.pipeline_parallel_size PIPELINE_PARALLEL_DEGREE"
    )
    """GPUs that share the layers in turn"""
    environ: dict[str, str] = option(
        {},
        VARIABLES,
        key="option.env",
        is_safe=False,
        grants="variables of processes, of which LD_PRELOAD and others run code",
    )
    """environment of engines and of the model's own code, as A=1,B=2"""
    num_threads: int | None = option(None, integer(1, 1024))
    """threads of an engine on a CPU"""
    bind_cores: bool = option(True)
    """keep an engine on a CPU to its cores and front ends to the rest, where both have enough"""
    min_workers: ClassVar = option(
        None, integer(1, 1024), key="minWorkers", names="SAGEMAKER_NUM_MODEL_WORKERS"
    )
    """least number of replicas"""
    max_workers: ClassVar = option(
        None, integer(1, 1024), key="maxWorkers", names="SAGEMAKER_NUM_MODEL_WORKERS"
    )
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
        3,
        integer(0, 1000),
        key="retry_threshold",
        names="option.retry_threshold PROCESS_AUTO_RECOVERY PROCESS_MAX_START_RETRIES",
    )
    """deaths of an engine in retry_window, then the server ends, if no other replica serves; 0 as
    1: the first one
    """
    retry_window_s: float = option(600.0, key="retry_window")
    """seconds in which those deaths are counted"""
    strict: bool = option(False)
    """an unknown option.* stops the start"""


class EngineConfig(annexes.AbilitiesConfig, ReplicasConfig, UserCodeOptions):
    """Settings of the engine replicas. None means that the engine chooses."""

    num_engines: int = 1
    # The TCP ports of all replicas in turn, by `Handler.port_variables`. () means any free ones.
    ports: tuple[int, ...] = ()
    # The GPUs of all replicas in turn, as CUDA_VISIBLE_DEVICES names them, () on a CPU.
    device_ids: tuple[str, ...] = ()
    # Requests that an Executor holds before it raises Overloaded. None: the front end bounds it.
    max_queue_size: int | None = None
    # Every other option.*, for engines that know more.
    options: dict[str, str] = field(default_factory=dict)
    # Where each option.* was given.
    option_sources: dict[str, str] = field(default_factory=dict, compare=False)
    # Whether nobody gave `max_num_sequences`, so that fewer may run.
    is_batch_default: bool = field(default=False, compare=False)

    trust_remote_code: bool = option(
        False,
        names="HF_MODEL_TRUST_REMOTE_CODE HF_TRUST_REMOTE_CODE",
        otherwise="code that comes with a model is never run",
        refused_by=REMOTE_CODE,
        grants="Python code that comes with the model, in the engine",
    )
    """run Python code that comes with the model (vllm, trtllm)"""
    install_requirements: ClassVar[bool | None] = option(True, names="STANDARD_AUTO_INSTALL_REQ")
    """install the model's requirements.txt for its own code; nothing: true"""
    allow_pickle: bool = option(
        False, refused_by=PICKLES, grants="pickled weights, which can run code in the engine"
    )
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
    """quantise the weights at load; the embedded engine needs its native kernels for it"""
    device: str = option("auto", choice("auto", "cpu", "cuda"))
    """auto: cuda where a GPU is visible"""
    max_num_sequences: int | None = option(
        None,
        integer(1, 65536),
        key="option.max_rolling_batch_size",
        names="option.max_num_seqs MAX_BATCH_SIZE",
    )
    """sequences that run at once"""
    max_prefill_tokens: int | None = option(
        None,
        key="option.max_rolling_batch_prefill_tokens",
        names="option.max_num_batched_tokens MAX_BATCH_PREFILL_TOKENS",
    )
    """prompt tokens of one step"""
    batch_size: ClassVar = option(
        None, integer(1, 65536), key="batch_size", names="max_dynamic_batch_size"
    )
    """sequences that run at once with option.rolling_batch=disable"""
    max_batch_delay: ClassVar = option(None, integer(0), key="max_batch_delay")
    """milliseconds to wait for a batch; accepted, nothing waits"""
    max_step_ms: float | None = option(
        None, kinds.MILLISECONDS, otherwise="option.max_rolling_batch_prefill_tokens bounds a step"
    )
    """longest step of the embedded engine that takes prompt tokens beside answers; nothing: it
    measures and chooses
    """
    max_kv_cache_tokens: int | None = option(None, names="MAX_BATCH_TOTAL_TOKENS")
    """size of the KV cache in tokens"""
    max_sequence_length: int | None = option(
        None, kinds.LENGTH_OR_AUTO, key="option.max_model_len", names="MAX_TOTAL_TOKENS"
    )
    """longest prompt and answer together, as in 4096 or 32k; auto: as long as the engine can"""
    max_beam_width: int = option(8, integer(1, 256))
    """widest beam search that a request may ask for, at most
    option.max_rolling_batch_size; 1: none
    """

    def num_ranks_here(self, num_ranks: int) -> int:
        """Return how many of an engine's ranks run on this machine. The others run on further
        machines, if option.nnodes names several.
        """
        nodes = self.options.get("nnodes", "")
        num_nodes = int(nodes) if nodes.isdecimal() else 1
        return max(1, num_ranks // max(1, num_nodes))


class Config(Settings):
    """The settings of a server and its model, frozen: the same in every process."""

    server: ServerConfig
    model: ModelConfig
    engine: EngineConfig
    user_code: UserCodeConfig | None = None
    # None means that nothing is installed.
    requirements: RequirementsConfig | None = None

    @property
    def is_user_code(self) -> bool:
        """Whether user code is the model. It then runs in place of the engines."""
        return self.user_code is not None and self.user_code.handler is not None

    @property
    def num_formatters(self) -> int:
        """The number of processes that run the formatters of user code."""
        return 0 if self.user_code is None or self.is_user_code else 1
