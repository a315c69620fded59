"""How soon the first token of a long prompt comes after a restart, with what the disk kept of it.

    scripts/bench restart [MODEL] [--tokens 3000]

It serves MODEL (smollm2 without one) with option.prefix_cache_dir three times: the first server
computes the prompt, ends and is started again; the second one is killed when the prompt is on disk.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from scripts.benchmarks.servers import Server, free_port, process

LIMIT_S = 600.0
# Ids that every vocabulary has, in no order that a model or a cache could know.
FIRST_ID = 300
NUM_IDS = 1000


@dataclass
class Answer:
    """The first token of a prompt."""

    seconds: float
    num_cached_tokens: int
    # The token and the most likely ones with their log-probs.
    log_probs: Any


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=3000)
    arguments = parser.parse_args()

    folder = Path(tempfile.mkdtemp())
    try:
        return compare(arguments.model, arguments.tokens, folder)
    finally:
        shutil.rmtree(folder)


def compare(model: str, num_tokens: int, folder: Path) -> int:
    """Ask the same prompt before and after two restarts, and print what came."""
    with serving(model, folder) as server:
        computed = first_token(server, num_tokens)
        warm = first_token(server, num_tokens)

    with serving(model, folder) as server:
        restored = first_token(server, num_tokens)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()

    with serving(model, folder) as server:
        after_kill = first_token(server, num_tokens)

    megabytes = sum(file.stat().st_size for file in folder.rglob("*.kv")) / 1e6
    print(f"{model}, the first token of {num_tokens} tokens; {megabytes:.0f} MB on disk")
    for name, answer in (
        ("computed", computed),
        ("cached in memory", warm),
        ("after a restart", restored),
        ("after a kill", after_kill),
    ):
        share = answer.seconds / computed.seconds
        print(
            f"  {name:<17} {1000 * answer.seconds:8.0f} ms  {share:6.3f} of computing it, "
            f"{answer.num_cached_tokens} tokens cached"
        )

    answers = (warm, restored, after_kill)
    is_equal = all(answer.log_probs == computed.log_probs for answer in answers)
    print(f"  log-probs are {'equal to the bit' if is_equal else 'NOT equal'}")
    return 0 if is_equal else 1


@contextmanager
def serving(model: str, folder: Path) -> Iterator[Server]:
    port = free_port()
    script = str(Path(sys.executable).with_name("lmi"))
    command = [script, "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--set", f"option.prefix_cache_dir={folder}"]
    with process(command, port, ready_s=LIMIT_S) as server:
        yield server


def first_token(server: Server, num_tokens: int) -> Answer:
    prompt = [FIRST_ID + 7 * place * place % NUM_IDS for place in range(num_tokens)]
    body = {"model": "", "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 5}
    request = Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    began_s = time.monotonic()
    with urlopen(request, timeout=LIMIT_S) as response:
        answer = json.load(response)

    seconds = time.monotonic() - began_s
    num_cached = answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return Answer(seconds, num_cached, answer["choices"][0]["logprobs"])


if __name__ == "__main__":
    sys.exit(main())
