"""The contract's rules on what a Result carries beside tokens: logits, tensors of the
model, times.
"""

from __future__ import annotations

import array
import sys
import time

import pytest

from lmi.errors import Unsupported
from lmi.executor import AdditionalModelOutput, Executor, OutputConfig, Tensor
from tests.conformance.asking import PROMPT, ask, finish, long_prompt, results, run
from tests.conformance.table import needs


def floats(tensor: Tensor) -> list[list[float]]:
    """The rows of a float32 tensor, whatever it has before its last axis."""
    assert tensor.dtype == "float32" and sys.byteorder == "little"

    values = array.array("f", tensor.data)
    width = tensor.shape[-1]
    return [list(values[at : at + width]) for at in range(0, len(values), width)]


def best(row: list[float]) -> int:
    return row.index(max(row))


@needs("context_logits")
def test_logits_of_the_context_have_a_row_for_each_token_of_the_prompt(executor: Executor) -> None:
    result = run(
        executor, cache_salt="context", output_config=OutputConfig(return_context_logits=True)
    )
    assert result.context_logits is not None and result.generation_logits is None
    assert result.context_logits.shape == (len(PROMPT), executor.info.vocab_size)
    assert best(floats(result.context_logits)[-1]) == result.output_token_ids[0][0]


@needs("context_logits")
def test_the_context_has_no_rows_for_what_was_cached(executor: Executor) -> None:
    prompt = long_prompt(executor, 43)
    output = OutputConfig(return_context_logits=True)
    for _ in range(2):
        result = run(executor, input_token_ids=prompt, output_config=output)
        assert result.context_logits is not None
        assert result.context_logits.shape[0] == len(prompt) - result.num_cached_tokens


@needs("generation_logits")
def test_logits_of_the_generation_are_those_from_which_its_tokens_were_chosen(
    executor: Executor,
) -> None:
    result = run(executor, output_config=OutputConfig(return_generation_logits=True))
    assert result.generation_logits is not None and result.context_logits is None
    assert result.generation_logits.shape == (1, 8, executor.info.vocab_size)
    assert [best(row) for row in floats(result.generation_logits)] == result.output_token_ids[0]


@needs("generation_logits")
def test_a_streamed_result_carries_the_rows_of_its_new_tokens(executor: Executor) -> None:
    output = OutputConfig(return_generation_logits=True)
    whole = run(executor, output_config=output)
    assert whole.generation_logits is not None

    data = b""
    for result in results(
        finish(executor, executor.enqueue_request(ask(streaming=True, output_config=output)))
    ):
        assert result.generation_logits is not None
        assert result.generation_logits.shape == (
            1,
            len(result.output_token_ids[0]),
            executor.info.vocab_size,
        )
        data += result.generation_logits.data

    assert len(data) == len(whole.generation_logits.data)


@needs("additional_outputs")
@pytest.mark.parametrize("streaming", [False, True])
def test_an_additional_output_has_rows_for_the_context_and_for_the_generation(
    executor: Executor, streaming: bool
) -> None:
    declared = next(
        output_facts
        for output_facts in executor.capabilities.additional_outputs
        if output_facts.gather_context
    )
    # Nothing of it is cached
    prompt = tuple(token_id + 100 for token_id in PROMPT)
    output = OutputConfig(
        additional_model_outputs=(AdditionalModelOutput(declared.name, gather_context=True),)
    )
    request = ask(
        input_token_ids=prompt, streaming=streaming, output_config=output, cache_salt=f"{streaming}"
    )
    parts = results(finish(executor, executor.enqueue_request(request)))
    first, *later = [part.additional_outputs or {} for part in parts]
    context = f"context_{declared.name}"
    generation = f"generation_{declared.name}"
    assert first[context].shape[0] == len(prompt) and all(
        context not in output_facts for output_facts in later
    )

    for part, outputs in zip(parts, [first, *later], strict=True):
        assert outputs[generation].shape[-2] == len(part.output_token_ids[0])


@needs("additional_outputs")
def test_an_output_that_was_not_declared_is_refused_with_those_that_were(
    executor: Executor,
) -> None:
    output = OutputConfig(additional_model_outputs=(AdditionalModelOutput("nowhere"),))
    with pytest.raises(Unsupported, match=executor.capabilities.additional_outputs[0].name):
        executor.enqueue_request(ask(output_config=output))


def test_nothing_is_carried_that_was_not_asked_for(executor: Executor) -> None:
    result = run(executor)
    assert result.context_logits is None and result.generation_logits is None
    assert result.additional_outputs is None and result.request_perf_metrics is None


@needs("perf_metrics")
@pytest.mark.parametrize("streaming", [False, True])
def test_times_stand_on_the_last_result_in_their_order(executor: Executor, streaming: bool) -> None:
    before = time.monotonic()
    request = ask(streaming=streaming, output_config=OutputConfig(return_perf_metrics=True))
    *earlier, last = results(finish(executor, executor.enqueue_request(request)))
    metrics = last.request_perf_metrics
    assert metrics is not None and all(result.request_perf_metrics is None for result in earlier)

    times = [
        before,
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
        time.monotonic(),
    ]
    known_times = [result for result in times if result is not None]

    assert len(known_times) == len(times) and known_times == sorted(known_times)
    assert 0 <= metrics.num_reused_tokens < len(PROMPT)
