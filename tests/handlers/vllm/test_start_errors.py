"""Failed starts of the real vLLM, in a separate process: each gives one line that says what to
change.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import tiny_model

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, sys
from handlers import lmi_vllm
from lmi.settings.config import EngineConfig
from lmi.errors import StartError

def said(folder, settings):
    try:
        lmi_vllm.load(EngineConfig(handler="vllm", dtype="fp32", **settings), folder, lambda stage, share: None)
    except StartError as error:
        return error.exit_code, str(error)

if __name__ == "__main__":
    print(json.dumps([said(*case) for case in json.loads(sys.argv[1])]))
"""  # noqa: E501


def changed(folder: Path, **changes: object) -> Path:
    shutil.copytree(tiny_model("llama_wide"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def cut(folder: Path) -> Path:
    weights = changed(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return folder


@pytest.mark.timeout(300)
def test_a_start_that_fails_is_one_line_with_the_cause_and_the_option(tmp_path: Path) -> None:
    whole = tiny_model("llama_wide")
    cases: list[tuple[Path, dict[str, object], int, str, str]] = [
        (cut(tmp_path / "cut"), {}, 4, "deserializing header", ""),
        (
            changed(tmp_path / "odd", architectures=["OddForCausalLM"]),
            {},
            4,
            "['OddForCausalLM'] are not",
            "",
        ),
        (changed(tmp_path / "new", model_type="odd"), {}, 4, "model type `odd`", ""),
        (without_weights(tmp_path / "empty"), {}, 4, "Cannot find any model weights", ""),
        (whole, {"max_sequence_length": 5000}, 2, "(5000) is greater", "option.max_model_len"),
        (
            whole,
            {"options": {"kv_cache_memory_bytes": "65536"}},
            4,
            "memory for the cache",
            "option.max_kv_cache",
        ),
        (
            whole,
            {"options": {"kv_cache_memory_bytes": "900g"}},
            4,
            "Available memory",
            "option.max_kv_cache_tokens",
        ),
    ]
    if importlib.util.find_spec("ray") is None:
        on_ray = {"options": {"distributed_executor_backend": "ray"}}
        cases.append((whole, on_ray, 2, "pip install ray", "option.nnodes"))

    cases_text = json.dumps([(str(folder), settings) for folder, settings, *_ in cases])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, cases_text],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert done.returncode == 0, done.stderr

    for (*_, code, cause, advice), message in zip(
        cases, json.loads(done.stdout.splitlines()[-1]), strict=True
    ):
        assert message is not None, cause
        assert (
            message[0] == code
            and cause in message[1]
            and advice in message[1]
            and "\n" not in message[1]
        ), message


def without_weights(folder: Path) -> Path:
    changed(folder)
    (folder / "model.safetensors").unlink()
    return folder
