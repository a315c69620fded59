"""The warning that SageMaker may not wait for a slow start."""

from __future__ import annotations

import pytest

from lmi.supervisor.messages import slow_start
from lmi.supervisor.supervisor import is_on_sagemaker


def test_the_warning_names_stage_progress_and_the_limit_with_its_bounds_and_default() -> None:
    line = slow_start(300.4, "weights", 0.42)
    assert "not ready after 300 s (stage weights, 42%)" in line
    assert "ContainerStartupHealthCheckTimeoutInSeconds" in line
    assert "60 to 3600 s" in line and "480 s" in line


@pytest.mark.parametrize(
    ("environ", "folder", "expected"),
    [
        ({}, "/opt/ml/model", True),
        ({"SAGEMAKER_BIND_TO_PORT": "8080"}, "/models/mine", True),
        ({"OPTION_DTYPE": "fp32"}, "/models/mine", False),
    ],
)
def test_it_is_for_servers_that_sagemaker_runs(
    environ: dict[str, str], folder: str, expected: bool
) -> None:
    assert is_on_sagemaker(environ, folder) == expected
