"""Messages of the supervisor to people: that the server is ready, or late, what its engines do, or
why it ends.

A message is text if the log is text, and one JSON object if the log is JSON. The object of a server
that failed is its last line, because platforms often keep only that line.
"""

import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires
from typing import NamedTuple

import orjson

from lmi.runtime import LoadReport
from lmi.settings.config import Config, ServerConfig
from lmi.settings.served_folder import PLATFORM_FOLDER
from lmi.shared.log import escape, is_text
from lmi.shared.state import EngineRecord
from lmi.supervisor.child import Failure

# Clears the line and shows the cursor, which a bar hides.
CLEAR_BAR = "\r\x1b[2K\x1b[?25h"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

CHECKPOINT = (
    "a model's folder holds what save_pretrained writes (config.json, a tokenizer, "
    "*.safetensors), or a model.py"
)
DAMAGED_FILE = "mend the file that the message names, or copy it again"
LOG = "see the log above"
OF_GGUF = "serve another GGUF file of it, or the checkpoint in safetensors that it was made from"
GGUF_ENGINE = (
    "--rolling-batch chooses an engine that reads it; others take the checkpoint in safetensors "
    "that it was made from"
)
GGUF_FILE = "lmi serve takes the GGUF file itself: lmi serve FOLDER/FILE.gguf"
OF_QUANTISED = (
    "serve it with that engine, or the checkpoint that it was made from, with "
    "--quantize int8 where memory is short"
)
OPTIONS = "`lmi config` prints every option, its value and where it came from"
SOURCES = (
    "lmi serve takes a folder, a GGUF file, a name that lmi list shows, OWNER/NAME of a hub "
    "(OWNER/NAME:Q4_K_M of its GGUF files), s3://BUCKET/PREFIX or demo"
)
MISSING_LIBRARY = re.compile(
    r"No module named '(\w+)|the library (\w+) is not installed|No package metadata was found for "
    r"(\w+)"
)
OF_A_CHECKPOINT = (".json", ".safetensors", ".jinja", ".model")
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+).*; extra == ['\"](?P<extra>[\w-]+)['\"]")
NOT_DAMAGED = re.compile("no architectures|option[.]rolling_batch=|is not installed")


class Hint(NamedTuple):
    """What an operator can do about the errors of one label whose message fits a pattern."""

    label: str
    pattern: str
    advice: str


# The first row that fits counts. A fault without a row has no hint, because none is better than a
# wrong one.
HINTS = (
    Hint("bad_configuration", "", OPTIONS),
    Hint(
        "port_unavailable",
        r"[(]lmi-",
        "--takeover takes the port over once this server is ready, --port chooses another",
    ),
    Hint(
        "port_unavailable",
        "",
        "--host and --port choose another address; a taken port belongs to another process",
    ),
    Hint(
        "source_unreachable",
        "^no (folder|file) ",
        "HF_HUB_OFFLINE=1 asks no hub and serves what its cache holds",
    ),
    Hint(
        "model_unusable", "(HF_HUB|TRANSFORMERS)_OFFLINE=", "without that variable the hub is asked"
    ),
    Hint(
        "model_unusable",
        "credentials",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a role name them",
    ),
    Hint("model_unusable", "^[^:]+: (does not exist|is not a folder)", SOURCES),
    Hint("model_unusable", "^option[.]", OPTIONS),
    Hint("model_unusable", "does not read GGUF|its weights are GGUF", GGUF_ENGINE),
    Hint(
        "model_unusable", "[.]gguf: (is not a GGUF file|is empty|it ends|.*cut short)", DAMAGED_FILE
    ),
    Hint("model_unusable", "[.]gguf: .*(not read|only .* read|must be one of)", OF_GGUF),
    Hint("model_unusable", "holds .*[.]gguf.*; a model", GGUF_FILE),
    Hint(
        "model_unusable",
        "a model(.s folder)? has |: no tokenizer|: no (weights|model[.]safetensors)",
        CHECKPOINT,
    ),
    Hint("model_unusable", "quantised already", OF_QUANTISED),
    Hint(
        "model_unusable",
        "option[.]rolling_batch=",
        "scripts/install installs other engines, --rolling-batch chooses one",
    ),
    Hint(
        "security_refused",
        r"option[.]\w+=true",
        "that option switches it on, if you trust the model",
    ),
    Hint(
        "security_refused",
        "DISALLOW_",
        "SAGEMAKER_SECURITY_CONTROLS names what secure mode refuses",
    ),
    Hint(
        "engine_lost", "did not finish loading", "--model-loading-timeout SECONDS gives it longer"
    ),
    Hint("engine_lost", "", "its own messages stand further up in this log"),
    Hint("front_end_lost", "", LOG),
    Hint("gateway_lost", "", LOG),
    Hint("start_failed", r"^\w+: |^the fetch failed|died", LOG),
)

log = logging.getLogger(__name__)


