"""The playground, `/docs` and the page of `lmi bench` in a real browser, with a real model and a
scripted engine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from lmi.settings.annexes import KEYS
from tests.clients.venvs import python_of, run
from tests.scripted import Host, host
from tests.served import Server
from tests.system.container import ENVIRON, ROOT, wait_until

CHROMIUM = shutil.which("chromium")
KEY = "sk-one"

pytestmark = [
    # Including the installation of a venv
    pytest.mark.timeout(500),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A server that wants a key, and whose model has no chat template."""
    with host(tmp_path_factory.mktemp("keyed"), server={"api_keys": KEYS.parse(KEY)}) as running:
        yield running


@pytest.fixture(scope="module")
def seen(demo: Server, keyed: Host, tmp_path_factory: pytest.TempPathFactory) -> Any:
    page = tmp_path_factory.mktemp("bench") / "bench.html"
    load = (
        "--dialect",
        "completions",
        "--requests",
        "6",
        "--max-tokens",
        "8",
        "--rounds",
        "2",
        "--html",
        str(page),
    )
    command = [sys.executable, "-P", "-m", "lmi", "bench", url(demo), url(demo), *load]
    subprocess.run(command, env=ENVIRON | {"PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    return run("browser", "browser.py", url(demo), url(keyed), KEY, str(CHROMIUM), page.as_uri())


@pytest.fixture(scope="module")
def answer(demo: Server) -> str:
    """The model's greedy answer, as a bare HTTP client gets it."""
    question = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    return str(
        json.loads(demo.post(question, "/v1/chat/completions").body)["choices"][0]["message"][
            "content"
        ]
    )


def url(server: Server | Host) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_the_end_of_an_answer_stays_above_the_box(seen: Any) -> None:
    ends = seen["following"]["ends"]
    assert [end for end in ends if end["hidden"] > 1 or end["box_bottom"] > end["window"] + 1] == []


def test_a_reader_who_scrolls_up_stays_there(seen: Any) -> None:
    assert min(seen["following"]["scrolled_up_by"]) > 100


def test_a_refusal_stands_beside_the_box(seen: Any) -> None:
    refusals = seen["following"]["refusals"]
    assert [
        refusal
        for refusal in refusals
        if not refusal.startswith("Failed: ") or "top_p" not in refusal
    ] == []


def test_a_chat_is_answered_with_and_without_log_probs(seen: Any, answer: str) -> None:
    assert answer and seen["chat"]["plain"] == seen["chat"]["marked"] == answer.strip()
    assert "tokens/s" in seen["chat"]["status"]


def test_keyboard_and_pointer_show_the_alternatives_to_a_token(seen: Any) -> None:
    chat = seen["chat"]
    assert chat["by_keyboard"] == chat["by_pointer"] and chat["after_escape"] == 0
    assert len(chat["by_keyboard"]) in (5, 6) and all("%" in line for line in chat["by_keyboard"])


def test_a_value_out_of_its_bounds_is_not_sent(seen: Any) -> None:
    assert seen["chat"]["turns_after_a_value_out_of_bounds"] == 2


def test_the_copied_programs_get_the_same_answer(seen: Any, answer: str) -> None:
    code = seen["chat"]["code"]
    output = run_program(["bash", "-c", code["curl"]])
    assert output.rstrip().endswith("data: [DONE]") and '"top_logprobs"' in output
    assert run_program([str(python_of("current")), "-I", "-c", code["python"]]) == answer
    compile(code["boto3"], "boto3", "exec")
    assert "invoke_endpoint_with_response_stream(" in code["boto3"]


def run_program(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_stop_ends_the_generation_on_the_server(seen: Any, keyed: Host) -> None:
    assert "ended by you" in seen["completion"]["stopped"]
    wait_until(
        lambda: keyed.executor.cancelled and not keyed.executor.num_active,
        "the engine has cancelled it",
    )


def test_a_model_without_a_chat_template_completes(seen: Any) -> None:
    completion = seen["completion"]
    assert (completion["can_chat"], completion["is_chosen"], completion["answer"]) == (
        False,
        True,
        "hello",
    )


def test_the_key_is_kept_nowhere(seen: Any) -> None:
    assert seen["completion"]["kept"] == [0, 0, ""]


def test_the_docs_send_a_request_and_show_its_stream(seen: Any) -> None:
    docs = seen["docs"]
    assert docs["status"] == "200 OK" and "content-type: text/event-stream" in docs["headers"]
    assert docs["answer"].rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("page", ["chat", "docs", "report"])
def test_axe_finds_nothing_grave_and_nothing_scrolls_sideways(seen: Any, page: str) -> None:
    assert seen[page]["faults"] == []


def test_the_page_of_a_load_test_has_its_plots(seen: Any) -> None:
    assert seen["report"]["plots"] == 4


def test_a_browser_s_request_for_a_foreign_page_is_refused(seen: Any) -> None:
    assert seen["foreign"] == {"simple": 403, "rebound": 403}


def test_the_pages_need_nothing_from_elsewhere_and_the_console_stays_empty(seen: Any) -> None:
    assert seen["asked_elsewhere"] == []
    failed = "Failed to load resource: the server responded with a status of"
    refused = [f"{failed} 400 (Bad Request)"] * len(seen["following"]["refusals"])
    without_key = f"{failed} 401 (Unauthorized)"
    assert seen["said"] == [*refused, without_key]
