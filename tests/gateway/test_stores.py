"""Which errors of a store may pass, so that an answer waits for it."""

from __future__ import annotations

from typing import Any

import botocore.exceptions as faults
import pytest

from lmi.gateway.stores import NO_BOTO3, StoreError, may_pass


def answered(status: int) -> faults.ClientError:
    answer: Any = {"Error": {}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return faults.ClientError(answer, "PutObject")


@pytest.mark.parametrize(
    ("error", "is_expected"),
    [
        (answered(503), True),
        (answered(403), False),
        (faults.EndpointConnectionError(endpoint_url="http://s3", error="refused"), True),
        (faults.ConnectTimeoutError(endpoint_url="http://s3"), True),
        (faults.ReadTimeoutError(endpoint_url="http://s3"), True),
        (faults.NoCredentialsError(), False),
        (StoreError(NO_BOTO3), False),
    ],
)
def test_what_nobody_answers_may_pass_and_what_is_refused_does_not(
    error: Exception, is_expected: bool
) -> None:
    assert may_pass(error) is is_expected
