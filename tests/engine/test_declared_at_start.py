"""Post-processors and additional outputs that options declare, in a real engine process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmi.engine.messages import Ready, Submit
from lmi.executor import AdditionalModelOutput, OutputConfig, Request
from lmi.runtime import Runtime
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from tests.engine.test_worker import Worker
from tests.system.container import START_TIMEOUT_S
from tests.tiny_models import tiny_model

FILE = """
from lmi.executor import LogitsPostProcessorConfig

def force(request_id, logits, tokens, stream, client_id):
    logits[..., client_id] = 1000.0

logits_post_processors = LogitsPostProcessorConfig({"force": force})
"""

Start = Callable[[str], Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts an engine with a file of post-processors that has this text."""
    workers: list[Worker] = []

    def start(text: str) -> Worker:
        model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
        (model / "mine.py").write_text(text)
        config = Config(
            server=ServerConfig(log_format="json"),
            model=ModelConfig(path=str(model), name="m"),
            engine=EngineConfig(
                handler="lmi-dist",
                logits_post_processors="mine.py",
                additional_outputs=("hidden_states:context",),
            ),
        )
        folder = tmp_path / "runtime"
        folder.mkdir()
        workers.append(Worker(Runtime.create(config, folder), tmp_path / "errors"))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()


def test_what_options_declare_is_there_for_requests_over_the_socket(start: Start) -> None:
    outputs = (AdditionalModelOutput("hidden_states", gather_context=True),)
    request = Request(
        (5, 6, 7),
        3,
        client_id=42,
        logits_post_processor_name="force",
        output_config=OutputConfig(additional_model_outputs=outputs),
    )
    front_end = start(FILE).wait_ready().connect()
    ready = front_end.next()
    assert isinstance(ready, Ready)

    can = ready.info.capabilities
    assert (can.logits_post_processors, can.additional_outputs) == (("force",), outputs)

    front_end.send(Submit(0, request))
    [frame] = front_end.outputs(until_final=1)
    result = frame.responses[0].get_result()
    assert result.output_token_ids == [[42, 42, 42]]

    shapes = {name: tensor.shape for name, tensor in (result.additional_outputs or {}).items()}
    assert shapes == {"context_hidden_states": (3, 96), "generation_hidden_states": (1, 3, 96)}


def test_a_file_that_fails_ends_the_start_with_exit_code_4_and_one_line(start: Start) -> None:
    worker = start("import json\nraise LookupError('no grammar here')")
    assert worker.process.wait(START_TIMEOUT_S) == 4
    [line] = [
        json.loads(line)
        for line in worker.errors.read_text().splitlines()
        if "no grammar here" in line
    ]
    assert line["message"].endswith(
        "mine.py, line 2: LookupError: no grammar here"
    ) and "Traceback" not in str(line)
