"""The Dockerfile, read without Docker; `scripts/build-image --test` builds and runs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmi.cli import lmi
from scripts.image.build import build_secrets

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "Dockerfile").read_text()
JOINED = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", TEXT, flags=re.MULTILINE))
INSTRUCTIONS = [
    (word, " ".join(rest.split()))
    for word, _, rest in (line.partition(" ") for line in JOINED.splitlines() if line)
]
STAGES = {
    rest.split(" AS ")[1]: rest.split(" AS ")[0] for word, rest in INSTRUCTIONS if word == "FROM"
}
TARGETS = ("cpu", "vllm", "trtllm")


def said(word: str) -> list[str]:
    return [arguments for name, arguments in INSTRUCTIONS if name == word]


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


def test_entry_points_commands_and_health_check_are_in_exec_form() -> None:
    entry_points = said("ENTRYPOINT")
    commands = said("CMD")
    (health,) = said("HEALTHCHECK")
    assert [json.loads(words)[0] for words in entry_points] == ["lmi", "bash"]
    assert [json.loads(words) for words in commands] == [["serve"], ["serve"]]
    program = json.loads(health.partition(" CMD ")[2])
    assert program[:2] == ["python3", "-ISc"]
    compile(program[2], "HEALTHCHECK", "exec")


@pytest.mark.parametrize("word", ["serve", "djl-serving", "config", "version"])
def test_the_words_that_platforms_start_it_with_are_commands_of_the_entry_point(word: str) -> None:
    assert word in lmi.commands


def test_every_target_tells_sagemaker_what_it_can_do_its_port_and_its_signal() -> None:
    for capability in ("accept-bind-to-port", "bidirectional-streaming", "multi-models"):
        assert f'com.amazonaws.sagemaker.capabilities.{capability}="true"' in said("LABEL")[0]

    assert said("EXPOSE") == ["8080"]
    assert said("STOPSIGNAL") == ["SIGTERM"]
    assert not said("USER"), "SageMaker runs containers as root"


def test_the_image_ships_pip_and_leaves_the_hub_to_the_process_that_fetches() -> None:
    assert "--without-pip" not in TEXT and "HF_HUB_OFFLINE" not in TEXT


def test_no_layer_is_given_a_secret() -> None:
    for arguments in said("ARG") + said("ENV"):
        assert not re.search(r"(?i)token|secret|passw|api_?key|pip_|cert", arguments), arguments

    assert not said("ADD")
    for arguments in said("RUN"):
        if re.search(r"bin/pip .*install", arguments) and "--no-index" not in arguments:
            assert (
                arguments.count("--mount=type=secret") == 2 and "--mount=type=cache" in arguments
            ), arguments


def test_what_ships_is_copied_from_a_build_stage_and_no_build_stage_ships() -> None:
    for target in TARGETS:
        assert not any(stage.startswith("build") for stage in ancestry(target))

    stage = ""
    copies = []
    for word, arguments in INSTRUCTIONS:
        if word == "FROM":
            stage = arguments.split(" AS ")[1]
        elif word == "COPY" and not stage.startswith("build"):
            copies.append(arguments)

    assert copies and all(copy.startswith("--from=build-") for copy in copies)


def test_everything_that_it_copies_is_in_the_repository_and_not_ignored() -> None:
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    sources = [
        source
        for arguments in said("COPY")
        if not arguments.startswith("--from")
        for source in arguments.split()[:-1]
    ]
    assert sources

    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == name or source.startswith(f"{name}/") for name in allowed), source


def test_the_default_image_gets_native_kernels_and_their_compiler_stays_in_the_build_stage() -> (
    None
):
    stages = TEXT.split("\nFROM ")
    (build,) = (stage for stage in stages if stage.startswith("runtime AS build-cpu"))
    assert (
        build.index("g++")
        < build.index("COPY scripts/build-native")
        < build.index("install --no-deps --no-build")
    )
    assert [stage.split("\n")[0] for stage in stages if re.search(r"install .*g\+\+", stage)] == [
        "runtime AS build-cpu"
    ]


# Target trtllm leaves its base as it is.


def stage(name: str) -> list[tuple[str, str]]:
    begin = next(
        i
        for i, (word, arguments) in enumerate(INSTRUCTIONS)
        if word == "FROM" and arguments.endswith(f" AS {name}")
    )
    arguments = INSTRUCTIONS[begin + 1 :]
    end = next((i for i, (word, _) in enumerate(arguments) if word == "FROM"), len(arguments))
    return arguments[:end]


def test_the_trtllm_image_adds_one_environment_to_its_base() -> None:
    assert ancestry("trtllm") == ["trtllm", "runtime", "${BASE_IMAGE}"]
    changes = [(word, arguments) for word, arguments in stage("trtllm") if word in ("RUN", "COPY")]
    assert changes == [("COPY", "--from=build-trtllm /opt/lmi /opt/lmi")]
    for arguments in (arguments for word, arguments in stage("build-trtllm") if word == "RUN"):
        assert "openmpi" not in arguments and "tensorrt-llm" not in arguments.replace(
            "nvidia/tensorrt-llm", ""
        ), arguments


def test_what_trtllm_installs_is_locked_and_brings_no_dependency_of_its_own() -> None:
    installs = [
        arguments
        for word, arguments in stage("build-trtllm")
        if word == "RUN" and "pip install" in arguments
    ]
    assert len(installs) == 2
    for arguments in installs:
        assert (
            "/opt/lmi/bin/pip install --no-deps" in arguments
            and "env --unset=PIP_CONSTRAINT" in arguments
        ), arguments


BASE_CHECK = next(
    rest for word, rest in stage("build-trtllm") if word == "RUN" and "importlib.metadata" in rest
)


@pytest.mark.parametrize(
    ("version", "is_taken"), [("1.1.0", False), ("1.2.1", True), ("1.3.0rc12", True)]
)
def test_a_base_of_trtllm_needs_a_version_that_the_handler_knows(
    tmp_path: Path, version: str, is_taken: bool
) -> None:
    metadata = tmp_path / f"tensorrt_llm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")
    assert (checked_base(tmp_path).returncode == 0) == is_taken


def test_a_base_without_tensorrt_llm_is_refused_with_one_line_that_says_which_to_give(
    tmp_path: Path,
) -> None:
    done = checked_base(tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "--build-arg BASE_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:" in line


def checked_base(packages: Path) -> subprocess.CompletedProcess[str]:
    """Run the Dockerfile's check on a base with these packages."""
    environ = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(packages)}
    return subprocess.run(
        ["sh", "-c", BASE_CHECK], env=environ, capture_output=True, text=True, timeout=60
    )


