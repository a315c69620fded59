"""Native kernels run where the machine and the model have them; otherwise torch, and the log says
why.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from handlers.lmi_dist.backend import choose_library, describe_threads
from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.native.library import num_threads
from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig
from lmi.shared import linux, machine
from tests.tiny_models import tiny_model


def test_the_log_says_which_kernels_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        library = choose_library(read_facts(str(tiny_model("llama"))), "cpu", EngineConfig())

    assert library is not None
    assert caplog.messages == [
        f"kernels: native {library.kind}, on {describe_threads(num_threads())}"
    ]


def test_the_log_says_why_there_are_fewer_threads_than_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_cores = machine.num_usable_cores()
    if num_cores == 1:
        pytest.skip("a machine with one core has no fewer threads")

    monkeypatch.delenv(linux.THREADS_WHY, raising=False)
    assert describe_threads(num_cores) == f"{num_cores} threads"
    assert describe_threads(1) == f"1 thread (of {num_cores} cores: OMP_NUM_THREADS)"
    monkeypatch.setenv(linux.THREADS_WHY, "2 replicas share them")
    assert describe_threads(1) == f"1 thread (of {num_cores} cores: 2 replicas share them)"

    cores = os.sched_getaffinity(0)
    # Of this thread alone.
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert describe_threads(1) == "1 thread"
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize(
    ("family", "device", "reason"),
    [
        ("olmo2", "cpu", "only the modules of transformers know Olmo2ForCausalLM"),
        ("llama", "cuda", "on cuda"),
    ],
)
def test_torch_runs_what_the_kernels_cannot_and_the_log_says_why(
    family: str, device: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_library(read_facts(str(tiny_model(family))), device, EngineConfig()) is None

    assert len(caplog.messages) == 1
    assert (
        caplog.messages[0].startswith("kernels: torch, because ") and reason in caplog.messages[0]
    )


@pytest.mark.parametrize("method", ["int4", "int8"])
def test_int4_and_int8_are_refused_where_torch_would_run(method: str) -> None:
    facts = read_facts(str(tiny_model("olmo2")))
    says = rf"option\.quantize={method} needs the native kernels.*Olmo2ForCausalLM"
    with pytest.raises(BadConfiguration, match=says):
        choose_library(facts, "cpu", EngineConfig(quantize=method))


def test_a_machine_without_the_library_runs_torch() -> None:
    code = (
        "import logging, sys; logging.basicConfig(level='INFO', format='%(message)s', "
        "stream=sys.stdout)\n"
        "from handlers.lmi_dist.backend import choose_library\n"
        "from handlers.lmi_dist.facts import read_facts\n"
        "from lmi.settings.config import EngineConfig\n"
        "print(choose_library(read_facts(sys.argv[1]), 'cpu', EngineConfig()))"
    )
    environment = os.environ | {"LMI_NATIVE_LIBRARY": "/nowhere/lmi_kernels.so"}
    command = [sys.executable, "-c", code, str(tiny_model("llama"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    line, library_name = done.stdout.splitlines()

    assert (
        line.startswith("kernels: torch, because lmi_kernels.so cannot be loaded")
        and library_name == "None"
    )
