"""A server that starts a gateway in front of itself, and AWS's own client at that gateway."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from botocore.config import Config  # type: ignore[import-untyped]

from lmi.errors import BadConfiguration
from lmi.settings.resolve import resolve_folder
from tests.served import launch
from tests.system.container import free_port, wait_until, write_model

BODY = json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 3}})


def client(port: int) -> Any:
    return boto3.client(
        "sagemaker-runtime",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id="nobody",
        aws_secret_access_key="nothing",
        config=Config(retries={"total_max_attempts": 1}),
    )


def invoke(port: int) -> dict[str, Any]:
    answer = client(port).invoke_endpoint(
        EndpointName="any-name", ContentType="application/json", Body=BODY
    )
    body: dict[str, Any] = json.loads(answer["Body"].read())
    return body


def test_boto3_reaches_a_server_through_its_gateway_which_ends_with_it(tmp_path: Path) -> None:
    write_model(tmp_path)
    port = free_port()
    with launch(
        tmp_path, {"SERVING_WITH_GATEWAY": str(port), "SERVING_LOG_FORMAT": "json"}
    ) as server:
        server.wait_ready()
        wait_until(lambda: b'"gateway":' in server.log.read_bytes(), "the gateway is ready")
        assert invoke(port)["generated_text"]

        os.kill(server.pid("lmi-gateway"), signal.SIGKILL)
        wait_until(lambda: server.log.read_bytes().count(b'"gateway":') == 2, "it starts again")
        assert invoke(port)["generated_text"]

        server.signal(signal.SIGTERM)
        assert server.wait() == 0 and server.pids() == []


def test_a_server_with_keys_serves_its_own_gateway_and_keeps_no_key(tmp_path: Path) -> None:
    write_model(tmp_path)
    port = free_port()
    key = "sk-of-an-operator"
    environ = {"SERVING_WITH_GATEWAY": str(port), "SERVING_LOG_FORMAT": "json", "LMI_API_KEY": key}
    with launch(tmp_path, environ) as server:
        server.wait_ready()
        wait_until(lambda: b'"gateway":' in server.log.read_bytes(), "the gateway is ready")

        assert invoke(port)["generated_text"]
        assert server.post(json.loads(BODY)).status == 401
        assert (
            server.post(json.loads(BODY), headers={"Authorization": f"Bearer {key}"}).status == 200
        )

        children = [pid for pid in server.pids() if pid != server.process.pid]
        assert not any(
            key.encode() in Path(f"/proc/{pid}/environ").read_bytes() for pid in children
        )
        assert key.encode() not in server.log.read_bytes()


def test_a_gateway_whose_port_is_taken_ends_the_start_with_the_port(tmp_path: Path) -> None:
    write_model(tmp_path)
    taken_port = free_port()
    with launch(
        tmp_path, {"SERVING_WITH_GATEWAY": str(taken_port), "SERVING_LOG_FORMAT": "json"}
    ) as first:
        first.wait_ready()
        with launch(
            tmp_path, {"SERVING_WITH_GATEWAY": str(taken_port), "SERVING_LOG_FORMAT": "json"}
        ) as second:
            assert second.wait(60) == 3
            assert str(taken_port) in second.last_words()["message"]


def test_a_killed_server_answers_later_what_its_gateway_had_accepted(tmp_path: Path) -> None:
    write_model(tmp_path / "model", **{"option.echo_prompt_s": 600})
    port = free_port()
    environ = {
        "SERVING_WITH_GATEWAY": str(port),
        "SERVING_ASYNC_QUEUE": str(tmp_path / "queue"),
        "SERVING_LOG_FORMAT": "json",
        # The gateway leaves its answers there.
        "TMPDIR": str(tmp_path),
    }
    with launch(tmp_path / "model", environ) as server:
        server.wait_ready()
        wait_until(lambda: b'"gateway":' in server.log.read_bytes(), "the gateway is ready")
        accepted = client(port).invoke_endpoint_async(EndpointName="any-name", Body=BODY)
        os.kill(server.pid("lmi-gateway"), signal.SIGKILL)
        server.signal(signal.SIGKILL)
        wait_until(lambda: not server.pids(), "no process is left")

    write_model(tmp_path / "model")
    output = Path(accepted["OutputLocation"].removeprefix("file://"))
    with launch(tmp_path / "model", environ):
        wait_until(output.exists, "the next server has answered it")

    assert json.loads(output.read_bytes())["generated_text"]


@pytest.mark.parametrize(
    ("given", "port"),
    [({}, None), ({"with_gateway": "true"}, 8081), ({"with_gateway": "9000"}, 9000)],
)
def test_the_flag_without_a_value_means_the_usual_port(
    given: dict[str, str], port: int | None, tmp_path: Path
) -> None:
    write_model(tmp_path)
    assert resolve_folder(str(tmp_path), {}, given).config.server.gateway_port == port


def test_the_gateway_listens_in_the_safe_range(tmp_path: Path) -> None:
    write_model(tmp_path)
    safe = {"SAGEMAKER_SAFE_PORT_RANGE": "9000-9003"}
    server = resolve_folder(
        str(tmp_path), safe, {"with_gateway": "true", "port": "9003"}
    ).config.server
    assert server.gateway_port == 9002
    with pytest.raises(
        BadConfiguration, match="with_gateway=8500: allowed is a port of safe_port_range, 9000-9003"
    ):
        resolve_folder(str(tmp_path), safe, {"with_gateway": "8500"})
