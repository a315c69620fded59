"""What the supervisor tells people: that the server is ready, or why it ends.

Text for people where the log is text, one JSON object where the log is JSON; the last line of a server that failed is
always one JSON object, because the logs of a platform keep little more than that.
"""

from __future__ import annotations

import sys
from typing import Any

import orjson
from msgspec import Struct

from lmi.config import Config
from lmi.engine.worker import LoadReport
from lmi.log import escape

HINTS = {
    "bad_configuration": "`lmi config` prints every option, its value and where it came from",
    "port_unavailable": "--host and --port choose another address; a port that is taken belongs to another process",
    "model_unusable": "a model's folder holds what save_pretrained writes (config.json, a tokenizer, *.safetensors), "
    "or a model.py",
    "security_refused": "the option that the message names switches it on, if you trust the model",
    "engine_lost": "the engine's own messages stand further up in this log",
}


class Failure(Struct, frozen=True, kw_only=True):
    """Why the server ends."""

    code: int  # exit code
    cause: str  # label of an error class
    stage: str
    message: str


def say_failed(failure: Failure) -> None:
    line = {
        "event": "failed",
        "stage": failure.stage,
        "cause": failure.cause,
        "message": failure.message,
        "hint": HINTS.get(failure.cause, "see the log above"),
        "code": failure.code,
    }
    print(orjson.dumps(line).decode(), file=sys.stderr, flush=True)


def say_ready(config: Config, port: int, report: LoadReport, after_s: float) -> None:
    is_text = config.server.log_format == "text" or (config.server.log_format == "auto" and sys.stderr.isatty())
    text = (
        banner(config, port, report, after_s)
        if is_text
        else orjson.dumps(_event(config, port, report, after_s)).decode()
    )
    print(text, flush=True)


def _event(config: Config, port: int, report: LoadReport, after_s: float) -> dict[str, Any]:
    return {
        "event": "ready",
        "model": config.model.name,
        "engine": report.info.name,
        "num_engines": config.engine.num_engines,
        "device": report.info.device,
        "dtype": report.info.dtype,
        "max_sequence_length": None if config.is_custom else report.info.max_sequence_length,
        "port": port,
        "ready_after_s": round(after_s, 2),
        "stages_s": {stage: round(seconds, 2) for stage, seconds in report.stages_s.items()},
    }


def banner(config: Config, port: int, report: LoadReport, after_s: float) -> str:
    """The first thing a new user reads: what runs, where, and a command that gets an answer."""
    info, host = report.info, "127.0.0.1" if config.server.host in ("0.0.0.0", "::") else config.server.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    replicas = f"{config.engine.num_engines} replicas" if config.engine.num_engines > 1 else ""
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.stages_s.items())
    context = f"{info.max_sequence_length} tokens, {info.max_num_sequences} requests at once"
    if config.is_custom and config.code is not None:
        context = f"of {config.code.handler} in {config.code.path}, one request at a time"
    rows = {
        "model": f"{config.model.name} ({config.model.path})",
        "engine": ", ".join(filter(None, (info.name, info.device, info.dtype, replicas))),
        "context": context,
        "ready": f"after {after_s:.1f} s ({stages})",
        "answers": f"{url}/invocations",
        "health": f"{url}/ping",
        "metrics": f"{url}/metrics",
    }
    table = "\n".join(f"  {name:<8} {escape(value)}" for name, value in rows.items())
    body = '{"inputs": "Tell me a story about a fox.", "parameters": {"max_new_tokens": 100}}'
    return f"\nlmi is ready\n{table}\n\n  curl {url}/invocations -d '{body}'\n"
