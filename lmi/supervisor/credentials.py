"""The files of API keys and certificates: the supervisor reads them, and all front ends have what
it has read.

It reads them at the start and at each SIGHUP, looks whether they can be used together, and only
then hands them on as one piece, in memory that front ends inherit. So all front ends change at the
same moment, one that starts again by itself has what the others have, and files that are being
replaced harm nobody. A number in the supervisor's record, which front ends see without asking, says
that there is something new. Only the supervisor must be able to read the files, and only digests of
keys are handed on.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from lmi.errors import BadConfiguration, cause_line
from lmi.settings.annexes import KEYS
from lmi.settings.config import ServerConfig
from lmi.shared.memory_file import MemoryFile, path_of
from lmi.shared.state import SupervisorRecord

if TYPE_CHECKING:
    import ssl

# The variable that names the descriptor to front ends
FD_NAME = "LMI_CREDENTIALS_FD"

log = logging.getLogger(__name__)


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """What the files have: digests of keys, and a certificate with those that signed it and its
    private key, in PEM.

    The private key is empty where the certificate's file has it too, and the certificate where the
    server has no TLS.
    """

    keys: tuple[str, ...] = ()
    certificate: bytes = b""
    private_key: bytes = b""

    @classmethod
    def read(cls, config: ServerConfig, *, may_have_no_key: bool = False) -> Self:
        """Read the files that the settings name. Raises BadConfiguration for one that cannot be
        used.
        """
        keys: tuple[str, ...] = ()
        if config.api_key_file is not None:
            keys = tuple(read_keys(Path(config.api_key_file), may_have_no_key=may_have_no_key))

        certificate, private_key = read_certificate(config.ssl_certfile, config.ssl_keyfile)
        return cls(keys=keys, certificate=certificate, private_key=private_key)

    def make_context(self) -> ssl.SSLContext:
        """Return a context of TLS with the certificate. Raises ssl.SSLError, or BadConfiguration
        for a password.
        """
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with ExitStack() as stack:
            certfile = stack.enter_context(path_of(self.certificate))
            keyfile = stack.enter_context(path_of(self.private_key)) if self.private_key else None
            context.load_cert_chain(certfile, keyfile, password=_refuse_password)

        return context


def read_keys(path: Path, *, may_have_no_key: bool = False) -> list[str]:
    """Return the digests of the keys in a file. Raises BadConfiguration."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
        keys = [key for line in lines if line for key in KEYS.parse(line)]
    except OSError as error:
        raise _unreadable(path, cause_line(error)) from None
    except ValueError:
        raise _unreadable(path, f"a line is not {KEYS.allowed}") from None

    if not keys and not may_have_no_key:
        raise BadConfiguration(f"option.api_key_file={path} has no key")

    return keys


def _unreadable(path: Path, reason: str) -> BadConfiguration:
    return BadConfiguration(f"option.api_key_file={path} cannot be read: {reason}")


def read_certificate(certfile: str | None, keyfile: str | None) -> tuple[bytes, bytes]:
    """Return what the files of a certificate and its key have, b"" for none.

    Raises BadConfiguration for files that cannot be read, are no PEM, are no pair or want a
    password.
    """
    if certfile is None:
        if keyfile is not None:
            raise BadConfiguration(
                f"ssl_keyfile={keyfile}: there is no ssl_certfile, which it is the key of"
            )

        return b"", b""

    import ssl

    certificate = _read_file("ssl_certfile", certfile)
    private_key = b"" if keyfile is None else _read_file("ssl_keyfile", keyfile)
    try:
        Credentials(certificate=certificate, private_key=private_key).make_context()
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        files = f"ssl_certfile={certfile}"
        if keyfile:
            files += f" and ssl_keyfile={keyfile}"

        raise BadConfiguration(
            f"{files}: not a certificate and its key in PEM ({reason})"
        ) from None

    return certificate, private_key


def _read_file(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadConfiguration(f"{key}={path} cannot be read: {error.strerror}") from None


def _refuse_password() -> str:
    raise BadConfiguration("ssl_keyfile: the key has a password; a server needs one without")


# The supervisor's side.


def hand_over(config: ServerConfig) -> MemoryFile | None:
    """Read the files for the start. Returns what front ends inherit, None without files. Raises
    BadConfiguration.
    """
    credentials = Credentials.read(config)
    if config.api_key_file is None and config.ssl_certfile is None:
        return None

    return MemoryFile.create("credentials", msgspec.json.encode(credentials))


def read_again(config: ServerConfig, file: MemoryFile, record: SupervisorRecord) -> None:
    """Read the files again, and let all front ends have what they have now. Files that cannot be
    used change nothing.

    A file of keys without a key is no mistake here: its owner has taken back all of them.
    """
    try:
        credentials = Credentials.read(config, may_have_no_key=True)
        file.write(msgspec.json.encode(credentials))
    except (BadConfiguration, OSError) as error:
        log.error("SIGHUP: %s; what was read before still counts", error)
        return

    record.credentials_version += 1
    files = filter(None, (config.api_key_file, config.ssl_certfile, config.ssl_keyfile))
    log.info("SIGHUP: read again: %s", ", ".join(files))
    if config.api_key_file is not None and not credentials.keys and not config.api_keys:
        log.warning(
            "option.api_key_file=%s has no key: nobody is served until it has one",
            config.api_key_file,
        )


# The front ends' side.


class MadeContext(msgspec.Struct, frozen=True):
    """A context of TLS, and what it was made of."""

    credentials: Credentials
    context: ssl.SSLContext


class SharedCredentials:
    """The credentials as one front end has them, which are at any moment those of all."""

    def __init__(self, file: MemoryFile, record: SupervisorRecord) -> None:
        self._file = file
        self._record = record
        # The version that was read.
        self._version = -1
        self._current = Credentials()
        # The context that was made last.
        self._made_context: MadeContext | None = None

    @classmethod
    def from_environ(cls, record: SupervisorRecord) -> Self | None:
        """Return what this process inherited, or None. `record` is the supervisor's."""
        fd = os.environ.get(FD_NAME)
        return None if fd is None else cls(MemoryFile(int(fd)), record)

    def current(self) -> Credentials:
        """Return what counts now, the same object until it changes. Raises OSError if it was never
        read.
        """
        version = self._record.credentials_version
        if version != self._version:
            self._current = msgspec.json.decode(self._file.read(), type=Credentials)
            self._version = version

        return self._current

    def serving_context(self) -> ssl.SSLContext:
        """Return a context of TLS in which each handshake gets the certificate that counts then.

        The callback runs in every handshake, also of a client that sends no name. Its context is
        new where the certificate is: an old one would keep a former certificate beside one with
        another kind of key.
        """

        def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            # Descriptors may be short for a moment; the connection has the former one then.
            with suppress(OSError):
                connection.context = self._context_now()

        credentials = self.current()
        context = credentials.make_context()
        self._made_context = MadeContext(credentials, context)
        context.sni_callback = choose
        return context

    def _context_now(self) -> ssl.SSLContext:
        """Return the context of the credentials that count now."""
        credentials = self.current()
        made_context = self._made_context
        if made_context is None or made_context.credentials is not credentials:
            made_context = MadeContext(credentials, credentials.make_context())
            self._made_context = made_context

        return made_context.context
