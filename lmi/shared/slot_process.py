"""The main function of a process that the supervisor starts for a slot."""

from __future__ import annotations

import argparse
import faulthandler
import signal
from collections.abc import Callable
from typing import NoReturn

from lmi.shared import linux
from lmi.shared.sink import guard_streams


def main(module: str, about: str | None, run: Callable[[int], int]) -> NoReturn:
    """Run a module for the slot that its command line names, and end with the exit code that `run` returns."""
    parser = argparse.ArgumentParser(prog=module, description=about)
    parser.add_argument("--slot", type=int, required=True)
    guard_streams()
    linux.print_lines_at_once()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    linux.end_at_once(run(parser.parse_args().slot))
