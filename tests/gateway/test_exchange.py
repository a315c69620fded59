"""The table of headers against botocore's model of the same operations."""

from __future__ import annotations

import dataclasses

import botocore.session
import pytest
from botocore.model import OperationModel, Shape

from lmi.gateway.members import ENDPOINT_NAME, MEMBERS, ROUTER_NAME, AwsMember

MODEL = botocore.session.Session().get_service_model("sagemaker-runtime")
ROUTERS = botocore.session.Session().get_service_model("sagemaker-inference-router-runtime")
TEXT = next(m for m in MEMBERS["InvokeEndpoint"] if m.name == "InferenceId")
NAME = ENDPOINT_NAME
TIMEOUT = MEMBERS["InvokeEndpointAsync"][-1]


def as_member(name: str, shape: Shape) -> AwsMember:
    rule = shape.metadata
    pattern = None if shape.type_name == "integer" else rule["pattern"]
    return AwsMember(
        name, shape.serialization.get("name", ""), pattern, rule.get("min", 0), rule["max"]
    )


def headers_of(operation: OperationModel) -> dict[str, AwsMember]:
    members = operation.input_shape.members.items()
    return {
        name: as_member(name, shape)
        for name, shape in members
        if shape.serialization.get("location") == "header"
    }


@pytest.mark.parametrize(
    "operation",
    [
        "InvokeEndpoint",
        "InvokeEndpointWithResponseStream",
        "InvokeEndpointAsync",
        "InvokeInferenceRouter",
        "InvokeInferenceRouterAsync",
    ],
)
def test_the_table_is_botocores_model(operation: str) -> None:
    model = ROUTERS if operation in ROUTERS.operation_names else MODEL
    theirs = headers_of(model.operation_model(operation))
    # The gateway takes files too
    theirs.pop("InputLocation", None)
    assert {member.name: member for member in MEMBERS[operation]} == theirs


def test_an_endpoints_name_has_botocores_rule() -> None:
    shape = MODEL.operation_model("InvokeEndpoint").input_shape.members["EndpointName"]
    assert (
        ENDPOINT_NAME.pattern == shape.metadata["pattern"]
        and ENDPOINT_NAME.maximum == shape.metadata["max"]
    )


def test_a_routers_name_has_botocores_rule() -> None:
    for operation in ROUTERS.operation_names:
        shape = ROUTERS.operation_model(operation).input_shape.members["InferenceRouterName"]
        theirs = as_member("InferenceRouterName", shape)
        assert dataclasses.replace(theirs, header="") == ROUTER_NAME


@pytest.mark.parametrize(
    ("member", "value", "is_taken"),
    [
        (NAME, "a", True),
        (NAME, "my--endpoint-1", True),
        (NAME, "a-", False),
        (NAME, "a" * 64, False),
        (NAME, "a\n", False),
        (TEXT, "!", True),
        (TEXT, "id 7~", True),
        (TEXT, "", False),
        (TEXT, " 7", False),
        (TEXT, "7é", False),
        (TEXT, "7\x00", False),
        (TIMEOUT, "900", True),
        (TIMEOUT, "0", False),
        (TIMEOUT, "3601", False),
        (TIMEOUT, "1.5", False),
    ],
)
def test_a_value_keeps_its_rule_as_a_whole(member: AwsMember, value: str, is_taken: bool) -> None:
    assert (not member.broken_rule(value)) == is_taken
