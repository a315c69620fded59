"""Warns of a start that SageMaker may not wait for. Source: the ProductionVariant of SageMaker's API."""

from __future__ import annotations

from collections.abc import Mapping

from lmi.settings.model_folder import PLATFORM_FOLDER

WARN_AFTER_S = 300.0
LIMIT = "ContainerStartupHealthCheckTimeoutInSeconds"
DEFAULT_LIMIT_S, MIN_LIMIT_S, MAX_LIMIT_S = 480, 60, 3600


def is_on_sagemaker(environ: Mapping[str, str], folder: str) -> bool:
    """Return whether SageMaker seems to run this server of the model in `folder`."""
    return folder == str(PLATFORM_FOLDER) or any(name.startswith("SAGEMAKER_") for name in environ)


def slow_start(after_s: float, stage: str, progress: float) -> str:
    """Return the warning about a server that is not ready yet. `progress` is a share of the stage."""
    return (
        f"not ready after {after_s:.0f} s (stage {stage}, {progress:.0%}): SageMaker gives up after the endpoint's "
        f"{LIMIT}, {MIN_LIMIT_S} to {MAX_LIMIT_S} s, by default {DEFAULT_LIMIT_S} s; this server goes on"
    )
