"""AWS's clients, unchanged but for an endpoint's URL, at gateways in front of a whole server with a
real model.

Each client runs at three gateways: one keeps the parts of a stream as the server sent them, one
joins them, one cuts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.clients.venvs import run
from tests.gateway.gateways import Gateway, gateway, scripted
from tests.gateway.model_server import ModelServer, write_model
from tests.served import Server
from tests.system.container import wait_until

# Including the installation of a venv
pytestmark = pytest.mark.timeout(500)
PROMPT = "The quick brown"
NUM_TOKENS = 8
# The second joins a whole answer
MODES = ("as-is", "coalesce:10000", "split:7")


class Front:
    """The gateways of all modes, with one folder for async invocations each."""

    def __init__(self, gateways: list[Gateway], folder: Path) -> None:
        self.gateways = gateways
        self.folder = folder

    @property
    def urls(self) -> list[str]:
        return [gateway.url for gateway in self.gateways]

    def run(self, venv: str, script: str, *arguments: str) -> Any:
        """Return what a script prints that visits each gateway in turn."""
        return run(venv, f"gateway/{script}", *arguments, *self.urls)


@pytest.fixture(scope="module")
def front(demo: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("async")
    flags = (
        "--endpoint",
        f"http://127.0.0.1:{demo.port}",
        "--async-output",
        str(folder),
        "--async-input",
        str(folder),
    )

    with ExitStack() as stack:
        yield Front(
            [stack.enter_context(gateway("--parts", mode, *flags)) for mode in MODES], folder
        )


@pytest.fixture(scope="module")
def said(demo: Server) -> str:
    """The model's greedy answer, as a bare HTTP client gets it."""
    answer = demo.post({"inputs": PROMPT, "parameters": {"max_new_tokens": NUM_TOKENS}})
    return str(json.loads(answer.body)["generated_text"])


@pytest.fixture(scope="module")
def chatted(demo: Server) -> str:
    """The same in a chat."""
    question = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
    }
    return str(
        json.loads(demo.post(question, "/v1/chat/completions").body)["choices"][0]["message"][
            "content"
        ]
    )


@pytest.mark.parametrize(("venv", "version"), [("current", "1.44.5"), ("older", "1.43.11")])
def test_boto3(front: Front, demo: Server, said: str, venv: str, version: str) -> None:
    cancelled_before = num_cancelled(demo)
    printed = front.run(venv, "boto3_client.py")
    assert printed["version"] == version

    for results in printed["found"]:
        plain = results["plain"]
        streamed = results["streamed"]

        assert plain["text"] == said and plain["content_type"] == "application/json"
        assert (plain["custom_attributes"], plain["variant"]) == ("trace=1", "AllTraffic")
        assert "".join(line["token"]["text"] for line in streamed["lines"]) == said
        assert (
            streamed["lines"][-1]["generated_text"] == said
            and streamed["content_type"] == "application/jsonlines"
        )

        for refused in (results["refused"], results["refused_stream"]):
            assert (refused["class"], refused["status"]) == ("ModelError", 424)
            assert "max_new_tokens" in refused["message"]

        assert results["left_after_bytes"] > 0

    as_is, coalesced, split = (results["streamed"] for results in printed["found"])
    assert (as_is["num_parts"], coalesced["num_parts"], split["longest"]) == (NUM_TOKENS, 1, 7)

    wait_until(demo.is_idle, "the streams that boto3 left have ended")
    # The joined one may be complete when its only part comes, and on a machine that pauses another
    # one too.
    assert num_cancelled(demo) > cancelled_before


def num_cancelled(server: Server) -> float:
    """The generations that ended because their client left."""
    return server.metrics().get('lmi_finished_total{finish_reason="cancelled"}', 0)


@pytest.mark.parametrize(
    ("venv", "kinds"), [("current", ["location", "inline", "wrong"]), ("older", ["location"])]
)
def test_boto3_async(front: Front, said: str, venv: str, kinds: list[str]) -> None:
    body_file = front.folder / "asked.json"
    body_file.write_text(
        json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": NUM_TOKENS}})
    )
    accepted = run(venv, "gateway/boto3_async.py", front.urls[0], body_file.as_uri())

    assert list(accepted) == kinds and {
        acceptance["status"] for acceptance in accepted.values()
    } == {202}
    assert accepted["location"]["InferenceId"] == "mine"
    assert json.loads(file_of(accepted["location"]))["generated_text"] == said

    if "inline" in accepted:
        assert accepted["inline"]["OutputLocation"] == f"{front.folder.as_uri()}/a/b/inline.json"
        assert json.loads(file_of(accepted["inline"]))["generated_text"] == said
        assert json.loads(file_of(accepted["wrong"]))["OriginalStatusCode"] == 424


def file_of(accepted: dict[str, str]) -> bytes:
    """Wait for the file that an async invocation leaves, and return its bytes."""
    locations = [accepted["OutputLocation"], accepted["FailureLocation"]]
    files = [Path(location.removeprefix("file://")) for location in locations]
    wait_until(lambda: any(file.exists() for file in files), "the invocation left a file")
    return next(file for file in files if file.exists()).read_bytes()


