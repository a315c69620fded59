"""User code: the file and the functions of it that are run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.json import decode, encode

from lmi.errors import ModelUnusable, SecurityRefused
from lmi.settings.config import Config
from lmi.settings.resolve import resolve
from lmi.settings.start import StartInputs
from lmi.supervisor.hints import hint
from lmi.user_code.options import UserCodeConfig
from lmi.user_code.settings import outline
from lmi.user_code.standards.settings import HANDLERS, MIDDLEWARES, SCRIPT, SCRIPT_FOLDER
from tests.settings.settling import ASYNC_SERVICE, CPU, faults, settle


def test_an_entry_point_for_neuron_devices_is_told(folder: Path) -> None:
    for name in ("transformers-neuronx", "transformers_neuronx"):
        (warning,) = settle(folder, f"option.entryPoint=djl_python.{name}").warnings
        assert warning == (
            f"option.entryPoint=djl_python.{name} (serving.properties:1): Neuron devices are not "
            f"served here, "
            "the model runs on GPUs or a CPU"
        )


def test_code_that_holds_nothing_to_run_is_told(folder: Path) -> None:
    (folder / "model.py").write_text("x = 1")
    resolved = settle(folder)
    (warning,) = resolved.warnings
    assert (
        warning
        == f"{folder / 'model.py'}: has neither a function handle nor a formatter, so it is not run"
    )
    assert resolved.config.user_code is None


def test_code_with_nothing_to_run_and_no_model_says_so(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "model.py").write_text("def predict(inputs): ...")
    with pytest.raises(ModelUnusable) as caught:
        settle(folder)

    assert str(caught.value) == (
        f"{folder / 'model.py'}: has neither a function handle nor a formatter, "
        "and there is no config.json of a model beside it"
    )


def test_a_handler_that_an_entry_point_hides_is_told_as_what_it_is(folder: Path) -> None:
    (folder / "model.py").write_text("def handle(inputs): ...")
    resolved = settle(folder, "option.entryPoint=djl_python.huggingface")
    (warning,) = resolved.warnings
    assert warning == (
        f"{folder / 'model.py'}: has no formatter, and option.entryPoint=djl_python.huggingface "
        f"answers "
        "in place of its function handle, so it is not run"
    )


@pytest.mark.parametrize(
    ("source", "text", "found"),
    [
        ("def handle(inputs): ...", "", {"handler": "handle"}),
        ("async def handle(inputs): ...", "option.entryPoint=model.py", {"handler": "handle"}),
        ("from service import handle", "", {"handler": "handle"}),
        ("def other(inputs): ...", "option.handler=other", {"handler": "other"}),
        ("handle = other = print", "option.handler=other", {"handler": "other"}),
        ("@output_formatter\ndef f(o): ...", "", {"output_formatter": ""}),
        ("@djl_python.input_parser.input_formatter\ndef f(o): ...", "", {"input_formatter": ""}),
        ("def f(o): ...", "option.output_formatter=f", {"output_formatter": "f"}),
        (
            "@output_formatter\ndef f(o): ...\ndef handle(inputs): ...",
            "option.entryPoint=djl_python.huggingface",
            {"output_formatter": ""},
        ),
        ("def handle(inputs): ...", ASYNC_SERVICE, {"handler": "handle"}),
        ("def other(inputs): ...", f"{ASYNC_SERVICE}\noption.handler=other", {"handler": "other"}),
        (
            "async def handle(inputs): ...",
            f"{ASYNC_SERVICE}\noption.rolling_batch=disable",
            {"handler": "handle"},
        ),
        (
            "@output_formatter\ndef f(o): ...",
            f"{ASYNC_SERVICE}\noption.rolling_batch=disable",
            {"handler": None},
        ),
    ],
)
def test_what_a_models_code_is_for_is_read_from_its_text(
    folder: Path, source: str, text: str, found: dict[str, object]
) -> None:
    (folder / "model.py").write_text(source)
    config = settle(folder, text).config
    assert (
        config.user_code is not None
        and {name: getattr(config.user_code, name) for name in found} == found
    )
    assert config.is_user_code == bool(found.get("handler"))
    assert config.model.output_formatter is None
    assert config.engine.handler == ("python" if config.is_user_code else "lmi-dist")
    assert decode(encode(config), type=Config) == config


def test_a_handler_is_given_every_option_and_needs_no_model_beside_it(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def handle(inputs): ...")
    resolved = settle(
        tmp_path, "option.model_id=org/name\noption.task=fill\noption.mine=1\noption.hf_token=x"
    )

    assert resolved.warnings == ()
    assert resolved.config.user_code is not None
    assert resolved.config.user_code.properties == {
        "model_id": "org/name",
        "task": "fill",
        "mine": "1",
        "tensor_parallel_degree": "1",
        "model_dir": str(tmp_path),
        "device_id": "-1",
    }


def test_code_that_is_not_python_makes_the_model_unusable(folder: Path) -> None:
    (folder / "model.py").write_text("\n\ndef handle(:")
    with pytest.raises(ModelUnusable, match=r"model.py: line 3: SyntaxError"):
        settle(folder)


def test_names_and_marks_are_read_from_the_top_level_and_nothing_is_run(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import os as system\nfrom a import b\nraise SystemExit\nx = y = 1\nclass C:\n    def "
        "inner(self): ...\n"
        "@output_formatter\ndef f(): ...\n@input_parser.input_formatter\nasync def g(): "
        "...\n@other()\ndef h(): ...\n"
    )
    names, marks = outline(path)
    assert names == {"system", "b", "x", "y", "C", "f", "g", "h"}
    assert marks == {"output_formatter", "input_formatter"}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (b"\n def f(:", "line 2"),
        (b"x = '\xff'", "model.py: "),
        (b"x = 1\0", "model.py: "),
        (b"(" * 10_000, "model.py: "),
    ],
)
def test_a_file_that_is_not_python_is_told_with_its_line(
    tmp_path: Path, source: bytes, said: str
) -> None:
    (tmp_path / "model.py").write_bytes(source)
    with pytest.raises(ModelUnusable, match=said):
        outline(tmp_path / "model.py")


# Code for AWS's model-hosting-container-standards.

STANDARDS = {
    "a decorator": """
