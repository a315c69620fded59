"""The process that installs a requirements.txt, with real wheels, a real pip and an
index in files.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmi.errors import StartError
from lmi.sources.fetches import failure
from tests.machine import measurements
from tests.wheels import snapshot, write_index, write_wheel

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Place:
    """A model with a requirements.txt, the folder that it is installed in, and the state of the
    process.
    """

    model: Path
    folder: Path
    state: Path
    index: Path

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        self.state.mkdir(exist_ok=True)
        paths = [
            f"--file={self.model / 'requirements.txt'}",
            f"--folder={self.folder}",
            f"--state={self.state}",
            *words,
        ]

        clean = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("PIP_", "HF_", "DJL_"))
        }

        return subprocess.Popen(
            [sys.executable, "-P", "-m", "lmi.user_code.requirements", *paths, "--log-format=json"],
            env={
                **clean,
                "PYTHONPATH": str(ROOT),
                "PIP_INDEX_URL": write_index(self.index),
                **environ,
            },
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, **environ: str) -> tuple[int, list[str]]:
        """Run the process to its end. Returns its exit code and the messages of its log."""
        process = self.start(*words, **environ)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, [json.loads(line)["message"] for line in errors.splitlines()]

    def failure(self) -> StartError:
        fault = failure(self.state)
        assert fault is not None
        return fault

    def version_of(self, module: str) -> str:
        code = f"import {module}; print({module}.VERSION)"
        environ = {**os.environ, "PYTHONPATH": str(self.folder)}
        return subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True
        ).stdout.strip()

    def left_over(self) -> list[str]:
        lasting_names = {self.folder.name, f"{self.folder.name}.lock"}
        return [
            path.name for path in self.folder.parent.iterdir() if path.name not in lasting_names
        ]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    model = tmp_path / "model"
    model.mkdir()
    (model / "requirements.txt").write_text("# ours\none\n")
    return Place(
        model, tmp_path / "cache" / "requirements" / "hash", tmp_path / "state", tmp_path / "index"
    )


def test_the_wheels_beside_the_file_are_enough_without_a_network(place: Place) -> None:
    write_wheel(place.model / "requirements", "one", requires="two")
    write_wheel(place.model / "requirements", "two", version="2.0")
    before = snapshot(place.model)
    code, _ = place.run(HF_HUB_OFFLINE="1")
    assert code == 0
    assert (place.version_of("one"), place.version_of("two")) == ("1.0", "2.0")
    assert json.loads((place.state / "progress.json").read_bytes())["stage"] == "requirements"
    assert place.left_over() == [] and snapshot(place.model) == before


def test_what_is_complete_is_used_again_without_pip(place: Place) -> None:
    place.folder.mkdir(parents=True)
    code, lines = place.run(PIP_INDEX_URL="http://127.0.0.1:1")
    assert code == 0 and "installed by an earlier start" in lines[-1]
    assert list(place.folder.iterdir()) == []


def test_the_index_is_asked_for_what_the_wheels_lack(place: Place, tmp_path: Path) -> None:
    write_wheel(place.model / "requirements", "one", requires="two")
    write_index(place.index, write_wheel(tmp_path / "wheels", "two"))
    code, lines = place.run()
    assert code == 0 and place.version_of("two") == "1.0"
    assert any("so the index is asked" in line for line in lines)


def test_words_for_pip_take_the_place_of_the_file(place: Place, tmp_path: Path) -> None:
    write_index(place.index, write_wheel(tmp_path / "wheels", "two"))
    (place.model / "more.txt").write_text("two\n")
    code, lines = place.run("--with-words", STANDARD_PIP_ARGS="-r 'more.txt' --no-deps")

    assert (code, place.version_of("two"), place.version_of("one")) == (0, "1.0", "")
    assert "STANDARD_PIP_ARGS: installed in" in lines[-1]


def test_words_that_pip_refuses_end_the_start_with_its_words(place: Place) -> None:
    code, _ = place.run("--with-words", STANDARD_PIP_ARGS="no-such-package")
    assert code == 4 and str(place.failure()).startswith("STANDARD_PIP_ARGS: ERROR: No matching")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "DJL_OFFLINE"])
def test_offline_the_index_is_not_asked(place: Place, tmp_path: Path, variable: str) -> None:
    write_wheel(place.model / "requirements", "one", requires="two")
    write_index(place.index, write_wheel(tmp_path / "wheels", "two"))
    code, _ = place.run(**{variable: "true"})
    fault = place.failure()
    assert (code, fault.exit_code, fault.label) == (4, 4, "model_unusable")
    assert fault.message.startswith(
        f"{place.model / 'requirements.txt'}: ERROR: No matching distribution"
    )
    assert f"{variable}=true is set" in fault.message


def test_offline_without_wheels_the_variable_and_the_folder_are_named(place: Place) -> None:
    code, _ = place.run(HF_HUB_OFFLINE="1")
    reason = f"{place.model / 'requirements.txt'}: HF_HUB_OFFLINE=1 is set, and there is no folder"
    assert code == 4 and place.failure().message == f"{reason} {place.model / 'requirements'}"


def test_a_failure_carries_the_last_error_of_pip_and_leaves_nothing(place: Place) -> None:
    code, lines = place.run()
    assert code == 4 and not place.folder.exists() and place.left_over() == []
    assert place.failure().message.endswith("ERROR: No matching distribution found for one")
    assert lines[-1] == place.failure().message


def test_a_file_that_names_nothing_installs_nothing(place: Place) -> None:
    (place.model / "requirements.txt").write_text("# nothing\n\n")
    assert place.run()[0] == 0 and place.folder.is_dir()


def test_a_folder_that_cannot_be_written_names_the_variable_that_moves_it(
    place: Place, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    code, _ = place.run()
    assert code == 4 and "set SERVING_DOWNLOAD_DIR to a folder" in place.failure().message


def test_two_processes_with_one_folder_install_once(place: Place) -> None:
    write_wheel(place.model / "requirements", "one")
    processes = [place.start(), place.start()]
    logs = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("installed by an earlier start" in log for log in logs) == 1
    assert place.left_over() == []


@pytest.fixture
def silent_index() -> Iterator[socket.socket]:
    """An index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_sigterm_ends_it_and_pip_within_two_seconds(
    place: Place, silent_index: socket.socket
) -> None:
    silent_index.settimeout(TIMEOUT_S)
    for measurement in measurements():
        process = place.start(
            PIP_INDEX_URL=f"http://127.0.0.1:{silent_index.getsockname()[1]}/simple"
        )
        connection, _ = silent_index.accept()
        with connection:
            with measurement.within(2):
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=TIMEOUT_S)

            assert process.returncode == 128 + signal.SIGTERM

            connection.settimeout(TIMEOUT_S)
            # Pip has ended, so its connection does
            while connection.recv(4096):
                pass

    assert not place.folder.exists() and place.left_over() == []


def test_the_secrets_of_an_index_are_not_logged(place: Place) -> None:
    code, lines = place.run(PIP_INDEX_URL="http://user:hunter2@127.0.0.1:1/simple", PIP_RETRIES="0")
    assert code == 4 and not any("hunter2" in line for line in lines)
