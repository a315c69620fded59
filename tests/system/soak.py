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
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.served import Server, serve
from tests.system.container import wait_until

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "handlers" / "lmi_dist" / "demo"
MAX_KEPT_BYTES = 150
"""A request. The allocator keeps some pages more in each minute of a server's first hour; a leak of
one object for each message is ten times this.
"""

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


def run(server: Server, seconds: float, num_clients: int) -> tuple[int, list[str]]:
    """Let clients ask for so long. Return how many requests there were, and each status that was
    another.
    """
    end_s = time.monotonic() + seconds
    wrong: list[str] = []

    def client(first: int) -> int:
        cases = list(asks())
        num_requests = 0
        for ask in itertools.islice(itertools.cycle(cases), first, None):
            if time.monotonic() >= end_s:
                break

            status = send(server, ask)
            num_requests += 1
            if status != ask.status:
                wrong.append(f"{ask.name}: {status} for {ask.status}")

        return num_requests

    with ThreadPoolExecutor(num_clients) as pool:
        num_requests = sum(pool.map(client, range(num_clients)))

    return num_requests, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()

    with serve(DEMO, "option.model_name=demo", "frontend_workers=1") as server:
        # whatever is done for the first time takes memory: a cache fills, a table grows to its
        # bound
        run(server, options.seconds / 5, options.clients)
        before = memory(server)

        num_requests, wrong = run(server, options.seconds, options.clients)
        wait_until(server.is_idle, "no request and no block of the cache is held")
        after = memory(server)

        server.signal(signal.SIGTERM)
        exit_code = server.wait()

    print(f"{num_requests} requests in {options.seconds:.0f} s by {options.clients} clients")
    is_kept = False
    for pid, (name, num_bytes) in after.items():
        kept_bytes = (num_bytes - before.get(pid, (name, 0))[1]) / num_requests
        is_kept |= kept_bytes > MAX_KEPT_BYTES
        print(f"{name:16} {num_bytes / 1e6:7.1f} MB {kept_bytes:+8.1f} bytes a request")

    print(
        *sorted(set(wrong)),
        f"{len(wrong)} answers with another status, exit code {exit_code}",
        sep="\n",
    )
    return int(is_kept or bool(wrong) or exit_code != 0)


if __name__ == "__main__":
    sys.exit(main())
