"""The Dockerfile, read without Docker; `scripts/build-image --test` builds and runs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmi.cli import lmi

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "Dockerfile").read_text()
JOINED = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", TEXT, flags=re.MULTILINE))
INSTRUCTIONS = [
    (word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in JOINED.splitlines() if line)
]
STAGES = {rest.split(" AS ")[1]: rest.split(" AS ")[0] for word, rest in INSTRUCTIONS if word == "FROM"}
TARGETS = ("cpu", "vllm", "trtllm")


def said(word: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == word]


def ancestry(stage: str) -> list[str]:
    """The stage and those that it is built on, down to the base image."""
    return [stage, *ancestry(STAGES[stage])] if stage in STAGES else [stage]


def test_the_last_stage_is_cpu_and_every_target_is_a_stage_on_the_base_image() -> None:
    assert list(STAGES)[-1] == "cpu"
    for target in TARGETS:
        assert ancestry(target)[-2:] == ["runtime", "${BASE_IMAGE}"]


def test_it_needs_no_frontend_of_its_own_and_no_heredoc() -> None:
    assert "syntax=" not in TEXT.replace(" ", "")
    assert "<<" not in TEXT


def test_entry_point_command_and_health_check_are_in_exec_form() -> None:
    (entry_point,), (command,), (health,) = said("ENTRYPOINT"), said("CMD"), said("HEALTHCHECK")
    assert json.loads(entry_point) == ["lmi"]
    assert json.loads(command) == ["serve"]
    program = json.loads(health.partition(" CMD ")[2])
    assert program[:2] == ["python3", "-ISc"]
    compile(program[2], "HEALTHCHECK", "exec")


@pytest.mark.parametrize("word", ["serve", "djl-serving", "config", "version"])
def test_the_words_that_platforms_start_it_with_are_commands_of_the_entry_point(word: str) -> None:
    assert word in lmi.commands


def test_every_target_tells_sagemaker_what_it_can_do_its_port_and_its_signal() -> None:
    for capability in ("accept-bind-to-port", "multi-models"):
        assert f'com.amazonaws.sagemaker.capabilities.{capability}="true"' in said("LABEL")[0]
    assert said("EXPOSE") == ["8080"]
    assert said("STOPSIGNAL") == ["SIGTERM"]
    assert not said("USER"), "SageMaker runs containers as root"


def test_it_promises_no_route_that_is_not_there() -> None:
    assert "bidirectional" not in TEXT


def test_the_image_ships_pip_and_leaves_the_hub_to_the_process_that_fetches() -> None:
    assert "--without-pip" not in TEXT and "HF_HUB_OFFLINE" not in TEXT


def test_no_layer_is_given_a_secret() -> None:
    for rest in said("ARG") + said("ENV"):
        assert not re.search(r"(?i)token|secret|passw|api_?key|pip_|cert", rest), rest
    assert not said("ADD")
    for rest in said("RUN"):
        if re.search(r"bin/pip .*install", rest) and "--no-index" not in rest:
            assert rest.count("--mount=type=secret") == 2 and "--mount=type=cache" in rest, rest


def test_what_ships_is_copied_from_a_build_stage_and_no_build_stage_ships() -> None:
    for target in TARGETS:
        assert not any(stage.startswith("build") for stage in ancestry(target))
    stage, copies = "", []
    for word, rest in INSTRUCTIONS:
        if word == "FROM":
            stage = rest.split(" AS ")[1]
        elif word == "COPY" and not stage.startswith("build"):
            copies.append(rest)
    assert copies and all(copy.startswith("--from=build-") for copy in copies)


def test_everything_that_it_copies_is_in_the_repository_and_not_ignored() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [source for rest in said("COPY") if not rest.startswith("--from") for source in rest.split()[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == name or source.startswith(f"{name}/") for name in allowed), source


def test_the_default_image_gets_native_kernels_and_their_compiler_stays_in_the_build_stage() -> None:
    stages = TEXT.split("\nFROM ")
    (build,) = (stage for stage in stages if stage.startswith("runtime AS build-cpu"))
    assert build.index("g++") < build.index("COPY scripts/build-native") < build.index("install --no-deps --no-build")
    assert [stage.split("\n")[0] for stage in stages if re.search(r"install .*g\+\+", stage)] == [
        "runtime AS build-cpu",
        "build-gpu AS build-trtllm",
    ]


def test_torch_has_the_version_that_install_pins() -> None:
    (version,) = re.findall(r"^readonly torch_version=(\S+)$", (ROOT / "scripts" / "install").read_text(), re.MULTILINE)
    assert f"TORCH_VERSION={version}" in said("ARG")


def test_the_linter_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert done.stdout + done.stderr == ""