from fastapi import Request
import model_hosting_container_standards.sagemaker as sagemaker_standards

@sagemaker_standards.custom_invocation_handler
async def invoke(request: Request):
    return {}
""",
    "functions of the fixed names": """
from fastapi import Request, Response

async def custom_sagemaker_invocation_handler(request: Request) -> Response:
    return Response()
""",
    "formatters of its own": """
from fastapi import Request
from model_hosting_container_standards.common.fastapi.middleware import input_formatter, output_formatter

@input_formatter
async def pre(request: Request) -> Request:
    return request

@output_formatter
async def post(response):
    return response
""",  # noqa: E501
    "an import inside a function": """
def handle(inputs):
    import model_hosting_container_standards
""",
}
NEEDS_PACKAGE = "handlers of model-hosting-container-standards need that package: scripts/install"


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds no module whose entry is None."""
    monkeypatch.setitem(sys.modules, "model_hosting_container_standards", None)


@pytest.fixture
def with_package() -> None:
    pytest.importorskip("model_hosting_container_standards", reason="scripts/install hooks")


@pytest.mark.parametrize("name", STANDARDS)
@pytest.mark.parametrize("place", ["model.py", "code/model.py"])
@pytest.mark.usefixtures("without_package")
def test_handlers_of_aws_s_standards_end_the_start_where_their_package_is_missing(
    folder: Path, name: str, place: str
) -> None:
    file = folder / place
    file.parent.mkdir(exist_ok=True)
    file.write_text(STANDARDS[name])
    with pytest.raises(ModelUnusable, match=NEEDS_PACKAGE) as caught:
        settle(folder)

    assert str(caught.value).startswith(f"{file}: line ")
    assert hint("model_unusable", str(caught.value)) == ""


@pytest.mark.usefixtures("without_package")
@pytest.mark.parametrize(
    "name",
    ["CUSTOM_FASTAPI_PING_HANDLER", "CUSTOM_FASTAPI_INVOCATION_HANDLER", "CUSTOM_PRE_PROCESS"],
)
def test_a_variable_that_names_a_handler_ends_the_start_without_the_package(
    folder: Path, name: str
) -> None:
    (fault,) = faults(folder, environ={name: "model:check"})
    assert fault.startswith(f"{name}='model:check': {NEEDS_PACKAGE}")


@pytest.mark.usefixtures("without_package")
def test_a_requirements_txt_that_names_the_package_brings_it(folder: Path) -> None:
    (folder / "model.py").write_text(STANDARDS["a decorator"])
    (folder / "requirements.txt").write_text("# ours\nModel_Hosting.container-standards>=0.1\n")
    assert settle(folder).config.user_code is not None
    with pytest.raises(ModelUnusable, match=NEEDS_PACKAGE):
        settle(folder, "option.install_requirements=false")


@pytest.mark.parametrize("name", STANDARDS)
@pytest.mark.parametrize("place", ["model.py", "code/model.py"])
@pytest.mark.usefixtures("with_package")
def test_handlers_of_aws_s_standards_run_beside_the_engine(
    folder: Path, name: str, place: str
) -> None:
    file = folder / place
    file.parent.mkdir(exist_ok=True)
    file.write_text(STANDARDS[name])
    resolved = settle(folder)

    code = resolved.config.user_code
    assert code is not None
    assert (code.path, code.standards_folder) == (str(file), str(file.parent))
    assert (code.handler, code.input_formatter, code.output_formatter) == (None, None, None)
    assert not resolved.config.is_user_code and resolved.config.num_formatters == 1
    assert resolved.warnings == ()