def test_the_entry_point_of_trtllm_reads_the_bases_environment_and_then_is_lmi(
    tmp_path: Path,
) -> None:
    """The vendor's containers set the paths of libraries in a file that BASH_ENV names."""
    (tmp_path / "lmi").write_text('#!/bin/sh\necho "$LD_LIBRARY_PATH $$ $*"\n')
    (tmp_path / "lmi").chmod(0o755)
    (tmp_path / "shinit").write_text("export LD_LIBRARY_PATH=/opt/libraries\n")
    (words,) = [
        json.loads(arguments) for word, arguments in stage("trtllm") if word == "ENTRYPOINT"
    ]
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BASH_ENV": str(tmp_path / "shinit")}
    process = subprocess.Popen(
        [*words, "serve", "a b"], env=environ, stdout=subprocess.PIPE, text=True
    )
    printed, _ = process.communicate(timeout=60)

    assert printed == f"/opt/libraries {process.pid} serve a b\n"


# `scripts/build-image --dry-run`.


@pytest.fixture
def dry_run(tmp_path: Path) -> Callable[..., list[str]]:
    """The words that it prints on a machine without Docker. It leaves no file behind."""

    def run(*flags: str, **environ: str) -> list[str]:
        temporary = tmp_path / "temporary"
        temporary.mkdir(exist_ok=True)
        environ_kept = {
            name: value
            for name, value in os.environ.items()
            if not re.match(r"(?i)pip_|.*_proxy$|lmi_", name)
        }

        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "build-image"), "--dry-run", *flags],
            env=environ_kept | {"PATH": str(tmp_path), "TMPDIR": str(temporary)} | environ,
            capture_output=True,
            text=True,
            timeout=60,
        )

        assert done.returncode == 0, done.stderr
        assert not list(temporary.iterdir())
        assert "hidden" not in done.stdout + done.stderr

        return shlex.split(done.stdout, comments=True)

    return run


