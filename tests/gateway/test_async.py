"""Async invocations through the gateway: what is accepted, and the one file that each leaves."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from lmi.gateway.async_invocations import EXPIRED, STOPPED, AsyncInvocations
from lmi.gateway.async_job import AsyncJob
from lmi.gateway.async_queue import AsyncQueue
from lmi.gateway.aws_endpoint import TIMED_OUT
from lmi.gateway.errors import AwsError
from lmi.gateway.named_endpoints import ANY, NamedEndpoints
from lmi.gateway.stores import Answers, Inputs
from tests.gateway.gateways import (
    Gateway,
    ScriptedContainer,
    Talk,
    chunked,
    gateway,
    scripted,
    then_silent,
    whole,
)
from tests.sources.faulty_server import Answer
from tests.sources.s3_server import S3Server, moto
from tests.system.container import wait_until

ANSWER = whole(b'{"generated_text": "hello"}', 200, "Content-Type: application/json")
UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def answer_as_asked(talk: Talk) -> None:
    """Answer in the way that the body names."""
    ways = {
        b"refuse": whole(b'{"error": "no", "code": 424}', 424, "Content-Type: application/json"),
        b"chunked": chunked(b"a", b"b"),
        b"4 KB": whole(b"{}", 200, "X-Long: " + "x" * 4100),
        b"silent": then_silent(lambda talk: None),
        b"cut": lambda talk: talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"),
    }
    ways.get(talk.seen.body, ANSWER)(talk)


class Place:
    """A gateway with folders for inputs and outputs, and the container behind it."""

    def __init__(
        self, container: ScriptedContainer, aws: Gateway, inputs: Path, outputs: Path
    ) -> None:
        self.container = container
        self.aws = aws
        self.inputs = inputs
        self.outputs = outputs

    def invoke(self, body: bytes | None = None, **parameters: Any) -> dict[str, Any]:
        arguments = parameters if body is None else {"Body": body, **parameters}
        answer: dict[str, Any] = self.aws.runtime.invoke_endpoint_async(
            EndpointName="any", **arguments
        )
        return answer

    def outcome(self, accepted: dict[str, Any]) -> bytes | dict[str, Any]:
        """Wait for the file of an invocation: the bytes of its output, or its failure
        as an object.
        """
        output, failure = (
            path_of(accepted[name]) for name in ("OutputLocation", "FailureLocation")
        )
        wait_until(lambda: output.exists() or failure.exists(), "there is a file")
        assert not (output.exists() and failure.exists())
        if output.exists():
            return output.read_bytes()

        failure_body: dict[str, Any] = json.loads(failure.read_bytes())
        return failure_body


def path_of(location: str) -> Path:
    assert location.startswith("file:///")
    return Path(location.removeprefix("file://"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    inputs = tmp_path_factory.mktemp("inputs")
    outputs = tmp_path_factory.mktemp("outputs")
    with scripted(answer_as_asked) as container:
        flags = ("--async-output", str(outputs), "--async-input", str(inputs))
        with gateway("--endpoint", container.url, *flags) as aws:
            yield Place(container, aws, inputs, outputs)


def refusal(place: Place, *arguments: bytes, **parameters: Any) -> tuple[str, int, str]:
    """Return the class, status and message of the error that a call ends with."""
    with pytest.raises(ClientError) as caught:
        place.invoke(*arguments, **parameters)

    answer = caught.value.response
    return (
        answer["Error"]["Code"],
        answer["ResponseMetadata"]["HTTPStatusCode"],
        answer["Error"]["Message"],
    )


def test_an_inline_body_is_accepted_with_the_places_of_its_files_and_becomes_an_output_file(
    place: Place,
) -> None:
    accepted = place.invoke(
        b"{}", ContentType="application/json", Accept="text/plain", CustomAttributes="trace=1"
    )

    assert accepted["ResponseMetadata"]["HTTPStatusCode"] == 202
    assert re.fullmatch(UUID, accepted["InferenceId"])

    root = place.outputs.as_uri()
    assert (match := re.fullmatch(f"{root}/({UUID}).out", accepted["OutputLocation"]))
    assert accepted["FailureLocation"] == f"{root}/{match[1]}-error.out"
    assert place.outcome(accepted) == b'{"generated_text": "hello"}'
    # Of its file while it was written
    assert not list(place.outputs.glob(".*"))

    request = place.container.seen[-1]
    assert (request.method, request.path, request.body) == ("POST", "/invocations", b"{}")

    names = {"content-type": "application/json", "accept": "text/plain"}
    headers = {name.lower(): value for name, value in request.headers}

    assert headers.pop("host") and headers.pop("content-length") == "2"
    assert headers.pop("x-lmi-endpoint-name") == "any"
    assert headers == {**names, "x-amzn-sagemaker-custom-attributes": "trace=1"}


def test_the_input_may_be_a_file_below_the_allowed_folder(place: Place) -> None:
    (place.inputs / "a folder").mkdir()
    file = place.inputs / "a folder" / "request é.json"
    file.write_bytes(b"from a file")
    assert (
        place.outcome(place.invoke(InputLocation=file.as_uri())) == b'{"generated_text": "hello"}'
    )
    assert place.container.seen[-1].body == b"from a file"


def test_the_client_chooses_the_name_of_the_output_and_a_folder_for_both_files(
    place: Place,
) -> None:
    accepted = place.invoke(
        b"{}", Filename="mine.json", S3OutputPathExtension="a/b", InferenceId="../../id 1"
    )
    assert accepted["InferenceId"] == "../../id 1"
    assert accepted["OutputLocation"] == f"{place.outputs.as_uri()}/a/b/mine.json"
    assert re.fullmatch(
        f"{place.outputs.as_uri()}/a/b/{UUID}-error.out", accepted["FailureLocation"]
    )
    assert place.outcome(accepted) == b'{"generated_text": "hello"}'
    assert place.container.seen[-1].header("X-Amzn-SageMaker-Inference-Id") == "../../id 1"


@pytest.mark.parametrize("extension", ["..", "a/../b", "../a", "x" * 256])
def test_a_path_extension_stays_below_the_output_folder(place: Place, extension: str) -> None:
    kind, status, message = refusal(place, b"{}", S3OutputPathExtension=extension)
    assert (kind, status) == ("ValidationError", 400) and "S3OutputPathExtension" in message
    accepted = place.invoke(b"{}", S3OutputPathExtension="/./c//")
    assert path_of(accepted["OutputLocation"]).parent == place.outputs / "c"
    place.outcome(accepted)


def test_exactly_one_of_body_and_location_is_required(place: Place) -> None:
    assert refusal(place)[:2] == ("ValidationError", 400)
    kind, status, message = refusal(place, b"{}", InputLocation="s3://bucket/key")
    assert (kind, status) == ("ValidationError", 400) and "Body and InputLocation" in message


@pytest.mark.parametrize(
    "location",
    [
        "https://host/key",
        "s3://",
        "s3://bucket",
        "/etc/hostname",
        "file:///etc/hostname",
        "file://host/a",
    ],
)
def test_a_location_is_an_object_or_an_allowed_file(place: Place, location: str) -> None:
    kind, status, message = refusal(place, InputLocation=location)
    assert (
        (kind, status) == ("ValidationError", 400)
        and "InputLocation" in message
        and location in message
    )


def test_no_way_leads_out_of_the_allowed_folder(place: Place) -> None:
    (place.inputs / "link").symlink_to("/etc")
    for path in ("../outside", "%2e%2e/outside", "link/hostname", "a/../../outside"):
        assert refusal(place, InputLocation=f"{place.inputs.as_uri()}/{path}")[:2] == (
            "ValidationError",
            400,
        )


@pytest.mark.parametrize(
    "parameters",
    [
        {"Filename": "a.b.c"},
        {"Filename": "x" * 33},
        {"RequestTTLSeconds": 21601},
        {"InvocationTimeoutSeconds": 3601},
    ],
    ids=str,
)
def test_a_header_against_its_rule_is_named(place: Place, parameters: dict[str, Any]) -> None:
    [name] = parameters
    kind, status, message = refusal(place, b"{}", **parameters)
    assert (kind, status) == ("ValidationError", 400) and name.lower() in message.lower()


def test_an_inline_body_has_at_most_128000_bytes(place: Place) -> None:
    assert refusal(place, b"x" * 128_001)[:2] == ("ValidationError", 413)
    assert place.outcome(place.invoke(b"x" * 128_000)) == b'{"generated_text": "hello"}'


def test_an_error_of_the_container_becomes_a_failure_file_with_a_model_error(place: Place) -> None:
    failure = place.outcome(place.invoke(b"refuse", Filename="refused"))
    assert isinstance(failure, dict)
    assert failure["OriginalStatusCode"] == 424 and json.loads(failure["OriginalMessage"]) == {
        "error": "no",
        "code": 424,
    }
    assert failure["Message"].startswith('Received client error (424) from primary with message "{')
    assert failure["LogStreamArn"].endswith(":log-group:/aws/sagemaker/Endpoints/any")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"chunked", "did not specify the required Content-Length header"),
        (b"4 KB", "headers of the response have 41"),
        (b"cut", "did not complete its answer"),
    ],
)
def test_an_answer_that_production_does_not_take_is_a_failure(
    place: Place, body: bytes, reason: str
) -> None:
    failure = place.outcome(place.invoke(body))
    assert isinstance(failure, dict)
    assert failure["OriginalStatusCode"] == 0 and reason in failure["OriginalMessage"]


def test_an_input_that_cannot_be_read_is_a_failure(place: Place) -> None:
    os.mkfifo(place.inputs / "pipe")
    (place.inputs / "large").touch()
    os.truncate(place.inputs / "large", (1 << 30) + 1)
    reasons = {
        "missing": "there is no",
        "pipe": "not a regular file",
        "": "not a regular file",
        "large": "at most 107",
    }
    for name, reason in reasons.items():
        failure = place.outcome(place.invoke(InputLocation=f"{place.inputs.as_uri()}/{name}"))
        assert isinstance(failure, dict) and reason in failure["OriginalMessage"]


def test_an_invocation_that_takes_too_long_is_a_failure_and_its_connection_is_closed(
    place: Place,
) -> None:
    failure = place.outcome(place.invoke(b"silent", InvocationTimeoutSeconds=1))
    assert isinstance(failure, dict)
    assert (failure["OriginalStatusCode"], failure["OriginalMessage"]) == (0, TIMED_OUT)
    assert place.container.left.wait(60)


def test_an_output_that_cannot_be_written_leaves_a_failure_file(place: Place) -> None:
    (place.outputs / "taken").mkdir()
    accepted = place.invoke(b"{}", Filename="taken")
    failure = path_of(accepted["FailureLocation"])
    wait_until(failure.exists, "there is a failure file")
    assert "cannot be written" in json.loads(failure.read_bytes())["OriginalMessage"]


def test_a_gateway_that_is_stopped_fails_what_runs_and_what_waits(tmp_path: Path) -> None:
    flags = ("--async-output", str(tmp_path / "out"), "--async-concurrency", "2")
    with (
        scripted(then_silent(lambda talk: None)) as container,
        gateway("--endpoint", container.url, *flags) as aws,
    ):
        accepted = [
            aws.runtime.invoke_endpoint_async(EndpointName="any", Body=b"{}") for _ in range(5)
        ]
        wait_until(lambda: len(container.seen) == 2, "two of them run")
        aws.process.send_signal(signal.SIGTERM)
        aws.process.wait(60)

        assert len(container.seen) == 2

    failures = [
        json.loads(path_of(acceptance["FailureLocation"]).read_bytes()) for acceptance in accepted
    ]
    assert {failure["OriginalMessage"] for failure in failures} == {STOPPED}
    assert not any(path_of(acceptance["OutputLocation"]).exists() for acceptance in accepted)


def test_a_container_that_is_not_ready_is_not_given_invocations(tmp_path: Path) -> None:
    with scripted(ANSWER, ping=whole(b"loading", 503)) as container:
        with gateway("--endpoint", container.url, "--async-output", str(tmp_path)) as aws:
            with pytest.raises(ClientError, match="loading") as caught:
                aws.runtime.invoke_endpoint_async(EndpointName="any", Body=b"{}")

    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503


class Queue:
    """The queue in this process, in front of a container."""

    def __init__(self, url: str, folder: Path) -> None:
        self._answers = Answers(str(folder), {})
        self.invocations = AsyncInvocations(
            NamedEndpoints({ANY: url}, {}),
            Inputs(None),
            self._answers,
            AsyncQueue(None),
            max_running=4,
        )

    async def add(self, name: str, ttl_s: float = 60.0) -> None:
        job = AsyncJob(
            endpoint="any",
            region="local",
            inference_id=name,
            headers=[],
            body=b"{}",
            output=self._answers.url(name),
            failure=self._answers.url(f"{name}-error"),
            expires_s=time.time() + ttl_s,
        )
        await self.invocations.add(job)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_an_invocation_that_waits_for_longer_than_its_ttl_is_a_failure(tmp_path: Path) -> None:
    async def scenario() -> None:
        queue = Queue(container.url, tmp_path)
        await queue.add("late", ttl_s=0.0)
        await queue.add("next")
        await until(lambda: len(list(tmp_path.iterdir())) == 2)
        await queue.invocations.close()

    with scripted(ANSWER) as container:
        asyncio.run(scenario())

    assert json.loads((tmp_path / "late-error").read_bytes())["OriginalMessage"] == EXPIRED
    assert (tmp_path / "next").read_bytes() == b'{"generated_text": "hello"}'


def test_a_thousand_invocations_may_wait_and_each_has_its_file_when_the_gateway_stops(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        queue = Queue(container.url, tmp_path)
        for number in range(4):
            await queue.add(f"{number}")

        await until(lambda: len(container.seen) == 4)
        for number in range(4, 1004):
            await queue.add(f"{number}")

        with pytest.raises(AwsError, match="1000 async invocations wait") as caught:
            await queue.add("too many")

        assert (caught.value.kind, caught.value.status) == ("ThrottlingException", 429)

        await queue.invocations.close()

    with scripted(then_silent(lambda talk: None)) as container:
        asyncio.run(scenario())

    assert {path.name for path in tmp_path.iterdir()} == {
        f"{number}-error" for number in range(1004)
    }


@pytest.fixture(scope="module")
def moto_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with moto(tmp_path_factory.mktemp("moto")) as port:
        yield port


@pytest.fixture(scope="module")
def s3(moto_port: int) -> Iterator[S3Server]:
    with S3Server(moto_port) as server:
        server.client.create_bucket(Bucket="bucket")
        yield server


def test_inputs_and_files_may_be_objects_of_s3(s3: S3Server, tmp_path: Path) -> None:
    def keys() -> list[str]:
        return [
            stored_object["Key"]
            for stored_object in s3.client.list_objects_v2(Bucket="bucket", Prefix="out/").get(
                "Contents", []
            )
        ]

    s3.put("bucket", {"in/request %41.json": b"from s3", "in/wrong.json": b"refuse"})
    flags = ("--async-output", "s3://bucket/out/", "--s3-endpoint", s3.url)
    with scripted(answer_as_asked) as container:
        with gateway("--endpoint", container.url, *flags, environ=s3.environ) as aws:
            place = Place(container, aws, tmp_path, tmp_path)
            accepted = place.invoke(
                InputLocation="s3://bucket/in/request %41.json", S3OutputPathExtension="a"
            )
            wait_until(lambda: len(keys()) == 1, "the output is there")

            assert container.seen[-1].body == b"from s3"
            assert [f"s3://bucket/{key}" for key in keys()] == [accepted["OutputLocation"]]

            object_read = s3.client.get_object(Bucket="bucket", Key=keys()[0])
            assert (
                object_read["Body"].read() == b'{"generated_text": "hello"}'
                and object_read["ContentType"] == "application/json"
            )

            reasons = {"wrong.json": '"code": 424', "missing": "NoSuchKey"}
            for name, reason in reasons.items():
                accepted = place.invoke(InputLocation=f"s3://bucket/in/{name}")
                key = accepted["FailureLocation"].removeprefix("s3://bucket/")
                wait_until(lambda key=key: key in keys(), "the failure is there")

                assert (
                    reason
                    in json.loads(s3.client.get_object(Bucket="bucket", Key=key)["Body"].read())[
                        "OriginalMessage"
                    ]
                )

            assert len(keys()) == 3


def test_an_output_that_s3_does_not_take_becomes_a_failure_or_a_line_of_the_log(
    s3: S3Server,
) -> None:
    flags = ("--async-output", "s3://nobodys/out", "--s3-endpoint", s3.url)
    with scripted(ANSWER) as container:
        with gateway("--endpoint", container.url, *flags, environ=s3.environ) as aws:
            aws.runtime.invoke_endpoint_async(EndpointName="any", Body=b"{}", InferenceId="mine")
            wait_until(lambda: aws.says("async invocation mine has no file"), "the log says so")
            assert aws.says("NoSuchBucket")


class ForgetfulS3(S3Server):
    """Takes each object, and says that it failed."""

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        done = super().answer(method, path, headers, body)
        return Answer(500) if method == "PUT" else done


def test_an_output_that_s3_took_is_not_followed_by_a_failure(s3: S3Server, moto_port: int) -> None:
    with ForgetfulS3(moto_port) as forgetful, scripted(ANSWER) as container:
        flags = ("--async-output", "s3://bucket/forgotten", "--s3-endpoint", forgetful.url)
        with gateway("--endpoint", container.url, *flags, environ=forgetful.environ) as aws:
            accepted = aws.runtime.invoke_endpoint_async(EndpointName="any", Body=b"{}")
            key = accepted["OutputLocation"].removeprefix("s3://bucket/")
            wait_until(
                lambda: forgetful.num_requests("HEAD"), "the gateway looks whether it is there"
            )

        stored_objects = s3.client.list_objects_v2(Bucket="bucket", Prefix="forgotten/")["Contents"]

    assert [stored_object["Key"] for stored_object in stored_objects] == [key]


class LosingS3(S3Server):
    """An S3 that is down, or that takes each object and is not heard."""

    is_down = True

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if self.is_down and method in ("PUT", "HEAD"):
            return Answer(503)

        return super().answer(method, path, headers, body)


@pytest.mark.parametrize("is_written", [False, True])
def test_an_answer_that_was_known_when_the_gateway_was_killed_is_the_one_that_is_left(
    tmp_path: Path, s3: S3Server, moto_port: int, is_written: bool
) -> None:
    """The object was written when the gateway was killed, and the gateway did not know; or not."""
    prefix = f"written-{is_written}/"
    queue = tmp_path / "queue"
    with LosingS3(moto_port) as losing, scripted(ANSWER) as container:
        losing.is_down = not is_written
        pause = losing.hold("PUT /bucket/written-True", after=0)
        flags = ["--endpoint", container.url, "--s3-endpoint", losing.url]
        flags += ["--async-queue", str(queue), "--async-output", f"s3://bucket/{prefix}"]
        with gateway(*flags, environ=losing.environ) as aws:
            accepted = aws.runtime.invoke_endpoint_async(EndpointName="any", Body=b"{}")
            if is_written:
                assert pause.reached.wait(60)
            else:
                wait_until(lambda: losing.num_requests("PUT /bucket/"), "it is about to be written")

            os.kill(aws.process.pid, signal.SIGKILL)
            aws.process.wait(60)

        pause.released.set()
        losing.is_down = False
        container.script = whole(b"another answer", 500)
        with gateway(*flags, environ=losing.environ):
            wait_until(lambda: not list(queue.glob("*.job")), "nothing is kept any more")

        objects = s3.client.list_objects_v2(Bucket="bucket", Prefix=prefix)["Contents"]
        assert [f"s3://bucket/{entry['Key']}" for entry in objects] == [accepted["OutputLocation"]]
        assert len(container.seen) == 1


def test_a_gateway_that_is_stopped_does_not_wait_for_an_input_that_hangs(
    s3: S3Server, tmp_path: Path
) -> None:
    s3.put("bucket", {"in/slow": b"x" * 100})
    pause = s3.hold("GET /bucket/in/slow", after=10)
    flags = ("--async-output", str(tmp_path), "--s3-endpoint", s3.url)
    with scripted(ANSWER) as container:
        with gateway("--endpoint", container.url, *flags, environ=s3.environ) as aws:
            accepted = aws.runtime.invoke_endpoint_async(
                EndpointName="any", InputLocation="s3://bucket/in/slow"
            )
            assert pause.reached.wait(60)

            aws.process.send_signal(signal.SIGTERM)
            assert aws.process.wait(60) == 0

            pause.released.set()

    assert (
        json.loads(path_of(accepted["FailureLocation"]).read_bytes())["OriginalMessage"] == STOPPED
    )


@pytest.mark.parametrize("stop_after_s", [0.0, 0.005, 0.02, 0.05])
def test_every_invocation_has_one_file_whenever_the_gateway_stops(
    tmp_path: Path, stop_after_s: float
) -> None:
    async def scenario() -> None:
        queue = Queue(container.url, tmp_path)
        for number in range(40):
            await queue.add(f"{number}")

        await asyncio.sleep(stop_after_s)
        await queue.invocations.close()
        with pytest.raises(AwsError, match="stops"):
            await queue.add("later")

    with scripted(ANSWER) as container:
        asyncio.run(scenario())

    names = sorted(path.name for path in tmp_path.iterdir())
    assert sorted(name.removesuffix("-error") for name in names) == sorted(map(str, range(40)))
