"""The options of annexes. Each class has those of one annex, and is a base of ServerConfig,
ModelConfig or EngineConfig.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec
import orjson
from msgspec import Meta, Struct

from lmi.settings.kinds import (
    ABSOLUTE_PATH,
    NAME,
    SIZE,
    TEXT,
    Kind,
    choice,
    integer,
    matching,
    several,
    word,
)
from lmi.settings.option import SCRIPTS, TEMPLATES, Settings, option


def digest(key: str) -> str:
    """Return what is kept of an API key, from which nobody can make the key."""
    return hashlib.sha256(key.encode()).hexdigest()


KEY = matching("a key", r"[\x21-\x7e]{1,256}", digest)
KEYS = several("keys of printable ASCII without blanks, with , between", KEY, re.compile(",").split)
OF_LIST = re.compile(r"[^\s,\"\[\]]+").findall
ORIGIN = matching("an origin", r"\*|[a-z][a-z0-9+.-]*://[A-Za-z0-9.:\[\]-]+")
ORIGINS = several("SCHEME://HOST[:PORT], several with , between, or *", ORIGIN, OF_LIST)
HOST_NAME = matching("a host name", r"\*|[A-Za-z0-9._-]{1,253}", str.lower)
HOSTS = several("host names with , between, or *", HOST_NAME, OF_LIST)


class AccessConfig(Settings):
    """Who may ask: by which key, from the pages of which origin, under which name of a host."""

    api_keys: tuple[str, ...] = option((), KEYS, key="option.api_key", names="LMI_API_KEY")
    """keys of which a request needs one, as Authorization: Bearer KEY or x-api-key; only digests of
    them are kept
    """
    api_key_file: str | None = option(None, ABSOLUTE_PATH, key="option.api_key_file", is_path=True)
    """file with further keys, one on each line; SIGHUP reads it again"""
    cors_allowed_origins: tuple[str, ...] = option(
        (), ORIGINS, names="allowed_origins CORS_ALLOW_ORIGIN"
    )
    """origins whose pages may call this server from a browser, as in https://app.example; *: all"""
    allowed_hosts: tuple[str, ...] = option((), HOSTS)
    """names under which requests may come, as in llm.example, beside those without a dot; *: any.
    Nothing: any, but on loopback only those without a dot
    """


BATCH_STRATEGY = choice(
    "SINGLE_RECORD", "MULTI_RECORD", singlerecord="SINGLE_RECORD", multirecord="MULTI_RECORD"
)


class TransformLimitsConfig(Settings):
    """What a server tells about its batch transforms."""

    max_payload_mb: int = option(
        6, integer(0), key="max_payload_in_mb", names="SAGEMAKER_MAX_PAYLOAD_IN_MB"
    )
    """largest request of a batch transform, which /execution-parameters reports; 0: no limit"""
    max_concurrent_transforms: int | None = option(
        None, names="SAGEMAKER_MAX_CONCURRENT_TRANSFORMS"
    )
    """requests of a batch transform at once, which /execution-parameters reports"""
    batch_strategy: str = option("SINGLE_RECORD", BATCH_STRATEGY, names="SAGEMAKER_BATCH_STRATEGY")
    """records in a request of a batch transform, which /execution-parameters reports"""


class SessionsConfig(Settings):
    """Sessions: whether clients may open some, how many, for how long, and where they lie."""

    enable_sessions: bool = option(
        True, key="option.enable_stateful_sessions", names="SAGEMAKER_ENABLE_STATEFUL_SESSIONS"
    )
    """clients may open sessions"""
    sessions_expiration_s: float = option(
        1200.0, key="option.sessions_expiration", names="SAGEMAKER_SESSIONS_EXPIRATION"
    )
    """seconds after which a session ends, used or not"""
    sessions_path: str | None = option(
        None,
        ABSOLUTE_PATH,
        key="option.sessions_path",
        names="SAGEMAKER_SESSIONS_PATH",
        is_path=True,
    )
    """folder of the sessions; one of your own outlives the server; nothing: a temporary one"""
    max_sessions: int = option(20_000, key="option.max_sessions")
    """sessions that are open at once; a client may have as many as are free, so one alone has half
    of them
    """


FOLDERS = several("absolute paths with ; between", ABSOLUTE_PATH)


class AdaptersConfig(Settings):
    """Whether models and adapters may be changed, how many adapters there may be, and of where."""

    management: bool = option(True)
    """routes that change models and adapters; false: they are answered 404"""
    max_adapters: int = option(128, names="SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY")
    """registered adapters of a model; more are answered 507"""
    adapter_roots: tuple[str, ...] = option((), FOLDERS, is_for_operator=True)
    """folders below which the src of an adapter may lie, beside the model's folder and /opt/ml"""


