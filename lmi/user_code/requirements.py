"""The process that installs what a model's requirements.txt names, by pip. It runs before user code
and engines start.

FOLDER appears only when it is complete. A second process with the same FOLDER waits for the first.
Wheels in a folder `requirements` beside FILE go before the index, and nothing is written there.
STATE gets `progress.json` and `failure.json` of `lmi/sources/fetches.py`. Only this process and the
one that fetches sources have the secrets of the environment, which an index may ask for. SIGTERM
ends it and pip at once.

With USER pip runs as that user, since a package may run code while it is built. What it installs
becomes root's, so that no process of the user can change it.
"""

import argparse
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import lmi.shared.log
from lmi.errors import ModelUnusable, StartError, cause_line
from lmi.settings.kinds import is_true
from lmi.settings.user import User
from lmi.shared import linux
from lmi.shared.sink import guard_streams
from lmi.sources.fetches import FAILURE, PROGRESS, FetchReport, write
from lmi.sources.place import Place
from lmi.user_code.options import PIP_ARGS
from lmi.user_code.settings import WHEELS

OFFLINE = ("HF_HUB_OFFLINE", "DJL_OFFLINE")
PIP = (
    sys.executable,
    "-P",
    "-m",
    "pip",
    "install",
    "--no-input",
    "--disable-pip-version-check",
    "--progress-bar=off",
)
# How lines of pip begin, of which it writes one for each package.
PACKAGE_STEPS = ("Collecting ", "Processing ")
STEPS = (*PACKAGE_STEPS, "Downloading ", "Building ", "Installing ")
# The least time between two lines of the log about progress.
LOG_S = 10.0

# Where this module runs, its name is __main__.
log = logging.getLogger("lmi.user_code.requirements")


class Installer:
    """Runs pip for one file."""

    def __init__(
        self,
        file: Path,
        folder: Path,
        state: Path,
        user: User | None = None,
        words: Sequence[str] = (),
    ) -> None:
        """`words` for pip take the place of the file, and pip runs where it would lie."""
        self._file = file
        # What messages call that which is installed.
        self._label = PIP_ARGS if words else str(file)
        self._words = words or [f"--requirement={file}"]
        self._folder = folder
        self._user = user
        self._part = folder.with_name(f"{folder.name}.part")
        self._state = state
        self._logged_s = time.monotonic()
        self._num_packages = 1
        if not words:
            self._num_packages = max(1, _num_packages(file.read_text(errors="replace")))

    def install(self) -> None:
        """Fill the folder, unless it is complete. Raises ModelUnusable with the cause that pip
        gives.
        """
        lock = self._folder.with_name(f"{self._folder.name}.lock")
        with Place(self._folder.parent, "SERVING_DOWNLOAD_DIR", self._file).only_one(lock):
            if self._folder.is_dir():
                log.info("%s: installed by an earlier start in %s", self._label, self._folder)
                return

            started_s = time.monotonic()
            try:
                self._fill()
                # For a file that names nothing, pip makes no folder.
                self._part.mkdir(exist_ok=True)
                self._take_over()
                self._part.rename(self._folder)
            finally:
                shutil.rmtree(self._part, ignore_errors=True)

            duration_s = time.monotonic() - started_s
            log.info("%s: installed in %s, %.1f s", self._label, self._folder, duration_s)

    def _fill(self) -> None:
        """Install from the folder of wheels, then from the index if that fails and an index may be
        asked.
        """
        if self._label == PIP_ARGS:
            error = self._pip()
            if error is not None:
                raise ModelUnusable(f"{PIP_ARGS}: {error}")

            return

        wheels = self._file.parent / WHEELS
        offline = self._offline()
        sources = [f"--find-links={wheels}"] if wheels.is_dir() else []
        if not sources and offline:
            raise ModelUnusable(f"{self._file}: {offline} is set, and there is no folder {wheels}")

        if sources:
            error = self._pip("--no-index", *sources)
            if error is None:
                return

            if offline:
                raise ModelUnusable(
                    f"{self._file}: {error} ({offline} is set, so no index is asked)"
                )

            log.warning(
                "%s: not all of it is in %s, so the index is asked: %s", self._file, wheels, error
            )

        error = self._pip(*sources)
        if error is not None:
            raise ModelUnusable(f"{self._file}: {error}")

    def _offline(self) -> str:
        """Return the variable that forbids the network, with its value, or ""."""
        for name in OFFLINE:
            text = os.environ.get(name, "")
            if text.strip() and is_true(text, True):
                return f"{name}={text}"

        return ""

    def _pip(self, *arguments: str) -> str | None:
        """Run pip beside the file. Returns None if it succeeded, else its last line that begins
        with ERROR.
        """
        shutil.rmtree(self._part, ignore_errors=True)
        if self._user is not None:
            self._part.mkdir()
            os.chown(self._part, self._user.uid, self._user.gid)

        command = [*PIP, f"--target={self._part}", *arguments, *self._words]
        # pip gets a process group of its own, of which nothing is left at the end.
        process = subprocess.Popen(
            command,
            cwd=self._file.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
            preexec_fn=partial(_prepare, self._user, os.getpid()),
        )
        assert process.stdout is not None
        try:
            lines = self._follow(process.stdout)
            process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

            process.wait()

        if process.returncode == 0:
            return None

        errors = [line for line in lines if line.startswith("ERROR:")]
        candidates = errors or lines or [f"pip exited with code {process.returncode}"]
        return candidates[-1]

    def _follow(self, output: Iterable[str]) -> list[str]:
        """Report what pip does until it ends, and return its lines."""
        lines: list[str] = []
        num_packages = 0
        for line in filter(None, map(str.strip, output)):
            log.debug("pip: %s", line)
            lines.append(line)
            if line.startswith(STEPS):
                num_packages += line.startswith(PACKAGE_STEPS)
                self._report(min(0.9, num_packages / self._num_packages), line)

        return lines

    def _take_over(self) -> None:
        """Make what pip has installed this process's own, each folder before what is in it. Pip has
        ended.
        """
        if self._user is None:
            return

        waiting = [self._part]
        while waiting:
            path = waiting.pop()
            os.chown(path, os.geteuid(), os.getegid(), follow_symlinks=False)
            if path.is_symlink():
                continue

            path.chmod(path.stat().st_mode & 0o755)
            if path.is_dir():
                waiting += path.iterdir()

    def _report(self, share: float, step: str) -> None:
        report = FetchReport(stage="requirements", source=str(self._file), share=share)
        write(self._state / PROGRESS, report)

        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_S:
            self._logged_s = now_s
            log.info("installing: %s", step)


