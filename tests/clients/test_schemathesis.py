"""schemathesis, an API fuzzer, checks a whole server against its /openapi.json."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.venvs import python_of
from tests.served import Server, launch
from tests.system.container import write_model

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
)
CHAT_TEMPLATE = "{{ messages[0]['content'] }}"
# Tokens, so that no answer is long
CONTEXT = 128
NUM_EXAMPLES = 6  # of each operation
SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "504"]  # some headers give no time to answer
"""


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Server]:
    settings = {
        "option.echo_step_ms": 0,
        "option.chat_template": CHAT_TEMPLATE,
        "frontend_workers": 1,
    }
    folder = write_model(tmp_path / "model", **settings)
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 257, "max_position_embeddings": CONTEXT})
    )
    with launch(folder) as server:
        server.wait_ready()
        yield server


@pytest.mark.timeout(900)  # including the installation
def test_no_generated_request_finds_a_fault_of_the_server_or_an_answer_that_is_not_described(
    echo: Server, tmp_path: Path
) -> None:
    program = python_of("schemathesis").with_name("schemathesis")
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    url = f"http://127.0.0.1:{echo.port}/openapi.json"
    num_all = 1
    num_tested = 0
    # A machine that others keep busy needs longer until every operation was reached
    for max_s in (
        35,
        105,
        315,
    ):
        if num_tested < num_all:
            num_all, num_tested = _run(program, url, max_s, tmp_path)

    assert num_tested == num_all >= 37
    assert echo.ping() == 200


def _run(program: Path, url: str, max_s: int, folder: Path) -> tuple[int, int]:
    """Return how many operations the description has, and how many of them were tested without a
    fault.
    """
    options = {
        "checks": ",".join(CHECKS),
        "phases": "examples,coverage,fuzzing",
        "max-examples": NUM_EXAMPLES,
        "seed": 1,
        "mode": "all",
        "request-timeout": 10,
        "max-time": max_s,
        "generation-database": "none",
    }
    command = [str(program), "run", url, "--no-color"]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=max_s + 85)

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

    counts = re.search(r"Selected: (\d+)/(\d+)\s+Tested: (\d+)", done.stdout)
    assert counts is not None, done.stdout[-2000:]

    selected, num_all, num_tested = map(int, counts.groups())
    assert selected == num_all

    return num_all, num_tested
