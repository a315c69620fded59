"""Flags and variables of other servers: each means something here, or is told what to write."""

import ast
import importlib.util
from pathlib import Path

import pytest

from lmi.flags import OURS, _key_of_engine
from lmi.settings.other_names import elsewhere
from lmi.settings.other_servers import ABSENT, NEEDLESS, UNUSED, WRITE_INSTEAD
from lmi.settings.resolve import Resolved
from tests.commands import lmi
from tests.settings.settling import settle


def flags_of_vllm_s_server() -> list[str]:
    """The flags of the installed vLLM's front end, from its source."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return []

    file = Path(spec.origin).parent / "entrypoints" / "launchers" / "cli_args.py"
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    fields = [
        field for class_ in classes for field in class_.body if isinstance(field, ast.AnnAssign)
    ]
    return [
        f"--{field.target.id}".replace("_", "-")
        for field in fields
        if isinstance(field.target, ast.Name)
    ]


def test_every_flag_of_vllm_s_front_end_means_something_or_is_told_what_to_write() -> None:
    flags = flags_of_vllm_s_server()
    if not flags:
        pytest.skip("vLLM is not installed")

    assert "--enable-prompt-tokens-details" in flags
    known_flags = [
        flag for flag in flags if flag in OURS or elsewhere(flag) or _key_of_engine(flag)
    ]
    assert known_flags == flags


@pytest.mark.parametrize("name", sorted(NEEDLESS))
def test_a_flag_of_what_is_always_so_starts_with_a_note(folder: Path, name: str) -> None:
    resolved = settle(folder, flags={f"option.{name}": "true"})
    note = f"option.{name} (--set option.{name}): has no effect here: {NEEDLESS[name]}"
    assert (note in resolved.notes, resolved.warnings) == (True, ())


@pytest.mark.parametrize(
    "flag",
    [
        "--enable-prompt-tokens-details",
        "--exclude-tools-when-tool-choice-none",
        "--structured-outputs-config.backend=xgrammar",
        "--log-error-stack",
    ],
)
def test_a_flag_of_vllm_s_own_suites_is_taken_as_it_is_written(flag: str) -> None:
    assert lmi("config", "demo", flag).returncode == 0


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_a_flag_of_what_is_not_here_says_what_to_write(name: str) -> None:
    done = lmi("config", "demo", "--" + name.replace("_", "-"))
    assert (done.returncode, ABSENT[name] in done.stderr) == (2, True), done


def test_vllm_s_time_for_open_answers_is_that_of_a_drain(folder: Path) -> None:
    resolved = settle(folder, flags={"option.shutdown_timeout": "50"})
    assert (resolved.config.server.drain_timeout_s, resolved.warnings) == (50, ())


def test_a_dotted_flag_of_vllm_is_a_part_of_an_object(folder: Path) -> None:
    words = (
        "--structured-outputs-config.backend",
        "xgrammar",
        "--structured-outputs-config.disable-fallback=true",
    )
    done = lmi("config", "demo", "--changed", *words)
    assert '{"backend": "xgrammar", "disable_fallback": true}' in done.stdout


@pytest.mark.parametrize(
    ("key", "means"),
    [
        ("option.no_enable_prefix_caching", "option.enable_prefix_caching"),
        ("option.no_enforce_eager", "option.enforce_eager"),
    ],
)
def test_a_key_that_begins_with_no_is_the_opposite_of_the_other(
    folder: Path, key: str, means: str
) -> None:
    for text, value in (("true", "false"), ("false", "true")):
        resolved = settle(folder, f"{key}={text}")
        assert value_of(resolved, means) == value


def value_of(resolved: Resolved, option: str) -> str:
    return next(setting.value for setting in resolved.settings if setting.option == option)


@pytest.mark.parametrize("name", sorted(WRITE_INSTEAD))
def test_a_variable_that_users_expect_something_of_is_told_what_to_write(
    folder: Path, name: str
) -> None:
    assert settle(folder, environ={name: "60"}).warnings == (
        f"{name}: has no effect here, {WRITE_INSTEAD[name]}",
    )


@pytest.mark.parametrize("name", sorted(UNUSED))
def test_a_variable_without_an_effect_is_noted(folder: Path, name: str) -> None:
    resolved = settle(folder, environ={name: "1"})
    assert resolved.warnings == ()
    assert any(note.startswith(f"{name}: has no effect here") for note in resolved.notes)


def test_a_program_that_is_not_run_is_a_warning_where_it_came_along(folder: Path) -> None:
    environ = {
        "SAGEMAKER_PROGRAM": "inference.py",
        "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/model/code",
    }
    warning = (
        "SAGEMAKER_PROGRAM='inference.py': it is not run; a model.py with a function handle is"
    )
    resolved = settle(folder, environ=environ)

    assert (resolved.warnings, warning in resolved.notes) == ((), True)

    (folder / "code").mkdir()
    (folder / "code" / "inference.py").touch()

    assert settle(folder, environ=environ).warnings == (warning,)


def test_a_port_that_is_not_the_port_is_told(folder: Path) -> None:
    assert settle(folder, environ={"PORT": "8080"}).warnings == ()

    (warning,) = settle(folder, environ={"PORT": "9000"}).warnings
    assert warning == "PORT='9000': has no effect here, SERVING_PORT is the port, which is 8080"
    assert settle(folder, environ={"PORT": "9000", "SERVING_PORT": "9000"}).warnings == ()


def test_variables_of_an_engine_that_does_not_run_are_one_note(folder: Path) -> None:
    environ = {
        "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
        "VLLM_USE_V1": "1",
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
    }
    resolved = settle(folder, environ=environ)

    assert (
        "VLLM_ATTENTION_BACKEND, VLLM_USE_V1: no effect on lmi-dist, only vllm reads such variables"
        in resolved.notes
    )
    assert any(
        note.startswith("SGLANG_JIT_DEEPGEMM_PRECOMPILE: no effect here") for note in resolved.notes
    )
    assert resolved.warnings == ()
