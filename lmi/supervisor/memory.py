"""How much memory each engine of a model may take: its part of what is free when the model starts,
beside the rest.

It is read once, so that replicas are alike, and one that starts again is as it was.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lmi.settings.config import Config
from lmi.shared.machine import MB, PROC, SHARE, free_bytes

# The process that starts front ends.
MASTER_BYTES = 24 * MB
# A front end, with a tokenizer and the bodies of usual requests.
FRONT_END_BYTES = 40 * MB


def of_memory(config: Config, proc: Path = PROC, held_bytes: int = 0) -> dict[str, str]:
    """Return the variable that tells an engine how much memory it may take, itself included.

    `held_bytes`: what the front ends have already of the memory that stays theirs. It is free no
    more.
    """
    num_processes = config.server.frontend_workers + config.num_formatters
    bytes_of_processes = MASTER_BYTES + num_processes * FRONT_END_BYTES
    bytes_of_engines = free_bytes(proc) - max(0, bytes_of_processes - held_bytes)
    share = bytes_of_engines // config.engine.num_engines
    return {SHARE: str(max(0, share))}


def bytes_held(pids: Iterable[int], proc: Path = PROC) -> int:
    """Return the memory that these processes have together, without what they map from files."""
    num_bytes = 0
    for pid in pids:
        # The process may have ended, or this kernel may not tell.
        with suppress(OSError):
            for line in (proc / str(pid) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    num_bytes += int(line.split()[1]) * 1024

    return num_bytes
