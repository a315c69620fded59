"""The contract's rules on adapters, held against every engine that has adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from lmi.errors import InvalidParameter, ModelUnusable, OutOfMemory, UnknownAdapter
from lmi.executor import Executor, LoraConfig, Request, Response, SamplingConfig
from tests.conformance.table import needs

if TYPE_CHECKING:
    from tests.conformance.conftest import Adaptable

pytestmark = needs("lora")

TIMEOUT_S = 60.0


def asking(adapter: str | None) -> Request:
    return Request(
        input_token_ids=(11, 12, 13),
        max_tokens=8,
        sampling_config=SamplingConfig(temperature=0),
        lora_config=None if adapter is None else LoraConfig(adapter),
    )


def tokens(executor: Executor, adapter: str | None) -> list[int]:
    request_id = executor.enqueue_request(asking(adapter))
    [response] = cast(list[Response], executor.await_responses(request_id, TIMEOUT_S))
    assert response.result is not None, response.error_msg
    return response.result.output_token_ids[0]


def test_an_adapter_is_loaded_used_and_unloaded_while_the_engine_runs(
    adaptable: Adaptable, tmp_path: Path
) -> None:
    executor = adaptable.executor
    path = adaptable.write(tmp_path / "rude")
    base = tokens(executor, None)
    executor.load_adapter("rude", str(path))

    assert executor.info.adapters == ("formal", "rude")
    assert len({tuple(tokens(executor, name)) for name in (None, "formal", "rude")}) == 3

    executor.unload_adapter("rude")
    assert executor.info.adapters == ("formal",)

    with pytest.raises(UnknownAdapter, match="^Adapter rude is not registered$"):
        tokens(executor, "rude")

    assert tokens(executor, None) == base


def test_an_adapter_that_is_not_preloaded_is_checked_and_gets_its_weights_with_its_first_request(
    adaptable: Adaptable, tmp_path: Path
) -> None:
    executor = adaptable.executor
    path = adaptable.write(tmp_path / "late")
    executor.load_adapter("late", str(path), preload=False)

    assert executor.info.adapters == ("formal", "late")
    assert tokens(executor, "late") != tokens(executor, None)

    (path / "adapter_model.safetensors").write_text("{")
    executor.load_adapter("broken", str(path), preload=False)
    request_id = executor.enqueue_request(asking("broken"))
    [response] = cast(list[Response], executor.await_responses(request_id, TIMEOUT_S))
    assert response.error is not None and "cannot load this adapter: " in response.error.message

    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"r": 16}))
    with pytest.raises(ModelUnusable, match="cannot load this adapter: .*rank"):
        executor.load_adapter("wide", str(path), preload=False)

    for name in ("late", "broken"):
        executor.unload_adapter(name)

    assert tokens(executor, "formal") != tokens(executor, None)


@needs("adapter_pins")
def test_a_loaded_adapter_can_be_pinned(adaptable: Adaptable, tmp_path: Path) -> None:
    executor = adaptable.executor
    paths = [str(adaptable.write(tmp_path / name)) for name in ("first", "second")]
    for name, path in zip(("first", "second"), paths, strict=True):
        executor.load_adapter(name, path, preload=False)

    executor.load_adapter("first", paths[0], pinned=True)
    with pytest.raises(OutOfMemory, match="2 adapters fit into a batch"):
        executor.load_adapter("second", paths[1], pinned=True)

    assert executor.info.adapters == ("first", "formal", "second")

    for name in ("first", "second"):
        assert tokens(executor, name) != tokens(executor, None)
        executor.unload_adapter(name)


def test_an_adapter_that_cannot_be_loaded_says_why(adaptable: Adaptable, tmp_path: Path) -> None:
    executor = adaptable.executor
    path = adaptable.write(tmp_path / "broken")
    calls: list[tuple[type[Exception], str, Callable[[], None]]] = [
        (
            InvalidParameter,
            "a new name.*'formal'",
            lambda: executor.load_adapter("formal", str(path)),
        ),
        (
            ModelUnusable,
            "has an adapter_config.json",
            lambda: executor.load_adapter("rude", str(tmp_path)),
        ),
        (
            ModelUnusable,
            "cannot load this adapter: .",
            lambda: executor.load_adapter("rude", str(path)),
        ),
        (UnknownAdapter, "rude is not registered", lambda: executor.unload_adapter("rude")),
    ]
    (path / "adapter_config.json").write_text("{")
    for kind, reason, call in calls:
        with pytest.raises(kind, match=reason):
            call()

    assert executor.info.adapters == ("formal",)


@needs("adapter_pins")
def test_pinned_adapters_leave_a_place_for_those_that_are_not(
    adaptable: Adaptable, tmp_path: Path
) -> None:
    executor = adaptable.executor
    first = adaptable.write(tmp_path / "a")
    second = adaptable.write(tmp_path / "b")
    executor.load_adapter("pinned", str(first), pinned=True)
    with pytest.raises(OutOfMemory, match="2 adapters fit into a batch"):
        executor.load_adapter("too many", str(second), pinned=True)

    executor.load_adapter("another", str(second))
    assert all(tokens(executor, name) for name in ("formal", "pinned", "another"))

    for name in ("pinned", "another"):
        executor.unload_adapter(name)

    assert executor.info.adapters == ("formal",)
