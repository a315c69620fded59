"""Secure mode, at the start of a whole server: exit code 5, and the names of what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmi.settings.secure_mode import CONTROLS
from lmi.settings.served_folder import demo_folder
from tests.served import launch
from tests.sources.hub_server import HubServer
from tests.system.container import ROOT, write_model
from tests.system.sagemaker.several import error_of, several_models

ALL = ",".join(CONTROLS)


def environ(folder: Path, controls: str = ALL, channels: str | None = None) -> dict[str, str]:
    return {
        "SAGEMAKER_SECURE_MODE": "True",
        "SAGEMAKER_SECURITY_CONTROLS": controls,
        "SAGEMAKER_UNTRUSTED_CHANNELS": str(folder) if channels is None else channels,
    }


def refused(folder: Path, **given: str) -> dict[str, object]:
    """Start a server that must be refused for security. Returns its last words."""
    command = [sys.executable, "-P", "-m", "lmi", "serve", str(folder)]
    paths = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=os.environ | paths | given, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 5 and done.stdout == ""
    words: dict[str, object] = json.loads(done.stderr.splitlines()[-1])
    assert (words["cause"], words["code"]) == ("security_refused", 5)
    return words


def test_a_harmless_model_is_served_under_all_controls(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    with launch(folder, environ(folder)) as server:
        server.wait_ready()
        assert server.generate(2).status == 200


@pytest.mark.parametrize(
    ("name", "channels"),
    [("requirements.txt", None), ("deep/weights.PKL", "")],
    ids=["a channel", "no channel"],
)
def test_a_file_that_a_control_refuses_ends_the_start_with_its_name(
    tmp_path: Path, name: str, channels: str | None
) -> None:
    folder = write_model(tmp_path / "model")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("")
    message = str(refused(folder, **environ(folder, channels=channels))["message"])
    assert f"{folder / name}: refused by DISALLOW_" in message


def test_an_option_in_the_models_own_file_that_runs_code_ends_the_start(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **{"option.env": "LD_PRELOAD=/opt/ml/model/x.so"})
    message = str(refused(folder, **environ(folder))["message"])
    assert message.startswith("option.env (") and "LD_PRELOAD" not in message


def test_controls_that_are_unknown_end_the_start(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    controls = "DISALLOW_PICKLE_FILES,DISALLOW_MAGIC"
    assert "DISALLOW_CHAT_TEMPLATE" in str(refused(folder, **environ(folder, controls))["message"])


def test_a_channel_that_does_not_exist_ends_the_start(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    assert "/nowhere is not a folder" in str(
        refused(folder, **environ(folder, channels="/nowhere"))["message"]
    )


def test_each_of_several_models_is_searched_when_it_is_loaded(tmp_path: Path) -> None:
    with several_models("frontend_workers=1", environ=environ(tmp_path)) as server:
        assert server.load("harmless", server.model("harmless")).status == 200

        for name in ("requirements.txt", "model.py", "weights.PKL", "chat_template.jinja"):
            url = server.model("harmful")
            (Path(url) / name).write_text("")
            refused = server.load("harmful", url)
            assert refused.status == 400 and f"{name}: refused by DISALLOW_" in error_of(refused)

            (Path(url) / name).unlink()

        url = server.model("harmful", "secure_mode=false", "option.trust_remote_code=true")
        assert "refused by DISALLOW_TRUST_REMOTE_CODE" in error_of(server.load("harmful", url))
        assert server.invoke("harmless").status == server.ping() == 200


def test_a_model_is_searched_after_it_was_fetched(tmp_path: Path) -> None:
    name = "requirements.txt"
    control = "DISALLOW_REQUIREMENTS_TXT"
    with HubServer() as hub:
        files = {path.name: path.read_bytes() for path in demo_folder().iterdir() if path.is_file()}
        hub.publish("someone/model", {**files, name: b""})
        fetched = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        variables = {
            "SERVING_LOG_FORMAT": "json",
            **environ(tmp_path, control, channels=""),
            **fetched,
        }

        with launch(Path("someone/model"), variables) as server:
            assert server.wait(60) == 5

            message = server.last_words()["message"]
            assert "/snapshots/" in message and f"/{name}: refused by {control}" in message
