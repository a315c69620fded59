"""The frame of a process that the supervisor starts for a slot: command line, record, log, exit
code.
"""

import argparse
import faulthandler
import logging
import signal
from collections.abc import Callable
from typing import NoReturn

import lmi.shared.log
from lmi.errors import StartError
from lmi.shared import linux
from lmi.shared.sink import guard_streams
from lmi.shared.state import EngineRecord, Phase

log = logging.getLogger(__name__)


def main(module: str, about: str | None, run: Callable[..., int], *words: str) -> NoReturn:
    """Run a module for the slot that its command line names, and end with `run`'s exit code.
    `words`: more flags.
    """
    parser = argparse.ArgumentParser(prog=module, description=about)
    parser.add_argument("--slot", type=int, required=True)
    for word in words:
        parser.add_argument(f"--{word}", required=True)

    guard_streams()
    linux.print_lines_at_once()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    linux.end_at_once(run(**vars(parser.parse_args())))


def live(
    record: EngineRecord, role: str, log_level: str, log_format: str, body: Callable[[], None]
) -> int:
    """Run the body of the process that a record is about, from its load to its end. Returns the
    exit code.

    The error that ends it is in the record. A StartError is one line in the log, an unexpected
    fault has a traceback.
    """
    record.claim()
    record.phase = Phase.LOADING
    linux.set_title(f"lmi-{role.replace(' ', '-')}")
    lmi.shared.log.setup(role, log_level, log_format, linux.log_fd())
    lmi.shared.log.follow(record.block.supervisor.log_level)
    lmi.shared.log.count_dropped_in(record)
    try:
        body()
    except StartError as error:
        record.fail(error, str(error))
        # On a terminal the supervisor's last message says it.
        if not lmi.shared.log.is_text(log_format):
            log.error("this process cannot start: %s", error)

        return error.exit_code
    except Exception as error:
        record.fail(error, f"{type(error).__name__}: {error}")
        log.exception("this process failed")
        return 1

    return 0
