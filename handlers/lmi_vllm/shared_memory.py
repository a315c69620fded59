"""The shared memory of vLLM's processes, which must not outlive them."""

import os
import re
import sys
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

from lmi.shared import processes


def start_tracker() -> None:
    """Start Python's tracker of shared memory outside this process group.

    The tracker removes the shared memory that is left once the last process that used it has ended,
    even if it was killed. The SIGKILL that the supervisor sends to the whole group must not reach
    the tracker. Its warnings about the memory that it removes are silenced.
    """
    # The leader of a session cannot leave its group.
    is_alone = os.getpgrp() == os.getpid() != os.getsid(0)
    if is_alone:
        with suppress(OSError):
            os.setpgid(0, os.getpgid(os.getppid()))

    sys.warnoptions.append("ignore")
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.pop()
        if is_alone:
            os.setpgid(0, 0)


def unlink_shared_memory() -> None:
    """Remove the names of the memory that vLLM's C++ code shares between ranks, once all ranks have
    mapped it.

    No other code removes them when the ranks are killed: Python's tracker does not accept a colon
    in a name.
    """
    for pid in (os.getpid(), *processes.descendants(os.getpid())):
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            for path in re.findall(r" (/dev/shm/vllm_\S+)$", maps, re.MULTILINE):
                os.unlink(path)
