"""Keys and certificates that are read again: what the supervisor takes, and what a front end has
then.
"""

from __future__ import annotations

import logging
import os
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmi.errors import BadConfiguration
from lmi.settings.annexes import digest
from lmi.settings.config import ServerConfig
from lmi.shared.memory_file import MemoryFile
from lmi.shared.state import Block
from lmi.supervisor.credentials import Credentials, SharedCredentials, hand_over, read_again

NEW = "openssl req -x509 -days 2 -nodes -subj /CN=localhost -addext subjectAltName=DNS:localhost"
KINDS = {
    "first": "-newkey ec -pkeyopt ec_paramgen_curve:P-256",
    "second": "-newkey ec -pkeyopt ec_paramgen_curve:P-256",
    "rsa": "-newkey rsa:2048",
}


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pem")
    for name, kind in KINDS.items():
        command = f"{NEW} {kind} -keyout {name}.key -out {name}.crt"
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)

    return folder


@dataclass
class Served:
    """A server's files, and what its supervisor and one front end make of them."""

    config: ServerConfig
    handed: MemoryFile
    block: Block

    def __post_init__(self) -> None:
        self.front_end = SharedCredentials(self.handed, self.block.supervisor)

    def hang_up(self) -> None:
        read_again(self.config, self.handed, self.block.supervisor)

    def install(self, folder: Path, certificate: str, key: str) -> None:
        for file, name in (
            (self.config.ssl_certfile, f"{certificate}.crt"),
            (self.config.ssl_keyfile, f"{key}.key"),
        ):
            assert file is not None
            Path(file).write_bytes((folder / name).read_bytes())


@pytest.fixture
def served(tmp_path: Path, pem: Path) -> Iterator[Served]:
    files = {"api_key_file": "keys", "ssl_certfile": "tls.crt", "ssl_keyfile": "tls.key"}
    config = ServerConfig(**{field: str(tmp_path / file) for field, file in files.items()})  # type: ignore[arg-type]
    (tmp_path / "keys").write_text("sk-one\n")
    (tmp_path / "tls.crt").write_bytes((pem / "first.crt").read_bytes())
    (tmp_path / "tls.key").write_bytes((pem / "first.key").read_bytes())
    handed = hand_over(config)
    assert handed is not None
    yield Served(config, handed, Block.create(tmp_path / "state", 0, 1))
    os.close(handed.fd)


def shown(context: ssl.SSLContext, trusted: Path) -> bytes:
    """The certificate that a client gets, which trusts these. Raises ssl.SSLError for any other."""
    trusting = ssl.create_default_context(cafile=str(trusted))
    to_server = ssl.MemoryBIO()
    to_client = ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server, server_hostname="localhost")
    server = context.wrap_bio(to_server, to_client, server_side=True)
    while True:
        waiting = 0
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                waiting += 1

        if not waiting:
            certificate = client.getpeercert(binary_form=True)
            assert certificate is not None
            return certificate


def test_what_counts_changes_at_the_signal_and_not_before(served: Served, tmp_path: Path) -> None:
    before = served.front_end.current()
    assert before.keys == (digest("sk-one"),)
    (tmp_path / "keys").write_text("sk-two\nsk-three\n")
    restarted = SharedCredentials(served.handed, served.block.supervisor)
    assert served.front_end.current() is before and restarted.current() == before

    served.hang_up()
    after = served.front_end.current()
    assert after.keys == (digest("sk-two"), digest("sk-three")) == restarted.current().keys
    assert served.front_end.current() is after


@pytest.mark.parametrize("second", ["second", "rsa"])
def test_a_connection_has_the_certificate_that_counts_when_it_begins(
    served: Served, pem: Path, second: str
) -> None:
    context = served.front_end.serving_context()
    first = shown(context, pem / "first.crt")
    served.install(pem, second, second)
    assert shown(context, pem / "first.crt") == first

    served.hang_up()
    assert shown(context, pem / f"{second}.crt") != first
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        shown(context, pem / "first.crt")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("keys", "two words\n", "a line is not keys of printable ASCII"),
        ("keys", None, "option.api_key_file=.*/keys cannot be read: .*No such file"),
        (
            "tls.crt",
            "nothing",
            "ssl_certfile=.*/tls.crt and ssl_keyfile=.*/tls.key: not a certificate and its key",
        ),
        ("tls.key", None, "ssl_keyfile=.*/tls.key cannot be read: No such file"),
        ("tls.crt", "second.crt", "not a certificate and its key in PEM .key values mismatch"),
    ],
)
def test_one_bad_file_changes_nothing_at_all_and_is_one_line(
    served: Served,
    pem: Path,
    tmp_path: Path,
    file: str,
    content: str | None,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = served.front_end.current()
    (tmp_path / "keys").write_text("sk-two\n")
    if content is None:
        (tmp_path / file).unlink()
    elif (pem / content).is_file():
        (tmp_path / file).write_bytes((pem / content).read_bytes())
    else:
        (tmp_path / file).write_text(content)

    served.hang_up()
    assert served.front_end.current() is before

    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.message.startswith("SIGHUP: ") and record.message.endswith(
        "; what was read before still counts"
    )

    caplog.clear()
    with pytest.raises(BadConfiguration, match=said):
        Credentials.read(served.config)


def test_a_file_without_a_key_takes_all_of_them_back(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys").write_text("\n")
    served.hang_up()
    assert served.front_end.current().keys == ()
    assert f"option.api_key_file={tmp_path}/keys has no key: nobody is served" in caplog.text
    (tmp_path / "keys").write_text("sk-two\n")
    served.hang_up()
    assert served.front_end.current().keys == (digest("sk-two"),)


def test_a_server_without_such_files_hands_nothing_over() -> None:
    assert hand_over(ServerConfig()) is None


def test_a_file_in_memory_is_read_whole_or_not_at_all() -> None:
    file = MemoryFile.create("test", b"a long first text")
    assert file.read() == b"a long first text"
    file.write(b"short")
    assert file.read() == b"short"
    os.pwrite(file.fd, b"?", 40)
    with pytest.raises(OSError, match="in part only"):
        file.read()

    os.close(file.fd)
