"""The engine, its replicas and devices, chosen from the settings and the installed packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lmi.errors import BadConfiguration
from lmi.settings.engine_choice import choose_handler
from lmi.settings.handler import Handler, announced
from lmi.settings.replicas import num_engines
from lmi.shared.machine import Machine
from tests.settings.settling import ASYNC_SERVICE, CPU, FOUR_GPUS, faults, settle


@pytest.mark.parametrize(
    ("text", "machine", "wanted"),
    [
        ("", CPU, (1, 1, ())),
        ("maxWorkers=3", CPU, (1, 1, ())),
        ("minWorkers=2", CPU, (2, 1, ())),
        ("", FOUR_GPUS, (4, 1, ("0", "1", "2", "3"))),
        ("maxWorkers=2", FOUR_GPUS, (2, 1, ("0", "1"))),
        ("load_on_devices=3;1", FOUR_GPUS, (2, 1, ("3", "1"))),
        ("load_on_devices=*", FOUR_GPUS, (4, 1, ("0", "1", "2", "3"))),
        ("option.device=cpu", FOUR_GPUS, (1, 1, ())),
        ("gpu.maxWorkers=1\ncpu.minWorkers=2", FOUR_GPUS, (1, 1, ("0",))),
        ("gpu.maxWorkers=1\ncpu.minWorkers=2", CPU, (2, 1, ())),
        (
            "option.rolling_batch=lmi-dist\noption.tensor_parallel_degree=max",
            FOUR_GPUS,
            (4, 1, ("0", "1", "2", "3")),
        ),
    ],
)
@pytest.mark.usefixtures("no_vllm")
def test_replicas_are_as_many_as_fit_between_the_two_bounds(
    folder: Path, text: str, machine: Machine, wanted: object
) -> None:
    engine = settle(folder, text, machine=machine).config.engine
    assert (engine.num_engines, engine.tensor_parallel_degree, engine.device_ids) == wanted


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("text", "machine", "wanted"),
    [
        ("", CPU, (1, 1)),
        ("option.tensor_parallel_degree=2", CPU, (1, 2)),
        ("option.tensor_parallel_degree=max", CPU, (1, 1)),
        ("option.tensor_parallel_degree=2\nminWorkers=2", CPU, (2, 2)),
        ("option.tensor_parallel_degree=2", FOUR_GPUS, (2, 2)),
        ("option.tensor_parallel_degree=max", FOUR_GPUS, (1, 4)),
        ("option.tensor_parallel_degree=8\noption.nnodes=2", FOUR_GPUS, (1, 8)),
        (
            "option.tensor_parallel_degree=8\noption.distributed_executor_backend=ray",
            FOUR_GPUS,
            (1, 8),
        ),
        (
            "option.tensor_parallel_degree=8\noption.distributed_executor_backend=ray\nminWorkers=2",
            FOUR_GPUS,
            (2, 8),
        ),
    ],
)
def test_ranks_of_vllm_are_gpus_or_share_the_cores(
    folder: Path,
    tmp_path: Path,
    text: str,
    machine: Machine,
    wanted: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = tmp_path / "other site" / "ray"
    ray.mkdir(parents=True)
    (ray / "__init__.py").write_text("raise RuntimeError('imported by the supervisor')")
    monkeypatch.syspath_prepend(ray.parent)

    engine = settle(folder, f"option.rolling_batch=vllm\n{text}", machine=machine).config.engine
    assert (engine.num_engines, engine.tensor_parallel_degree) == wanted
    (fault,) = faults(folder, "option.rolling_batch=vllm\noption.pipeline_parallel_degree=2")
    assert fault.endswith("allowed is 1 on vllm where no GPU is used")


@pytest.mark.usefixtures("vllm")
def test_ranks_of_vllm_that_nothing_would_start_are_refused(folder: Path) -> None:
    text = "option.rolling_batch=vllm\noption.data_parallel_size="
    assert settle(folder, f"{text}1").config.engine.options == {"data_parallel_size": "1"}
    (fault,) = faults(folder, f"{text}2")
    assert fault.endswith("allowed is 1, since minWorkers is the number of replicas")


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("text", "machine", "wanted"),
    [
        (
            "option.rolling_batch=lmi-dist\noption.tensor_parallel_degree=4",
            FOUR_GPUS,
            ("vllm", 4, 1),
        ),
        (
            "option.rolling_batch=lmi-dist\noption.tensor_parallel_degree=max",
            FOUR_GPUS,
            ("vllm", 4, 1),
        ),
        (
            "option.rolling_batch=scheduler\noption.pipeline_parallel_degree=2",
            FOUR_GPUS,
            ("vllm", 1, 2),
        ),
        ("option.rolling_batch=lmi-dist\noption.tensor_parallel_degree=2", CPU, ("vllm", 2, 1)),
        ("option.rolling_batch=disable\noption.tensor_parallel_degree=2", CPU, ("vllm", 2, 1)),
        (
            "option.rolling_batch=lmi-dist\noption.tensor_parallel_degree=1",
            FOUR_GPUS,
            ("lmi-dist", 1, 1),
        ),
        (
            "option.rolling_batch=lmi-dist\noption.tensor_parallel_degree=max",
            CPU,
            ("lmi-dist", 1, 1),
        ),
    ],
)
def test_the_embedded_engine_gives_a_parallel_degree_over_one_to_vllm(
    folder: Path, text: str, machine: Machine, wanted: object
) -> None:
    resolved = settle(folder, text, machine=machine)
    engine = resolved.config.engine

    assert (
        engine.handler,
        engine.tensor_parallel_degree,
        engine.pipeline_parallel_degree,
    ) == wanted

    reason = ": lmi-dist runs on one device, so the engine is vllm"
    assert [warning.endswith(reason) for warning in resolved.warnings] == [True] * (
        engine.handler == "vllm"
    )
    assert resolved.config.model.dynamic_batch == ("disable" in text)


def test_replicas_that_do_not_fit_are_refused_with_numbers(folder: Path) -> None:
    (fault,) = faults(folder, "minWorkers=5", machine=FOUR_GPUS)
    assert (
        fault
        == "5 replicas of 1 GPUs each do not fit: allowed are 4 GPUs in all (serving.properties:1)"
    )
    (fault,) = faults(folder, "minWorkers=2\nmaxWorkers=1")
    assert "minWorkers=2, maxWorkers=1" in fault
    with pytest.raises(BadConfiguration, match="1 replicas of 2 GPUs"):
        num_engines(1, 2, None, None)


def test_auto_takes_the_embedded_engine_where_vllm_cannot_run() -> None:
    assert choose_handler("auto", CPU, announced()) == ("lmi-dist", "no GPU is visible")
    without = {name: handler for name, handler in announced().items() if name != "vllm"}
    assert choose_handler("auto", FOUR_GPUS, without)[0] == "lmi-dist"
    assert choose_handler("Scheduler", CPU, announced())[0] == "lmi-dist"
    assert choose_handler("other", CPU, announced() | {"other": Handler(load="of:others")}) == (
        "other",
        "asked for",
    )


@pytest.mark.usefixtures("vllm")
def test_auto_takes_vllm_where_it_is_installed_beside_a_gpu(folder: Path) -> None:
    assert choose_handler("auto", FOUR_GPUS, announced())[0] == "vllm"
    assert choose_handler("auto", CPU, announced())[0] == "lmi-dist"


@pytest.mark.parametrize(("word", "library"), [("vllm", "vllm"), ("trtllm", "tensorrt_llm")])
def test_an_announced_engine_without_its_library_is_refused_by_name(
    folder: Path, word: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vllm", "tensorrt_llm"):
        # As if it were not installed
        monkeypatch.setitem(sys.modules, name, None)

    assert choose_handler("auto", FOUR_GPUS, announced())[0] == "lmi-dist"
    (fault,) = faults(folder, f"option.rolling_batch={word}")
    assert "lmi-dist" in fault and fault.endswith(
        f"({word}: the library {library} is not installed)"
    )


def test_without_a_rolling_batch_the_engine_is_the_one_of_auto(folder: Path) -> None:
    resolved = settle(
        folder,
        "option.rolling_batch=Disable\nbatch_size=4\nmax_batch_delay=50\noption.enable_streaming=true",
    )
    model = resolved.config.model
    engine = resolved.config.engine

    assert (model.dynamic_batch, model.enable_streaming) == (True, True)
    assert (engine.handler, engine.max_num_sequences, resolved.warnings) == ("lmi-dist", 4, ())
    assert (
        "max_batch_delay (serving.properties:3): unneeded, a request joins the running batch at "
        "once" in resolved.notes
    )
    assert choose_handler("disable", FOUR_GPUS, announced()) == choose_handler(
        "auto", FOUR_GPUS, announced()
    )

    both = settle(
        folder, "option.rolling_batch=disable\nbatch_size=4\noption.max_rolling_batch_size=7"
    )

    assert both.config.engine.max_num_sequences == 7


@pytest.mark.parametrize(
    "text", ["option.async_mode=true", ASYNC_SERVICE, f"{ASYNC_SERVICE}\noption.async_mode=true"]
)
def test_no_rolling_batch_in_asynchronous_mode_is_the_engine_of_auto_in_the_lmi_schema(
    folder: Path, text: str
) -> None:
    resolved = settle(folder, f"option.rolling_batch=disable\n{text}\noption.strict=true")
    assert not resolved.config.model.dynamic_batch
    assert (resolved.config.engine.handler, resolved.config.engine.options) == ("lmi-dist", {})
    assert resolved.warnings == ()
    assert any("option.rolling_batch=disable means auto beside" in note for note in resolved.notes)


@pytest.mark.parametrize(
    "text", ["option.async_mode=false", "option.entryPoint=djl_python.huggingface"]
)
def test_no_rolling_batch_without_asynchronous_mode_is_a_dynamic_batch(
    folder: Path, text: str
) -> None:
    assert settle(folder, f"option.rolling_batch=disable\n{text}").config.model.dynamic_batch


def test_what_only_a_dynamic_batch_has_is_noted_with_a_rolling_one(folder: Path) -> None:
    resolved = settle(folder, "max_dynamic_batch_size=4\noption.enable_streaming=huggingface")
    assert (resolved.config.model.dynamic_batch, resolved.config.engine.max_num_sequences) == (
        False,
        64,
    )
    alone = "has an effect with option.rolling_batch=disable alone"
    assert len([note for note in resolved.notes if note.endswith(alone)]) == 2


@pytest.mark.parametrize("word", ["trtllm", "nonsense"])
def test_an_engine_that_is_not_there_is_refused_with_those_that_are(
    folder: Path, word: str
) -> None:
    (fault,) = faults(folder, f"option.rolling_batch={word}")
    assert fault.startswith(
        f"option.rolling_batch='{word}' (serving.properties:1): allowed is auto, disable, "
        f"scheduler, "
    )
    assert "lmi-dist" in fault


@pytest.mark.parametrize("word", ["DeepSpeed", "neuronx"])
def test_an_engine_of_the_reference_that_is_not_here_is_refused_with_the_reason_and_the_way_out(
    folder: Path, word: str
) -> None:
    (fault,) = faults(folder, f"option.rolling_batch={word}")
    assert f"; auto chooses lmi-dist or vllm ({word.lower()}: " in fault
    assert "not installed" not in fault


@pytest.mark.parametrize(
    ("num_gpus", "gpus_each", "low", "high", "wanted"),
    [
        (8, 2, None, None, 4),
        (8, 2, 2, 3, 3),
        (7, 2, None, None, 3),
        (8, 8, None, None, 1),
        (0, 1, None, None, 1),
    ],
)
def test_replicas_share_the_gpus(
    num_gpus: int, gpus_each: int, low: int, high: int, wanted: int
) -> None:
    assert num_engines(num_gpus, gpus_each, low, high) == wanted


def test_the_machine_has_cores_and_obeys_the_list_of_visible_gpus() -> None:
    assert Machine.here({}).num_cores >= 1
    assert Machine.here({"CUDA_VISIBLE_DEVICES": ""}).gpus == ()
