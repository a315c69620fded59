"""A disk of a few bytes that one process sees, and what it has there."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

from tests.gateway.gateways import Gateway

BLOCK_BYTES = 4096


def on_small_disk(folder: Path, num_bytes: int) -> tuple[str, ...]:
    """The beginning of a command that sees a disk of so many bytes at `folder`."""
    folder.mkdir()
    mount = f"mount -t tmpfs -o size={num_bytes} tmpfs {folder}"
    return ("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh")


def enlarge(aws: Gateway, folder: Path, num_bytes: int) -> None:
    """Give the disk of a gateway more room."""
    enter = ["nsenter", "-t", str(aws.process.pid), "-m"]
    subprocess.run([*enter, "mount", "-o", f"remount,size={num_bytes}", str(folder)], check=True)


def seen_by(aws: Gateway, path: Path) -> Path:
    """Return a path as the gateway sees it."""
    return Path(f"/proc/{aws.process.pid}/root{path}")


def fill(file: Path) -> None:
    """Write a file that takes all the room of its disk."""
    with open(file, "wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(BLOCK_BYTES))
