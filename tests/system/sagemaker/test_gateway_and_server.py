"""What a gateway and a whole server must do together: adapters of components, sessions,
asynchronous streams.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError  # type: ignore[import-untyped]

from tests.gateway.gateways import Gateway, gateway
from tests.served import Server, launch
from tests.system.container import wait_until, write_model
from tests.system.engines.foreign_engine import write_adapter

BODY = json.dumps({"inputs": "abc", "parameters": {"max_new_tokens": 3}}).encode()
STREAM = json.dumps({"inputs": "abc", "parameters": {"max_new_tokens": 3}, "stream": True}).encode()


@contextmanager
def both(folder: Path, *flags: str, **options: object) -> Iterator[tuple[Server, Gateway]]:
    with launch(write_model(folder, frontend_workers=2, **options)) as server:
        server.wait_ready()
        with gateway("--endpoint", f"http://127.0.0.1:{server.port}", *flags) as aws:
            yield server, aws


def test_a_component_is_answered_by_its_adapter_and_refused_under_its_own_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    write_adapter(tmp_path / "model" / "adapters" / "shifted", 1)
    lora = {"option.rolling_batch": "foreign", "option.enable_lora": "true"}
    flags = ("--component", "polite=shifted", "--component", "lost=nobody", "--component", "base")
    with both(tmp_path / "model", *flags, **lora) as (_, aws):
        for component, first in (("polite", "b"), ("base", "a")):
            whole = aws.invoke(BODY, InferenceComponentName=component)["Body"].read()
            assert json.loads(whole)["generated_text"][0] == first

            streamed = b"".join(aws.parts(STREAM, InferenceComponentName=component)).splitlines()
            assert json.loads(streamed[-1])["generated_text"] == json.loads(whole)["generated_text"]

        for call in (aws.invoke, aws.stream):
            with pytest.raises(ClientError) as caught:
                call(STREAM if call == aws.stream else BODY, InferenceComponentName="lost")

            assert caught.value.response["OriginalStatusCode"] == 424
            assert "Adapter lost is not registered" in caught.value.response["OriginalMessage"]


def test_an_asynchronous_stream_needs_a_server_that_buffers_it(tmp_path: Path) -> None:
    for buffers in (True, False):
        (tmp_path / str(buffers)).mkdir()
        flags = ("--async-output", str(tmp_path / "out"))
        with both(tmp_path / str(buffers), *flags, buffer_streams=str(buffers).lower()) as (_, aws):
            accepted = aws.runtime.invoke_endpoint_async(EndpointName="any", Body=STREAM)
            output, failure = (
                file_of(accepted[name]) for name in ("OutputLocation", "FailureLocation")
            )
            wait_until(lambda: output.exists() or failure.exists(), "there is a file")  # noqa: B023
            assert (output.exists(), failure.exists()) == (buffers, not buffers)

            if buffers:
                assert len(output.read_bytes().splitlines()) == 3
            else:
                assert "Content-Length" in json.loads(failure.read_bytes())["OriginalMessage"]


def file_of(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def test_a_closed_session_is_refused_with_the_containers_words(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with both(tmp_path / "model") as (_, aws):
        opened: dict[str, Any] = aws.invoke(
            b'{"requestType": "NEW_SESSION"}', SessionId="NEW_SESSION"
        )
        session = opened["NewSessionId"].partition(";")[0]

        assert (
            json.loads(aws.invoke(BODY, SessionId=session)["Body"].read())["generated_text"]
            == "abc"
        )
        assert len(aws.parts(STREAM, SessionId=session)) == 3
        assert (
            aws.invoke(b'{"requestType": "CLOSE"}', SessionId=session)["ClosedSessionId"] == session
        )

        for call, body in ((aws.invoke, BODY), (aws.stream, STREAM)):
            with pytest.raises(ClientError) as caught:
                call(body, SessionId=session)

            error_response = caught.value.response
            assert (error_response["Error"]["Code"], error_response["OriginalStatusCode"]) == (
                "ModelError",
                400,
            )
            assert "X-Amzn-SageMaker-Session-Id" in error_response["OriginalMessage"]
