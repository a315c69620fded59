"""Servers that must not start, each with one line that names the file, and the ways to start a
server.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from handlers.lmi_dist.executor import load
from lmi.errors import ModelUnusable
from lmi.settings.config import EngineConfig
from tests.machine import measurements
from tests.served import QUIET, Server, launch, serve
from tests.system.container import (
    ENGINES,
    ENVIRON,
    ROOT,
    START_TIMEOUT_S,
    free_port,
    wait_until,
    write_model,
)
from tests.tiny_models import tiny_model

BIN = Path(sys.executable).parent
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Refused:
    """A failed start: its exit code, its last line and all its output."""

    code: int
    last: dict[str, Any]
    printed: str


def write_safetensors(
    file: Path, header: object, num_bytes: int = 0, header_bytes: int | None = None
) -> None:
    """Write a file in the format of safetensors: the header's length in 8 bytes, the header, the
    tensors' bytes.
    """
    text = json.dumps(header).encode()
    file.write_bytes(
        struct.pack("<Q", len(text) if header_bytes is None else header_bytes)
        + text
        + bytes(num_bytes)
    )


def change_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


class Bomb:
    """An object that makes a file when it is unpickled without care."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return (Path.touch, (self.file,))


# The faults of each unusable checkpoint. A function changes a copy of a good one.


def vanish(folder: Path) -> None:
    shutil.rmtree(folder)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def be_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("{}")


def have_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def have_half_a_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], ')


def have_an_unknown_architecture(folder: Path) -> None:
    change_json(
        folder / "config.json", model_type="perceptron", architectures=["PerceptronForCausalLM"]
    )


def be_no_decoder(folder: Path) -> None:
    change_json(folder / "config.json", model_type="bert", architectures=["BertForMaskedLM"])


def have_no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def have_half_a_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:1000])


def have_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def be_cut_short(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1000)


def lie_about_the_end(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [320, 96], "data_offsets": [0, 10**12]}
    write_safetensors(folder / WEIGHTS, {"model.embed_tokens.weight": entry}, num_bytes=1000)


def have_a_huge_header(folder: Path) -> None:
    write_safetensors(folder / WEIGHTS, {}, header_bytes=2**62)


def miss_a_shard(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    files = {
        "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
        "a": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def have_another_shape(folder: Path) -> None:
    change_json(folder / "config.json", hidden_size=48)


def need_another_layer(folder: Path) -> None:
    change_json(folder / "config.json", num_hidden_layers=3)


def be_pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save(
        {"model.embed_tokens.weight": Bomb(folder / "exploded")}, folder / "pytorch_model.bin"
    )


def be_pickled_and_trusted(folder: Path) -> None:
    be_pickled(folder)
    (folder / "serving.properties").write_text("option.allow_pickle=true\n")


def have_a_bad_property(folder: Path) -> None:
    (folder / "serving.properties").write_text(
        "# ours\noption.model_name=tiny\n\noption.dtype=fp8\n"
    )


def have_a_malformed_property(folder: Path) -> None:
    (folder / "serving.properties").write_text("option.model_name=tiny\nport=\\u12\n")


BROKEN: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "missing": (vanish, 4, "{folder}: does not exist"),
    "empty": (empty, 4, "{folder}: is empty"),
    "a file": (be_a_file, 4, "{folder}: is not a folder"),
    "no config": (have_no_config, 4, "{folder}: holds"),
    "half a config": (have_half_a_config, 4, "config.json"),
    "unknown architecture": (have_an_unknown_architecture, 4, "{folder}/config.json: "),
    "no decoder": (be_no_decoder, 4, "{folder}/config.json: BertForMaskedLM"),
    "no tokenizer": (have_no_tokenizer, 4, "{folder}: "),
    "half a tokenizer": (have_half_a_tokenizer, 4, "tokenizer.json"),
    "no weights": (have_no_weights, 4, "{folder}: no model.safetensors"),
    "cut short": (be_cut_short, 4, "{folder}/model.safetensors: "),
    "lying": (lie_about_the_end, 4, "{folder}/model.safetensors: "),
    "huge header": (have_a_huge_header, 4, "{folder}/model.safetensors: "),
    "missing shard": (miss_a_shard, 4, "{folder}/model-00002-of-00002.safetensors: missing"),
    "shape": (have_another_shape, 4, "{folder}/model.safetensors: tensor "),
    "layer": (need_another_layer, 4, "{folder}: tensor model.layers.2."),
    "pickled": (be_pickled, 5, "{folder}/pytorch_model.bin: pickled weights"),
    "pickled and trusted": (
        be_pickled_and_trusted,
        4,
        "{folder}/pytorch_model.bin: cannot be read",
    ),
    "bad property": (
        have_a_bad_property,
        2,
        "option.dtype='fp8' ({folder}/serving.properties:4): allowed",
    ),
    "malformed property": (have_a_malformed_property, 2, "{folder}/serving.properties:2: "),
}


# These differ only in the reading of one file. They are loaded in this process as a server's engine
# process does it.
IN_PROCESS = ("no decoder", "unknown architecture", "no weights", "lying", "huge header", "layer")
WHOLE = tuple(name for name in BROKEN if name not in IN_PROCESS)


@pytest.fixture(scope="module")
def refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[Path, Future[Refused]]]]:
    """Every broken folder and the start of a server on it; two start at a time."""
    root = tmp_path_factory.mktemp("broken")
    with ThreadPoolExecutor(2) as pool:
        yield {name: (folder := broken(root, name), pool.submit(start, folder)) for name in WHOLE}


