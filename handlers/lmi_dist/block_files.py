"""Blocks of the KV cache in files, which outlive the process. Any number of processes share them.

Each model has a folder of its own below the shared one, and each block a file in it, named by its
digest. A file is written aside and renamed, so a name stands for a whole block; what a power
failure tears is found by its checksum. Files that nobody has used for longest go first.
"""

import logging
import os
import re
import secrets
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from handlers.lmi_dist.arrays import Array
from lmi.errors import error_line

SUFFIX = ".kv"
UNFINISHED = ".new"
FOLDER_NAME = re.compile(r"[0-9a-f]{64}")
FILE_NAME = re.compile(r"[0-9a-f]{64}\.kv(\.new[0-9a-f]+)?")
MAGIC = b"lmi-kv 1"
# The magic word, the digest of the block, the checksum and the number of the bytes behind it.
HEADER = struct.Struct("<8s32sIQ")

# Copies that wait for the disk take so much memory at most, or that of one block.
MAX_WAITING_BYTES = 128 << 20
# A folder that is too large shrinks to so much of its bound, so that it is not read at each block.
SHARE_KEPT = 0.9
# After so many writes the folder is read again, since other processes write to it too.
WRITES_PER_LOOK = 64
# What a killed process has left unfinished is nobody's after so long.
UNFINISHED_S = 3600.0
# A block counts as used earlier than the one before it, which must not go first.
EARLIER_PER_BLOCK_NS = 1_000_000_000
# The end of a process waits for so long for what is not written yet.
CLOSE_S = 10.0

log = logging.getLogger(__name__)


class _Copy(NamedTuple):
    """A block that waits to be written."""

    digest: bytes
    # Its place in its sequence.
    place: int
    content: bytes


@dataclass(frozen=True, slots=True)
class _BlockFile:
    """A file of the folder."""

    path: str
    num_bytes: int
    used_ns: int


