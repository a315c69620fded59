"""What `lmi bench` does with its settings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import click
import orjson

from lmi.client.bench import prompts, report, run
from lmi.client.bench.dialects import DIALECTS, Ask
from lmi.client.bench.figures import Targets
from lmi.client.bench.load import Load
from lmi.client.bench.page import page_of
from lmi.client.talk import headers_of

MAX_SERVERS = 2


def bench(settings: dict[str, Any]) -> int:
    """Run, print the table and write the files. Returns 1 if a request has no whole answer."""
    urls, api_key = settings["urls"], settings.pop("api_key")
    if len(urls) > MAX_SERVERS:
        raise click.UsageError(f"{len(urls)} URLs: at most {MAX_SERVERS} servers take turns")
    settings["rounds"] = settings["rounds"] or (1 if len(urls) == 1 else 3)
    files = {page: settings.pop(page) for page in ("json_file", "html_file", "png_file")}
    if files["png_file"]:
        from lmi.client.bench.picture import write_picture  # before the load, where Pillow is missing
    extra = settings["body"] = _object("--body", settings["body"])
    servers = [
        run.Served(
            url,
            Load(
                run.client_of(url, headers_of(api_key)),
                DIALECTS[settings["dialect"]],
                settings["model"],
                is_streamed=not settings["is_whole"],
                num_streams=settings["num_streams"],
                rate=settings["rate"],
                timeout_s=settings["timeout_s"],
                extra=extra,
            ),
        )
        for url in urls
    ]
    counts = (settings["num_warmup"], settings["num_requests"], settings["rounds"])
    asyncio.run(run.run(servers, _asks(settings), *counts))
    shown = {name: str(value) if name == "prompts" and value else value for name, value in settings.items()}
    found = report.report_of(shown, servers, _targets(settings))
    click.echo(report.table_of(found))
    if files["json_file"]:
        files["json_file"].write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    if files["html_file"]:
        files["html_file"].write_text(page_of(found))
    if files["png_file"]:
        write_picture(found, files["png_file"])
    return int(any(server["total"]["num_ok"] < server["total"]["num_requests"] for server in found["servers"]))


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        found = orjson.loads(text)
    except ValueError as error:
        raise click.UsageError(f"{flag}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.UsageError(f"{flag}={text}: not a JSON object")
    return found


def _asks(settings: dict[str, Any]) -> Iterator[Ask]:
    if settings["prompts"]:
        return prompts.of_file(settings["prompts"], settings["max_tokens"])
    names = ("num_words", "num_shared_words", "num_prefixes", "max_tokens", "seed")
    return prompts.synthetic(*(settings[name] for name in names))


def _targets(settings: dict[str, Any]) -> Targets:
    limits_ms = (settings[f"target_{name}_ms"] for name in ("ttft", "itl", "e2e"))
    return Targets(*(None if limit is None else limit / 1e3 for limit in limits_ms))