def say_failed(failure: Failure, log_format: str = "json") -> None:
    advice = hint(failure.cause, failure.message)
    if is_text(log_format):
        lines = [f"lmi: {escape(line)}" for line in failure.message.split("\n")]
        if advice:
            lines.append(f"     {escape(advice)}")

        print("\n".join(lines), file=sys.stderr, flush=True)
        return

    event: dict[str, object] = {
        "event": "failed",
        "stage": failure.stage,
        "cause": failure.cause,
        "message": failure.message,
    }
    if advice:
        event["hint"] = advice

    event["code"] = failure.code
    print(orjson.dumps(event).decode(), file=sys.stderr, flush=True)


def clear_bar() -> None:
    """Remove the progress bar that an engine leaves on a terminal when it ends while it loads."""
    if sys.stderr.isatty():
        print(CLEAR_BAR, end="", file=sys.stderr, flush=True)


def say_ready(config: Config, port: int, report: LoadReport, after_s: float) -> None:
    event = {
        "event": "ready",
        "model": config.model.name,
        "engine": report.engine,
        "num_engines": config.engine.num_engines,
        "device": report.device,
        "dtype": report.dtype,
        "kernels": report.kernels,
        "max_sequence_length": report.max_sequence_length,
        "generation_defaults": config.model.generation_defaults.values,
        "port": port,
        "ready_after_s": round(after_s, 2),
        "stages_s": {stage: round(seconds, 2) for stage, seconds in report.stages_s.items()},
    }

    _say(config.server, banner(config, port, report, after_s), event)


def say_ready_for_models(server: ServerConfig, port: int, after_s: float) -> None:
    """Say that a server without a model takes models."""
    url = f"{_address(server)}:{server.management_port or port}/models"
    command = _curl(server, url, """'{"model_name": "NAME", "url": "FOLDER"}'""")
    event = {
        "event": "ready",
        "model_store": server.model_store,
        "port": port,
        "ready_after_s": round(after_s, 2),
    }
    models = escape(server.model_store)
    _say(server, f"\nlmi is ready for models below {models}\n\n  {command}\n", event)


def _say(server: ServerConfig, text: str, event: Mapping[str, object]) -> None:
    message = text if is_text(server.log_format) else orjson.dumps(event).decode()
    print(message, flush=True)


def banner(config: Config, port: int, report: LoadReport, after_s: float) -> str:
    """Return the text that a new user reads first: what runs, where, and a command that gets an
    answer.
    """
    address = _address(config.server)
    url = f"{address}:{port}"
    management_url = f"{address}:{config.server.management_port or port}"
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.stages_s.items())
    command = _first_command(config, report, url)
    code = config.user_code
    is_handler = code is not None and code.handler is not None

    rows = _code_rows(config) if is_handler else _engine_rows(config, report)
    rows["ready"] = f"after {after_s:.1f} s ({stages})"
    rows["answers"] = command.url
    if not is_handler:
        rows["openai"] = f"{url}/v1 is the base_url of OpenAI's clients"

    has_playground = not is_handler and not report.gives_embeddings
    pages = f"{management_url}/docs"
    rows["browser"] = f"{url}/playground, {pages}" if has_playground else pages
    rows["health"] = f"{url}/ping"
    rows["metrics"] = f"{management_url}/metrics"
    if config.server.host in LOOPBACK:
        rows["network"] = "only this machine reaches it; --host 0.0.0.0 opens it to others"

    table = "\n".join(f"  {name:<8} {escape(value)}" for name, value in rows.items())
    curl = _curl(config.server, command.url, command.body)
    return f"\nlmi is ready\n{table}\n\n  {curl}\n"


class Command(NamedTuple):
    """What a new user asks first: an address, and a body as the shell reads it."""

    url: str
    body: str


def _first_command(config: Config, report: LoadReport, url: str) -> Command:
    code = config.user_code
    if code is not None and code.handler is not None:
        body = f"@FILE    # FILE holds what {code.handler} reads"
        return Command(f"{url}/invocations", body)

    if report.gives_embeddings:
        return Command(f"{url}/v1/embeddings", """'{"input": "a text about a fox"}'""")

    body = """'{"inputs": "Tell me a story about a fox.", "parameters": {"max_new_tokens": 100}}'"""
    return Command(f"{url}/invocations", body)


def _code_rows(config: Config) -> dict[str, str]:
    code = config.user_code
    assert code is not None
    facts = [f"{code.handler} in {code.path}, one request at a time", *_replicas(config)]
    return {"model": config.model.name, "code": ", ".join(facts)}


def _engine_rows(config: Config, report: LoadReport) -> dict[str, str]:
    facts = [report.engine, report.device, _dtype(config, report)]
    if report.kernels:
        facts.append(f"{report.kernels} kernels")

    facts += _replicas(config)
    rows = {
        "model": f"{config.model.name} ({config.model.path})",
        "engine": ", ".join(filter(None, facts)),
        "context": (
            f"{report.max_sequence_length} tokens, {report.max_num_sequences} requests at once"
        ),
    }
    defaults = config.model.generation_defaults
    if defaults.values:
        rows["defaults"] = f"{defaults} ({defaults.source})"

    return rows


