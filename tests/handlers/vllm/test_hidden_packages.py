"""Small distributions in a folder on the path. The import of each fails as that of a CUDA build
does on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMPANIONS = {"torchvision": "0.28.0", "torchaudio": "2.11.0", "torchcodec": "0.17.0"}

# What this process, its spawned child and that child's spawned child can see after the call.
PROGRAM = """
import json, logging, sys
import nested
from handlers.lmi_vllm import process_setup

if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(message)s")
    process_setup.prepare()
    hidden = [name for name in ("torchvision", "torchaudio", "torchcodec") if sys.modules.get(name, 1) is None]
    loaded = [name for name in ("torch", "vllm", "transformers") if name in sys.modules]
    print(json.dumps([hidden, loaded, *map(nested.seen, range(3))]))
"""  # noqa: E501
NESTED = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

def seen(depth):
    if depth == 0:
        return [name for name in ("torchvision", "torchaudio", "torchcodec") if find_spec(name)]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(seen, depth - 1).result()
"""


def distribution(
    folder: Path, name: str, version: str, source: str = "raise RuntimeError('CUDA')"
) -> None:
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / f"{name.replace('-', '_')}.py").write_text(source)


def run(folder: Path) -> tuple[dict, str]:
    """What the program found in a separate process with the folder's distributions, and what it
    logged.
    """
    (folder / "program.py").write_text(PROGRAM)
    (folder / "nested.py").write_text(NESTED)
    environ = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-m", "program"]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    keys = ("hidden", "loaded", "here", "child", "grandchild")
    return dict(zip(keys, json.loads(done.stdout), strict=True)), done.stderr


def test_cuda_builds_beside_a_cpu_torch_are_hidden_here_and_in_spawned_processes(
    tmp_path: Path,
) -> None:
    distribution(tmp_path, "torch", "2.13.0+cpu")
    for name, version in COMPANIONS.items():
        distribution(tmp_path, name, version)

    outcome, logged = run(tmp_path)
    assert outcome["hidden"] == list(COMPANIONS)
    assert outcome["here"] == outcome["child"] == outcome["grandchild"] == []
    assert outcome["loaded"] == []
    assert logged.splitlines() == [
        (
            "hidden from vllm, not built for torch 2.13.0+cpu: torchvision 0.28.0, torchaudio 2.11.0, "  # noqa: E501
            "torchcodec 0.17.0"
        )
    ]


def test_the_build_that_fits_stays(tmp_path: Path) -> None:
    distribution(tmp_path, "torch", "2.13.0+cpu")
    distribution(tmp_path, "torchvision", "0.28.0+cpu", "")
    distribution(tmp_path, "torchaudio", "2.11.0")
    outcome, _ = run(tmp_path)
    assert outcome["hidden"] == ["torchaudio"]
    assert outcome["here"] == outcome["child"] == outcome["grandchild"] == ["torchvision"]


@pytest.mark.parametrize("torch", ["2.14.0", "2.14.0+cu130"])
def test_nothing_is_hidden_beside_a_torch_with_cuda(tmp_path: Path, torch: str) -> None:
    distribution(tmp_path, "torch", torch)
    for name, version in COMPANIONS.items():
        distribution(tmp_path, name, version)

    outcome, logged = run(tmp_path)
    assert outcome["hidden"] == []
    assert outcome["here"] == outcome["child"] == outcome["grandchild"] == list(COMPANIONS)
    assert logged == ""
