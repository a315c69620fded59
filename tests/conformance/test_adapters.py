"""The contract's rules on adapters, held against every engine that has adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from lmi.errors import InvalidParameter, ModelUnusable, OutOfMemory, UnknownAdapter
from lmi.executor import Executor, LoraConfig, Request, Response, SamplingConfig

if TYPE_CHECKING:
    from tests.conformance.conftest import Adaptable

TIMEOUT_S = 60.0


def tokens(executor: Executor, adapter: str | None, max_tokens: int = 8) -> list[int]:
    request = Request(
        input_token_ids=(11, 12, 13),
        max_tokens=max_tokens,
        sampling_config=SamplingConfig(temperature=0),
        lora_config=None if adapter is None else LoraConfig(adapter),
    )
    [response] = cast(list[Response], executor.await_responses(executor.enqueue_request(request), TIMEOUT_S))
    assert response.result is not None, response.error_msg
    return response.result.output_token_ids[0]


def test_the_adapters_beside_the_model_are_loaded_at_the_start(adaptable: Adaptable) -> None:
    assert adaptable.executor.info.adapters == ("formal",)
    assert tokens(adaptable.executor, "formal") != tokens(adaptable.executor, None)


def test_an_adapter_is_loaded_used_and_unloaded_while_the_engine_runs(adaptable: Adaptable, tmp_path: Path) -> None:
    executor, path = adaptable.executor, adaptable.write(tmp_path / "rude")
    base = tokens(executor, None)
    executor.load_adapter("rude", str(path))
    assert executor.info.adapters == ("formal", "rude")
    assert len({tuple(tokens(executor, name)) for name in (None, "formal", "rude")}) == 3
    executor.unload_adapter("rude")
    assert executor.info.adapters == ("formal",)
    with pytest.raises(UnknownAdapter, match=r"one of the loaded adapters \(formal\), given 'rude'"):
        tokens(executor, "rude")
    assert tokens(executor, None) == base


def test_an_adapter_that_cannot_be_loaded_says_why(adaptable: Adaptable, tmp_path: Path) -> None:
    executor, path = adaptable.executor, adaptable.write(tmp_path / "broken")
    calls: list[tuple[type[Exception], str, Callable[[], None]]] = [
        (InvalidParameter, "a new name.*'formal'", lambda: executor.load_adapter("formal", str(path))),
        (ModelUnusable, "has an adapter_config.json", lambda: executor.load_adapter("rude", str(tmp_path))),
        (ModelUnusable, "cannot load this adapter: .", lambda: executor.load_adapter("rude", str(path))),
        (UnknownAdapter, "given 'rude'", lambda: executor.unload_adapter("rude")),
    ]
    (path / "adapter_config.json").write_text("{")
    for kind, reason, call in calls:
        with pytest.raises(kind, match=reason):
            call()
    assert executor.info.adapters == ("formal",)


def test_pinned_adapters_leave_a_place_for_those_that_are_not(adaptable: Adaptable, tmp_path: Path) -> None:
    executor, first, second = adaptable.executor, adaptable.write(tmp_path / "a"), adaptable.write(tmp_path / "b")
    executor.load_adapter("pinned", str(first), pinned=True)
    with pytest.raises(OutOfMemory, match="2 adapters fit into a batch"):
        executor.load_adapter("too many", str(second), pinned=True)
    executor.load_adapter("another", str(second))
    assert all(tokens(executor, name) for name in ("formal", "pinned", "another"))
    for name in ("pinned", "another"):
        executor.unload_adapter(name)
    assert executor.info.adapters == ("formal",)
