"""What of a model's definition reaches the process that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi.gateway.control.definition import Definitions
from lmi.gateway.model_store import LoadFailed
from tests.sources.faulty_server import Answer, FaultyServer
from tests.sources.s3_server import CREDENTIALS

NOTHING = b"""<?xml version="1.0"?><ListBucketResult><Name>models</Name><KeyCount>0</KeyCount>
<IsTruncated>false</IsTruncated></ListBucketResult>"""


def definitions(folder: Path) -> Definitions:
    return Definitions(folder=folder, buckets={}, images=(), trusts_models=False)


@pytest.mark.parametrize(
    "variables",
    [
        {"SM_VLLM_MODEL": "owner/tiny", "SM_VLLM_MAX_MODEL_LEN": "64"},
        {"SM_SGLANG_MODEL_PATH": "owner/tiny", "SM_SGLANG_CONTEXT_LENGTH": "64"},
        {"SM_LLAMA_CPP_HF_REPO": "owner/tiny-GGUF", "SM_LLAMA_CPP_CTX_SIZE": "64"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_variables_of_each_image_that_give_options_are_passed(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    launch = definitions(tmp_path).launch({"Environment": variables})
    assert variables.items() <= launch.environ.items()
    assert launch.model == str(tmp_path / "empty")


@pytest.mark.parametrize("name", ["SM_VLLM_PORT", "SM_VLLM_SSL_KEYFILE", "SM_SGLANG_HOST"])
def test_a_variable_that_is_the_gateways_to_say_is_not_passed(tmp_path: Path, name: str) -> None:
    launch = definitions(tmp_path).launch({"Environment": {name: "9000"}})
    assert name not in launch.environ


def test_a_variable_of_an_image_that_the_operator_has_is_not_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM_VLLM_MAX_MODEL_LEN", "64")
    launch = definitions(tmp_path).launch({"Environment": {"SM_VLLM_MODEL": "owner/tiny"}})
    assert "SM_VLLM_MAX_MODEL_LEN" not in launch.environ


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{folder}/models/a/config.json is empty", "…/models/a/config.json is empty"),
        ("'/home/me/key': no such file", "'…': no such file"),
        ("config:/home/me/key is cut", "config:… is cut"),
        ("file:///home/me/key is cut", "… is cut"),
        ("owner/tiny of https://host/a is gated", "owner/tiny of https://host/a is gated"),
        ("/opt/ml/model holds notes.txt", "/opt/ml/model holds notes.txt"),
    ],
)
def test_a_text_for_clients_has_no_path_of_this_machine(
    tmp_path: Path, text: str, shown: str
) -> None:
    folder = tmp_path / "a folder"
    rules = definitions(folder)
    assert rules.without_paths(text.format(folder=folder)) == shown
    assert rules.without_paths(shown) == shown


class EmptyS3(FaultyServer):
    """An S3 whose buckets hold nothing."""

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if method == "HEAD":
            return Answer(404)

        return Answer(200, {"Content-Type": "application/xml"}, NOTHING)


def test_a_model_that_its_environment_names_needs_no_objects_at_its_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ModelBuilder of the SageMaker SDK deploys, which uploads a folder without files."""
    rules = Definitions(folder=tmp_path, buckets={"models": ""}, images=(), trusts_models=False)
    prefix = {"ModelDataUrl": "s3://models/code/"}
    archive = {"ModelDataUrl": "s3://models/code.tar.gz"}
    named = {"Environment": {"HF_MODEL_ID": "owner/tiny"}}
    with EmptyS3() as s3:
        for name, value in (CREDENTIALS | {"AWS_ENDPOINT_URL_S3": s3.url}).items():
            monkeypatch.setenv(name, value)

        assert rules.launch({**prefix, **named}).model == str(tmp_path / "empty")
        with pytest.raises(LoadFailed, match="no objects with this prefix"):
            rules.launch(prefix)

        with pytest.raises(LoadFailed, match="NoSuchKey"):
            rules.launch({**archive, **named})