def broken(root: Path, name: str) -> Path:
    folder = root / name.replace(" ", "-")
    shutil.copytree(tiny_model("llama"), folder)
    BROKEN[name][0](folder)
    return folder


def start(folder: Path) -> Refused:
    with launch(folder) as server:
        code = server.wait(START_TIMEOUT_S)
        return Refused(code, server.last_words(), server.log.read_text())


@pytest.mark.parametrize("name", WHOLE)
def test_an_unusable_folder_ends_the_start_with_one_line_that_names_the_file(
    refused: dict[str, tuple[Path, Future[Refused]]], name: str
) -> None:
    _, code, message = BROKEN[name]
    folder, future = refused[name]
    end = future.result()
    assert (end.code, end.last["code"], end.last["event"]) == (code, code, "failed"), end.printed
    assert_one_line(end.last["message"], message, folder)
    assert end.last["stage"] and end.last.get("hint") != ""
    assert [line for line in end.printed.splitlines() if "Traceback" in line] == []
    assert end.printed.count("starts as process") <= 1, "it was tried again"
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize("name", IN_PROCESS)
def test_an_unusable_checkpoint_is_refused_with_one_line_that_names_the_file(
    tmp_path: Path, name: str
) -> None:
    _, code, message = BROKEN[name]
    folder = broken(tmp_path, name)
    with pytest.raises(ModelUnusable) as refusal:
        load(EngineConfig(), str(folder), lambda stage, share: None)

    assert refusal.value.exit_code == code
    assert_one_line(str(refusal.value), message, folder)


def assert_one_line(message: str, said: str, folder: Path) -> None:
    assert said.format(folder=folder) in message
    assert "\n" not in message and len(message) < 600


def start_on_terminal(folder: Path, **environ: str) -> tuple[int, str]:
    """Start a server on a terminal; return its exit code and its output."""
    keyboard, terminal = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "lmi",
            "serve",
            str(folder),
            "--host",
            "127.0.0.1",
            "--port",
            str(free_port()),
        ],
        env={**ENVIRON, **QUIET, "PYTHONPATH": f"{ENGINES}:{ROOT}", "TERM": "xterm", **environ},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    screen = b""
    # It has ended, and the terminal is closed
    with suppress(OSError):
        while select.select([keyboard], [], [], START_TIMEOUT_S)[0]:
            screen += os.read(keyboard, 65536)

    os.close(keyboard)
    return process.wait(START_TIMEOUT_S), screen.decode()


