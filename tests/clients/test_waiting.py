"""The libraries of OpenAI and Anthropic take a stream that begins before its first token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.venvs import run
from tests.served import launch
from tests.system.container import write_model

pytestmark = pytest.mark.timeout(600)  # including the installation


def test_the_libraries_join_an_answer_whose_stream_says_first_that_it_waits(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    options = {
        "model_name": "demo",
        "chat_template": "script.jinja",
        "echo_step_ms": 1,
        "echo_prompt_s": 1.5,
    }
    settings = {f"option.{name}": value for name, value in options.items()}
    write_model(folder, frontend_workers=1, stream_keepalive=0.2, **settings)
    (folder / "script.jinja").write_text("Hi<end>")
    with launch(folder) as server:
        server.wait_ready()
        done = run("current", "waiting.py", f"http://127.0.0.1:{server.port}")

    assert {name: text for name, text in done["said"].items() if name != "completion"} == {
        "chat": "Hi",
        "response": "Hi",
        "message": "Hi",
    }
    assert done["said"]["completion"].startswith("HiHi")
    assert min(done["waited"].values()) >= 2
    assert done["stop_reason"] == "end_turn"
