"""Messages of the supervisor to people: that the server is ready or late, and why it ends.

A message is text if the log is text, and one JSON object if the log is JSON. The object about a
failure is the last line of the server, because platforms often keep only that line.
"""

import sys
from collections.abc import Mapping
from typing import NamedTuple

import orjson

from lmi.runtime import LoadReport
from lmi.settings.config import Config, ServerConfig
from lmi.shared.log import escape, is_text
from lmi.supervisor.child import Failure
from lmi.supervisor.hints import hint

# The codes of terminals that clear the line, and show the cursor, which a progress bar hides.
CLEAR_BAR = "\r\x1b[2K\x1b[?25h"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# The names that engines report for the values of option.dtype.
DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}


def say_failed(failure: Failure, log_format: str = "json") -> None:
    """Say why the server ends, and what an operator can do about it."""
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
    """Say that a server of one model answers."""
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
    """Say that a server which starts without a model answers, and how to load one."""
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
    """Return the text that a new user reads first: what runs, its addresses, and a command that
    gets an answer.
    """
    command = _first_command(config, report, f"{_address(config.server)}:{port}")
    handler = _handler(config)
    rows = _engine_rows(config, report) if handler is None else _code_rows(config, handler)

    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.stages_s.items())
    rows["ready"] = f"after {after_s:.1f} s ({stages})"
    rows["answers"] = command.url
    rows |= _address_rows(config, port, report)

    table = "\n".join(f"  {name:<8} {escape(value)}" for name, value in rows.items())
    curl = _curl(config.server, command.url, command.body)
    return f"\nlmi is ready\n{table}\n\n  {curl}\n"


class Command(NamedTuple):
    """The first request of a new user: its URL, and its body as an argument of curl's `-d`."""

    url: str
    body: str


def _first_command(config: Config, report: LoadReport, url: str) -> Command:
    """Return a request that the server answers, whose model is user code, embeds or generates."""
    handler = _handler(config)
    if handler is not None:
        body = f"@FILE    # FILE holds what {handler} reads"
        return Command(f"{url}/invocations", body)

    if report.gives_embeddings:
        return Command(f"{url}/v1/embeddings", """'{"input": "a text about a fox"}'""")

    body = """'{"inputs": "Tell me a story about a fox.", "parameters": {"max_new_tokens": 100}}'"""
    return Command(f"{url}/invocations", body)


def _handler(config: Config) -> str | None:
    """Return the name of the handler of user code that answers in place of an engine, or None."""
    return None if config.user_code is None else config.user_code.handler


def _code_rows(config: Config, handler: str) -> dict[str, str]:
    code = config.user_code
    assert code is not None
    facts = [f"{handler} in {code.path}, one request at a time", *_replicas(config)]
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


def _address_rows(config: Config, port: int, report: LoadReport) -> dict[str, str]:
    """Return where programs and people find what the server has."""
    address = _address(config.server)
    url = f"{address}:{port}"
    management_url = f"{address}:{config.server.management_port or port}"
    has_engine = _handler(config) is None

    rows = {}
    if has_engine:
        rows["openai"] = f"{url}/v1 is the base_url of OpenAI's clients"

    rows["browser"] = f"{management_url}/docs"
    if has_engine and not report.gives_embeddings:
        rows["browser"] = f"{url}/playground, {management_url}/docs"

    rows["health"] = f"{url}/ping"
    rows["metrics"] = f"{management_url}/metrics"
    if config.server.host in LOOPBACK:
        rows["network"] = "only this machine reaches it; --host 0.0.0.0 opens it to others"

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
    """Return a command that can be run as it is, unless the server has keys.

    It knows only their digests, so KEY stands for one.
    """
    certificate = " -k" if server.ssl_certfile else ""
    key = " -H 'Authorization: Bearer KEY'" if server.api_keys else ""
    return f"curl{certificate}{key} {url} -d {body}"


def _dtype(config: Config, report: LoadReport) -> str | None:
    """Return the type that the engine computes in, and the configured one if it is another."""
    configured = DTYPES.get(config.engine.dtype)
    is_known = configured is not None and report.dtype in DTYPES.values()
    if is_known and report.dtype != configured:
        return f"{report.dtype} in place of {configured}"

    return report.dtype


def slow_start(after_s: float, stage: str, progress: float) -> str:
    """Return the warning about a server that is not ready after `after_s`. `progress` is the share
    of its stage that is done.
    """
    # The limit is in the ProductionVariant of SageMaker's API.
    return (
        f"not ready after {after_s:.0f} s (stage {stage}, {progress:.0%}): SageMaker gives up "
        "after the endpoint's ContainerStartupHealthCheckTimeoutInSeconds, 60 to 3600 s, by "
        "default 480 s; this server goes on"
    )
