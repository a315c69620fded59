"""Prefix-aware routing of the control plane, asked by AWS's own client: which of several containers
a request goes to.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.gateway.control_planes import ROLE, ControlPlane, control_plane
from tests.gateway.test_gateway import fails
from tests.system.container import wait_until

PREFIX_LENGTH = 1024
AWARE = {
    "RoutingStrategy": "PREFIX_AWARE",
    "PrefixAwareRoutingConfig": {"PrefixLength": PREFIX_LENGTH, "ConcurrencyThreshold": 1},
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as running:
        running.model("echo")
        yield running


def body(beginning: str, ending: str = "", **parameters: Any) -> bytes:
    """A body whose first 1024 bytes are those of `beginning`."""
    prompt = beginning * PREFIX_LENGTH + ending
    return json.dumps(
        {"inputs": prompt, "parameters": {"max_new_tokens": 2, **parameters}}
    ).encode()


def log_with(plane: ControlPlane, folder: str, inference_id: str) -> str:
    """Return the name of the log of the container that has answered a request."""
    names: list[str] = []

    def is_found() -> bool:
        for file in (plane.folder / "control" / "logs" / folder).iterdir():
            if f'"{inference_id}"' in file.read_text():
                names.append(file.name)

        return bool(names)

    wait_until(is_found, f"a container has answered {inference_id}")
    return names[0]


def test_requests_that_begin_alike_go_to_one_instance_until_it_is_busy(
    plane: ControlPlane,
) -> None:
    plane.config("near", "echo", InitialInstanceCount=2, RoutingConfig=AWARE)
    plane.create("near", "near")
    plane.wait_in_service("near")

    def instance(inference_id: str, content: bytes, **members: str) -> str:
        plane.aws.invoke(content, "near", InferenceId=inference_id, **members)
        return log_with(plane, "near", inference_id)

    first = instance("near-0", body("a"))
    assert instance("near-1", body("a", "another ending", max_new_tokens=3)) == first
    beginnings = [instance(f"near-b{n}", body(chr(ord("b") + n))) for n in range(12)]
    assert len(set(beginnings)) == 2
    identifiers = [instance(f"near-i{n}", body("a"), PrefixAwareId=f"team {n}") for n in range(12)]
    assert len(set(identifiers)) == 2

    # While one request is open, the threshold sends the others elsewhere.
    streamed = json.loads(body("a", max_new_tokens=1000)) | {"stream": True}
    opened = plane.aws.stream(json.dumps(streamed).encode(), "near")
    with closing(opened["Body"]) as events:
        next(iter(events))
        assert instance("near-2", body("a")) != first

    # An id of its own for each try, since those before may be in the log of another.
    tries = itertools.count()
    wait_until(
        lambda: instance(f"near-again-{next(tries)}", body("a")) == first,
        "the first one is free again",
    )
    plane.delete("near")


def test_a_chat_goes_by_the_characters_of_its_messages(plane: ControlPlane) -> None:
    plane.config(
        "chats", "echo", InitialInstanceCount=2, RoutingConfig={"RoutingStrategy": "KV_AWARE"}
    )
    assert plane.aws.says("variant echo is KV_AWARE")
    plane.create("chats", "chats")
    plane.wait_in_service("chats")

    def instance(inference_id: str, text: str, **members: Any) -> str:
        chat = {**members, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        headers = {"X-Amzn-SageMaker-Inference-Id": inference_id}
        path = "/endpoints/chats/openai/v1/chat/completions"
        with closing(HTTPConnection("127.0.0.1", plane.aws.port, timeout=60)) as connection:
            connection.request("POST", path, json.dumps(chat).encode(), headers)
            connection.getresponse().read()

        return log_with(plane, "chats", inference_id)

    first = instance("chats-0", "a" * 5000)
    assert instance("chats-1", "a" * 5000 + "another ending", temperature=0.5) == first
    keys = [instance(f"chats-k{n}", "a" * 5000, prompt_cache_key=f"{n}") for n in range(12)]
    assert len(set(keys)) == 2
    plane.delete("chats")


def test_copies_of_a_component_are_chosen_by_the_strategy_of_its_variant(
    plane: ControlPlane,
) -> None:
    variant = {
        "VariantName": "AllTraffic",
        "InstanceType": "ml.g6.2xlarge",
        "InitialInstanceCount": 1,
        "RoutingConfig": AWARE,
    }
    control = plane.control
    control.create_endpoint_config(
        EndpointConfigName="shared", ExecutionRoleArn=ROLE, ProductionVariants=[variant]
    )
    plane.create("shared", "shared")
    plane.wait_in_service("shared")
    needs = {"MinMemoryRequiredInMb": 1024}
    control.create_inference_component(
        InferenceComponentName="copies",
        EndpointName="shared",
        VariantName="AllTraffic",
        Specification={"ModelName": "echo", "ComputeResourceRequirements": needs},
        RuntimeConfig={"CopyCount": 2},
    )

    def status() -> str:
        description = control.describe_inference_component(InferenceComponentName="copies")
        text: str = description["InferenceComponentStatus"]
        return text

    wait_until(lambda: status() == "InService", "its copies serve")
    copies = []
    for number, beginning in enumerate("abcdefghijab"):
        inference_id = f"copies-{number}"
        plane.aws.invoke(
            body(beginning), "shared", InferenceComponentName="copies", InferenceId=inference_id
        )
        copies.append(log_with(plane, "shared", inference_id))

    assert len(set(copies)) == 2
    assert copies[10:] == copies[:2]
    control.delete_inference_component(InferenceComponentName="copies")
    wait_until(
        lambda: not control.list_inference_components()["InferenceComponents"], "it is deleted"
    )
    plane.delete("shared")


def test_a_configuration_without_the_limits_of_its_strategy_is_refused(
    plane: ControlPlane,
) -> None:
    with fails("ValidationException", 400) as error:
        plane.config("bad", "echo", RoutingConfig={"RoutingStrategy": "PREFIX_AWARE"})

    assert "needs PrefixAwareRoutingConfig.PrefixLength" in error["Error"]["Message"]
    limits = {"PrefixLength": 65537, "ConcurrencyThreshold": 1}
    with fails("ValidationException", 400) as error:
        plane.config("bad", "echo", RoutingConfig={**AWARE, "PrefixAwareRoutingConfig": limits})

    assert "less than or equal to 65536" in error["Error"]["Message"]
