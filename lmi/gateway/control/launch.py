"""The first moment of a container's process: it becomes `lmi serve`, and ends with the gateway.

python -m lmi.gateway.control.launch PID WORD… with the gateway's pid, and the words after `lmi`
"""

import os
import signal
import sys

from lmi.shared.linux import die_with_parent


def main() -> None:
    """Tie this process to the gateway, and replace it."""
    # The kernel keeps it over an exec.
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "lmi", *sys.argv[2:]])


if __name__ == "__main__":
    main()
