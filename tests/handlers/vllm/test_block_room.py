"""The shorter allocation of blocks: it is used, and blocks and tokens are those of vLLM's own
allocation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.handlers.vllm.asking import TOKENS_PER_BLOCK, ask, finals, start

if TYPE_CHECKING:
    from handlers.lmi_vllm.executor import VllmExecutor

# Of prompts, in tokens; each answer needs a second block
LENGTHS = (
    TOKENS_PER_BLOCK - 2,
    TOKENS_PER_BLOCK,
)
NUM_NEW = 20


@pytest.fixture(scope="module")
def executor() -> Iterator[VllmExecutor]:
    with start() as started:
        yield started


def kv_cache_manager(executor: VllmExecutor) -> Any:
    return executor._engine._scheduler.kv_cache_manager  # type: ignore[attr-defined]


def answers(executor: VllmExecutor) -> list[tuple[int, ...]]:
    """The tokens of greedy answers to prompts that end before and at the end of a block, all at
    once.
    """
    requests = [
        ask(
            input_token_ids=tuple(5 + (i * length) % 90 for i in range(length)),
            max_tokens=NUM_NEW,
            ignore_eos=True,
        )
        for length in LENGTHS
    ]
    ids = [executor.enqueue_request(request) for request in requests]
    ended = finals(executor, ids)
    results = [ended[request_id].result for request_id in ids]
    return [tuple(result.output_token_ids[0]) for result in results if result is not None]


def test_only_steps_that_need_or_fill_a_block_ask_vllms_allocation(executor: VllmExecutor) -> None:
    manager = kv_cache_manager(executor)
    skipping = manager.allocate_slots
    nums_computed = []
    allocate_slots = type(manager).allocate_slots

    def counted(request: Any, num_new_tokens: int, **more: Any) -> Any:
        nums_computed.append(request.num_computed_tokens)
        return allocate_slots(manager, request, num_new_tokens, **more)

    from handlers.lmi_vllm.allocation import skipping as make

    manager.allocate_slots = make(
        counted, manager.coordinator.single_type_managers[0], manager.empty_kv_cache_blocks
    )
    try:
        counted_answers = answers(executor)
    finally:
        manager.allocate_slots = skipping

    assert len(counted_answers) == len(LENGTHS)

    prompts = [0] * len(LENGTHS)
    block = TOKENS_PER_BLOCK

    # Fills its block, and two that need another
    assert sorted(nums_computed) == [
        *prompts,
        block - 1,
        block,
        block,
    ]


def test_tokens_are_those_of_vllms_own_allocation(executor: VllmExecutor) -> None:
    manager = kv_cache_manager(executor)
    skipping = manager.allocate_slots
    short = answers(executor)
    manager.allocate_slots = type(manager).allocate_slots.__get__(manager)
    try:
        whole = answers(executor)
    finally:
        manager.allocate_slots = skipping

    assert short == whole


def test_every_block_is_free_again_after_the_answers(executor: VllmExecutor) -> None:
    answers(executor)
    assert kv_cache_manager(executor).usage == 0
