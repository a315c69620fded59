"""The fetch process as a real child, as the supervisor starts it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lmi.errors import StartError
from lmi.sources import fetches
from lmi.sources.fetches import FetchReport, FetchRequest, WantedSource, write

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
QUICK = ("--delays", "0.05", "0.05", "0.05", "0.05", "--spare-bytes", "0")
CONFIG = json.dumps({"model_type": "llama", "vocab_size": 257}).encode()


def model_files(num_bytes: int = 1000, **more: bytes) -> dict[str, bytes]:
    """The files of a small model; its weights are bytes that are not zero."""
    weights = bytes(range(1, 256)) * (num_bytes // 255 + 1)
    return {
        "config.json": CONFIG,
        "tokenizer.json": b"{}",
        "model.safetensors": weights[:num_bytes],
        **more,
    }


def on_small_disk(folder: Path, num_bytes: int) -> tuple[str, ...]:
    """The beginning of a command that sees an empty disk at `folder`. `left` beside it lists its
    files at the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mount = f"mount -t tmpfs -o size={num_bytes} tmpfs {folder}"
    command = f"find {folder} -type f -size +0 -printf '%f\\n' > {folder.parent}/left"
    return ("unshare", "-m", "sh", "-c", f'{mount} && "$@"; code=$?; {command}; exit $code', "sh")


def on_read_only(folder: Path) -> tuple[str, ...]:
    """The beginning of a command that sees `folder` as a disk that cannot be written."""
    mount = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}"
    return ("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh")


def can_mount() -> bool:
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, capture_output=True).returncode == 0
    )


needs_mount = pytest.mark.skipif(not can_mount(), reason="this user may not mount a small disk")
# Arguments, as if others filled the disk after the check for room
MIDWAY = (
    *QUICK[:-1],
    str(-8 << 20),
)


class Fetch:
    """One fetch process and what it leaves in its folder. It prints to a file, or to the descriptor
    `output`.
    """

    def __init__(
        self,
        folder: Path,
        *sources: str,
        environ: Mapping[str, str],
        arguments: tuple[str, ...] = QUICK,
        prefix: tuple[str, ...] = (),
        output: int | None = None,
        log_format: str = "json",
        **options: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        options = {"download_dir": str(folder / "downloads"), **options}
        sources_wanted = tuple(WantedSource(source=source, **options) for source in sources)
        write(folder / "request.json", FetchRequest(sources=sources_wanted))
        self.log = folder / "log"
        environ_kept = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "PYTHONPATH": str(ROOT),
        }

        module = [
            sys.executable,
            "-P",
            "-m",
            "lmi.sources.worker",
            str(folder / "request.json"),
            str(folder),
        ]

        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*prefix, *module, "--log-format", log_format, *arguments],
                env=environ_kept | dict(environ),
                stdout=output or log,
                stderr=output or log,
                cwd=folder,
            )

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        return self.process.wait(timeout_s)

    def folders(self) -> list[Path]:
        """Wait for the end of a fetch that succeeds. Returns the folders."""
        assert self.wait() == 0, self.log.read_text()
        result = fetches.result(self.folder)
        assert result is not None
        return list(result.values())

    def failure(self) -> StartError:
        """Wait for the end of a fetch that fails, with the exit code and one line for people."""
        code = self.wait()
        failure = fetches.failure(self.folder)
        assert failure is not None, self.log.read_text()
        assert failure.exit_code == code, failure
        assert "\n" not in failure.message, failure.message
        return failure

    def progress(self) -> FetchReport:
        return fetches.read(self.folder / fetches.PROGRESS, FetchReport) or FetchReport()

    def lines(self) -> list[str]:
        """The messages of its log."""
        return [json.loads(line)["message"] for line in self.log.read_text().splitlines()]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder: bytes by path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
