"""The flags of `lmi gateway`."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest

from lmi.gateway import argv, local_url
from lmi.gateway.command import gateway
from lmi.gateway.eventstream import Split
from lmi.gateway.settings import GatewaySettings, settings as read
from tests.system.container import ENVIRON, ROOT


def given(*flags: str) -> GatewaySettings:
    context = gateway.make_context("lmi gateway", list(flags))
    return read(**context.params)


def test_the_defaults_are_those_of_the_settings() -> None:
    assert given() == GatewaySettings()


def test_every_flag_reaches_its_setting() -> None:
    flags = (
        "--host ::1 --port 9 --endpoint http://a:1/b/ --endpoint one=http://c --component "
        "ic=x "
        "--component one/ic"
    )

    more = (
        "--parts split:3 --http2-port 0 --max-body 10 --timeout 0.5 --stream-timeout 2 "
        "--check-signatures --log-level debug"
    )

    assert given(*flags.split(), *more.split(), "--log-format", "text") == GatewaySettings(
        host="::1",
        port=9,
        endpoints={"": "http://a:1/b", "one": "http://c"},
        components={("", "ic"): "x", ("one", "ic"): ""},
        parts=Split(3),
        http2_port=0,
        max_body_bytes=10,
        timeout_s=0.5,
        stream_timeout_s=2,
        checks_signatures=True,
        log_level="DEBUG",
        log_format="text",
    )


def test_sources_of_models_and_places_of_async_invocations_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    places = [
        "--models",
        str(folder),
        "--models",
        "multi=s3://bucket/models",
        "--models-dir",
        "here",
    ]
    more = [
        "--async-output",
        "out",
        "--async-input",
        str(folder),
        "--async-concurrency",
        "9",
        "--async-queue",
        "kept",
        "--async-bucket",
        f"answers={folder}",
        "--s3-endpoint",
        "http://a",
    ]

    assert given(*places, *more) == GatewaySettings(
        models={"": str(folder), "multi": "s3://bucket/models"},
        models_dir=Path.cwd() / "here",
        async_output=str(Path.cwd() / "out"),
        async_input=folder,
        async_concurrency=9,
        async_queue=Path.cwd() / "kept",
        async_buckets={"answers": str(folder)},
        s3_endpoint="http://a",
    )


def test_what_a_control_plane_allows_is_read(tmp_path: Path) -> None:
    flags = ["--control-dir", "here", "--bucket", "real", "--bucket", f"mine={tmp_path}"]
    more = ["--image", "a*", "--image", "b", "--trust-models", "--max-containers", "3"]

    assert given(*flags, *more) == GatewaySettings(
        control_dir=Path.cwd() / "here",
        buckets={"real": "", "mine": str(tmp_path)},
        images=("a*", "b"),
        trusts_models=True,
        max_containers=3,
    )


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("--bucket A_B=/tmp", "needs the name of a bucket"),
        ("--bucket mine=/nowhere", "must name a folder that exists"),
        ("--max-containers 0", "0"),
        ("--endpoint https://a", "must be http://HOST"),
        ("--endpoint a.b=http://c", "needs a name of letters"),
        ("--endpoint a=http://b --endpoint a=http://c", "contradicts another --endpoint"),
        ("--component a_b", "needs a name of letters"),
        ("--component =x", "needs a name of letters"),
        ("--parts all", "must be as-is"),
        ("--timeout 0", "0"),
        ("--max-body none", "none"),
        ("--port 70000", "70000"),
        ("--models /nowhere", "must name a folder that exists or s3://BUCKET"),
        ("--models multi=gs://bucket", "must be a folder or s3://BUCKET"),
        ("--async-output s3://", "must be a folder or s3://BUCKET"),
        ("--async-input /nowhere", "does not exist"),
        ("--async-concurrency 0", "0"),
        ("--async-bucket mine=/nowhere", "--async-bucket must name a folder that exists"),
    ],
)
def test_a_flag_against_its_rule_is_a_usage_error(flags: str, rule: str) -> None:
    with pytest.raises(click.UsageError, match=rule):
        given(*flags.split())


def lmi(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "lmi", *words]
    return subprocess.run(
        command,
        env={**ENVIRON, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_place_in_s3_without_boto3_is_exit_code_2() -> None:
    code = "import sys; sys.modules['boto3'] = None; from lmi.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "gateway",
        "--port",
        "0",
        "--async-output",
        "s3://bucket",
    ]
    done = subprocess.run(
        command,
        env={**ENVIRON, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 2 and "pip install boto3" in done.stderr


def test_a_wrong_flag_is_one_line_and_exit_code_2() -> None:
    done = lmi("gateway", "--parts", "all")
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith("lmi gateway: --parts must be as-is")
        and done.stderr.count("\n") == 1
    )


def test_a_port_that_is_taken_is_exit_code_3() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = lmi("gateway", "--port", str(listener.getsockname()[1]))

    assert done.returncode == 3
    assert "cannot listen on 127.0.0.1 port" in done.stderr


def test_a_server_starts_a_gateway_with_words_that_it_understands() -> None:
    log = {"log_level": "WARNING", "log_format": "json"}
    words = argv(8081, "0.0.0.0", 8080, *log.values(), None)

    assert words[0] == "gateway"
    assert given(*words[1:]) == GatewaySettings(**log)

    words = argv(8081, "0.0.0.0", 8080, *log.values(), "/var/lib/queue")
    assert given(*words[1:]) == GatewaySettings(**log, async_queue=Path("/var/lib/queue"))


@pytest.mark.parametrize(
    ("host", "name"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("a", "a")]
)
def test_a_url_names_an_address_that_can_be_called(host: str, name: str) -> None:
    assert local_url(host, 80) == f"http://{name}:80"


def test_what_a_supervisor_loads_of_the_gateway_is_one_module() -> None:
    unused = ["asyncio", "click", "lmi.gateway.settings"]
    code = f"import sys, lmi.gateway; print([name for name in {unused} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_it_ends_when_the_supervisor_that_started_it_is_gone() -> None:
    gateway = (
        f"LMI_SUPERVISOR_PID=$$ {sys.executable} -P -m lmi gateway --port 0 --log-format "
        f"json & wait"
    )
    environ = {**ENVIRON, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(["sh", "-c", gateway], env=environ, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None

        port = json.loads(parent.stdout.readline())["port"]
        parent.kill()

        # The gateway has ended too
        assert parent.stdout.read() == b""

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (("--ssl-certfile",), "--ssl-certfile is for --http2-port"),
        (("--http2-port", "0", "--ssl-keyfile"), "--ssl-keyfile is for --ssl-certfile"),
    ],
)
def test_a_certificate_needs_its_port_and_a_key_its_certificate(
    tmp_path: Path, flags: tuple[str, ...], rule: str
) -> None:
    file = tmp_path / "tls.crt"
    file.touch()
    with pytest.raises(click.UsageError, match=rule):
        given(*flags, str(file))


def test_a_certificate_that_is_none_is_told_before_anything_is_served(tmp_path: Path) -> None:
    file = tmp_path / "tls.crt"
    file.write_text("no certificate")
    command = [sys.executable, "-P", "-m", "lmi", "gateway", "--port", "0", "--http2-port", "0"]
    done = subprocess.run(
        [*command, "--ssl-certfile", str(file)],
        env={**ENVIRON, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "must be a certificate and its key without a password" in done.stderr
    assert str(file) in done.stderr
