"""Unpacks an archive that nobody trusts."""

import bz2
import gzip
import io
import platform
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import IO, Self

from lmi.errors import ModelUnusable, SecurityRefused, cause_line
from lmi.sources.paths import check_path, shown

MAX_MEMBERS = 100_000
# The members of so many unpacked bytes are counted before the first is written.
COUNTED_BYTES = 256 << 20
# The size of a member's long name or its further fields, which tarfile holds in memory.
MAX_HEADER_BYTES = 1 << 20
BUFFER_BYTES = 1 << 20
BLOCK_BYTES = 512
GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
BZIP2 = re.compile(rb"BZh[1-9]1AY&SY")
# The library that reads zstd.
ZSTANDARD = "zstandard"
HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class Member(tarfile.TarInfo):
    """A member whose header fits in memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if member.type in HEADERS and member.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"it has a header of {member.size} bytes")

        return member


class TarStream(io.BufferedIOBase):
    """The bytes of a tar file, unpacked if gzip, bzip2 or zstd packed them, which remembers how
    they end.

    `count` gets how many bytes of the file each read has taken.
    """

    def __init__(self, file: io.FileIO, count: Callable[[int], None]) -> None:
        self._packed = file
        self._count = count
        self._num_counted = 0
        self._file, self._faults = _unpacked(io.BufferedReader(file, BUFFER_BYTES))
        # The last bytes that were read.
        self._end = b""

    def read(self, size: int | None = -1) -> bytes:
        try:
            data = self._file.read(-1 if size is None else size)
        except self._faults as error:
            raise tarfile.ReadError(str(error)) from error

        self._count(self._packed.tell() - self._num_counted)
        self._num_counted = self._packed.tell()
        self._end = (self._end + data[-BLOCK_BYTES:])[-BLOCK_BYTES:]
        return data

    def finish(self) -> None:
        """Read the rest. Raises ReadError unless the last block is the empty one that ends each tar
        file.

        tarfile takes an archive that was cut between two members for one that has ended.
        """
        while self.read(BUFFER_BYTES):
            pass

        if self._end != bytes(BLOCK_BYTES):
            raise tarfile.ReadError("it ends in the middle")


def unpack(
    archive: Path,
    folder: Path,
    *,
    name: str = "",
    count: Callable[[int], None] = lambda num_bytes: None,
    check_room: Callable[[int], None] = lambda num_bytes: None,
    max_members: int = MAX_MEMBERS,
) -> None:
    """Unpack a tar file, packed by gzip, bzip2, zstd or not at all, into `folder`.

    `count` gets the bytes of the archive that were read. `check_room` gets the size of each member
    before it is written. Raises SecurityRefused for a member that leaves the folder or is not a
    file, folder or link, and ModelUnusable for a broken archive or a Python that cannot refuse
    such members. Messages begin with `name`, which is the archive's path unless it is given.
    """
    subject = name or str(archive)
    _check_python(subject)

    with _opened(archive, subject) as (_, tar):
        for member in _counted(tar, subject, max_members):
            if member.offset_data + member.size > COUNTED_BYTES:
                break

    with _opened(archive, subject, count) as (stream, tar):
        for member in _counted(tar, subject, max_members):
            _check_member(member, subject)
            check_room(member.size)

            # The filter refuses links that lead outward and devices, and drops owners and modes.
            try:
                tar.extract(member, folder, filter="data")
            except tarfile.FilterError as error:
                reason = f"the member {shown(member.name)} is refused: {cause_line(error)}"
                raise SecurityRefused(f"{subject}: {reason}") from error

        stream.finish()


def _check_member(member: tarfile.TarInfo, subject: str) -> None:
    """Raise SecurityRefused for a path that leaves the folder, and what `check_path` raises."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise SecurityRefused(
            f"{subject}: the member {shown(member.name)} leaves the archive's folder"
        )

    # A path without parts is the folder itself, as ./ is.
    if path.parts:
        check_path(subject, str(path))


def check_readable(name: str) -> None:
    """Raise ModelUnusable if the package is missing that unpacks an archive of this name."""
    if name.lower().endswith(".zst") and find_spec(ZSTANDARD) is None:
        raise _missing(name)


def _check_python(subject: str) -> None:
    """Raise ModelUnusable where tarfile has no filter, as in the Python 3.11.2 of Debian 12."""
    if not hasattr(tarfile, "data_filter"):
        version = platform.python_version()
        raise ModelUnusable(
            f"{subject}: Python {version} cannot unpack an archive safely, 3.11.4 and newer can"
        )


def _missing(subject: str) -> ModelUnusable:
    return ModelUnusable(f"{subject}: the library {ZSTANDARD} is not installed, which unpacks zstd")


def _unpacked(packed: io.BufferedReader) -> tuple[IO[bytes], tuple[type[Exception], ...]]:
    """Return the bytes in a file, and what else than an OSError says that they are broken."""
    start = packed.peek(16)
    if start.startswith(GZIP):
        return gzip.GzipFile(fileobj=packed), (zlib.error, EOFError)  # type: ignore[return-value]

    if BZIP2.match(start):
        return bz2.BZ2File(packed), (EOFError,)

    if start.startswith(ZSTD):
        zstandard = import_module(ZSTANDARD)
        reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
        return reader, (zstandard.ZstdError,)

    return packed, ()


@contextmanager
def _opened(
    archive: Path, subject: str, count: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[tuple[TarStream, tarfile.TarFile]]:
    """Open an archive. Raises ModelUnusable if it is broken."""
    try:
        with io.FileIO(archive) as file, TarStream(file, count) as stream:
            with tarfile.open(None, "r|", stream, BUFFER_BYTES, tarinfo=Member) as tar:
                yield stream, tar
    except ModuleNotFoundError as error:
        raise _missing(subject) from error
    except (tarfile.TarError, RecursionError, OSError) as error:
        is_of_disk = isinstance(error, OSError) and error.errno is not None
        if is_of_disk:
            raise

        raise ModelUnusable(f"{subject}: the archive is broken: {cause_line(error)}") from error


def _counted(tar: tarfile.TarFile, subject: str, max_members: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members. Raises SecurityRefused if there are too many."""
    for number, member in enumerate(tar, start=1):
        if number > max_members:
            raise SecurityRefused(f"{subject}: the archive has more than {max_members} members")

        yield member
