"""aiperf, with which AWS's benchmark jobs measure an endpoint: `scripts/aiperf`.

It measures the demo model, unchanged, over chats and completions, whole and streamed, at `lmi
serve` and at a gateway that checks the bearer token of each request. It exits with 1 if a request
failed, or if the usage that the server tells is not what was asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.venvs import ROOT, python_of, run
from tests.gateway.gateways import gateway
from tests.served import serve

DEMO = ROOT / "handlers" / "lmi_dist" / "demo"
REGION = "us-east-1"
# Those of `tests.clients.venvs`, with which the token is made.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_REGION": REGION,
}
NUM_REQUESTS = 12
NUM_TOKENS = 16  # of each answer
LOAD = {
    "--request-count": NUM_REQUESTS,
    "--concurrency": 4,
    "--prompt-input-tokens-mean": 60,
    "--prompt-input-tokens-stddev": 10,
    "--prompt-output-tokens-mean": NUM_TOKENS,
    "--extra-inputs": "ignore_eos:true",
}
# The numbers of tokens are the server's, which aiperf would else count by the text.
HOW = ("--use-server-token-count", "--no-gpu-telemetry", "--ui-type", "none", "--workers-max", "2")
RUN_TIMEOUT_S = 300
MAX_ERROR_CHARS = 3000


@dataclass(frozen=True)
class Run:
    """One measurement. `place`: "serve" or "gateway"."""

    place: str
    endpoint_type: str
    is_streamed: bool

    @property
    def title(self) -> str:
        form = "streamed" if self.is_streamed else "whole"
        return f"{self.endpoint_type} at lmi {self.place}, {form}"


RUNS = (
    Run("serve", "chat", is_streamed=False),
    Run("serve", "chat", is_streamed=True),
    Run("serve", "completions", is_streamed=False),
    Run("serve", "completions", is_streamed=True),
    Run("gateway", "chat", is_streamed=False),
    Run("gateway", "chat", is_streamed=True),
)


@contextmanager
def places() -> Iterator[dict[str, list[str]]]:
    """Run a server and a gateway in front of it. Yields the flags that lead aiperf to each."""
    with serve(DEMO, "option.model_name=demo", "frontend_workers=1") as server:
        server_url = f"http://127.0.0.1:{server.port}"
        flags = ("--endpoint", server_url, "--check-signatures")
        with gateway(*flags, environ=CREDENTIALS) as aws:
            token = run("current", "gateway/bearer_token.py", REGION)
            endpoint_url = f"{aws.url}/endpoints/demo/openai/v1"
            yield {
                "serve": ["--url", server_url],
                "gateway": ["--url", endpoint_url, "--api-key", token],
            }


def measure(measurement: Run, place_flags: list[str], folder: Path) -> dict[str, Any]:
    """Run aiperf. Returns the figures that it leaves as JSON."""
    program = python_of("aiperf").parent / "aiperf"
    command = [str(program), "profile", "--model", "demo", "--tokenizer", str(DEMO)]
    command += ["--endpoint-type", measurement.endpoint_type, *place_flags, *HOW]
    for flag, value in LOAD.items():
        command += [flag, str(value)]

    if measurement.is_streamed:
        command.append("--streaming")

    home = {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder)}
    done = subprocess.run(
        [*command, "--output-artifact-dir", str(folder)],
        cwd=folder,
        env=home,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, f"{measurement.title}: {done.stdout[-MAX_ERROR_CHARS:]}"
    figures: dict[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_text())
    return figures


def fault(measurement: Run, figures: Mapping[str, Any]) -> str:
    """Return what is wrong with the figures, or ""."""
    if figures["error_summary"] or figures["request_count"]["avg"] != NUM_REQUESTS:
        return f"requests failed: {figures['error_summary']}"

    num_tokens = figures["output_sequence_length"]["sum"]
    if num_tokens != NUM_REQUESTS * NUM_TOKENS:
        return f"{num_tokens} tokens came"

    if measurement.is_streamed and "time_to_first_token" not in figures:
        return "nothing was streamed"

    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    num_faults = 0
    with places() as flags:
        for measurement in RUNS:
            with tempfile.TemporaryDirectory(prefix="lmi-aiperf-") as folder:
                figures = measure(measurement, flags[measurement.place], Path(folder))

            what_is_wrong = fault(measurement, figures)
            num_faults += bool(what_is_wrong)
            says = what_is_wrong or f"{NUM_REQUESTS} requests of {NUM_TOKENS} tokens"
            print(f"aiperf {figures['aiperf_version']}, {measurement.title}: {says}", flush=True)

    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
