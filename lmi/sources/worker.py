"""The fetch process: `python -m lmi.sources.worker REQUEST FOLDER` (`lmi/sources/fetches.py`).

It has the secrets of hub and S3 from its environment. It exits with 0, or with the exit code of the
error in `failure.json`. A signal ends it at once: what lies on the disk is good at any moment.
"""

import argparse
import faulthandler
import logging
import os
import signal
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import msgspec

import lmi.shared.log
from lmi.errors import StartError, cause_line
from lmi.shared import linux
from lmi.shared.sink import guard_streams
from lmi.sources.fetch import fetch
from lmi.sources.fetches import FAILURE, PROGRESS, RESULT, FetchRequest, write
from lmi.sources.job import DELAYS_S, FetchJob, Progress
from lmi.sources.place import SPARE_BYTES
from lmi.sources.reporter import LOG_S, Reporter

# This module is `__main__` where it runs.
log = logging.getLogger("lmi.sources.worker")


def run(
    jobs: Sequence[FetchJob],
    folder: Path,
    reporter: AbstractContextManager[object],
    *,
    says_failure: bool,
) -> int:
    """Fetch every source and write the result or the failure. Returns the exit code."""
    folders: dict[str, str] = {}
    try:
        with reporter:
            for job in jobs:
                started_s = time.monotonic()
                source = job.wanted.source
                folders[source] = str(fetch(job))
                time_s = time.monotonic() - started_s
                log.info("%s is in %s, after %.1f s", source, folders[source], time_s)
    except Exception as error:
        if isinstance(error, StartError):
            failure = error
        else:
            log.exception("the fetch failed")
            failure = StartError(f"the fetch failed: {type(error).__name__}: {cause_line(error)}")

        # If this disk is full too, the exit code and the log still say it.
        with suppress(OSError):
            write(folder / FAILURE, failure.info)

        # On a terminal people read it only once, in the supervisor's last message.
        if says_failure:
            log.error("%s", failure)

        return failure.exit_code

    write(folder / RESULT, folders)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lmi.sources.worker", description=__doc__)
    parser.add_argument("request", type=Path, help="a file with the FetchRequest as JSON")
    parser.add_argument("folder", type=Path, help="where progress, result or failure are written")

    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--log-format", default="auto", choices=("auto", "text", "json"))
    parser.add_argument("--no-bar", action="store_true", help="log the progress on a terminal too")
    parser.add_argument(
        "--log-s", type=float, default=LOG_S, help="seconds between two lines of the log"
    )
    parser.add_argument(
        "--delays", type=float, nargs="*", default=DELAYS_S, help="seconds between tries"
    )
    parser.add_argument(
        "--spare-bytes", type=int, default=SPARE_BYTES, help="bytes of the disk that stay free"
    )

    return parser.parse_args()


def _quieten_libraries() -> None:
    """Let the log of the hub's client go where ours goes, and the other libraries write no line for
    each request.
    """
    hub = logging.getLogger("huggingface_hub")
    hub.handlers.clear()
    hub.propagate = True
    for name in ("httpx2", "httpx", "botocore", "boto3", "s3transfer", "urllib3", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)


def main() -> None:
    arguments = _arguments()
    guard_streams()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    linux.set_title("lmi-fetch")
    linux.hide_memory()
    lmi.shared.log.setup("fetch", arguments.log_level, arguments.log_format, linux.log_fd())
    # With telemetry on, the hub's client also fetches /api/agent-harnesses, a list of the programs
    # that it may run in.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    _quieten_libraries()

    request = msgspec.json.decode(arguments.request.read_bytes(), type=FetchRequest)
    is_json = arguments.log_format == "json"
    has_bar = os.isatty(lmi.shared.log.fd()) and not is_json and not arguments.no_bar

    progress = Progress()
    delays_s = tuple(arguments.delays)
    jobs: list[FetchJob] = []
    for source in request.sources:
        jobs.append(FetchJob(source, progress, delays_s, arguments.spare_bytes))

    progress_file = arguments.folder / PROGRESS
    reporter = Reporter(progress, progress_file, has_bar=has_bar, log_s=arguments.log_s)
    linux.end_at_once(run(jobs, arguments.folder, reporter, says_failure=not has_bar))


if __name__ == "__main__":
    main()