def _collector(text: str, *, is_base: bool = False) -> str:
    """Return the URL of a collector, with the usual path if it has none. With `is_base` that path
    is always added.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError

    if is_base or parts.path in ("", "/"):
        return text.rstrip("/") + "/v1/traces"

    return text


COLLECTOR = Kind(
    "http://HOST:PORT/v1/traces, or https, for OTLP over HTTP and not gRPC", _collector, unit="URL"
)
COLLECTOR_BASE = Kind(
    "http://HOST:PORT, or https, for OTLP over HTTP and not gRPC", partial(_collector, is_base=True)
)


class TracingConfig(Settings):
    """Where traces go."""

    otlp_traces_endpoint: str | None = option(
        None,
        COLLECTOR,
        key="option.otlp_traces_endpoint",
        names="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT OTEL_EXPORTER_OTLP_ENDPOINT",
        own_kinds={"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR_BASE},
        is_for_operator=True,
    )
    """collector of OpenTelemetry traces, over HTTP; nothing: there are none"""


class PurposeConfig(Settings):
    """What the server is for: batch transforms, or several models."""

    batch_transform: ClassVar[bool | None] = option(None, names="SAGEMAKER_BATCH", has_flag=False)
    """the server runs for a batch transform, where max_queue_wait may be over 60"""
    multi_model: bool = option(False, names="SAGEMAKER_MULTI_MODEL")
    """start without a model; POST /models loads one"""
    max_models: int = option(64, integer(1, 10_000))
    """models that are loaded at once with multi_model"""
    model_store: str = option("/opt/ml/models", ABSOLUTE_PATH, is_for_operator=True)
    """folder that models of multi_model must be in"""
    reserved_memory_mb: int = option(500, integer(0))
    """megabytes of memory that a further model of multi_model must leave free"""


TEXTS = several("texts with , between", TEXT, re.compile(r"[^;,\s][^;,]*").findall)


class SecureModeConfig(Settings):
    """What is refused of what a model brings along."""

    secure_mode: bool = option(False, names="SAGEMAKER_SECURE_MODE", is_for_operator=True)
    """refuse what security_controls name, and every option and path that is not known to be safe"""
    security_controls: tuple[str, ...] = option(
        (), TEXTS, names="SAGEMAKER_SECURITY_CONTROLS", is_for_operator=True
    )
    """what secure_mode refuses, as in DISALLOW_PICKLE_FILES,DISALLOW_CHAT_TEMPLATE"""
    untrusted_channels: tuple[str, ...] = option(
        (), TEXTS, names="SAGEMAKER_UNTRUSTED_CHANNELS", is_for_operator=True
    )
    """folders in which secure_mode looks for pickles and chat templates, with , between; nothing:
    the model's
    """


DOWNLOAD_HOST = matching("a host", r"(?:\*|(?:\*\.)?[\w.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
DOWNLOAD_HOSTS = several(
    "HOST or HOST:PORT, several with , between; HOST is a name, *.DOMAIN, an address or *",
    DOWNLOAD_HOST,
    re.compile(r"[^;,\s]+").findall,
)


class SourcesConfig(Settings):
    """Where what is fetched comes from and goes."""

    download_hosts: tuple[str, ...] = option((), DOWNLOAD_HOSTS, is_for_operator=True)
    """hosts to which a hub may redirect, beside its own and, over https, those of the public
    internet; * opens all
    """
    download_dir: str = option("", is_for_operator=True)
    """folder for models from S3 and for what requirements.txt installs; nothing: lmi/models in the
    user's cache
    """


OPTION_NAME = matching("the name of an option", r"\*|[A-Za-z_][A-Za-z0-9_.]{0,127}")
OPTION_NAMES = several("names of options with , between, or *", OPTION_NAME)


class StrangersConfig(Settings):
    """What the files of models may do beyond their model."""

    allow_model_options: tuple[str, ...] = option((), OPTION_NAMES, is_for_operator=True)
    """options that serving.properties may set although it came with one of several models, or from
    a hub or bucket, and they run code or reach beyond the model, as in option.trust_remote_code; *:
    all
    """


class NamedModel(Struct, frozen=True):
    """One model of `load_models`. Its name and its engine may be empty. Version and device mean
    nothing here.
    """

    url: str
    name: str = ""
    engine: str = ""

    @classmethod
    def of(cls, head: str | None, url: str) -> NamedModel:
        """Return the model of NAME:VERSION:ENGINE:DEVICE=URL. All before the URL may be missing,
        and may stand in brackets.
        """
        head = head or ""
        if head.startswith("[") and head.endswith("]"):
            head = head[1:-1]

        name, _version, engine, *_device = [*head.split(":"), "", ""]
        if name:
            name = NAME.parse(name)

        return cls(url, name, engine)

    def __str__(self) -> str:
        if not self.name and not self.engine:
            return self.url

        return f"{self.name}::{self.engine}={self.url}"


SERVED_NAME = matching(
    "1 to 128 letters, digits or ._:@/-, a letter, digit or / first",
    r"[A-Za-z0-9/][A-Za-z0-9._:@/-]{0,127}",
)
SERVED_NAMES = several(
    f"names with , or blanks between, each {SERVED_NAME.allowed}",
    SERVED_NAME,
    lambda text: re.findall(r"[^;,\s]+", text.strip("[]").replace('"', "")),
)
# A URL or a path without a name may hold =.
MODEL = matching("a model", r"(?:([^=/]*)=)?+(.+)", NamedModel.of)
MODELS = Kind(
    "NAME=PATH, NAME:VERSION:ENGINE:DEVICE=PATH, a path, ALL or NONE",
    word({"all": (), "none": ()}, several("", MODEL, re.compile(r"[,\s]+").split).parse),
    unit="NAME=PATH",
)


class NamingConfig(Settings):
    """The model's folder and names as other servers give them."""

    served_model_name: ClassVar = option(None, SERVED_NAMES)
    """the model's name, then further ones; nothing: option.model_name"""
    load_models: ClassVar = option(None, MODELS, key="load_models", names="-m --models")
    """the folder to serve and the model's name, as NAME=PATH"""


