"""How what TensorRT-LLM reports becomes tokens and log-probs, in whatever form a line
reports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch

from handlers.base.sequence import Sequence, new_sequences
from handlers.driven.outputs import LogProbs, SequenceOutput, feed
from lmi.executor import FinishReason, OutputConfig, Request, SamplingConfig
from tests.handlers.trtllm.asking import answers, start, tokens
from tests.handlers.trtllm.double import double, knobs

PROMPT = (1, 2, 3)
END = 7
STOP = 8


@dataclass
class Step:
    """A RequestOutput after a step."""

    outputs: list[Any]
    finished: bool = False
    cached_tokens: int | None = 0
    context_logits: torch.Tensor | None = None


@dataclass
class Reader:
    """Reads steps as the engine does, and feeds them to a sequence."""

    sequence: Sequence
    cursor: Any
    new_completion: Any
    new_log_prob: Any
    outputs: list[SequenceOutput] = field(default_factory=list)

    def read(
        self, token_ids: list[int], *, finished: bool = False, context: Any = None, **more: Any
    ) -> None:
        log_probs = [self._entry(entry) for entry in more.pop("logprobs", ())]
        prompt = [self._entry(entry) for entry in more.pop("prompt_logprobs", ())]
        completion = self.new_completion(
            index=0, token_ids=token_ids, logprobs=log_probs, prompt_logprobs=prompt, **more
        )
        new = self.cursor.read(Step([completion], finished, 2, context))
        if new is not None:
            self.outputs.append(new)
            feed(self.sequence, new)

    def _entry(self, entry: float | dict[int, float]) -> Any:
        if isinstance(entry, float):
            return entry

        ranked = sorted(entry, key=lambda one: -entry[one])
        return {
            token_id: self.new_log_prob(logprob=entry[token_id], rank=ranked.index(token_id) + 1)
            for token_id in entry
        }

    @property
    def ids(self) -> list[int]:
        return self.sequence.token_ids[len(PROMPT) :]


@pytest.fixture
def reader(line: str, request: pytest.FixtureRequest) -> Reader:
    """A reader for the fields of a request that the test gives it."""
    fields = getattr(request, "param", {})
    [sequence] = new_sequences(
        1, Request(**{"input_token_ids": PROMPT, "max_tokens": 8, "end_id": END, **fields}), 512
    )
    cursor = import_module("handlers.lmi_trtllm.outputs").Cursor("1.0", sequence)
    package = import_module("tensorrt_llm.llmapi")
    log_prob = import_module("tensorrt_llm.executor.result").Logprob
    return Reader(sequence, cursor, package.CompletionOutput, log_prob)


WITH_LOG_PROBS = {"output_config": OutputConfig(True)}
WITH_TOP = {"output_config": OutputConfig(True, num_top_log_probs=2)}
OF_THE_PROMPT = {"output_config": OutputConfig(num_prompt_log_probs=1)}


def test_each_token_is_read_once_and_a_step_without_news_gives_nothing(reader: Reader) -> None:
    for token_ids in ([4], [4], [4, 5, 6]):
        reader.read(token_ids)

    assert [output.token_ids for output in reader.outputs] == [[4], [5, 6]]
    assert reader.sequence.num_cached_tokens == 2


@pytest.mark.parametrize("token_ids", [[4, 5, END], [4, 5]], ids=["kept", "cut off"])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_end_token_is_in_the_answer_whether_it_was_cut_off_or_not(
    reader: Reader, token_ids: list[int], is_streamed: bool
) -> None:
    if is_streamed:
        reader.read([4, 5])

    reader.read(token_ids, finished=True, finish_reason="stop")
    assert (reader.ids, reader.sequence.finish_reason) == ([4, 5, END], FinishReason.END_ID)


@pytest.mark.parametrize("reader", [{"stop_words": ((STOP,),)}], indirect=True)
@pytest.mark.parametrize("token_ids", [[4, STOP], [4]], ids=["kept", "cut off"])
def test_a_stop_word_is_in_the_answer_whether_it_was_cut_off_or_not(
    reader: Reader, token_ids: list[int]
) -> None:
    reader.read(token_ids, finished=True, finish_reason="stop", stop_reason=STOP)
    assert (reader.ids, reader.sequence.finish_reason) == ([4, STOP], FinishReason.STOP_WORDS)


@pytest.mark.parametrize("reader", [{"end_id": None}], indirect=True)
def test_no_token_is_made_up_where_none_may_end_the_sequence(reader: Reader) -> None:
    reader.read([4], finished=True, finish_reason="stop")
    assert (reader.ids, reader.sequence.finish_reason) == ([4], FinishReason.END_ID)


@pytest.mark.parametrize(
    ("token_ids", "reason", "expected"),
    [
        # Cut by the engine's own limit
        ([4, 5], "length", FinishReason.LENGTH),
        ([4] * 8, None, FinishReason.LENGTH),
        ([4, END], None, FinishReason.END_ID),
        ([4, 5], None, FinishReason.END_ID),
    ],
)
def test_a_missing_reason_is_found_from_the_tokens(
    reader: Reader, token_ids: list[int], reason: str | None, expected: FinishReason
) -> None:
    reader.read(token_ids, finished=True, finish_reason=reason)
    assert (reader.ids, reader.sequence.finish_reason) == (token_ids, expected)


@pytest.mark.parametrize(
    "reader", [{"sampling_config": SamplingConfig(min_tokens=3)}], indirect=True
)
@pytest.mark.parametrize("token_ids", [[4, END], [4, 5]])
def test_an_end_before_the_least_number_of_tokens_is_a_fault(
    reader: Reader, token_ids: list[int]
) -> None:
    reader.read(token_ids, finished=True, finish_reason="stop")
    assert "the engine ended it before min_tokens (3)" in str(reader.outputs[-1].end)


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "not_finished"])
def test_an_end_that_nobody_asked_for_is_an_error(reader: Reader, reason: str) -> None:
    reader.read([4], finished=True, finish_reason=reason)
    assert str(reader.outputs[-1].end) == f"the engine ended it: {reason}"


@pytest.mark.parametrize("reader", [WITH_LOG_PROBS], indirect=True)
@pytest.mark.parametrize(
    "form", [lambda token_id, value: value, lambda token_id, value: {token_id: value, 99: -9.0}]
)
def test_log_probs_are_those_of_their_tokens_in_every_form(reader: Reader, form: Any) -> None:
    steps = ([4], [5, 6], [4], [END])
    known_ids = list[int]()
    for number, new in enumerate(steps):
        known_ids += new
        entries = [form(token_id, -float(token_id)) for token_id in known_ids]
        is_last = number == len(steps) - 1
        reader.read(
            list(known_ids),
            logprobs=entries,
            finished=is_last,
            finish_reason="stop" if is_last else None,
        )

    assert reader.ids == [4, 5, 6, 4, END]
    assert reader.sequence.log_probs == [-4.0, -5.0, -6.0, -4.0, -7.0]


@pytest.mark.parametrize("reader", [WITH_LOG_PROBS], indirect=True)
def test_tokens_wait_for_their_log_probs(reader: Reader) -> None:
    reader.read([4, 5], logprobs=[-4.0])
    assert (reader.ids, reader.sequence.log_probs) == ([4], [-4.0])

    reader.read([4, 5, 6], logprobs=[-4.0, -5.0, -6.0], finished=True, finish_reason="length")
    assert (reader.ids, reader.sequence.log_probs) == ([4, 5, 6], [-4.0, -5.0, -6.0])


@pytest.mark.parametrize("reader", [WITH_LOG_PROBS], indirect=True)
@pytest.mark.parametrize(("log_probs", "expected"), [([-4.0], [4]), ([-4.0, -7.0], [4, END])])
def test_an_end_that_was_cut_off_is_put_back_if_it_has_a_log_prob(
    reader: Reader, log_probs: list[float], expected: list[int]
) -> None:
    reader.read([4], logprobs=log_probs, finished=True, finish_reason="stop")
    assert (reader.ids, reader.sequence.finish_reason) == (expected, FinishReason.END_ID)
    assert reader.sequence.log_probs == log_probs, "they stay parallel"


@pytest.mark.parametrize("reader", [WITH_LOG_PROBS], indirect=True)
def test_missing_log_probs_at_the_end_are_a_fault(reader: Reader) -> None:
    with pytest.raises(RuntimeError, match="fewer log-probs than tokens"):
        reader.read([4, 5, 6], logprobs=[-4.0, -5.0], finished=True, finish_reason="length")


@pytest.mark.parametrize("reader", [WITH_TOP], indirect=True)
def test_the_best_tokens_come_in_their_order_and_the_chosen_one_need_not_be_among_them(
    reader: Reader,
) -> None:
    reader.read([4, 5], logprobs=[{4: -0.5, 6: -1.0}, {6: -0.1, 4: -0.2, 5: -3.0}])
    assert reader.sequence.log_probs == [-0.5, -3.0]
    assert [[top_token.token_id for top_token in top] for top in reader.sequence.top_log_probs] == [
        [4, 6],
        [6, 4],
    ]


@pytest.mark.parametrize("reader", [WITH_TOP], indirect=True)
@pytest.mark.parametrize(
    ("entry", "fault"), [({6: -1.0}, "no log-prob of token 4"), (-1.0, "chosen tokens only")]
)
def test_log_probs_that_lack_what_was_asked_for_are_a_fault(
    reader: Reader, entry: Any, fault: str
) -> None:
    with pytest.raises(RuntimeError, match=fault):
        reader.read([4], logprobs=[entry])


@pytest.mark.parametrize("reader", [OF_THE_PROMPT], indirect=True)
def test_log_probs_of_the_prompt_are_those_of_the_next_token_of_each(reader: Reader) -> None:
    # The last one is about the first generated token
    entries = [
        {2: -2.0, 9: -1.0},
        {3: -0.5},
        {4: -0.1},
    ]
    reader.read([4], prompt_logprobs=entries)
    reader.read([4, 5], prompt_logprobs=entries)

    assert [prompt_entry.log_prob for prompt_entry in reader.sequence.prompt_log_probs] == [
        None,
        -2.0,
        -0.5,
    ]
    assert [prompt_entry.token_id for prompt_entry in reader.sequence.prompt_log_probs[1].top] == [
        9
    ]
    assert reader.outputs[1].prompt_log_probs is None


@pytest.mark.parametrize("reader", [OF_THE_PROMPT], indirect=True)
def test_log_probs_of_the_prompt_are_computed_from_its_logits_where_there_are_only_these(
    reader: Reader,
) -> None:
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    reader.read([4], context=logits)
    expected = logits.log_softmax(-1)
    prompt_log_probs = reader.outputs[0].prompt_log_probs
    assert isinstance(prompt_log_probs, LogProbs)
    assert [values[0] for values in prompt_log_probs.values] == pytest.approx(
        [float(expected[0, 2]), float(expected[1, 3])]
    )
    assert [ids[1] for ids in prompt_log_probs.token_ids] == expected[:2].argmax(-1).tolist()


def test_a_long_prompt_has_the_log_probs_of_all_its_tokens(line: str) -> None:
    token_ids = [position % 7 for position in range(300)]
    logits = torch.randn(300, 7, generator=torch.Generator().manual_seed(0))
    log_probs_of_logits = import_module("handlers.lmi_trtllm.outputs").of_logits(
        token_ids, logits, 0
    )
    rows = logits[:-1].log_softmax(-1)
    expected = [float(row[token_id]) for row, token_id in zip(rows, token_ids[1:], strict=True)]

    assert [ids[0] for ids in log_probs_of_logits.token_ids] == token_ids[1:]
    assert [values[0] for values in log_probs_of_logits.values] == pytest.approx(expected)


@pytest.mark.parametrize("reader", [OF_THE_PROMPT], indirect=True)
def test_an_answer_without_the_log_probs_of_the_prompt_is_a_fault(reader: Reader) -> None:
    reader.read([4])
    assert reader.outputs == []
    with pytest.raises(RuntimeError, match="no log-probs of the prompt"):
        reader.read([4, 5], finished=True, finish_reason="length")


def test_an_error_that_a_result_carries_is_a_fault(reader: Reader) -> None:
    step = Step([])
    step.error = "no room"  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="no room"):
        reader.cursor.read(step)


def test_an_output_of_an_unknown_form_is_a_fault_of_that_request(reader: Reader) -> None:
    engine = import_module("handlers.lmi_trtllm.engine")
    with pytest.raises(RuntimeError, match="the engine's output cannot be read"):
        engine._new_of(reader.cursor, Step([]))


@pytest.fixture(scope="module")
def executor(line: str) -> Iterator[Any]:
    with double(line) as executor_class, start(executor_class) as executor:
        yield executor


def test_a_log_prob_that_the_engine_lacks_ends_only_that_request(executor: Any) -> None:
    # So that a token is not the best one
    config = SamplingConfig(temperature=5)
    with knobs(chosen_log_prob="missing"):
        [response] = answers(
            executor, sampling_config=config, max_tokens=64, output_config=OutputConfig(True)
        )

    assert "gave the request up: the engine reported no log-prob of token" in response.error_msg
    assert len(tokens(executor)) == 8