@pytest.mark.parametrize("target", TARGETS)
def test_a_dry_run_prints_a_build_whose_arguments_and_secrets_the_dockerfile_has(
    target: str, dry_run: Callable[..., list[str]]
) -> None:
    switch, docker, verb, *words = dry_run("--target", target)
    assert (switch, docker, verb) == ("DOCKER_BUILDKIT=1", "docker", "build")
    assert words[words.index("--target") + 1] == target and words[-1] == str(ROOT)

    for word in words:
        if word.startswith("--build-arg="):
            name = word.removeprefix("--build-arg=").partition("=")[0]
            assert name in {arguments.partition("=")[0] for arguments in said("ARG")}, word

        if word.startswith("--secret="):
            assert (
                f"--mount=type=secret,{word.removeprefix('--secret=').partition(',')[0]}" in TEXT
            ), word


def test_trtllm_is_built_on_the_vendors_container_unless_told_otherwise(
    dry_run: Callable[..., list[str]],
) -> None:
    (build_argument,) = [word for word in dry_run("--target", "trtllm") if "BASE_IMAGE" in word]
    assert build_argument.removeprefix("--build-arg=") in BASE_CHECK, (
        "the refusal names the same one"
    )
    assert "--build-arg=BASE_IMAGE=mine:1" in dry_run("--target", "trtllm", "--base", "mine:1")
    assert not [word for word in dry_run() if "BASE_IMAGE" in word]


def test_a_dry_run_shows_no_value_that_may_hold_a_password(
    dry_run: Callable[..., list[str]],
) -> None:
    place = "https://user:hidden@index.example/simple"
    words = dry_run(
        "--target", "torch", PIP_INDEX_URL=place, HTTPS_PROXY=place, LMI_TORCH_INDEX_URL=place
    )
    assert "--secret=id=pip_conf,src=pip_conf" in words
    assert "--build-arg=HTTPS_PROXY" in words and "--build-arg=TORCH_INDEX_URL" in words
    assert "TORCH_INDEX_URL=$LMI_TORCH_INDEX_URL" in words


def test_a_build_gets_the_secrets_that_a_dry_run_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry_run: Callable[..., list[str]]
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} {tmp_path / 'nowhere'}")
    words = dry_run(PIP_FIND_LINKS=os.environ["PIP_FIND_LINKS"])
    with build_secrets() as (secrets, has_loopback):
        assert [f"--secret=id={name},src={name}" for name in secrets] == [
            word for word in words if "--secret" in word
        ]
        assert re.search(
            r"^find-links = http://127\.0\.0\.1:\d+/$",
            secrets["pip_conf"].read_text(),
            re.MULTILINE,
        )

    assert has_loopback and "--network=host" in words


def test_torch_has_the_version_that_install_pins() -> None:
    (version,) = re.findall(
        r"^readonly torch_version=(\S+)$", (ROOT / "scripts" / "install").read_text(), re.MULTILINE
    )
    assert f"TORCH_VERSION={version}" in said("ARG")


def test_the_linter_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("hadolint is not installed")

    done = subprocess.run(
        [hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60
    )
    assert done.stdout + done.stderr == ""
