"""The main function of a process that the supervisor starts for a slot."""

from __future__ import annotations

import argparse
import faulthandler
import signal
from collections.abc import Callable
from typing import NoReturn

from lmi.shared import linux
from lmi.shared.sink import guard_streams


def main(module: str, about: str | None, run: Callable[..., int], *words: str) -> NoReturn:
    """Run a module for the slot that its command line names, and end with the exit code that `run` returns.

    `words` are further flags, each with a value that `run` takes as a text.
    """
    parser = argparse.ArgumentParser(prog=module, description=about)
    parser.add_argument("--slot", type=int, required=True)
    for word in words:
        parser.add_argument(f"--{word}", required=True)
    guard_streams()
    linux.print_lines_at_once()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    linux.end_at_once(run(**vars(parser.parse_args())))
