"""What a request may ask beside tokens, through the executor and a double of TensorRT-LLM that computes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

from lmi.errors import ModelUnusable, UnknownAdapter, Unsupported
from lmi.executor import (
    AdditionalModelOutput,
    ErrorKind,
    FinishReason,
    GuidedDecodingParams,
    GuideType,
    KvCacheRetentionConfig,
    LoraConfig,
    OutputConfig,
    SamplingConfig,
    TokenRangeRetentionConfig,
)
from lmi.executor import Tensor as OurTensor
from lmi.settings.config import EngineConfig
from tests.conformance.asking import PROMPT, ask, finish, run
from tests.handlers.trtllm.asking import FAMILY, answers, start, tokens, until
from tests.handlers.trtllm.double import double, knobs
from tests.handlers.vllm.small_adapters import write_adapter
from tests.tiny_models import tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FILE = """
from lmi.executor import LogitsPostProcessorConfig

def only_seven(request_id, logits, tokens, stream, client_id):
    logits[..., :7] = logits[..., 8:] = -float("inf")

def count_up(request_id, logits, tokens, stream, client_id):
    for beam, ids in enumerate(tokens):
        logits[0, beam, 20 + len(ids)] = 1e6

def fail_at_third(request_id, logits, tokens, stream, client_id):
    if len(tokens[0]) == 2:
        raise ValueError("enough")

def all_thirty(request_ids, logits, tokens, stream, client_ids):
    for row in logits:
        row[..., 30] = 1e6

logits_post_processors = LogitsPostProcessorConfig(
    {"only_seven": only_seven, "count_up": count_up, "fail_at_third": fail_at_third}, all_thirty
)
"""


@pytest.fixture(scope="module", params=["main-2025-10", "main-2026-08"])
def executor_class(request: pytest.FixtureRequest) -> Iterator[Any]:
    with double(request.param) as executor_class:
        yield executor_class


@pytest.fixture(scope="module")
def executor(executor_class: Any) -> Iterator[Any]:
    with start(executor_class, disable_overlap_scheduler="true") as executor:
        yield executor


@pytest.fixture(scope="module")
def processing(executor_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An executor whose model has a file of post-processors beside it."""
    folder = shutil.copytree(tiny_model(FAMILY), tmp_path_factory.mktemp("processing") / "model")
    (folder / "post.py").write_text(FILE)
    config = EngineConfig(handler="trtllm", max_beam_width=1, logits_post_processors="post.py")
    with executor_class(folder, config) as executor:
        yield executor


def text_of(executor: Any, params: GuidedDecodingParams) -> str:
    """The text of a guided answer, which has ended by itself."""
    answer = run(executor, guided_decoding_params=params, max_tokens=200)
    assert answer.finish_reasons == [FinishReason.END_ID]
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_model(FAMILY) / "tokenizer.json"))
    return str(tokenizer.decode(answer.output_token_ids[0]))


def numbers(tensor: OurTensor | None) -> np.ndarray[Any, Any]:
    assert tensor is not None
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


# Words and biases.


def test_a_word_of_several_tokens_is_never_completed_and_its_tokens_stay_allowed(executor: Any) -> None:
    plain = tokens(executor)
    banned = tokens(executor, bad_words=(tuple(plain[1:3]),))
    assert banned[:2] == plain[:2] and banned[2] != plain[2]
    assert tuple(plain[1:3]) not in zip(banned, banned[1:], strict=False)


def test_a_word_of_one_token_never_comes(executor: Any) -> None:
    plain = tokens(executor)
    banned = tokens(executor, bad_words=((plain[2],),))
    assert banned[:2] == plain[:2] and plain[2] not in banned


def test_a_large_bias_forces_a_token(executor: Any) -> None:
    assert tokens(executor, embedding_bias=((17, 1e6),)) == [17] * 8


def test_with_the_overlap_scheduler_only_words_of_several_tokens_are_refused(executor_class: Any) -> None:
    with start(executor_class) as executor:
        plain = tokens(executor)
        assert plain[2] not in tokens(executor, bad_words=((plain[2],),))
        with pytest.raises(Unsupported, match=r"bad_words .*option.disable_overlap_scheduler=true"):
            executor.enqueue_request(ask(bad_words=((4, 5),)))


