"""What must hold before a server starts: open files, its certificate, and that others may start as `option.user`.

And what must be gone: the folders of servers that were killed.
"""

import fcntl
import logging
import os
import resource
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from lmi.errors import BadConfiguration, StartError
from lmi.runtime import URL, ServerRuntime
from lmi.settings.listeners import User

MIN_OPEN_FILES = 64  # a front end reserves 40, the others are for clients

log = logging.getLogger(__name__)


def raise_file_limit() -> None:
    """Raise the limit of open files for this process and its children as far as the system allows.

    Raises StartError if the system allows too few.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < MIN_OPEN_FILES:
        raise StartError(
            f"a server needs {MIN_OPEN_FILES} open files in each process, and only {most} are allowed here "
            "(`ulimit -Hn`, RLIMIT_NOFILE)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Raise BadConfiguration for files that cannot be read, are no PEM, are no pair or want a password."""
    if certfile is None:
        if keyfile is not None:
            raise BadConfiguration(f"ssl_keyfile={keyfile}: there is no ssl_certfile, which it is the key of")
        return
    import ssl

    for key, file in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        try:
            if file is not None:
                open(file, "rb").close()
        except OSError as error:
            raise BadConfiguration(f"{key}={file} cannot be read: {error.strerror}") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=_refuse)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        named = f"ssl_certfile={certfile}" + (f" and ssl_keyfile={keyfile}" if keyfile else "")
        raise BadConfiguration(f"{named}: not a certificate and its key in PEM ({reason})") from None


def _refuse() -> str:
    raise BadConfiguration("ssl_keyfile: the key has a password; a server needs one without")


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


def remove_leftovers() -> None:
    """Remove the runtime folders of this user whose server no longer runs, because it was killed."""
    for folder in Path(tempfile.gettempdir()).glob("lmi-*"):
        with suppress(OSError):  # it has no such file, or its server holds the lock
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                with open(folder / URL, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
                    log.info("removed %s, which a killed server had left", folder)