def _num_packages(requirements: str) -> int:
    """Return how many lines name a package: neither a comment nor an option of pip."""
    lines = filter(None, map(str.strip, requirements.splitlines()))
    return sum(not line.startswith(("#", "-")) for line in lines)


def _prepare(user: User | None, parent_pid: int) -> None:
    """Make the process that becomes pip one of the user, and let it end with its parent."""
    if user is not None:
        user.become()

    linux.die_with_parent(parent_pid, signal.SIGKILL)


def run(
    file: Path, folder: Path, state: Path, user: User | None = None, words: Sequence[str] = ()
) -> int:
    """Install. Returns the exit code."""
    try:
        Installer(file, folder, state, user, words).install()
        return 0
    except StartError as error:
        log.error("%s", error)
        failure = error
    except Exception as error:
        log.exception("%s was not installed", file)
        failure = ModelUnusable(f"{file}: {cause_line(error)}")

    # On a full disk, the exit code and the log still tell of the failure.
    with suppress(OSError):
        write(state / FAILURE, failure.info)

    return failure.exit_code


def main() -> None:
    parser = argparse.ArgumentParser(prog="lmi.user_code.requirements", description=__doc__)
    for name in ("--file", "--folder", "--state"):
        parser.add_argument(name, type=Path, required=True)

    parser.add_argument("--user", type=User.of)
    parser.add_argument("--with-words", action="store_true")
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--log-format", default="auto")
    arguments = parser.parse_args()

    guard_streams()
    signal.signal(signal.SIGTERM, _end)
    linux.set_title("lmi-install")
    lmi.shared.log.setup("requirements", arguments.log_level, arguments.log_format, linux.log_fd())
    words = shlex.split(os.environ[PIP_ARGS]) if arguments.with_words else ()
    sys.exit(run(arguments.file, arguments.folder, arguments.state, arguments.user, words))


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    # A second signal must not interrupt the end of pip.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    main()
