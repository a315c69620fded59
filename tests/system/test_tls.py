"""A server that speaks HTTPS, and clients that do, do not, or stop in the middle of the
handshake.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPSConnection
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.machine import wait_until
from tests.served import Server, launch
from tests.system.container import write_model

WHO = "-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
LONG = {"inputs": "abc", "stream": True, "parameters": {"max_new_tokens": 50_000}}


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for this machine, its key, the key of another one, and one with a
    password.
    """
    folder = tmp_path_factory.mktemp("pem")
    new = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 2 {WHO}"
    for command in (
        f"{new} -nodes -keyout own.key -out own.crt",
        f"{new} -nodes -keyout other.key -out other.crt",
        f"{new} -passout pass:secret -keyout locked.key -out locked.crt",
    ):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)

    (folder / "both.pem").write_text(
        (folder / "own.crt").read_text() + (folder / "own.key").read_text()
    )
    return folder


@contextmanager
def client(server: Server, pem: Path) -> Iterator[HTTPSConnection]:
    context = ssl.create_default_context(cafile=str(pem / "own.crt"))
    connection = HTTPSConnection("localhost", server.port, timeout=60, context=context)
    try:
        yield connection
    finally:
        connection.close()


def ping(server: Server, pem: Path) -> int:
    with client(server, pem) as connection:
        connection.request("GET", "/ping")
        return connection.getresponse().status


