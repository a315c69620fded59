"""The life of adapters on the embedded engine: limits, weights that come and go, faults of one
request only.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from handlers.lmi_dist.executor import EmbeddedExecutor
from lmi.errors import OutOfMemory, SecurityRefused, UnknownAdapter, Unsupported
from lmi.executor import ErrorKind, LoraConfig, OutputConfig, Request, Response, SamplingConfig
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist.test_equality import TIMEOUT_S, Answer, alone, take_all
from tests.handlers.vllm.small_adapters import write_adapter
from tests.tiny_models import tiny_model

# Two blocks and more
PROMPT = tuple(range(11, 150))


def new_executor(**options: str) -> EmbeddedExecutor:
    lora = {"enable_lora": "true", "max_lora_rank": "8", "max_loras": "2", **options}
    return EmbeddedExecutor(
        tiny_model("llama_wide"), EngineConfig(options=lora, max_num_sequences=8)
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, seed) for seed, name in enumerate("abcd", start=1)}


@pytest.fixture
def executor(folders: dict[str, Path]) -> Iterator[EmbeddedExecutor]:
    with new_executor() as executor:
        for name, folder in folders.items():
            executor.load_adapter(name, str(folder))

        yield executor


def asking(
    adapter: str | None, max_tokens: int = 12, num_sequences: int = 1, **more: Any
) -> Request:
    return Request(
        input_token_ids=PROMPT,
        max_tokens=max_tokens,
        ignore_eos=True,
        sampling_config=SamplingConfig(seed=4, num_return_sequences=num_sequences),
        output_config=OutputConfig(return_log_probs=True),
        lora_config=None if adapter is None else LoraConfig(adapter),
        **more,
    )


def lone(executor: EmbeddedExecutor, name: str | None) -> Answer:
    return alone(executor, [asking(name)])[0]


def error_of(executor: EmbeddedExecutor, request: Request) -> Response:
    request_id = executor.enqueue_request(request)
    [response] = executor.await_responses(request_id, TIMEOUT_S)
    assert isinstance(response, Response) and response.is_final
    return response


def at_boundary(executor: EmbeddedExecutor, function: Callable[[], object]) -> None:
    executor._at_boundary(lambda: (function(), None)[1])


def test_an_engine_has_adapters_only_where_they_are_enabled(folders: dict[str, Path]) -> None:
    with EmbeddedExecutor(tiny_model("llama_wide")) as executor:
        assert not executor.capabilities.lora
        for call in (
            lambda: executor.load_adapter("a", str(folders["a"])),
            lambda: executor.unload_adapter("a"),
            lambda: executor.enqueue_request(asking("a")),
        ):
            with pytest.raises(Unsupported, match="lmi-dist has no adapters"):
                call()

    with new_executor() as executor:
        assert executor.capabilities.lora and executor.info.adapters == ()
        with pytest.raises(UnknownAdapter, match="^Adapter a is not registered$"):
            executor.enqueue_request(asking("a"))


def test_a_batch_uses_at_most_max_loras_adapters_and_nothing_overtakes_the_one_that_waits(
    executor: EmbeddedExecutor,
) -> None:
    expected = [lone(executor, name) for name in ("a", "b", "c", None)]
    executor.get_latest_iteration_stats()
    long = [asking(name, max_tokens=300) for name in ("a", "b")]
    ids = executor.enqueue_requests([*long, asking("c"), asking(None), asking("a")])
    got = take_all(executor, ids)
    assert got[2:4] == expected[2:] and got[4] == expected[0]

    steps = executor.get_latest_iteration_stats()
    most = max(step.num_active_requests for step in steps)

    assert most == 3, (
        "the third adapter and those behind it wait until one of the first two is free"
    )


def test_weights_that_are_no_numbers_fail_the_requests_that_ask_for_them_alone(
    executor: EmbeddedExecutor, tmp_path: Path
) -> None:
    before = [lone(executor, name) for name in (None, "a")]
    folder = write_adapter(tmp_path / "nan", seed=1)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {name: tensor.fill_(torch.nan) for name, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    executor.load_adapter("nan", str(folder))
    ids = executor.enqueue_requests([asking(None), asking("nan"), asking("a")])
    [response] = executor.await_responses(ids[1], TIMEOUT_S)

    assert isinstance(response, Response) and response.error is not None
    assert response.error.kind is ErrorKind.GENERATION and "not numbers" in response.error.message
    assert take_all(executor, [ids[0], ids[2]]) == before


def test_requests_go_on_while_an_adapter_is_read(folders: dict[str, Path]) -> None:
    with new_executor() as executor:
        executor.load_adapter("a", str(folders["a"]))
        before = lone(executor, "a")
        reading = threading.Event()
        go_on = threading.Event()
        loader = executor._lora._loader  # type: ignore[union-attr]
        read_file = loader.read

        def read_slowly(path: str) -> Any:
            reading.set()
            assert go_on.wait(TIMEOUT_S)
            return read_file(path)

        loader.read = read_slowly  # type: ignore[method-assign]
        thread = threading.Thread(target=executor.load_adapter, args=("b", str(folders["b"])))
        thread.start()

        assert reading.wait(TIMEOUT_S)
        assert lone(executor, "a") == before and not executor.is_loading_adapter
        assert executor.info.adapters == ("a",)

        go_on.set()
        thread.join(TIMEOUT_S)

        assert executor.info.adapters == ("a", "b") and lone(executor, "b") != before


def test_an_adapter_that_is_unloaded_stays_for_its_requests_and_its_name_may_mean_another(
    executor: EmbeddedExecutor, folders: dict[str, Path]
) -> None:
    expected = {name: lone(executor, name) for name in ("a", "b")}
    whole = alone(executor, [asking("a", max_tokens=200)])[0]
    running = executor.enqueue_request(asking("a", max_tokens=200))
    executor.unload_adapter("a")
    with pytest.raises(UnknownAdapter):
        executor.enqueue_request(asking("a"))

    executor.load_adapter("a", str(folders["b"]))
    assert lone(executor, "a") == expected["b"], (
        "keys of the first adapter were reused for the second"
    )
    assert take_all(executor, [running]) == [whole]

    executor.unload_adapter("a")
    executor.load_adapter("a", str(folders["a"]))

    assert lone(executor, "a") == expected["a"]


def test_an_adapter_that_was_unloaded_leaves_no_weights(executor: EmbeddedExecutor) -> None:
    lora = executor._lora
    assert lora is not None and len(lora._resident) == 4
    assert lone(executor, "a") and lone(executor, "b")
    for name in "abcd":
        executor.unload_adapter(name)

    assert not lora._resident and executor.info.adapters == ()
    assert lone(executor, None)


def test_a_request_whose_adapter_was_just_unloaded_ends_with_an_error(
    executor: EmbeddedExecutor,
) -> None:
    """The adapter goes after the request was accepted, and before a step has seen its sequences."""
    before = lone(executor, "b")
    ids = list[int]()

    def enqueue_and_unload() -> None:
        requests = [asking("a", num_sequences=3), asking("b")]
        ids.extend(executor.enqueue_request(request) for request in requests)
        assert executor._lora is not None

        executor._lora.unload("a")

    at_boundary(executor, enqueue_and_unload)
    [response] = executor.await_responses(ids[0], TIMEOUT_S)

    assert isinstance(response, Response) and response.error is not None
    assert (response.error.kind, response.error.message) == (
        ErrorKind.INVALID,
        "Adapter a is not registered",
    )
    assert take_all(executor, ids[1:]) == [before]


def test_weights_used_longest_ago_are_dropped_and_read_again(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with new_executor(max_loras="1", max_cpu_loras="2") as executor:
        for name in "abc":
            executor.load_adapter(
                name, str(shutil.copytree(folders[name], tmp_path / name)), preload=False
            )

        lora = executor._lora
        assert lora is not None and not lora._resident

        expected = {name: lone(executor, name) for name in "abc"}
        assert len({tuple(answer[0]) for answer in expected.values()}) == 3
        assert [adapter.name for adapter in lora._resident.values()] == ["b", "c"]
        assert lone(executor, "a") == expected["a"]
        assert [adapter.name for adapter in lora._resident.values()] == ["c", "a"]

        shutil.rmtree(tmp_path / "b")
        ids = executor.enqueue_requests([asking("c"), asking("b", num_sequences=2), asking("a")])
        [response] = executor.await_responses(ids[1], TIMEOUT_S)

        assert isinstance(response, Response) and response.error is not None
        assert response.error.message.startswith(
            f"{tmp_path / 'b'}: lmi-dist cannot load this adapter: "
        )
        assert take_all(executor, [ids[0], ids[2]]) == [expected["c"], expected["a"]]


def test_memory_has_no_more_weights_than_it_may_also_when_adapters_are_loaded(
    folders: dict[str, Path],
) -> None:
    with new_executor(max_cpu_loras="2") as executor:
        for name, folder in folders.items():
            executor.load_adapter(name, str(folder))

        assert executor._lora is not None
        assert [adapter.name for adapter in executor._lora._resident.values()] == ["c", "d"]
        assert executor.info.adapters == ("a", "b", "c", "d") and lone(executor, "a") != lone(
            executor, "b"
        )


def test_a_pinned_adapter_keeps_its_weights(folders: dict[str, Path]) -> None:
    with new_executor(max_cpu_loras="2") as executor:
        executor.load_adapter("a", str(folders["a"]), pinned=True)
        for name in "bcd":
            executor.load_adapter(name, str(folders[name]), preload=False)
            assert lone(executor, name)

        assert executor._lora is not None and "a" in [
            adapter.name for adapter in executor._lora._resident.values()
        ]

        with pytest.raises(OutOfMemory, match="2 adapters fit into a batch"):
            executor.load_adapter("b", str(folders["b"]), pinned=True)


def test_the_reason_why_an_adapter_is_refused_names_its_folder(
    executor: EmbeddedExecutor, folders: dict[str, Path], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    weights = shutil.copytree(folders["a"], tmp_path / "pickled") / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(
        SecurityRefused, match="pickled/adapter_model.bin: pickled weights can run code"
    ):
        executor.load_adapter("pickled", str(weights.parent))

    assert executor.info.adapters == ("a", "b", "c", "d")
    assert lone(executor, "a")
