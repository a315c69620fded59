"""A start that fails: one line that names the cause in TensorRT-LLM's own words and says what to
change.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from handlers.lmi_trtllm.start_errors import explained
from lmi.errors import BadConfiguration, ModelUnusable, NoMemory
from lmi.settings.config import EngineConfig

ROOT = Path(__file__).resolve().parents[3]
OUT_OF_MEMORY = """\
Executor creation failed due to insufficient GPU memory.

The following component could not be created: Model weights
"""


def led_to(cause: Exception) -> Exception:
    """The error that LLM raises for one of its processes."""
    try:
        raise RuntimeError("Executor worker returned error") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "quoted", "advice"),
    [
        (
            led_to(RuntimeError(OUT_OF_MEMORY)),
            "Executor creation failed due to insufficient GPU memory.",
            "set option.kv_cache_free_gpu_mem_fraction,",
        ),
        (
            led_to(RuntimeError("CUDA out of memory. Tried to allocate 40.00 MiB.")),
            "CUDA out of memory. Tried to allocate 40.00 MiB.",
            "or option.tensor_parallel_degree higher",
        ),
        (
            led_to(ValueError("Unknown architecture for AutoModelForCausalLM: OPTForCausalLM")),
            "Unknown architecture for AutoModelForCausalLM: OPTForCausalLM",
            "take option.rolling_batch=vllm",
        ),
        (
            RuntimeError("Only 1 GPUs are available, but 4 are required."),
            "Only 1 GPUs are available, but 4 are required.",
            "set option.tensor_parallel_degree or option.pipeline_parallel_degree lower",
        ),
        (
            RuntimeError("No CUDA GPUs are available"),
            "No CUDA GPUs are available",
            "docker run --gpus all",
        ),
        (
            ImportError("libmpi.so.40: cannot open shared object file: No such file or directory"),
            "libmpi.so.40: cannot open shared object file",
            "install Open MPI",
        ),
        (
            OSError("libcudart.so.13: cannot open shared object file: No such file or directory"),
            "libcudart.so.13: cannot open shared object file",
            "TensorRT-LLM needs its own CUDA libraries",
        ),
        (
            ModuleNotFoundError("No module named 'tensorrt_llm.llmapi'"),
            "No module named 'tensorrt_llm.llmapi'",
            "its wheel on PyPI is a stub",
        ),
        (
            ModuleNotFoundError("No module named 'tensorrt_llm.lora_helper'"),
            "No module named 'tensorrt_llm.lora_helper'",
            "this TensorRT-LLM has it elsewhere or no longer: serve",
        ),
    ],
)
def test_a_known_cause_is_one_line_with_what_to_change(
    error: Exception, quoted: str, advice: str
) -> None:
    start_error = explained(error, "/m", EngineConfig())
    assert isinstance(start_error, ModelUnusable)
    message = str(start_error)
    assert message.startswith(f"/m: TensorRT-LLM cannot start: {quoted}") and "\n" not in message
    assert advice in message


@pytest.mark.parametrize(
    ("text", "kind"),
    [(OUT_OF_MEMORY, NoMemory), ("CUDA out of memory", NoMemory), ("No CUDA GPUs", ModelUnusable)],
)
def test_a_lack_of_memory_has_its_own_error(text: str, kind: type[ModelUnusable]) -> None:
    assert type(explained(led_to(RuntimeError(text)), "/m", EngineConfig())) is kind


def test_an_unknown_cause_is_told_in_its_own_words() -> None:
    message = str(explained(led_to(RuntimeError("rope_type is missing")), "/m", EngineConfig()))
    assert message == "/m: TensorRT-LLM cannot start: rope_type is missing"
    assert (
        str(explained(ValueError(), "/m", EngineConfig()))
        == "/m: TensorRT-LLM cannot start: ValueError"
    )


def test_an_architecture_counts_before_memory_that_a_process_retried() -> None:
    memory = RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (handled, retrying)")
    memory.__cause__ = ValueError("Unknown architecture for AutoModelForCausalLM: Exotic")
    assert "Unknown architecture" in str(explained(memory, "/m", EngineConfig()))


def test_errors_that_lead_to_each_other_end() -> None:
    first = RuntimeError("first")
    second = RuntimeError("second")
    first.__cause__ = second
    second.__cause__ = first
    assert "second" in str(explained(first, "/m", EngineConfig()))


def test_what_lmi_has_explained_stays_as_it_is() -> None:
    error = BadConfiguration("option.x: no")
    assert explained(error, "/m", EngineConfig()) is error


class Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")
    stream_interval: int = 1


def test_what_the_classes_of_tensorrt_llm_refuse_is_a_line_for_each_option() -> None:
    with pytest.raises(ValidationError) as caught:
        Arguments(stream_interval="often", surprise=1)  # type: ignore[arg-type, call-arg]

    engine = EngineConfig(
        options={"stream_interval": "often"}, option_sources={"stream_interval": "file:2"}
    )
    error = explained(caught.value, "/m", engine)

    assert isinstance(error, BadConfiguration)
    assert str(error).split("\n") == [
        "option.stream_interval='often' (file:2): Input should be a valid integer, unable to parse "
        "string as an "
        "integer",
        "option.surprise: Extra inputs are not permitted",
    ]


LOAD = """
from handlers.lmi_trtllm import load
from lmi.errors import StartError
from lmi.settings.config import EngineConfig

try:
    load(EngineConfig(), "/m", lambda stage, share: None)
except StartError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("prelude", "advice"),
    [
        ("", "its wheel on PyPI is a stub"),
        ("raise ImportError('libmpi.so.40: cannot open shared object file')", "install Open MPI"),
        (
            "raise OSError('libnvinfer.so.10: cannot open shared object file')",
            "needs its own CUDA libraries",
        ),
    ],
)
def test_a_package_that_cannot_be_imported_is_explained_by_the_entry_point(
    prelude: str, advice: str, tmp_path: Path
) -> None:
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text(prelude)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD], env=environ, capture_output=True, text=True, timeout=60
    )
    assert advice in done.stdout, done.stderr