@pytest.fixture(scope="module")
def server(pem: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {
        "ssl_certfile": pem / "own.crt",
        "ssl_keyfile": pem / "own.key",
        "frontend_workers": 1,
    }
    folder = write_model(
        tmp_path_factory.mktemp("tls") / "model", max_request_size=1 << 20, **options
    )
    with launch(folder) as server:
        wait_until(lambda: '"event":"ready"' in server.log.read_text(), "it is ready")
        yield server


def test_answers_and_streams_come_over_tls_and_one_connection_has_many(
    server: Server, pem: Path
) -> None:
    with client(server, pem) as connection:
        for stream in (False, True, True):
            body = {"inputs": "abc", "stream": stream, "parameters": {"max_new_tokens": 5}}
            connection.request("POST", "/invocations", json.dumps(body))
            response = connection.getresponse()
            last = json.loads(response.read().splitlines()[-1])
            assert (response.status, last["generated_text"]) == (200, "abcab")


def asked(server: Server, trusted: Path, key: str) -> set[int | str]:
    """What clients get, each on its own connection, so that every front end is asked."""
    context = ssl.create_default_context(cafile=str(trusted))
    statuses: set[int | str] = set()
    for _ in range(12):
        connection = HTTPSConnection("localhost", server.port, timeout=60, context=context)
        try:
            connection.request("GET", "/v1/models", headers={"x-api-key": key})
            statuses.add(connection.getresponse().status)
        except ssl.SSLCertVerificationError:
            statuses.add("not trusted")
        finally:
            connection.close()

    return statuses


def test_keys_and_certificates_change_in_all_front_ends_at_once_or_in_none(
    pem: Path, tmp_path: Path
) -> None:
    own_certificate = pem / "own.crt"
    other_certificate = pem / "other.crt"
    files = {name: tmp_path / name for name in ("keys", "tls.crt", "tls.key")}

    def write(name: str) -> None:
        files["keys"].write_text(f"sk-{name}\n")
        for kind in ("crt", "key"):
            files[f"tls.{kind}"].write_bytes((pem / f"{name}.{kind}").read_bytes())

    write("own")
    options = {
        "ssl_certfile": files["tls.crt"],
        "ssl_keyfile": files["tls.key"],
        "option.api_key_file": files["keys"],
    }
    with launch(write_model(tmp_path / "model", frontend_workers=2, **options)) as server:
        wait_until(lambda: '"event":"ready"' in server.log.read_text(), "it is ready")
        assert asked(server, own_certificate, "sk-own") == {200} and asked(
            server, own_certificate, "sk-other"
        ) == {401}

        write("other")
        killed = server.pids("lmi-front")[0]
        os.kill(killed, signal.SIGKILL)
        wait_until(
            lambda: len({*server.pids("lmi-front")} - {killed}) == 2,
            "another front end has started",
        )
        wait_until(lambda: "starts again as process" in server.log.read_text(), "it says so")
        assert asked(server, own_certificate, "sk-own") == {200} and asked(
            server, own_certificate, "sk-other"
        ) == {401}

        server.signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP: read again: " in server.log.read_text(), "it has read them")

        assert asked(server, other_certificate, "sk-other") == {200} and asked(
            server, other_certificate, "sk-own"
        ) == {401}
        assert asked(server, own_certificate, "sk-other") == {"not trusted"}

        write("own")
        files["tls.key"].unlink()
        server.signal(signal.SIGHUP)
        wait_until(
            lambda: "what was read before still counts" in server.log.read_text(), "it says so"
        )

        assert asked(server, other_certificate, "sk-other") == {200} and asked(
            server, other_certificate, "sk-own"
        ) == {401}


def test_a_client_that_leaves_ends_its_generation(server: Server, pem: Path) -> None:
    with client(server, pem) as connection:
        connection.request("POST", "/invocations", json.dumps(LONG))
        assert connection.getresponse().read1(100)
        assert running(server, pem) == 1

    wait_until(lambda: running(server, pem) == 0, "nothing is generated for it")


def running(server: Server, pem: Path) -> float:
    with client(server, pem) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()

    return float(
        next(line for line in lines if line.startswith("lmi_requests_running")).rpartition(" ")[2]
    )


def test_a_body_that_is_too_large_gets_its_answer_and_the_connection_ends(
    server: Server, pem: Path
) -> None:
    with client(server, pem) as connection:
        connection.request("POST", "/invocations", headers={"Content-Length": str(2 << 20)})
        connection.send(bytes(1 << 16))
        assert connection.getresponse().status == 413


@pytest.mark.parametrize(
    "sent", [b"", b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"]
)
def test_a_client_without_a_handshake_gets_nothing_and_holds_up_nobody(
    server: Server, pem: Path, sent: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(sent)
        assert ping(server, pem) == 200
        if sent.startswith(b"GET"):
            assert b"HTTP" not in connection.recv(100)


@pytest.mark.parametrize(
    "words", ["complete -q abc", "bench --dialect completions --requests 2 --max-tokens 5"]
)
def test_our_commands_trust_the_certificate_that_a_variable_names(
    server: Server, pem: Path, words: str
) -> None:
    done = lmi(f"https://localhost:{server.port}", words, SSL_CERT_FILE=str(pem / "own.crt"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("scheme", "advice"),
    [("https", "SSL_CERT_FILE=FILE names the certificates"), ("http", "URL begins with https")],
)
def test_our_commands_say_what_may_be_wrong_with_the_connection(
    server: Server, scheme: str, advice: str
) -> None:
    done = lmi(f"{scheme}://localhost:{server.port}", "chat -q abc")
    assert done.returncode == 1 and advice in done.stderr


def lmi(url: str, words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command, *further_words = words.split()
    place = [url] if command == "bench" else ["--url", url]
    line = [sys.executable, "-P", "-m", "lmi", command, *place, *further_words]
    return subprocess.run(
        line, env=os.environ | environ, capture_output=True, text=True, timeout=120
    )


def test_the_folder_of_the_server_has_the_url_that_a_health_check_asks(
    server: Server, pem: Path
) -> None:
    [url] = Path(server.environ["TMPDIR"]).glob("lmi-*/url")
    assert url.read_text() == f"https://127.0.0.1:{server.port}"
    with urlopen(
        f"{url.read_text()}/ping", context=ssl.create_default_context(cafile=str(pem / "own.crt"))
    ) as answer:
        assert answer.status == 200


def test_one_file_may_have_the_certificate_and_its_key(pem: Path, tmp_path: Path) -> None:
    with launch(
        write_model(tmp_path / "model", ssl_certfile=pem / "both.pem", log_format="text")
    ) as server:
        wait_until(lambda: "lmi is ready" in server.log.read_text(), "it is ready")
        assert f"curl -k https://127.0.0.1:{server.port}/invocations" in server.log.read_text()
        assert ping(server, pem) == 200


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        (
            "none.crt",
            "own.key",
            "ssl_certfile={pem}/none.crt cannot be read: No such file or directory",
        ),
        (
            "own.crt",
            "other.key",
            "ssl_keyfile={pem}/other.key: not a certificate and its key in PEM (key values mism",
        ),
        (
            "own.key",
            "own.key",
            "ssl_certfile={pem}/own.key and ssl_keyfile={pem}/own.key: not a certificate and its",
        ),
        ("own.crt", "", "ssl_certfile={pem}/own.crt: not a certificate and its key in PEM"),
        ("locked.crt", "locked.key", "ssl_keyfile: the key has a password"),
        ("", "own.key", "ssl_keyfile={pem}/own.key: there is no ssl_certfile"),
    ],
)
def test_a_certificate_that_cannot_be_used_ends_the_server_with_the_reason(
    pem: Path, tmp_path: Path, certificate: str, key: str, said: str
) -> None:
    files_of_tls = {"ssl_certfile": certificate, "ssl_keyfile": key}
    options = {name: pem / file for name, file in files_of_tls.items() if file}
    with launch(write_model(tmp_path / "model", **options)) as server:
        assert server.wait() == 2
        assert said.format(pem=pem) in server.last_words()["message"]


def test_the_gateway_is_refused_beside_a_certificate(pem: Path, tmp_path: Path) -> None:
    with launch(
        write_model(tmp_path / "model", ssl_certfile=pem / "both.pem", with_gateway=8081)
    ) as server:
        assert server.wait() == 2
        assert "with_gateway" in server.last_words()["message"]
