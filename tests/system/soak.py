"""A soak: one client after another asks every API, answered and refused, and no process may keep
what a request was.

`scripts/soak` prints by process how many bytes a request left behind, and exits with 1 if one left
more than MAX_KEPT_BYTES.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.machine import wait_until
from tests.served import Server, serve

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "handlers" / "lmi_dist" / "demo"
MAX_KEPT_BYTES = 150
"""A request. The allocator keeps some pages more in each minute of a server's first hour; a leak of
one object for each message is ten times this.
"""

# What the processes have is looked at after each.
NUM_PARTS = 10
NUM_TOKENS = 4
PROMPT = "What is the capital of France?"
MAX_LEFT_BYTES = 200


@dataclass(frozen=True)
class Ask:
    """A request that the soak sends over and over. `leaves`: its client goes while the answer is
    written.
    """

    name: str
    path: str
    body: Mapping[str, Any]
    status: int
    leaves: bool = False


def asks() -> Iterator[Ask]:
    """Every API whole, streamed and refused, with what is read apart: tools, guides, images,
    adapters, sessions.
    """
    turns = [
        {"role": "assistant" if number % 2 else "user", "content": f"turn {number}"}
        for number in range(10)
    ]
    messages = [*turns, {"role": "user", "content": PROMPT}]
    chat = {"messages": messages, "max_tokens": NUM_TOKENS}
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    lmi = {"inputs": PROMPT, "parameters": {"max_new_tokens": NUM_TOKENS}}
    long_chat = {"messages": [{"role": "user", "content": "a"}] * 2000, "max_tokens": 1}

    yield Ask("lmi", "/invocations", lmi, 200)
    yield Ask("lmi, a stream", "/invocations", {**lmi, "stream": True}, 200)
    yield Ask("lmi, refused", "/invocations", {**lmi, "parameters": {"top_p": 5}}, 424)
    yield Ask("lmi, an unknown adapter", "/invocations", {**lmi, "adapters": "nobody"}, 424)
    yield Ask(
        "lmi, left",
        "/invocations",
        {**lmi, "stream": True, "parameters": {"max_new_tokens": 300}},
        200,
        True,
    )
    yield Ask("lmi, a guide", "/invocations", {**lmi, "parameters": {"guided_json": schema}}, 200)

    yield Ask(
        "tgi",
        "/generate",
        {**lmi, "parameters": {"details": True, "max_new_tokens": NUM_TOKENS}},
        200,
    )
    yield Ask("tgi, a stream", "/generate_stream", lmi, 200)
    yield Ask("tgi, refused", "/generate", {"inputs": ""}, 422)

    completion = {"prompt": PROMPT, "max_tokens": NUM_TOKENS}
    yield Ask("completions", "/v1/completions", {**completion, "logprobs": 2, "n": 2}, 200)
    yield Ask("completions, a stream", "/v1/completions", {**completion, "stream": True}, 200)
    yield Ask("completions, refused", "/v1/completions", {**completion, "temperature": -1}, 400)

    path = "/v1/chat/completions"
    yield Ask("chat", path, {**chat, "logprobs": True, "top_logprobs": 2}, 200)
    yield Ask(
        "chat, a stream",
        path,
        {**chat, "stream": True, "stream_options": {"include_usage": True}},
        200,
    )
    yield Ask("chat, a tool", path, {**chat, "tools": [tool], "tool_choice": "required"}, 200)
    yield Ask("chat, an image", path, {"messages": [{"role": "user", "content": [image]}]}, 400)
    yield Ask("chat, too long", path, long_chat, 400)
    format = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    yield Ask("chat, a format", path, {**chat, "max_tokens": 40, "response_format": format}, 200)

    yield Ask("messages", "/v1/messages", chat, 200)
    yield Ask("messages, a stream", "/v1/messages", {**chat, "stream": True}, 200)
    yield Ask("messages, refused", "/v1/messages", {**chat, "tool_choice": {"type": "odd"}}, 400)
    yield Ask("messages, counted", "/v1/messages/count_tokens", {"messages": messages}, 200)

    response = {"input": messages, "max_output_tokens": NUM_TOKENS}
    yield Ask("responses", "/v1/responses", response, 200)
    yield Ask("responses, a stream", "/v1/responses", {**response, "stream": True}, 200)
    yield Ask(
        "responses, refused",
        "/v1/responses",
        {**response, "text": {"format": {"type": "odd"}}},
        400,
    )

    triton = {"text_input": PROMPT, "max_tokens": NUM_TOKENS}
    yield Ask("triton", "/v2/models/demo/generate", triton, 200)
    yield Ask("triton, a stream", "/v2/models/demo/generate_stream", triton, 200)
    yield Ask("triton, refused", "/v2/models/demo/generate", {**triton, "top_p": 7}, 400)

    yield Ask("embeddings, refused", "/v1/embeddings", {"input": PROMPT}, 400)
    yield Ask("no route", "/v1/nothing", {}, 404)


def send(server: Server, ask: Ask) -> int:
    """Ask, and return the status. A client that leaves reads the beginning of its stream."""
    with server.open(dict(ask.body), ask.path) as response:
        if ask.leaves:
            response.read1(MAX_LEFT_BYTES)
        else:
            response.read()

        return response.status


def private_bytes(pid: int) -> int:
    """Return the memory that a process shares with no other."""
    fields = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in fields}
    return (kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]) * 1024


def memory(server: Server) -> dict[int, tuple[str, int]]:
    """Return the name and the private bytes of each process of a server, by its id."""
    processes = {}
    for pid in server.pids():
        with suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            processes[pid] = (name, private_bytes(pid))

    return processes


def run(server: Server, num_requests: int, num_clients: int) -> list[str]:
    """Let clients send so many requests together, one API after the other. Return a line for each
    answer with another status.
    """
    wrong: list[str] = []
    numbers = itertools.count()
    cases = list(asks())

    def client(number: int) -> None:
        # Taking the next number is one step of the interpreter, so no two clients share one
        while (request := next(numbers)) < num_requests:
            ask = cases[request % len(cases)]
            status = send(server, ask)
            if status != ask.status:
                wrong.append(f"{ask.name}: {status} for {ask.status}")

    with ThreadPoolExecutor(num_clients) as pool:
        list(pool.map(client, range(num_clients)))

    wait_until(server.is_idle, "no request and no block of the cache is held")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()

    with serve(DEMO, "option.model_name=demo", "frontend_workers=1") as server:
        kept, wrong = soak(server, options.requests // NUM_PARTS, options.clients)
        server.signal(signal.SIGTERM)
        exit_code = server.wait()

    print(
        *sorted(set(wrong)),
        f"{len(wrong)} answers with another status, exit code {exit_code}",
        sep="\n",
    )
    is_leak = any(num_bytes > MAX_KEPT_BYTES for num_bytes in kept.values())
    return int(is_leak or bool(wrong) or exit_code != 0)


def soak(server: Server, num_requests: int, num_clients: int) -> tuple[dict[str, float], list[str]]:
    """Send requests in NUM_PARTS parts of so many, and print after each what the processes have.

    Return by process the bytes that a request of the second half left behind, and what was answered
    wrong. In the first half caches fill and tables grow to their bounds.
    """
    wrong: list[str] = []
    parts: list[dict[int, tuple[str, int]]] = []
    for part in range(1, NUM_PARTS + 1):
        wrong += run(server, num_requests, num_clients)
        processes = memory(server)
        parts.append(processes)
        sizes = [f"{name} {num_bytes / 1e6:.2f} MB" for name, num_bytes in processes.values()]
        print(f"{part * num_requests:7} requests: {', '.join(sizes)}", flush=True)

    middle = parts[NUM_PARTS // 2 - 1]
    num_counted = (NUM_PARTS - NUM_PARTS // 2) * num_requests
    kept: dict[str, float] = {}
    for pid, (name, num_bytes) in parts[-1].items():
        if pid in middle:
            kept[name] = (num_bytes - middle[pid][1]) / num_counted
            print(f"{name:16} {kept[name]:+8.1f} bytes a request of the second half")

    return kept, wrong


if __name__ == "__main__":
    sys.exit(main())
