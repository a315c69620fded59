"""Coding agents at a slow engine, and the cache of their second conversation: `scripts/agents
[--prompt-s S] [agent…]`.

First each agent works with a server whose engine takes S seconds for each prompt (330, which is
longer than any of them waits in silence): it must ask for nothing twice. Then each has two
conversations with a server of a random model, and the prompt of the second must be cached but for
its end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NamedTuple

from tests.clients.agents import program_of, run
from tests.clients.test_agents import HOW, KEY, SCRIPT, exported, lines
from tests.scripted import write_byte_tokenizer
from tests.served import Server, launch
from tests.system.container import write_model

PATHS = {"claude": "/v1/messages", "codex": "/v1/responses", "opencode": "/v1/chat/completions"}
# Of a conversation with one call of a tool, one of them perhaps for its title
NUM_ROUNDS = 3
# Beside what the prompts take
TIMEOUT_S = 600.0
TALK_TIMEOUT_S = 90.0
CONTEXT = 262_144  # bytes
LEAST_CACHED = 0.9  # of a prompt
# Tokens that end an answer: the random model says a few letters
ENDS = range(200, 257)
# It writes all that an agent sends, as a template of a model with tools does.
WHOLE = """
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}"""


class Answered(NamedTuple):
    """A request as the server's log tells it."""

    status: int
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


def prepare(server: Server, name: str, folder: Path) -> tuple[Path, Path, dict[str, str]]:
    """Write the files of the page for an agent. Returns its folder, its home and its
    environment.
    """
    work = folder / "work"
    home = folder / "home"
    work.mkdir(parents=True)
    home.mkdir()
    (work / "given.txt").write_text("swordfish\n")
    if name == "codex":
        config = home / ".codex" / "config.toml"
        config.parent.mkdir()
        config.write_text(lines(server, "toml", "model_providers"))

    if name == "opencode":
        (work / "opencode.json").write_text(lines(server, "json", "opencode.ai"))

    return work, home, exported(lines(server, "sh", name))


def answered(server: Server, name: str) -> list[Answered]:
    log_message = f"POST {PATHS[name]}"
    records: list[dict[str, Any]] = [
        line for line in server.log_lines() if line.get("message") == log_message
    ]
    return [
        Answered(
            status=line["status"],
            duration_s=line["duration_ms"] / 1000,
            num_prompt_tokens=line.get("prompt_tokens", 0),
            num_cached_tokens=line.get("cached_tokens", 0),
        )
        for line in records
    ]


def work_slowly(server: Server, name: str, folder: Path, prompt_s: float) -> str:
    """Let an agent work at the slow server. Returns what is wrong, or ""."""
    work, home, environ = prepare(server, name, folder)
    began_s = time.monotonic()
    output = run(
        name, work, home, environ, *HOW[name], timeout_s=TIMEOUT_S + NUM_ROUNDS * prompt_s
    ).strip()
    requests = answered(server, name)
    num_slow = sum(request.duration_s >= prompt_s for request in requests)
    print(
        f"{name}: {time.monotonic() - began_s:.0f} s, {output!r}, requests: {requests}", flush=True
    )

    if not output.endswith("SWORDFISH"):
        return f"{name} has not told what its tool said"

    if not 2 <= len(requests) <= NUM_ROUNDS:
        return f"{name} has sent {len(requests)} requests"

    if num_slow < len(requests) or {request.status for request in requests} != {200}:
        return f"{name} has not waited for each answer"

    return ""


def talk_twice(server: Server, name: str, folder: Path) -> str:
    """Let an agent have two conversations. Returns what is wrong, or ""."""
    work, home, environ = prepare(server, name, folder)
    num_before = 0
    for number in (1, 2):
        # Opencode goes on for as long as a random model says nothing of use
        with suppress(TimeoutExpired):
            run(name, work, home, environ, *HOW[name], timeout_s=TALK_TIMEOUT_S)

        requests = answered(server, name)[num_before:]
        num_before += len(requests)
        print(f"{name}, conversation {number}: {requests}", flush=True)

    longest = max(requests, key=lambda request: request.num_prompt_tokens)
    share = longest.num_cached_tokens / longest.num_prompt_tokens
    return (
        ""
        if share >= LEAST_CACHED
        else f"{name}: {share:.0%} of the second conversation's prompt were cached"
    )


def slow_model(folder: Path, prompt_s: float) -> Path:
    options = {
        "model_name": "demo",
        "chat_template": "script.jinja",
        "tool_call_parser": "hermes",
        "reasoning_parser": "think",
        "api_key": KEY,
        "echo_step_ms": 10,
        "echo_prompt_s": prompt_s,
    }
    write_model(
        folder, frontend_workers=1, **{f"option.{key}": value for key, value in options.items()}
    )
    (folder / "script.jinja").write_text(SCRIPT)
    return folder


def random_model(folder: Path) -> Path:
    """Write a random checkpoint that reads bytes, with room for an agent's prompt."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=257,
        max_position_embeddings=CONTEXT,
        num_key_value_heads=1,
        eos_token_id=list(ENDS),
        **sizes,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    (folder / "template.jinja").write_text(WHOLE)
    settings = {
        "option.rolling_batch": "lmi-dist",
        "option.model_name": "demo",
        "option.chat_template": "template.jinja",
        "option.tool_call_parser": "hermes",
        "option.api_key": KEY,
        "log_format": "json",
        "frontend_workers": 1,
    }
    (folder / "serving.properties").write_text(
        "".join(f"{key}={value}\n" for key, value in settings.items())
    )
    return folder


def main() -> int:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("agents", nargs="*", default=[*PATHS], help=", ".join(PATHS))
    words.add_argument("--prompt-s", type=float, default=330.0, help="seconds that a prompt takes")
    options = words.parse_args()
    for name in options.agents:
        program_of(name)

    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as pool:
        folder = Path(scratch)
        with launch(slow_model(folder / "slow", options.prompt_s)) as server:
            server.wait_ready()
            works = [
                pool.submit(work_slowly, server, name, folder / "slowly" / name, options.prompt_s)
                for name in options.agents
            ]
            wrong += [work.result() for work in works]

        with launch(random_model(folder / "random")) as server:
            server.wait_ready()
            wrong += [talk_twice(server, name, folder / "twice" / name) for name in options.agents]

    wrong = [reason for reason in wrong if reason]
    print("\n".join(wrong) or "all is as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