class BlockFiles:
    """The files of one model. One thread reads and writes; the disk is written by another.

    `model` is the digest of all that the content of a block depends on, beside its tokens.
    `max_bytes` bounds the files of all models in the folder.
    """

    def __init__(self, folder: str, model: bytes, max_bytes: int) -> None:
        """Raises OSError if the folder cannot be made or written."""
        self._shared = Path(folder)
        self._folder = self._shared / model.hex()
        self._max_bytes = max_bytes
        # It ends the names of files until they are whole. Process ids are not enough: two
        # containers may have the same.
        self._unfinished = UNFINISHED + secrets.token_hex(8)

        # What is computed of prompts is as private as they are.
        self._shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if not os.access(self._folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"{self._folder} cannot be read and written")

        self._waiting = deque[_Copy]()
        self._waiting_bytes = 0
        self._is_closing = False
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None

        # Of the writer alone.
        self._num_bytes = 0
        self._num_writes = 0
        self._has_failed = False

    def __len__(self) -> int:
        """How many blocks of this model the folder has."""
        return sum(name.endswith(SUFFIX) for name in os.listdir(self._folder))

    def has(self, digest: bytes) -> bool:
        """Whether there is a file of a block."""
        return os.path.exists(self._path(digest))

    def read(self, digest: bytes, place: int, content: Array) -> bool:
        """Read a block into memory, (num_bytes,). `place` is its place in its sequence.

        Returns False if there is no such block. A file that is not whole is removed, with a line
        in the log.
        """
        path = self._path(digest)
        try:
            fault = _read(path, digest, content)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("a cached prefix cannot be read: %s", error_line(error))
            return False

        if fault:
            log.warning("%s is left out and removed: %s", path, fault)
            _remove(path)
            return False

        _note_use(path, place)
        return True

    def write(self, digest: bytes, place: int, content: Array) -> bool:
        """Copy a block, (num_bytes,), for the disk.

        Returns False, with nothing done, while too many wait.
        """
        with self._changed:
            if self._waiting and self._waiting_bytes + content.size > MAX_WAITING_BYTES:
                return False

            self._waiting.append(_Copy(digest, place, content.tobytes()))
            self._waiting_bytes += content.size
            self._changed.notify()

        if self._writer is None:
            self._writer = threading.Thread(
                target=self._write_waiting, name="prefix-files", daemon=True
            )
            self._writer.start()

        return True

    def close(self) -> None:
        """Write what waits, for CLOSE_S at most."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

        if self._writer is not None:
            self._writer.join(CLOSE_S)

    def _path(self, digest: bytes) -> str:
        return f"{self._folder}/{digest.hex()}{SUFFIX}"

    # The thread that writes.

    def _write_waiting(self) -> None:
        self._look()
        while True:
            with self._changed:
                while not self._waiting and not self._is_closing:
                    self._changed.wait()

                if not self._waiting:
                    return

                copy = self._waiting[0]

            try:
                self._write(copy)
                self._has_failed = False
            except OSError as error:
                # A full disk stays full for many blocks.
                if not self._has_failed:
                    log.warning("cached prefixes cannot be written: %s", error_line(error))
                    self._has_failed = True

            # It counts until it is written.
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= len(copy.content)

    def _write(self, copy: _Copy) -> None:
        path = self._path(copy.digest)
        if os.path.exists(path):
            return

        unfinished = path + self._unfinished
        header = HEADER.pack(MAGIC, copy.digest, zlib.crc32(copy.content), len(copy.content))
        try:
            with open(unfinished, "xb", opener=_private) as file:
                file.write(header)
                file.write(copy.content)

            _note_use(unfinished, copy.place)
            os.rename(unfinished, path)
        except OSError:
            _remove(unfinished)
            raise

        self._num_bytes += len(header) + len(copy.content)
        self._num_writes += 1
        if self._num_bytes > self._max_bytes or self._num_writes % WRITES_PER_LOOK == 0:
            self._look()

    def _look(self) -> None:
        """Count the bytes of all models, and remove the files that were used longest ago if they
        are too many.
        """
        files = sorted(self._all(), key=lambda file: file.used_ns)
        self._num_bytes = sum(file.num_bytes for file in files)
        if self._num_bytes <= self._max_bytes:
            return

        for file in files:
            _remove(file.path)
            self._num_bytes -= file.num_bytes
            if self._num_bytes <= SHARE_KEPT * self._max_bytes:
                return

    def _all(self) -> Iterator[_BlockFile]:
        """The blocks of all models. What a killed process has left is removed."""
        ended_ns = time.time_ns() - int(UNFINISHED_S * 1e9)
        for folder in _entries(self._shared):
            if not FOLDER_NAME.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue

            for file in _entries(folder.path):
                name = FILE_NAME.fullmatch(file.name)
                if name is None:
                    continue

                try:
                    status = file.stat(follow_symlinks=False)
                except OSError:
                    # Another process has removed it.
                    continue

                if name[1] and status.st_mtime_ns < ended_ns:
                    _remove(file.path)
                else:
                    yield _BlockFile(file.path, status.st_size, status.st_mtime_ns)


def _read(path: str, digest: bytes, content: Array) -> str:
    """Read a file into memory. Returns what is wrong with it, or nothing."""
    with open(path, "rb", buffering=0, opener=_unlinked) as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            return "it ends in its header"

        magic, name, checksum, num_bytes = HEADER.unpack(header)
        if magic != MAGIC or name != digest:
            return "it is not the block that its name says"

        if num_bytes != content.size:
            return f"it is a block of {num_bytes} bytes, not of {content.size}"

        num_read = 0
        memory = content.data
        while num_read < num_bytes:
            num_more = file.readinto(memory[num_read:])
            if not num_more:
                return f"it ends after {num_read} of {num_bytes} bytes"

            num_read += num_more

    if zlib.crc32(content.data) != checksum:
        return "its bytes have changed"

    return ""


def _note_use(path: str, place: int) -> None:
    """Note that a block was used now, a little earlier than the one before it."""
    used_ns = time.time_ns() - place * EARLIER_PER_BLOCK_NS
    try:
        os.utime(path, ns=(used_ns, used_ns))
    except OSError:
        # Another process has removed it.
        pass


def _entries(folder: str | Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        # Another process has removed it, or the folder may not be written any more.
        pass


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _unlinked(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)
