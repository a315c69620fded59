"""A hint fits its fault, or there is none."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from handlers.lmi_dist.config_file import unsupported
from lmi.engine.worker import missing_library
from lmi.errors import BadConfiguration, ModelUnusable
from lmi.settings.config import ModelConfig
from lmi.settings.engine_choice import choose_handler
from lmi.settings.handler import announced
from lmi.shared.machine import Machine
from lmi.shared.state import Block
from lmi.supervisor.hints import (
    CHECKPOINT,
    DAMAGED_FILE,
    GGUF_ENGINE,
    GGUF_FILE,
    LOG,
    OF_GGUF,
    OPTIONS,
    SOURCES,
    hint,
)
from lmi.user_code.options import UserCodeConfig
from lmi.user_code.worker import load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("label", "message", "said"),
    [
        (
            "source_unreachable",
            "no folder a/b here; as an id of a hub it cannot be reached: x",
            "HF_HUB_OFFLINE=1",
        ),
        (
            "source_unreachable",
            "no file a/b:Q4_0 here; as an id of a hub it cannot be reached: x",
            "HF_HUB_OFFLINE=1",
        ),
        (
            "model_unusable",
            "no folder a/b here; x, and HF_HUB_OFFLINE=1 forbids to ask the hub",
            "without that",
        ),
        (
            "model_unusable",
            "s3://b/k: no credentials for S3: Unable to locate credentials",
            "AWS_ACCESS_KEY_ID",
        ),
        ("model_unusable", "demos: does not exist; did you mean demo?", SOURCES),
        ("model_unusable", "weights.bin: is not a folder", SOURCES),
        (
            "model_unusable",
            "/m: holds a.bin; a model's folder has a config.json (no option.model_id)",
            CHECKPOINT,
        ),
        ("model_unusable", "s3://b/k: holds zeros.json; a model has config.json", CHECKPOINT),
        (
            "model_unusable",
            "/m/fox.gguf: vllm does not read GGUF; option.rolling_batch may be lmi-dist",
            GGUF_ENGINE,
        ),
        (
            "model_unusable",
            "a/b: its weights are GGUF, which the chosen engine does not read; option",
            GGUF_ENGINE,
        ),
        ("model_unusable", "/m/fox.gguf: is not a GGUF file: it does not begin", DAMAGED_FILE),
        ("model_unusable", "/m/fox.gguf: it ends within its head, at byte 9", DAMAGED_FILE),
        (
            "model_unusable",
            "/m/fox.gguf: tensor 'a' lies in bytes 1 to 9, the file has 3: it is cut short or dama",
            DAMAGED_FILE,
        ),
        (
            "model_unusable",
            "/m/fox.gguf: tensor 'a' is Q2_K, which is not read, only F32, F16",
            OF_GGUF,
        ),
        ("model_unusable", "/m/fox.gguf: is GGUF of version 1, only 2 and 3 are read", OF_GGUF),
        ("model_unusable", "/m/fox.gguf: models with experts are not read from GGUF", OF_GGUF),
        (
            "model_unusable",
            "/m/fox.gguf: general.architecture must be one of llama, given 'bert'",
            OF_GGUF,
        ),
        (
            "model_unusable",
            "/m: holds a.bin, a.gguf; a model's folder has a config.json",
            GGUF_FILE,
        ),
        (
            "model_unusable",
            "/m/config.json: its weights are quantised already (…); option.rolling_batch=vllm does",
            "int8",
        ),
        ("model_unusable", "/m: no tokenizer: tokenizer.json is missing", CHECKPOINT),
        ("model_unusable", "option.chat_template: Expected an expression, line 1", OPTIONS),
        (
            "security_refused",
            "/m/a.bin: pickled weights …, or set option.allow_pickle=true if",
            "that option switches",
        ),
        (
            "security_refused",
            "/m/a.bin: refused by DISALLOW_PICKLE_FILES",
            "SAGEMAKER_SECURITY_CONTROLS",
        ),
        (
            "engine_lost",
            "engine 0 died 3 times, … did not finish loading for 1.1 s",
            "--model-loading-timeout",
        ),
        (
            "engine_lost",
            "engine 0 died 3 times, the last time it was killed by SIGSEGV",
            "its own messages",
        ),
        (
            "engine_lost",
            "… was killed by SIGKILL, which the kernel also does when memory runs out (9 MB …)",
            "a larger limit of memory",
        ),
        (
            "start_failed",
            "download died 3 times, … SIGKILL, which the kernel also does when memory runs out",
            "a larger limit of memory",
        ),
        ("start_failed", "KeyError: 'a'", LOG),
        ("port_unavailable", "port 8080 is taken", "--port"),
    ],
)
def test_a_hint_fits_its_fault(label: str, message: str, said: str) -> None:
    assert said in hint(label, message)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (
            "model_unusable",
            "a/b: /disk is full: 2 GB are needed, 1 GB are free "
            "(set HF_HOME to a folder on another disk)",
        ),
        ("model_unusable", "a/b: has no revision v2 at https://hub"),
        (
            "model_unusable",
            (
                "s3://b/k: S3 answers NoSuchBucket to ListObjectsV2: The specified bucket does not "
                "exist"
            ),
        ),
        (
            "model_unusable",
            "a/b: https://hub does not answer as a hub: Expecting value: line 1 column 1 (char 0)",
        ),
        ("model_unusable", "a/b:Q5_K: there is no such GGUF file, only b.Q4_K_M.gguf"),
        ("model_unusable", "s3://b/k: it holds several models, name one of the files: a.gguf"),
        ("model_unusable", "no file a/b:Q4_0 here; as an id of a hub there is no such model"),
        ("model_unusable", "/m/requirements.txt: pip: No matching distribution found for one"),
        ("security_refused", "s3://b/k.tar.gz: the member ../../evil leaves the archive's folder"),
        ("source_unreachable", "s3://b/k: EndpointConnectionError: x (5 tries)"),
        ("start_failed", "/tmp/lmi-1 (TMPDIR chooses another place): No space left on device"),
    ],
)
def test_a_fault_that_says_enough_has_no_hint(label: str, message: str) -> None:
    assert hint(label, message) == ""


def unusable(message: str) -> str:
    return hint("model_unusable", message)


def test_only_a_file_of_a_checkpoint_that_cannot_be_read_is_to_be_mended_or_copied_again(
    tmp_path: Path,
) -> None:
    template, config, names = (
        tmp_path / name for name in ("chat_template.jinja", "config.json", "requirements.txt")
    )
    for file in (template, config, names):
        file.write_text("{% if %}")

    assert unusable(f"{template}: line 1: Expected an expression") == DAMAGED_FILE
    assert unusable(f"{config}: not JSON: x") == DAMAGED_FILE
    assert unusable(f"{names}: pip failed") == unusable(f"{tmp_path}/nowhere.json: missing") == ""

    hint = unusable(str(unsupported(config, "BertForMaskedLM is not a decoder of text")))
    assert hint == "scripts/install installs other engines, --rolling-batch chooses one"
    assert (
        unusable(f"{config}: Starcoder2ForCausalLM runs through …, and torch is not installed: …")
        == ""
    )


def not_configured(error: BadConfiguration) -> str:
    return hint(error.label, str(error))


def brings(extra: str) -> str:
    return f"scripts/install {extra}, or pip install '.[{extra}]', in a clone of lmi"


@pytest.mark.parametrize(
    ("library", "extra"), [("torch", "torch"), ("vllm", "vllm"), ("opentelemetry", "otel")]
)
def test_a_missing_library_names_the_extra_that_brings_it(library: str, extra: str) -> None:
    error = missing_library("any", ModuleNotFoundError(f"No module named '{library}.nn'"))
    assert not_configured(error) == brings(extra)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert any(name.replace("-", "_").startswith(library) for name in extras[extra])


def test_a_missing_engine_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if it were not installed
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(BadConfiguration) as refusal:
        choose_handler("vllm", Machine(num_cores=1), announced())

    assert not_configured(refusal.value) == brings("vllm")
    with pytest.raises(ImportError) as refused:
        version("tensorrt_llm_that_nobody_has")

    advice = "install tensorrt_llm_that_nobody_has where lmi itself is installed"
    assert not_configured(missing_library("any", refused.value)) == advice


def test_a_library_that_user_code_misses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[:])
    (tmp_path / "user_code.py").write_text(
        "import lacking_here.part\n\n\ndef handle(inputs): ...\n"
    )
    code = UserCodeConfig(path=str(tmp_path / "user_code.py"), handler="handle")
    record = Block.create(tmp_path / "state", num_engines=1, num_frontends=1).engines[0]
    with pytest.raises(ModelUnusable) as refusal:
        load(code, ModelConfig(path=".", name="m"), record)

    hint = unusable(str(refusal.value))
    assert "name lacking_here in a requirements.txt" in hint
