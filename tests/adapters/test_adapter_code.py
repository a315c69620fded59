"""An adapter's own model.py, around real requests: whose formatters read and write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmi.errors import ModelUnusable, SecurityRefused
from lmi.user_code.options import UserCodeConfig
from lmi.user_code.runner import COMPAT
from tests.adapters.test_routes import ENABLED, LORA, call, write_files
from tests.scripted import Host, host
from tests.settings.settling import faults, settle

OF_MODEL = """
from djl_python.output_formatter import output_formatter

@output_formatter
def write(response):
    return {"model": response.generated_text}
"""
READS_AND_WRITES = """
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter

@input_formatter
def read(payload: dict) -> dict:
    return {"inputs": payload["question"], "adapters": payload.get("adapters")}

@output_formatter
def write(response):
    return {"both": response.generated_text}
"""
READS = READS_AND_WRITES.partition("@output_formatter\n")[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("coded")
    (folder / "model.py").write_text(OF_MODEL)
    code = UserCodeConfig(
        path=str(folder / "model.py"), output_formatter="write", runs_adapters=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(COMPAT))
        with host(folder, capabilities=LORA, options=ENABLED, user_code=code) as running:
            for name, source in {"both": READS_AND_WRITES, "reads": READS, "plain": ""}.items():
                assert register(running, name, source)[0] == 200

            yield running


def register(server: Host, name: str, source: str) -> tuple[int, Any]:
    folder = write_files(Path(server.config.model.path) / "loras" / name)
    if source:
        (folder / "model.py").write_text(source)

    return call(server, "POST", "/adapters", {"name": name, "src": str(folder)})


def ask(server: Host, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    response, text = server.post(body, headers=headers)
    return json.loads(text)


@pytest.mark.parametrize("place", ["header", "body", "list"])
def test_the_formatters_of_an_adapter_act_on_its_requests(server: Host, place: str) -> None:
    body: dict[str, Any] = {"question": "say a"}
    headers = {}
    if place == "header":
        headers["X-Amzn-SageMaker-Adapter-Identifier"] = "both"
    else:
        body["adapters"] = ["both"] if place == "list" else "both"

    assert ask(server, body, headers) == {"both": "a"}


def test_where_an_adapter_has_no_formatter_the_model_s_acts(server: Host) -> None:
    assert ask(server, {"inputs": "say a"}) == {"model": "a"}
    assert ask(server, {"inputs": "say a", "adapters": "plain"}) == {"model": "a"}
    assert ask(server, {"question": "say a", "adapters": "reads"}) == {"model": "a"}


def test_a_registered_adapter_s_new_code_acts_at_once(server: Host) -> None:
    folder = Path(server.config.model.path) / "loras" / "changed"
    assert register(server, "changed", READS_AND_WRITES)[0] == 200
    assert ask(server, {"question": "say a", "adapters": "changed"}) == {"both": "a"}
    assert call(server, "DELETE", "/adapters/changed")[0] == 200

    (folder / "model.py").write_text(READS_AND_WRITES.replace('"both"', '"new"'))
    os.utime(folder / "model.py", ns=(1, 1))
    registration = {"name": "changed", "src": str(folder)}

    assert call(server, "POST", "/adapters", registration)[0] == 200
    assert ask(server, {"question": "say a", "adapters": "changed"}) == {"new": "a"}


def test_code_that_cannot_be_imported_keeps_its_adapter_out(server: Host) -> None:
    status, answer = register(server, "broken", "import nowhere\n")
    assert status == 424
    assert answer["error"] == (
        "model.py of the adapter cannot be used: ModuleNotFoundError: No module named 'nowhere'"
    )
    assert call(server, "GET", "/adapters/broken")[0] == 404
    assert ask(server, {"inputs": "say a"}) == {"model": "a"}, "and hurts nobody else"


# Settings.

ON = "option.adapter_code=true\noption.enable_lora=true"


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A model with an adapter beside it that has code."""
    folder = tmp_path / "model"
    adapter = write_files(folder / "adapters" / "legal")
    (adapter / "model.py").write_text(READS_AND_WRITES)
    (folder / "config.json").write_text("{}")
    return folder


def test_an_adapter_beside_the_model_with_code_needs_the_option(beside: Path) -> None:
    with pytest.raises(ModelUnusable, match=r"legal: model.py .* option.adapter_code=true alone"):
        settle(beside, "option.enable_lora=true")

    config = settle(beside, ON).config
    assert config.user_code == UserCodeConfig(path="", runs_adapters=True, properties=props(config))
    assert config.num_formatters == 1 and not config.is_user_code


def props(config: Any) -> dict[str, str]:
    return config.user_code.properties  # type: ignore[no-any-return]


def test_code_of_adapters_stands_beside_formatters_and_no_handler(beside: Path) -> None:
    (beside / "model.py").write_text(OF_MODEL)
    code = settle(beside, ON).config.user_code
    assert code is not None and code.runs_adapters and code.output_formatter == ""

    (beside / "model.py").write_text("def handle(inputs): ...")
    (fault,) = faults(beside, ON)
    assert fault.startswith("option.adapter_code='true'")
    assert fault.endswith(f"allowed is false beside the code in {beside / 'model.py'}")


def test_secure_mode_refuses_code_of_adapters(beside: Path) -> None:
    secure = {
        "SAGEMAKER_SECURE_MODE": "true",
        "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_CUSTOM_INFERENCE_SCRIPTS",
    }
    with pytest.raises(SecurityRefused, match="option.adapter_code=true.*: refused by DISALLOW"):
        settle(beside, ON, environ=secure)