@pytest.mark.usefixtures("with_package")
def test_the_file_that_a_variable_names_is_run_whatever_it_holds(folder: Path) -> None:
    (folder / "hooks.py").write_text("from helpers import *\n")
    assert settle(folder).config.user_code is None

    code = settle(folder, environ={"CUSTOM_SCRIPT_FILENAME": "hooks.py"}).config.user_code
    assert code is not None and code.path == str(folder / "hooks.py")

    elsewhere = {
        "OPTION_MODEL_ID": str(folder),
        "CUSTOM_SCRIPT_FILENAME": "hooks.py",
        "SAGEMAKER_MODEL_PATH": str(folder),
    }
    code = settle(folder.parent, environ=elsewhere).config.user_code
    assert code is not None and code.path == str(folder / "hooks.py")


def test_a_file_that_a_variable_names_and_that_is_not_there_is_told(folder: Path) -> None:
    (warning,) = settle(folder, environ={"CUSTOM_SCRIPT_FILENAME": "hooks.py"}).warnings
    assert warning == "CUSTOM_SCRIPT_FILENAME='hooks.py': there is no such file, so none is run"


@pytest.mark.usefixtures("with_package")
def test_variables_alone_run_the_functions_that_they_name(folder: Path) -> None:
    (folder / "code").mkdir()
    (folder / "code" / "checks.py").write_text("async def throttle(request, call_next): ...")
    environ = {"CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE": "checks.py:throttle"}
    resolved = settle(folder, environ=environ)
    assert resolved.config.user_code is not None
    assert resolved.config.user_code.standards_folder == str(folder / "code")
    assert resolved.warnings == ()


@pytest.mark.usefixtures("with_package")
def test_empty_variables_name_nothing(folder: Path) -> None:
    names = (*HANDLERS, *MIDDLEWARES, SCRIPT, SCRIPT_FOLDER)
    assert settle(folder, environ=dict.fromkeys(names, "")).config.user_code is None


@pytest.mark.usefixtures("with_package")
def test_of_two_files_with_handlers_the_first_runs_and_the_other_is_told(folder: Path) -> None:
    (folder / "code").mkdir()
    for file in (folder / "model.py", folder / "code" / "model.py"):
        file.write_text(STANDARDS["a decorator"])

    resolved = settle(folder)
    (warning,) = resolved.warnings
    assert warning.startswith(f"{folder / 'code/model.py'}: not run, since {folder / 'model.py'}")
    assert resolved.config.user_code is not None
    assert resolved.config.user_code.path == str(folder / "model.py")


@pytest.mark.usefixtures("with_package")
def test_code_for_both_packages_ends_the_start(folder: Path) -> None:
    both = "import djl_python\n" + STANDARDS["a decorator"]
    (folder / "model.py").write_text(both)
    with pytest.raises(ModelUnusable, match="it is for djl_python too, and one of the two runs"):
        settle(folder)

    (folder / "model.py").write_text("def handle(inputs): ...")
    (folder / "code").mkdir()
    (folder / "code" / "model.py").write_text(STANDARDS["a decorator"])
    with pytest.raises(ModelUnusable, match=r"code/model.py: .*/model.py is for djl_python"):
        settle(folder)


@pytest.mark.usefixtures("with_package")
def test_secure_mode_refuses_handlers_of_the_standards_wherever_they_lie(folder: Path) -> None:
    secure = {
        "SAGEMAKER_SECURE_MODE": "true",
        "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_CUSTOM_INFERENCE_SCRIPTS",
    }
    (folder / "code").mkdir()
    file = folder / "code" / "model.py"
    file.write_text(STANDARDS["a decorator"])
    with pytest.raises(SecurityRefused, match=f"{file}: refused by DISALLOW_CUSTOM"):
        settle(folder, environ=secure)


@pytest.mark.usefixtures("with_package")
def test_handlers_that_a_hub_brought_run_only_where_its_code_is_trusted(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "config.json").write_text("{}")
    (cache / "model.py").write_text(STANDARDS["a decorator"])

    def fetched(**environ: str) -> UserCodeConfig | None:
        named = {"HF_MODEL_ID": "owner/name", **environ}
        places = {"owner/name": cache}
        start = StartInputs(cwd=tmp_path, machine=CPU, environ=named, fetched=places)
        return resolve(start).config.user_code

    with pytest.raises(ModelUnusable, match="came from a hub .* option.trust_remote_code=false"):
        fetched()

    code = fetched(HF_MODEL_TRUST_REMOTE_CODE="true")
    assert code is not None and code.path == str(cache / "model.py")


@pytest.mark.usefixtures("with_package")
def test_handlers_of_the_standards_do_not_run_where_several_models_come_and_go(
    folder: Path,
) -> None:
    (fault,) = faults(
        folder, "multi_model=true", environ={"CUSTOM_FASTAPI_PING_HANDLER": "model:check"}
    )
    assert fault.startswith("CUSTOM_FASTAPI_PING_HANDLER='model:check': handlers of")


def test_other_code_beside_the_model_is_no_handler_of_the_standards(folder: Path) -> None:
    (folder / "code").mkdir()
    (folder / "code" / "model.py").write_text(
        "import fastapi\n\ndef custom_sagemaker():\n    pass\n"
    )
    (folder / "code" / "inference.py").write_text(STANDARDS["a decorator"])
    resolved = settle(folder)
    assert resolved.warnings == () and resolved.config.user_code is None
