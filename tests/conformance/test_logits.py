"""The contract's rules on what changes the logits before a token is chosen from them."""

from __future__ import annotations

import pytest

from lmi.errors import Unsupported
from lmi.executor import Executor, OutputConfig, Request, SamplingConfig
from tests.conformance.asking import ask, finish, results, run
from tests.conformance.table import needs


@needs("logits_post_processors")
def test_a_named_processor_changes_the_logits_of_its_requests_only(executor: Executor) -> None:
    plain = run(executor).output_token_ids
    running = executor.enqueue_request(ask())
    assert run(executor, logits_post_processor_name="only_seven").output_token_ids == [[7] * 8]
    [result] = results(finish(executor, running))
    assert result.output_token_ids == plain != [[7] * 8]


@needs("logits_post_processors")
def test_the_batched_processor_serves_all_requests_that_name_it(executor: Executor) -> None:
    requests = [ask(logits_post_processor_name=Request.BATCHED_POST_PROCESSOR_NAME)] * 2 + [ask()]
    ids = executor.enqueue_requests(requests)
    [*forced, plain] = [
        results(finish(executor, request_id))[0].output_token_ids for request_id in ids
    ]
    assert forced == [[[7] * 8]] * 2 and plain == run(executor).output_token_ids


@needs("logits_post_processors")
@needs("log_probs_before_processors")
def test_log_probs_are_the_models_own_and_not_the_processors(executor: Executor) -> None:
    output = OutputConfig(return_log_probs=True)
    result = run(executor, logits_post_processor_name="only_seven", output_config=output)
    assert result.log_probs is not None and all(log_prob < 0 for log_prob in result.log_probs[0])


@needs("logits_post_processors")
def test_a_processor_that_raises_ends_only_its_request(executor: Executor) -> None:
    running = executor.enqueue_request(ask(max_tokens=40))
    [response] = finish(
        executor, executor.enqueue_request(ask(logits_post_processor_name="broken"))
    )
    assert response.has_error() and "the processor's own fault" in response.error_msg
    [result] = results(finish(executor, running))
    assert len(result.output_token_ids[0]) == 40


@needs("logits_post_processors")
def test_an_unknown_processor_is_refused_with_the_names_of_those_there_are(
    executor: Executor,
) -> None:
    with pytest.raises(Unsupported, match=r"^logits_post_processor_name .*'only_seven'"):
        executor.enqueue_request(ask(logits_post_processor_name="nobody"))


@needs("embedding_bias")
def test_a_large_bias_forces_its_token_at_every_step(executor: Executor) -> None:
    assert run(executor, embedding_bias=((7, 1000.0),)).output_token_ids == [[7] * 8]


@needs("bad_words")
def test_a_bad_word_never_stands_in_the_answer(executor: Executor) -> None:
    whole = run(executor, max_tokens=20).output_token_ids[0]
    pair = (whole[1], whole[2])
    ids = run(executor, bad_words=((whole[0],), pair), max_tokens=20).output_token_ids[0]

    assert whole[0] not in ids and pair not in list(zip(ids, ids[1:], strict=False))


@needs("no_repeat_ngram_size")
def test_no_ngram_of_the_size_comes_twice(executor: Executor) -> None:
    config = SamplingConfig(temperature=0, no_repeat_ngram_size=2)
    ids = run(executor, sampling_config=config, max_tokens=60).output_token_ids[0]
    pairs = list(zip(ids, ids[1:], strict=False))

    assert len(set(pairs)) == len(pairs)


@needs("min_p")
def test_a_min_p_of_one_leaves_only_the_most_probable_token(executor: Executor) -> None:
    assert (
        run(executor, sampling_config=SamplingConfig(min_p=1.0)).output_token_ids
        == run(executor).output_token_ids
    )


@needs("typical_p")
def test_a_tiny_typical_p_leaves_one_token_and_no_chance(executor: Executor) -> None:
    answers = [
        run(executor, sampling_config=SamplingConfig(typical_p=1e-6, seed=seed)).output_token_ids
        for seed in range(3)
    ]
    assert answers[0] == answers[1] == answers[2]


def test_a_top_k_of_one_is_greedy(executor: Executor) -> None:
    assert (
        run(executor, sampling_config=SamplingConfig(top_k=1)).output_token_ids
        == run(executor).output_token_ids
    )
