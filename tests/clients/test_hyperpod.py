"""The manifest of `scripts/sagemaker hyperpod`, read by AWS's own package."""

from __future__ import annotations

import json

import pytest

from scripts.sagemaker_kit.hyperpod import manifest
from scripts.sagemaker_kit.words import parse
from tests.clients.venvs import run

# Including the installation of a venv
pytestmark = pytest.mark.timeout(500)
BUCKET = ("--model", "s3://models/llama/", "--region", "eu-west-1")
EVERYTHING = (
    *("--model", "meta-llama/Llama-3.1-8B-Instruct", "--hf-token-secret", "hub/token"),
    *("--fallback", "ml.g6e.2xlarge", "--count", "2", "--gpus", "1", "--cpus", "4"),
    *("--memory-mb", "16384", "--env", "OPTION_DTYPE=bf16", "--path", "v1/chat/completions"),
    *("--routing", "session", "--namespace", "models", "--certificates", "s3://certificates/chat"),
    *("--capture", "s3://seen/chat", "--capture-percent", "5", "--tag", "team=chat"),
)


@pytest.mark.parametrize(
    "flags", [BUCKET, ("--model", "fsx://fs-1/llama"), EVERYTHING], ids=["S3", "FSx", "everything"]
)
def test_the_operators_own_classes_know_each_member_of_a_manifest(flags: tuple[str, ...]) -> None:
    words = ("hyperpod", "chat", "--image", "lmi:chat", "--instance-type", "ml.g6.2xlarge")
    _, options = parse((*words, *flags))
    spec = manifest(options)["spec"]
    # They leave out what they do not know
    assert run("hyperpod", "hyperpod.py", json.dumps(spec)) == spec