# Structures.


def test_every_kind_of_structure_is_followed_to_its_end(executor: Any) -> None:
    # A short object: a random model would go on with a long one for ever.
    schema = GuidedDecodingParams(GuideType.JSON_SCHEMA, json.dumps(SCHEMA))
    jsonschema.validate(json.loads(text_of(executor, schema)), SCHEMA)
    assert re.fullmatch("[a-c]{2,4}", text_of(executor, GuidedDecodingParams(GuideType.REGEX, "[a-c]{2,4}")))
    grammar = GuidedDecodingParams(GuideType.EBNF_GRAMMAR, 'root ::= ("yes" | "no") "!"')
    assert text_of(executor, grammar) in ("yes!", "no!")


def test_json_without_a_schema_begins_an_object(executor: Any) -> None:
    params = GuidedDecodingParams(GuideType.JSON)
    answer = run(executor, guided_decoding_params=params, max_tokens=1, embedding_bias=())
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_model(FAMILY) / "tokenizer.json"))
    assert tokenizer.decode(answer.output_token_ids[0]).startswith("{")


def test_wrong_structures_cost_the_engine_nothing_of_its_error_budget(executor: Any) -> None:
    with knobs(error_budget=0):
        for number in range(4):
            params = GuidedDecodingParams(GuideType.REGEX, "(" * (number + 1))
            [response] = answers(executor, guided_decoding_params=params)
            assert response.error.kind is ErrorKind.INVALID and response.error.field == "guided_decoding_params"
        assert len(tokens(executor)) == 8


# Post-processors.


def test_post_processors_change_the_answers_of_the_requests_that_name_them(processing: Any) -> None:
    names = ("only_seven", "count_up", "batched", None)
    requests = [ask(logits_post_processor_name=name) for name in names]
    got = [finish(processing, one)[-1].get_result() for one in processing.enqueue_requests(requests)]
    assert [one.output_token_ids[0] for one in got[:3]] == [[7] * 8, list(range(20, 28)), [30] * 8]
    assert got[3].output_token_ids[0] == tokens(processing)
    assert processing.capabilities.logits_post_processors == ("only_seven", "count_up", "fail_at_third", "batched")


def test_an_error_of_a_post_processor_ends_only_its_request(processing: Any) -> None:
    requests = [ask(logits_post_processor_name="fail_at_third", streaming=True), ask(max_tokens=40)]
    failing, neighbour = processing.enqueue_requests(requests)
    responses = finish(processing, failing)
    assert responses[-1].error.message == "logits post-processor 'fail_at_third' failed: ValueError: enough"
    assert responses[-1].error.kind is ErrorKind.GENERATION
    sent = [token for one in responses[:-1] for token in one.get_result().output_token_ids[0]]
    assert sent == tokens(processing)[: len(sent)] and len(sent) <= 2
    assert finish(processing, neighbour)[-1].get_result().output_token_ids[0] == tokens(processing, max_tokens=40)


def test_a_request_whose_post_processor_failed_holds_no_place_in_the_engine(processing: Any) -> None:
    engine = processing._trtllm._llm._engine
    before = engine._num_steps
    answers(processing, logits_post_processor_name="fail_at_third", max_tokens=400)
    until(lambda: not engine._active)
    assert engine._num_steps - before < 100


# Rows.


def test_logits_are_the_same_streamed_and_not_and_the_prompts_are_whole_each_time(executor: Any) -> None:
    output = OutputConfig(return_context_logits=True, return_generation_logits=True)
    whole = run(executor, output_config=output)
    assert numbers(whole.generation_logits).argmax(-1)[0].tolist() == whole.output_token_ids[0]
    parts = [one.get_result() for one in answers(executor, output_config=output, streaming=True)]
    streamed = np.concatenate([numbers(one.generation_logits) for one in parts if one.output_token_ids[0]], axis=1)
    assert np.array_equal(streamed, numbers(whole.generation_logits))
    assert numbers(whole.context_logits).shape[0] == len(PROMPT)
    assert np.array_equal(numbers(parts[0].context_logits), numbers(whole.context_logits))