@pytest.mark.parametrize("venv", ["current", "older"])
def test_boto3_target_model(tmp_path: Path, venv: str) -> None:
    for name in ("a", "b"):
        write_model(tmp_path / "source" / name, f"I am {name}")

    flags = ("--models", str(tmp_path / "source"), "--models-dir", str(tmp_path / "models"))
    with (
        scripted(ModelServer(num_places=1)) as container,
        gateway("--endpoint", container.url, *flags) as aws,
    ):
        a, b, again, nobody = run(
            venv, "gateway/boto3_target_model.py", aws.url, "a", "b", "a", "nobody"
        )

    assert [session["say"] for session in (a, b, again)] == ["I am a", "I am b", "I am a"]
    assert nobody["error"] == "ValidationError" and "nobody" in nobody["message"]


@pytest.mark.parametrize("venv", ["current", "older"])
def test_boto3_sessions(front: Front, said: str, venv: str) -> None:
    results = run(venv, "gateway/boto3_session.py", front.urls[0])
    opened = re.fullmatch(
        r"([0-9a-f-]{36}); Expires=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", results["opened"]
    )
    assert opened is not None and results["closed"] == opened[1]
    assert results["text"] == results["streamed"] == said and results["fields"] == []
    assert "X-Amzn-SageMaker-Session-Id" in results["refused"]


def test_the_aws_cli(front: Front, said: str) -> None:
    for results in front.run("older", "aws_cli.py", str(front.folder)):
        plain = results["plain"]
        refused = results["refused"]
        waited = results["waited"]

        assert plain["code"] == 0 and plain["text"] == said
        assert json.loads(plain["output"]) == {
            "ContentType": "application/json",
            "InvokedProductionVariant": "AllTraffic",
        }
        assert (
            refused["code"] != 0
            and "(ModelError)" in refused["errors"]
            and "max_new_tokens" in refused["errors"]
        )
        assert waited == {"code": 0, "output": "", "errors": ""}


def test_langchain_aws(front: Front, said: str, chatted: str) -> None:
    for results in front.run("current", "langchain_aws_client.py"):
        assert results["plain"] == results["streamed"] == said
        assert results["chat"] == results["chat_streamed"] == chatted
        assert "ModelError" in results["refused"] and "max_new_tokens" in results["refused"]


@pytest.mark.parametrize(
    ("venv", "major"), [("older", 2), ("current", 3)], ids=["sagemaker 2", "sagemaker 3"]
)
def test_the_sagemaker_sdk(front: Front, said: str, venv: str, major: int) -> None:
    body_file = front.folder / "asked by the sdk.json"
    body_file.write_text(
        json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": NUM_TOKENS}})
    )
    for results in front.run(venv, f"sagemaker{major}.py", body_file.as_uri()):
        assert results["plain"] == said
        assert "ModelError" in results["refused"] and "max_new_tokens" in results["refused"]
        assert json.loads(file_of(results["async"]))["generated_text"] == said

        if major == 2:
            assert results["djl"] == said
            assert "".join(line["token"]["text"] for line in results["lines"]) == said
            assert [json.loads(line) for line in results["bytes"].splitlines()] == results["lines"]
        else:
            assert results["status"] == "InService"
            # A fault of version 3, whose method for streams cannot read any answer of the service.
            assert (
                results["streamed"] == "AttributeError: 'EventStream' object has no attribute 'get'"
            )


@pytest.fixture(scope="module")
def through_litellm(front: Front) -> Any:
    return front.run("litellm", "litellm_client.py")


def test_litellm(through_litellm: Any, said: str, chatted: str) -> None:
    for results in through_litellm:
        assert (results["sagemaker"]["plain"], results["sagemaker_chat"]["plain"]) == (
            said,
            chatted,
        )
        assert "max_tokens must be at least 1" in results["sagemaker_chat"]["refused"]
        # Its own handler then hides the body
        assert "424 Failed Dependency" in results["sagemaker"]["refused"]

    streamed = {place: results["streamed"] for place, results in through_litellm[0].items()}
    assert streamed["sagemaker_chat"] == chatted
    # It drops leading blanks and parts of blanks
    assert streamed["sagemaker"].replace(" ", "") == said.replace(" ", "")


def test_litellm_loses_a_stream_whose_parts_are_not_one_record_each(through_litellm: Any) -> None:
    """A fault of litellm, which decodes each part alone. AWS promises nothing about the bounds of
    parts.
    """
    for results in through_litellm[1:]:
        assert (results["sagemaker"]["streamed"], results["sagemaker_chat"]["streamed"]) == ("", "")


def test_openai(front: Front) -> None:
    for results in front.run("current", "openai_client.py"):
        assert results["plain"] and results["plain"] == results["streamed"]
        assert "max_tokens" in results["refused"]


def test_openai_with_a_token_of_the_sagemaker_sdk(demo: Server) -> None:
    environ = {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_REGION": "us-east-1",
    }
    server = f"http://127.0.0.1:{demo.port}"
    with gateway("--endpoint", server, "--check-signatures", environ=environ) as checked:
        results = run("current", "gateway/openai_bearer.py", checked.url)

    assert results["plain"] and results["plain"] == results["streamed"]
    assert "ExpiredTokenException" in results["expired"]
    assert "UnrecognizedClientException" in results["mangled"]
