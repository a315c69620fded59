"""Rows of logits and further outputs, from results of TensorRT-LLM in the forms that they have."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from handlers.base.sequence import Sequence, new_sequences
from handlers.driven.outputs import SequenceOutput, feed
from lmi.executor import (
    AdditionalModelOutput,
    FinishReason,
    OutputConfig,
    Request,
    Result,
    Tensor as OurTensor,
)

PROMPT = (1, 2, 3)
HIDDEN = AdditionalModelOutput("hidden", gather_context=True)
ALL = OutputConfig(
    return_context_logits=True, return_generation_logits=True, additional_model_outputs=(HIDDEN,)
)


@dataclass
class Output:
    generation_logits: Tensor | None = None
    additional_context_outputs: dict[str, Tensor] | None = None
    additional_generation_outputs: dict[str, Tensor] | None = None


@dataclass
class Answer:
    """As much of a RequestOutput as rows are read from."""

    context_logits: Tensor | None = None
    outputs: list[Output] = field(default_factory=lambda: [Output()])


@pytest.fixture
def outputs(line: str) -> Any:
    return import_module("handlers.lmi_trtllm.output_rows")


def sequence_of(output: OutputConfig, **fields: Any) -> Sequence:
    request = Request(
        **{"input_token_ids": PROMPT, "max_tokens": 3, "streaming": True, **fields},
        output_config=output,
    )
    [sequence] = new_sequences(1, request, 100)
    return sequence


def rows(first: int, num: int, size: int = 2) -> Tensor:
    """Row i is i repeated."""
    return torch.arange(first, first + num, dtype=torch.float32)[:, None].repeat(1, size)


def hidden(first: int, num: int) -> Tensor:
    return rows(first, num, 4)[:, None]  # (num_tokens, num_beams, size)


def step(outputs: Any, sequence: Sequence, answer: Answer, *token_ids: int) -> list[Result]:
    """What the executor does with one answer of the engine."""
    outputs.note_rows(sequence, outputs.rows_of(answer), len(token_ids))
    feed(sequence, SequenceOutput("1.0", list(token_ids)))
    return [response.get_result() for response in sequence.take_responses()]


def numbers(tensor: OurTensor | None) -> list[Any]:
    assert tensor is not None
    array: list[Any] = np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape).tolist()
    return array


def test_streamed_answers_carry_the_rows_of_their_tokens_and_the_first_one_the_prompts(
    outputs: Any,
) -> None:
    """Logits come step by step there, further outputs all again with each step."""
    sequence = sequence_of(ALL)
    first = Answer(
        rows(0, 3), [Output(rows(10, 1), {"hidden": rows(20, 3, 4)}, {"hidden": hidden(30, 1)})]
    )
    second = Answer(
        rows(0, 3), [Output(rows(11, 1), {"hidden": rows(20, 3, 4)}, {"hidden": hidden(30, 2)})]
    )
    [first_step] = step(outputs, sequence, first, 5)
    [two] = step(outputs, sequence, second, 6)

    assert (
        numbers(first_step.context_logits) == [[0, 0], [1, 1], [2, 2]]
        and two.context_logits is None
    )
    assert numbers(first_step.generation_logits) == [[[10, 10]]] and numbers(
        two.generation_logits
    ) == [[[11, 11]]]
    assert numbers(first_step.additional_outputs["context_hidden"])[2] == [22] * 4
    assert numbers(first_step.additional_outputs["generation_hidden"]) == [[[30] * 4]]
    assert numbers(two.additional_outputs["generation_hidden"]) == [[[31] * 4]]


def test_an_answer_with_several_tokens_carries_a_row_for_each(outputs: Any) -> None:
    sequence = sequence_of(OutputConfig(return_generation_logits=True))
    [first_step] = step(outputs, sequence, Answer(outputs=[Output(rows(10, 2))]), 5, 6)
    [two] = step(outputs, sequence, Answer(outputs=[Output(rows(10, 4))]), 7)

    assert numbers(first_step.generation_logits) == [[[10, 10], [11, 11]]]
    # Rows behind the last token are nobody's
    assert numbers(two.generation_logits) == [[[12, 12]]]


def test_a_missing_row_ends_the_request_with_an_error(outputs: Any) -> None:
    sequence = sequence_of(OutputConfig(return_generation_logits=True))
    outputs.note_rows(sequence, outputs.rows_of(Answer(outputs=[Output(rows(10, 1))])), 2)
    assert (
        sequence.error is not None
        and sequence.error.message == "the model gave no row of logits for each token of a step"
    )


def test_rows_of_which_nobody_knows_the_tokens_end_the_request_too(outputs: Any) -> None:
    """Two rows behind three tokens are neither those of all four tokens nor that of the new one."""
    sequence = sequence_of(OutputConfig(return_generation_logits=True), max_tokens=8)
    step(outputs, sequence, Answer(outputs=[Output(rows(10, 3))]), 5, 6, 7)
    outputs.note_rows(sequence, outputs.rows_of(Answer(outputs=[Output(rows(12, 2))])), 1)

    assert sequence.error is not None


def test_of_a_reused_prompt_the_last_rows_come(outputs: Any) -> None:
    sequence = sequence_of(OutputConfig(return_context_logits=True))
    [first_step] = step(outputs, sequence, Answer(rows(1, 2)), 5)
    assert numbers(first_step.context_logits) == [[1, 1], [2, 2]]


def test_half_precision_becomes_float32_and_whole_numbers_stay(outputs: Any) -> None:
    sequence = sequence_of(
        OutputConfig(additional_model_outputs=(AdditionalModelOutput("experts"), HIDDEN))
    )
    outputs_made = {"hidden": hidden(3, 1).bfloat16(), "experts": torch.tensor([[[4, 5]]])}
    [first_step] = step(
        outputs, sequence, Answer(outputs=[Output(additional_generation_outputs=outputs_made)]), 5
    )
    assert first_step.additional_outputs["generation_hidden"].dtype == "float32"
    assert first_step.additional_outputs["generation_experts"].dtype == "int64"
    assert numbers(first_step.additional_outputs["generation_experts"]) == [[[4, 5]]]


def test_an_end_without_a_token_needs_no_row(outputs: Any) -> None:
    sequence = sequence_of(OutputConfig(return_generation_logits=True))
    step(outputs, sequence, Answer(outputs=[Output(rows(10, 1))]), 5)
    outputs.note_rows(sequence, outputs.rows_of(Answer()), 0)
    feed(sequence, SequenceOutput("1.0", [], end=FinishReason.END_ID))

    assert sequence.error is None