def test_declared_outputs_come_with_each_token(executor_class: Any) -> None:
    config = EngineConfig(handler="trtllm", max_beam_width=1, additional_outputs=("hidden_states:context",))
    with executor_class(tiny_model(FAMILY), config) as executor:
        hidden = AdditionalModelOutput("hidden_states", gather_context=True)
        answer = run(executor, output_config=OutputConfig(additional_model_outputs=(hidden,)))
        context, generation = (
            numbers(answer.additional_outputs[f"{one}_hidden_states"]) for one in ("context", "generation")
        )
        assert context.shape[0] == len(PROMPT) and generation.shape[:2] == (1, 8)
        assert np.array_equal(context[-1], generation[0, 0])  # the first token is drawn from the prompt's last row


def test_an_output_that_the_model_lacks_stops_the_start(executor_class: Any) -> None:
    config = EngineConfig(handler="trtllm", max_beam_width=1, additional_outputs=("attentions",))
    with pytest.raises(Exception, match="attentions"):
        executor_class(tiny_model(FAMILY), config)


def test_a_tokenizer_that_cannot_be_read_stops_the_start_with_one_line(executor_class: Any, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model(FAMILY), tmp_path / "model")
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ModelUnusable, match="^[^\\n]*TensorRT-LLM cannot start: [^\\n]*$"):
        executor_class(model, EngineConfig(handler="trtllm", max_beam_width=1))


# The cache, times, adapters.


def test_a_retention_policy_and_times_change_no_token(executor: Any) -> None:
    policy = KvCacheRetentionConfig((TokenRangeRetentionConfig(0, 3, 90, 1000),), 10)
    answer = run(executor, kv_cache_retention_config=policy, output_config=OutputConfig(return_perf_metrics=True))
    assert answer.output_token_ids[0] == tokens(executor)
    times = answer.request_perf_metrics
    assert times is not None and times.first_token_time is not None
    assert times.arrival_time <= times.first_token_time <= times.last_token_time


def test_adapters_are_loaded_named_mixed_and_unloaded(executor_class: Any, tmp_path: Path) -> None:
    first, second = write_adapter(tmp_path / "first", 1), write_adapter(tmp_path / "second", 2)
    with start(executor_class, enable_lora="true") as executor:
        executor.load_adapter("first", str(first))
        executor.load_adapter("second", str(second), preload=False)
        requests = [ask(), *(ask(lora_config=LoraConfig(name)) for name in ("first", "second", "first"))]
        ids = executor.enqueue_requests(requests)
        base, one, two, again = (finish(executor, each)[-1].get_result().output_token_ids[0] for each in ids)
        assert one == again and len({tuple(each) for each in (base, one, two)}) == 3
        executor.unload_adapter("first")
        with pytest.raises(UnknownAdapter):
            executor.enqueue_request(requests[1])
        executor.load_adapter("first", str(second))
        assert tokens(executor, lora_config=LoraConfig("first")) == two


def test_an_engine_that_only_searches_beams_loads_adapters_too(executor_class: Any, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "first", 1)
    with start(executor_class, max_beam_width=2, enable_lora="true") as executor:
        executor.load_adapter("first", str(folder))
        beams = SamplingConfig(2)
        assert len(tokens(executor, lora_config=LoraConfig("first"), sampling_config=beams)) == 8


def test_an_adapter_that_cannot_be_used_is_refused_with_its_reason_and_harms_nobody(
    executor_class: Any, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "large", 1, rank=16)
    with start(executor_class, enable_lora="true", max_lora_rank="8") as executor:
        with pytest.raises(ModelUnusable, match=r"r must be from 1 to 8 \(option.max_lora_rank\), given 16"):
            executor.load_adapter("large", str(folder))
        with pytest.raises(Unsupported, match="pin is not supported here"):
            executor.load_adapter("small", str(write_adapter(tmp_path / "small", 1)), pinned=True)
        assert executor.info.adapters == () and len(tokens(executor)) == 8
