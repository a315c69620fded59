"""Whether this process may start others as the user of `option.user`."""

from __future__ import annotations

import os
import sys

from lmi.errors import BadConfiguration
from lmi.runtime import ServerRuntime
from lmi.settings.user import User


def check_user(user: User, runtime: ServerRuntime) -> None:
    """Raise BadConfiguration unless children may become the user, and can then use what front ends open."""
    if os.geteuid() != 0:
        raise BadConfiguration(
            f"option.user={user}: only root may start processes as another user, and this is user {os.geteuid()}"
        )
    files = (runtime.config.ssl_certfile, runtime.config.ssl_keyfile)
    needed = {sys.executable: os.X_OK, str(runtime.path): os.W_OK | os.X_OK}
    needed |= {file: os.R_OK for file in files if file is not None}
    pid = os.fork()
    if pid == 0:
        try:
            user.become()
            os._exit(next((code for code, item in enumerate(needed.items(), 2) if not os.access(*item)), 0))
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        powers = "root needs the capabilities CHOWN, DAC_OVERRIDE, KILL, SETGID and SETUID for this"
        why = [powers, *(f"that user cannot use {path}" for path in needed)][max(0, code - 1)]
        raise BadConfiguration(f"option.user={user}: {why}")
