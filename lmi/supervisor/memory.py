"""How much memory each engine of a model may take: its part of what is free when the model starts,
beside the rest.

It is read once, so that replicas are alike, and one that starts again is as it was.
"""

from pathlib import Path

from lmi.settings.config import Config
from lmi.shared.machine import MB, PROC, SHARE, free_bytes

# The process that starts front ends.
MASTER_BYTES = 24 * MB
# A front end, with a tokenizer and the bodies of usual requests.
FRONT_END_BYTES = 40 * MB


def of_memory(config: Config, proc: Path = PROC) -> dict[str, str]:
    """Return the variable that tells an engine how much memory it may take, itself included."""
    num_processes = config.server.frontend_workers + config.num_formatters
    bytes_of_processes = MASTER_BYTES + num_processes * FRONT_END_BYTES
    bytes_of_engines = free_bytes(proc) - bytes_of_processes
    share = bytes_of_engines // config.engine.num_engines
    return {SHARE: str(max(0, share))}