def _replicas(config: Config) -> list[str]:
    num_engines = config.engine.num_engines
    return [f"{num_engines} replicas"] if num_engines > 1 else []


def _address(server: ServerConfig) -> str:
    """Return the beginning of the URLs by which this machine reaches the server."""
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    if ":" in host:
        host = f"[{host}]"

    return f"{server.scheme}://{host}"


def _curl(server: ServerConfig, url: str, body: str) -> str:
    """Return a command that works as it is, but for a key, of which the server knows only the
    digest.
    """
    certificate = " -k" if server.ssl_certfile else ""
    key = " -H 'Authorization: Bearer KEY'" if server.api_keys else ""
    return f"curl{certificate}{key} {url} -d {body}"


def _dtype(config: Config, report: LoadReport) -> str | None:
    """Return the type that the engine computes in, and the one that was configured if it is
    another.
    """
    dtype = DTYPES.get(config.engine.dtype)
    is_known = dtype is not None and report.dtype in DTYPES.values()
    if is_known and report.dtype != dtype:
        return f"{report.dtype} in place of {dtype}"

    return report.dtype


def is_on_sagemaker(environ: Mapping[str, str], folder: str) -> bool:
    """Return whether SageMaker seems to run this server of the model in `folder`."""
    return folder == str(PLATFORM_FOLDER) or any(name.startswith("SAGEMAKER_") for name in environ)


def slow_start(after_s: float, stage: str, progress: float) -> str:
    """Return the warning about a server that is not ready yet. `progress` is a share of
    the stage.
    """
    # The limit is in the ProductionVariant of SageMaker's API.
    return (
        f"not ready after {after_s:.0f} s (stage {stage}, {progress:.0%}): SageMaker gives up "
        "after the endpoint's ContainerStartupHealthCheckTimeoutInSeconds, 60 to 3600 s, by "
        "default 480 s; this server goes on"
    )


class Throughput:
    """Logs what the engines of all models did, every `interval_s` in which they did something,
    never if it is None.
    """

    def __init__(self, interval_s: float | None, now: float) -> None:
        self._interval_s = interval_s
        self._looked_s = now
        # The tokens until then.
        self._num_prefilled = 0
        self._num_decoded = 0

    def look(self, engines: Iterable[EngineRecord], now: float) -> None:
        seconds = now - self._looked_s
        if self._interval_s is None or seconds < self._interval_s:
            return

        records = list(engines)
        num_prefilled = sum(record.num_context_tokens for record in records)
        num_decoded = sum(record.num_generation_tokens for record in records)
        # A model that was unloaded took its totals with it.
        num_new_prefilled = max(0, num_prefilled - self._num_prefilled)
        num_new_decoded = max(0, num_decoded - self._num_decoded)
        self._looked_s = now
        self._num_prefilled = num_prefilled
        self._num_decoded = num_decoded

        work = {
            "prefill_tokens_per_s": round(num_new_prefilled / seconds, 1),
            "decode_tokens_per_s": round(num_new_decoded / seconds, 1),
            "running": sum(record.num_running for record in records),
            "waiting": sum(record.num_waiting for record in records),
        }
        if any(work.values()):
            max_num_blocks = sum(record.max_num_blocks for record in records)
            usage = sum(record.num_used_blocks for record in records) / max(1, max_num_blocks)
            log.info("throughput", extra={**work, "kv_cache_usage": round(usage, 3)})


def hint(label: str, message: str) -> str:
    """Return what an operator can do about an error of this label and message, or ""."""
    missing = MISSING_LIBRARY.search(message)
    if missing is not None:
        library = next(filter(None, missing.groups()))
        return _hint_of_library(library, message)

    if label == "model_unusable" and _names_damaged_file(message):
        return DAMAGED_FILE

    for row in HINTS:
        if row.label == label and re.search(row.pattern, message):
            return row.advice

    return ""


def _hint_of_library(library: str, message: str) -> str:
    if ".py: " in message:
        return (
            f"name {library} in a requirements.txt beside the file, or install it where lmi "
            "itself is installed"
        )

    extra = _extra_with(library)
    if extra:
        return f"scripts/install {extra}, or pip install '.[{extra}]', in a clone of lmi"

    return f"install {library} where lmi itself is installed"


def _names_damaged_file(message: str) -> bool:
    file = message.partition(": ")[0]
    is_of_checkpoint = file.endswith(OF_A_CHECKPOINT) and os.path.isfile(file)
    return is_of_checkpoint and not NOT_DAMAGED.search(message)


def _extra_with(library: str) -> str | None:
    """Return the extra of this package that installs a library, None if no extra for users does."""
    try:
        requirements = requires("lmi") or ()
    except PackageNotFoundError:
        # It runs from its sources.
        return None

    extras = dict[str, str]()
    for line in requirements:
        match = REQUIREMENT.match(line)
        if match and match["extra"] != "dev":
            extras[match["name"].replace("-", "_")] = match["extra"]

    if library in extras:
        return extras[library]

    # Perhaps the library is a namespace of several packages.
    for name, extra in extras.items():
        if name.startswith(f"{library}_"):
            return extra

    return None