@pytest.mark.parametrize(
    ("break_it", "engine", "code", "said"),
    [
        (have_no_tokenizer, "slow", 4, "no tokenizer: tokenizer.json is missing"),
        (have_half_a_tokenizer, "freezing", 4, "tokenizer.json: "),
        (lambda folder: None, "broken", 4, "model.safetensors is cut short"),
        (lambda folder: None, "lacking", 2, "No module named 'a_library_that_nobody_has'"),
        (vanish, "echo", 4, "does not exist"),
    ],
    ids=["front end", "front end beside a bar", "engine", "library", "configuration"],
)
def test_a_person_reads_one_message_about_a_start_that_failed(
    tmp_path: Path, break_it: Callable[[Path], None], engine: str, code: int, said: str
) -> None:
    folder = write_model(
        tmp_path / "model",
        **{"option.rolling_batch": engine, "option.load_s": 60, "log_format": "auto"},
    )
    break_it(folder)
    ended_with, screen = start_on_terminal(folder)

    assert ended_with == code, screen
    assert screen.count(said) == 1, screen

    for machinery in (
        '{"',
        "gunicorn",
        "Reason:",
        "Shutting down",
        "Traceback",
        "exited with code",
    ):
        assert machinery not in screen, screen

    *lines, last = screen.replace("\r\n", "\n").removesuffix("\n").split("\n")
    # A hint follows some messages
    message = lines[-1] if last.startswith("     ") else last

    assert said in message
    assert re.match(r"(.*\x1b\[2K\x1b\[\?25h)?lmi: ", message), "a bar stands before it"


def test_the_pickled_file_of_these_tests_runs_code_where_it_is_read_without_care(
    tmp_path: Path,
) -> None:
    folder = broken(tmp_path, "pickled")
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (folder / "exploded").exists()


def test_pickled_weights_that_are_trusted_are_served(tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_model("llama"), folder)
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    with serve(folder, "option.allow_pickle=true") as server:
        assert server.post({"inputs": "a"}).status == 200


def test_sigterm_while_torch_is_imported_ends_the_server_at_once() -> None:
    for measurement in measurements():
        with launch(tiny_model("olmo2")) as server:
            wait_until(
                lambda: server.ping() == 503 and b"Loading" in server.request("GET", "/ping").body,
                "it loads",
            )
            with measurement.within(5):
                server.signal(signal.SIGTERM)
                assert server.wait() == 0
                wait_until(lambda: not server.pids(), "nothing is left")


# The ways to start a server.


@pytest.mark.parametrize(
    "argv", [["serve"], ["djl-serving", "-s", "."]], ids=["serve", "djl-serving"]
)
def test_the_environment_alone_configures_a_server(tmp_path: Path, argv: list[str]) -> None:
    """Start a server as a platform starts an image, without flags. The file beats the
    environment.
    """
    server = Server(write_model(tmp_path / "model"), tmp_path / "log")
    (server.folder / "serving.properties").write_text("option.model_name=from-file\n")
    environ = {
        "SAGEMAKER_BIND_TO_PORT": str(server.port),
        "SAGEMAKER_SAFE_PORT_RANGE": f"{server.port + 1}-{server.port + 9}",
        "OPTION_ROLLING_BATCH": "echo",
        "OPTION_OUTPUT_FORMATTER": "sse",
        "OPTION_MODEL_NAME": "from-environment",
        "SERVING_FRONTEND_WORKERS": "1",
    }
    with server.log.open("wb") as log:
        command = [BIN / argv[0], *argv[1:]]
        server.process = subprocess.Popen(
            command,
            cwd=server.folder,
            env={**os.environ, **QUIET, **environ},
            stdout=log,
            stderr=log,
        )

    try:
        server.wait_ready()
        answer = server.post(
            {"inputs": "abc", "parameters": {"max_new_tokens": 3}}, "/predictions/from-file"
        )

        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.body.count(b"data: ") == 3

        wait_until(
            lambda: any(line.get("event") == "ready" for line in server.log_lines()),
            "the banner is there",
        )
        [ready] = [line for line in server.log_lines() if line.get("event") == "ready"]

        assert (ready["port"], ready["engine"], ready["model"]) == (
            server.port,
            "echo",
            "from-file",
        )
    finally:
        server.process.terminate()
        assert server.wait(60) == 0