def _form(words: Sequence[str], other_names: dict[str, str]) -> Kind:
    """Return the kind of names of forms: one of `words`, in any case, or any other name, which
    means a form that is not read here. `other_names` have the words that they mean.
    """
    meanings = {text: text for text in words} | other_names
    allowed = f"{', '.join(words)}, or another name, which means plain text"
    return Kind(allowed, word(meanings, FORM_NAME.parse), words=tuple(words))


FORM_NAME = matching("a name", r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# The forms that lmi/apis/openai/parts/ reads, and two more: with `text` calls stay in the text, and
# with `none` a chat is refused whose tools the model may call freely.
TOOL_CALL_FORMS = (
    "generic",
    "hermes",
    "json",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "granite",
    "granite-20b-fc",
    "jamba",
    "kimi_k2",
    "lfm2",
    "minimax_m2",
    "mistral",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_xml",
    "seed_oss",
    "text",
    "none",
)
# vLLM has other names for some forms. Source: the parsers of vLLM 0.32.
TOOL_CALL_FORM = _form(
    TOOL_CALL_FORMS,
    {
        **dict.fromkeys(("qwen", "qwen25", "qwen2_5", "qwen3", "qwen3_json", "granite4"), "hermes"),
        **dict.fromkeys(("llama3", "llama3_json", "llama4_json"), "json"),
        **{"qwen3_coder": "qwen3_xml", "glm47": "glm45", "llama4_pythonic": "pythonic"},
    },
)
REASONING_FORMS = ("think", "mistral", "openai", "seed_oss", "none")
THINKING = (
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "glm47",
    "holo2",
    "kimi_k2",
    "minimax_m2",
    "nemotron_v3",
    "olmo3",
    "qwen3",
)
REASONING_FORM = _form(
    REASONING_FORMS, dict.fromkeys(THINKING, "think") | {"openai_gptoss": "openai"}
)


class PromptsConfig(Settings):
    """How the prompts of chats are made, what is read in their answers, and which prompts are
    cached together.
    """

    chat_template: str | None = option(None, is_path=True, refused_by=TEMPLATES)
    """chat template: a file, or the text itself"""
    special_tokens_in_content: bool = option(False)
    """special tokens that the content of a chat spells count as such, so that a user can write a
    system message
    """
    tool_call_parser: str | None = option(None, TOOL_CALL_FORM)
    """form of a model's tool calls in its answers; nothing: found in the chat template"""
    reasoning_parser: str | None = option(None, REASONING_FORM)
    """marks around a model's thoughts; nothing: found in the chat template"""
    prefix_cache_scope: str = option("server", choice("server", "request"))
    """whose prompts share cached keys and values: all of the server, or only those of
    one request
    """


def _object(text: str) -> str:
    """Return the text of a JSON object as it is. Raises ValueError for any other text."""
    if not isinstance(orjson.loads(text), dict):
        raise ValueError

    return text


# Two names of one meaning: what the APIs document counts.
OWN_DEFAULTS = ("vllm", "lmi")
GENERATION_CONFIG = Kind(
    "auto, vllm, lmi, or a folder with a generation_config.json",
    word({name: name for name in ("auto", *OWN_DEFAULTS)}, matching("a path", r"[^\0]+").parse),
    words=("auto", *OWN_DEFAULTS),
)
OBJECT = Kind("a JSON object", _object, unit="JSON")


class GenerationConfig(Settings):
    """Where the defaults come from that count where a request is silent, by vLLM's names."""

    generation_config: ClassVar[str] = option("auto", GENERATION_CONFIG, is_path=True)
    """what counts where a request to OpenAI's or Anthropic's APIs is silent. auto: the model's
    generation_config.json; a folder: the one in it; vllm, lmi: what these APIs document
    """
    override_generation_config: ClassVar[str | None] = option(None, OBJECT)
    """single defaults in place of those, as in {"temperature": 0.6, "top_p": 0.95}; max_new_tokens
    of it, or of a folder's file, bounds every request
    """


class EmbeddingsConfig(Settings):
    """How an embedding model answers LMI's body."""

    normalize: bool = option(True)
    """vectors of LMI's embeddings at /invocations have the length 1; false: as the
    model gives them
    """


OUTPUT = matching("a name", r"([A-Za-z_][A-Za-z0-9_.]{0,127}(?::context)?)")
OUTPUTS = several(
    "names with ; between, each once and perhaps with :context, as in logits;hidden_states:context",
    OUTPUT,
    once=lambda output: output.partition(":")[0],
)
PYTHON_FILE = matching("a Python file in the model's folder", r"[^/\0]+\.py")


class KvEventsConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where an engine tells what its KV cache keeps. Names, meanings and defaults are vLLM's."""

    enable_kv_cache_events: bool = False
    # None means zmq where events are enabled.
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    # The number of batches that are kept.
    buffer_steps: Annotated[int, Meta(ge=0)] = 10_000
    # The number of batches that wait for a slow subscriber.
    hwm: Annotated[int, Meta(ge=0, lt=2**31)] = 100_000
    # The number of batches that wait to be sent.
    max_queue_size: Annotated[int, Meta(ge=1)] = 100_000
    topic: str = ""

    @property
    def is_enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def parse(cls, text: str) -> KvEventsConfig:
        """Return the configuration in a JSON object. Raises ValueError."""
        config = msgspec.json.decode(text, type=cls)
        for endpoint in (config.endpoint, config.replay_endpoint):
            if endpoint is not None and not ENDPOINT.fullmatch(endpoint):
                raise ValueError

        return config

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


ENDPOINT = re.compile(r"tcp://.+:[0-9]{1,5}|(?:ipc|inproc)://.+")
KV_EVENTS = Kind(
    f"a JSON object with some of {', '.join(KvEventsConfig.__struct_fields__)}, endpoints as "
    f"tcp://*:5557, "
    "tcp://HOST:5557 or ipc://FILE",
    KvEventsConfig.parse,
    unit="JSON",
)


class AbilitiesConfig(Settings):
    """What some engines can do."""

    request_stats_max_iterations: int = option(0, integer(0))
    """steps of which an engine keeps each request's statistics"""
    additional_outputs: tuple[str, ...] = option((), OUTPUTS)
    """tensors of the model that requests may ask for, NAME or NAME:context, which has the prompt's
    rows too
    """
    logits_post_processors: str | None = option(
        None,
        PYTHON_FILE,
        refused_by=SCRIPTS,
        grants="Python code that comes with the model, in the engine",
    )
    """Python file with functions that change logits; it runs in the engine's own process"""
    enable_prefix_caching: bool | None = option(None)
    """prompts that begin alike share cached keys and values; nothing: the engine chooses, as a rule
    true
    """
    speculative: str | None = option(None, choice("ngram"), otherwise="nothing is guessed ahead")
    """the embedded engine guesses tokens ahead, which changes no answer: ngram, from what the
    sequence holds
    """
    kv_events_config: KvEventsConfig | None = option(
        None,
        KV_EVENTS,
        is_for_operator=True,
        grants="the prompts of all clients, told to any address",
        otherwise="routers are told nothing",
    )
    """engines tell routers over ZeroMQ which prompts they have cached, as in
    {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}"""
    prefix_cache_dir: str | None = option(
        None,
        ABSOLUTE_PATH,
        is_for_operator=True,
        grants="files in any folder of this machine",
        otherwise="cached prompts end with the engine",
    )
    """folder in which cached keys and values of prompts outlive the engine; nothing: they end with
    it
    """
    max_prefix_cache_disk: int = option(
        8 << 30, SIZE, otherwise="nothing of prompts is kept on disk"
    )
    """most bytes of option.prefix_cache_dir, for all models that share it, as in 20g"""
    idle_cache_timeout_s: float | None = option(
        3600.0, otherwise="the engine keeps the memory of its cache"
    )
    """seconds after which cached keys and values that nobody has used give their memory back"""
