"""TargetModel at a gateway in front of a whole server with several models, whose model_store the
two share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError  # type: ignore[import-untyped]

from tests.gateway.gateways import Gateway, gateway
from tests.system.container import write_model
from tests.system.sagemaker.several import SeveralServer, several_models


@contextmanager
def target_models(*settings: str) -> Iterator[tuple[SeveralServer, Gateway, Path]]:
    """A server with several models, a gateway that loads them, and the folder that clients name
    them in.
    """
    with several_models("frontend_workers=2", *settings) as server:
        source = server.store.parent / "source"
        flags = ("--endpoint", f"http://127.0.0.1:{server.port}", "--models", str(source))
        for name in ("a", "b", "c"):
            (source / "deep" / name).mkdir(parents=True)
            write_model(source / "deep" / name)

        with gateway(*flags, "--models-dir", str(server.store)) as aws:
            yield server, aws, source


def said(answer: Any) -> str:
    return str(json.loads(answer["Body"].read())["generated_text"])


def test_each_target_model_is_loaded_when_it_is_named_and_the_oldest_makes_room() -> None:
    with target_models("max_models=2") as (server, aws, source):
        body = json.dumps({"inputs": "abc", "parameters": {"max_new_tokens": 4}}).encode()
        for name in ("a", "b", "a", "c", "b"):
            assert said(aws.invoke(body, TargetModel=f"deep/{name}")) == "abca"

        hashed = {name: sha256(f"{source}/deep/{name}".encode()).hexdigest()[:32] for name in "abc"}
        assert {model["modelName"]: model["modelUrl"] for model in server.listed()["models"]} == {
            hashed[name]: str(server.store / hashed[name] / "model") for name in "bc"
        }

        log = server.log.read_text()
        assert (
            log.count(f"model {hashed['a']} is ready") == 1
            and log.count(f"model {hashed['b']} is ready") == 2
        )
        assert '"target_model":"deep/c"' in log


def test_faults_of_a_target_model_are_model_errors_with_the_containers_words() -> None:
    with target_models() as (server, aws, source):
        for name in ("hollow", "cursed", "large"):
            (source / name).mkdir()

        write_model(source / "cursed", **{"option.rolling_batch": "crashing", "retry_threshold": 1})
        write_model(source / "large", required_memory_mb=100_000_000)
        for target, body, status, words in (
            ("deep/a", b"{", 424, "JSON"),
            ("hollow", b"{}", 400, "config.json"),
            ("cursed", b"{}", 400, "the weights are cursed"),
            ("large", b"{}", 507, "needs 100000000 MB"),
        ):
            with pytest.raises(ClientError) as caught:
                aws.invoke(body, TargetModel=target)

            error_response = caught.value.response
            assert (error_response["Error"]["Code"], error_response["OriginalStatusCode"]) == (
                "ModelError",
                status,
            ), error_response
            assert words in error_response["OriginalMessage"]

        assert server.ping() == 200


def test_a_session_lives_in_a_target_model() -> None:
    with target_models() as (server, aws, source):
        opened = aws.invoke(
            b'{"requestType": "NEW_SESSION"}', TargetModel="deep/a", SessionId="NEW_SESSION"
        )
        session = opened["NewSessionId"].split(";")[0]
        body = json.dumps({"inputs": "abc", "parameters": {"max_new_tokens": 3}}).encode()
        assert said(aws.invoke(body, TargetModel="deep/a", SessionId=session)) == "abc"

        closed = aws.invoke(b'{"requestType": "CLOSE"}', TargetModel="deep/a", SessionId=session)
        assert closed["ClosedSessionId"] == session

        with pytest.raises(ClientError, match="Session-Id"):
            aws.invoke(body, TargetModel="deep/a", SessionId=session)
