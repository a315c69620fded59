"""Guides in the executor: what a request asks for is what it gets, and nobody else notices."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import jsonschema
import lark
import msgspec
import pytest
import tokenizers
import transformers

from handlers.base.token_sequence import sequences_of
from handlers.guides.compiler import Compiled
from handlers.guides.tokenizer_files import read_vocabulary
from handlers.guides.turns import Kept
from handlers.guides.vocabulary import Vocabulary
from handlers.lmi_dist import Executor
from handlers.lmi_dist.guide import Guide
from handlers.lmi_dist.guides import equip, fill_masks
from handlers.lmi_dist.lora_limits import own_options
from handlers.lmi_dist.plan import Plan
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import BadConfiguration, InvalidRequest, Unsupported
from lmi.executor import (
    ErrorKind,
    ExecutorConfig,
    FinishReason,
    GuidedDecodingConfig,
    GuidedDecodingParams,
    GuideType,
    KvCacheConfig,
    OutputConfig,
    Request,
    Response,
    ResponseError,
    Result,
    SamplingConfig,
)
from lmi.settings.config import EngineConfig
from lmi.shared import processes
from tests.fake_runner import FakeRunner, Floats, SharingRunner, log_softmax
from tests.handlers.lmi_dist.test_executor import collect, joined
from tests.handlers.lmi_dist.test_speculation import steady
from tests.system.container import wait_until
from tests.tiny_models import tiny_model

TIMEOUT_S = 120.0
END = 0
TEXTS = ["<end>", *'{}[]":,-. ', *"0123456789", *"abcdefghijklmnopqrstuvwxyz", "ab", "yes"]
# Of the logits: wider than the vocabulary
VOCAB_SIZE = 64
CONFIG = GuidedDecodingConfig(TEXTS, stop_token_ids=[END])
GUIDED = ExecutorConfig(guided_decoding_config=CONFIG)
FIELD = "guided_decoding_params"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "colour": {"enum": ["red", "green"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age"],
}
GRAMMAR = """root ::= sum
sum ::= term (("+" | "-") term)?
term ::= [0-9] | "(" sum ")"
"""
LARK = """start: sum
sum: term (("+" | "-") term)?
term: /[0-9]/ | "(" sum ")"
"""
REGEX = r"[a-c]{2,4}(-\d+)?(x|yes){1,3}"
EXPLODING = (
    '{"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}], "title": "%d"}'
)
# At the first of 2^40 letters, which is not among the masks that are tried
FAILING = (
    "root ::= [abc]{8} x0\n"
    + "".join(f"x{i} ::= x{i + 1} x{i + 1}\n" for i in range(40))
    + 'x40 ::= "i" | endless\nendless ::= "i" endless'
)


def guided(kind: GuideType, guide: str | None = None, **fields: Any) -> Request:
    params = GuidedDecodingParams(kind, guide)
    defaults = {"input_token_ids": (1, 2, 3), "max_tokens": 40, "end_id": END, FIELD: params}
    return Request(**{**defaults, **fields})


regex = partial(guided, GuideType.REGEX)


def sampled(seed: int = 1, **fields: Any) -> SamplingConfig:
    return SamplingConfig(**{"temperature": 1.0, "seed": seed, **fields})


def text_of(token_ids: list[int]) -> str:
    return "".join(TEXTS[token_id] for token_id in token_ids if token_id != END)


def responses_of(executor: Executor, request: Request) -> list[Response]:
    [responses] = collect_ids(executor, [executor.enqueue_request(request)]).values()
    return responses


def collect_ids(executor: Executor, ids: list[int]) -> dict[int, list[Response]]:
    """All Responses of these requests; others may be in flight."""
    got: dict[int, list[Response]] = {request_id: [] for request_id in ids}
    deadline = time.monotonic() + TIMEOUT_S
    for request_id in ids:
        while not got[request_id] or not got[request_id][-1].is_final:
            assert time.monotonic() < deadline, "a request without an end"
            got[request_id] += executor.await_responses(request_id, 1.0)

    return got


def result_of(executor: Executor, request: Request) -> Result:
    [response] = responses_of(executor, request)
    return response.get_result()


def error_of(executor: Executor, request: Request) -> ResponseError:
    [response] = responses_of(executor, request)
    assert response.error is not None, response
    return response.error


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(FakeRunner(VOCAB_SIZE), GUIDED) as executor:
        yield executor


# What a guide allows.


def test_an_answer_fits_its_guide_and_ends_where_nothing_else_may_follow(
    executor: Executor,
) -> None:
    result = result_of(executor, regex("[a-c]{3}"))
    assert re.fullmatch("[a-c]{3}", text_of(result.output_token_ids[0]))
    assert result.finish_reasons == [FinishReason.END_ID] and result.output_token_ids[0][-1] == END


def test_ids_beyond_the_vocabulary_are_never_allowed(executor: Executor) -> None:
    for seed in range(20):
        result = result_of(
            executor, regex(".*", max_tokens=100, sampling_config=sampled(seed, temperature=5.0))
        )
        assert max(result.output_token_ids[0]) < len(TEXTS)


def test_the_stop_tokens_of_the_config_end_a_request_that_names_none(executor: Executor) -> None:
    result = result_of(executor, regex("ab?", end_id=None))
    assert result.finish_reasons == [FinishReason.END_ID]


def test_an_end_id_of_the_request_is_no_text(executor: Executor) -> None:
    """The token 'a' ends this answer, so the guide cannot write it."""
    end_id = TEXTS.index("a")
    result = result_of(executor, regex("[ab]{2}", end_id=end_id))
    assert result.output_token_ids[0] == [
        TEXTS.index("b"),
        TEXTS.index("b"),
        result.output_token_ids[0][-1],
    ]


def test_before_min_tokens_an_answer_goes_on_where_the_guide_lets_it(executor: Executor) -> None:
    [ids] = result_of(
        executor, regex("[a-z]+", sampling_config=sampled(min_tokens=20))
    ).output_token_ids
    assert len(text_of(ids)) >= 20 - ids.count(TEXTS.index("ab")) and END not in ids[:20]


def test_before_min_tokens_end_tokens_fill_what_the_guide_leaves(executor: Executor) -> None:
    result = result_of(executor, regex("[a-c]{3}", sampling_config=sampled(min_tokens=10)))
    assert (
        re.fullmatch("[a-c]{3}", text_of(result.output_token_ids[0]))
        and len(result.output_token_ids[0]) == 11
    )


def test_with_ignore_eos_end_tokens_fill_the_answer(executor: Executor) -> None:
    result = result_of(executor, regex("[a-c]{3}", ignore_eos=True, max_tokens=12))
    assert (
        re.fullmatch("[a-c]{3}", text_of(result.output_token_ids[0]))
        and len(result.output_token_ids[0]) == 12
    )
    assert result.finish_reasons == [FinishReason.LENGTH]


def test_each_of_several_answers_follows_the_guide_by_itself(executor: Executor) -> None:
    request = regex("[a-z]{1,9}", sampling_config=sampled(num_return_sequences=8))
    texts = {
        text_of(response.get_result().output_token_ids[0])
        for response in responses_of(executor, request)
    }
    assert len(texts) > 1 and all(re.fullmatch("[a-z]{1,9}", text) for text in texts)


def test_a_stop_word_ends_an_answer_before_its_guide_is_complete(executor: Executor) -> None:
    stop = (TEXTS.index("b"),)
    result = result_of(executor, regex("[bd]{30}", stop_words=(stop,), sampling_config=sampled()))
    assert (
        result.finish_reasons == [FinishReason.STOP_WORDS] and len(result.output_token_ids[0]) < 30
    )


def test_a_ban_of_all_that_the_guide_allows_ends_only_that_request(executor: Executor) -> None:
    error = error_of(executor, regex("a{3}", bad_words=((TEXTS.index("a"),),), end_id=END))
    assert (error.kind, error.field) == (
        ErrorKind.INVALID,
        FIELD,
    ) and "every token is banned" in error.message


def test_a_guide_that_no_token_can_follow_is_the_fault_of_its_request(executor: Executor) -> None:
    """No token writes an `é`, so after the last `a` nothing may come."""
    error = error_of(executor, regex("a{9}\u00e9"))
    assert (error.kind, error.field) == (ErrorKind.INVALID, FIELD)
    assert "no text of this vocabulary fits it" in error.message


def test_log_probs_stay_those_of_the_model(executor: Executor) -> None:
    output = OutputConfig(return_log_probs=True)
    result = result_of(executor, regex("[a-c]{3}", output_config=output))
    assert result.log_probs is not None
    for place, log_prob in enumerate(result.log_probs[0]):
        before = [1, 2, 3, *result.output_token_ids[0][:place]]
        of_model = log_softmax(FakeRunner(VOCAB_SIZE).logits(before))
        assert log_prob == pytest.approx(
            float(of_model[result.output_token_ids[0][place]]), abs=1e-5
        )


def test_a_mask_has_a_bit_for_each_token() -> None:
    words = Vocabulary(CONFIG, 70).mask_of({0, 31, 32, 69})
    assert words.tolist() == [1 - 2**31, 1, 32]


# What is refused.


@pytest.mark.parametrize(
    ("kind", "guide", "message"),
    [
        (GuideType.REGEX, "[a-c", "unclosed character class"),
        (GuideType.REGEX, r"(a)\1", "backreferences are not supported"),
        (GuideType.REGEX, "a\\", "ends with a backslash"),
        (
            GuideType.EBNF_GRAMMAR,
            "root ::= other",
            'line 1, column 10: Rule "other" is not defined',
        ),
        (GuideType.EBNF_GRAMMAR, "root ::= root", "no text of this vocabulary fits it"),
        (GuideType.EBNF_GRAMMAR, r'root ::= "a\ud800"', r"column 12: \ud800 is no character"),
        (GuideType.EBNF_GRAMMAR, 'root ::= (= "a") "b"', "line 1, column 11: = is not known"),
        (
            GuideType.EBNF_GRAMMAR,
            'root ::= TagDispatch(("a", b))',
            "line 1, column 26: , is not known",
        ),
        (GuideType.EBNF_GRAMMAR, "start: a", 'line 1, column 8: unknown name: "a"'),
        (
            GuideType.EBNF_GRAMMAR,
            '%llguidance {}\nstart: "a"',
            "line 1, column 1: %llguidance is not followed here",
        ),
        (GuideType.EBNF_GRAMMAR, "root ::= <|end|>", "line 1, column 10: < is not known"),
        (
            GuideType.EBNF_GRAMMAR,
            'root ::= "a"{' + "9" * 5000 + "}",
            "line 1, column 13: a count has too many digits",
        ),
        (
            GuideType.EBNF_GRAMMAR,
            'root ::= "a"{2,\t1\n}',
            "line 1, column 13: {2, 1 } counts backwards",
        ),
        (GuideType.EBNF_GRAMMAR, "root ::= " + "(" * 3000, "more than 100 parentheses"),
        (GuideType.JSON_SCHEMA, "{", "must be a structure"),
        (GuideType.JSON_SCHEMA, '{"type": "colour"}', "type 'colour' cannot be followed"),
        (GuideType.JSON_SCHEMA, '{"type": "string", "pattern": "(?=a)b"}', "look-ahead"),
        (GuideType.JSON_SCHEMA, '{"not": {"multipleOf": 2}}', "not cannot be followed"),
        (GuideType.JSON_SCHEMA, '{"type": "object", "required": 5}', "required of a wrong type"),
        (GuideType.JSON_SCHEMA, '{"type": "string", "pattern": 5}', "pattern of a wrong type"),
        (
            GuideType.JSON_SCHEMA,
            '{"type": "object", "required": [["a"]]}',
            "required of a wrong type",
        ),
        (GuideType.JSON_SCHEMA, '{"$ref": "#"}', "no text of this vocabulary fits it"),
        (GuideType.JSON_SCHEMA, "[" * 100_000, "so many levels"),
    ],
)
def test_a_wrong_guide_is_refused_with_its_reason(
    executor: Executor, kind: GuideType, guide: str, message: str
) -> None:
    error = error_of(executor, guided(kind, guide))
    assert (error.kind, error.field) == (ErrorKind.INVALID, FIELD) and message in error.message
    assert "lark" not in error.message and "<" not in error.message.replace("< is not", ""), (
        "Lark is nothing to a client"
    )


def test_without_an_end_id_a_guide_is_refused(executor: Executor) -> None:
    result_of(executor, regex("a"))
    compiled = executor._guides.outcomes.of(GuidedDecodingParams(GuideType.REGEX, "a")).result()
    assert isinstance(compiled, Compiled)

    vocabulary = Vocabulary(GuidedDecodingConfig(TEXTS), VOCAB_SIZE)
    [sequence] = sequences_of(EmbeddedSequence, 1, regex("a", end_id=None), 100)
    equip(sequence, Compiled(compiled.matcher, vocabulary))

    assert sequence.error is not None and (sequence.error.kind, sequence.error.field) == (
        ErrorKind.INVALID,
        FIELD,
    )
    assert "needs an end id" in sequence.error.message


def exploding(number: int, **fields: Any) -> Request:
    return guided(GuideType.JSON_SCHEMA, EXPLODING % number, **fields)


def test_an_exploding_guide_is_refused_and_holds_nobody_up(executor: Executor) -> None:
    request_id = executor.enqueue_request(exploding(0))
    plain = Request(input_token_ids=(1, 2), max_tokens=5)
    assert len(result_of(executor, plain).output_token_ids[0]) == 5
    assert text_of(result_of(executor, regex("a{7}")).output_token_ids[0]) == "a" * 7
    assert executor.get_num_responses_ready(request_id) == 0, (
        "it must explode for longer than the others took"
    )
    [[response]] = collect_ids(executor, [request_id]).values()
    assert response.error is not None and response.error.kind is ErrorKind.INVALID
    assert "to compile it takes more than" in response.error.message


def test_a_first_guide_waits_behind_no_other_client_s_costly_ones(executor: Executor) -> None:
    hogs = executor.enqueue_requests([exploding(number, client_id=1) for number in range(20, 40)])
    assert text_of(result_of(executor, regex("b{7}", client_id=2)).output_token_ids[0]) == "b" * 7
    assert sum(executor.get_num_responses_ready(one) for one in hogs) <= 8, (
        "half of them must still wait"
    )
    for one in hogs:
        executor.cancel_request(one)

    collect_ids(executor, hogs)


def test_a_guide_that_is_slow_to_follow_ends_only_its_request(executor: Executor) -> None:
    result_of(executor, regex("a"))
    compiled = executor._guides.outcomes.of(GuidedDecodingParams(GuideType.REGEX, "a")).result()
    [slow], [further_sequence] = (
        sequences_of(EmbeddedSequence, number, regex("a"), 100) for number in (1, 2)
    )
    for sequence in (slow, further_sequence):
        equip(sequence, compiled)

    cast(Guide, slow.guide).note(slow, 0.06)
    cast(Guide, further_sequence.guide).note(further_sequence, 0.04)

    assert (
        slow.error is not None
        and slow.error.kind is ErrorKind.INVALID
        and "quick to follow" in slow.error.message
    )
    assert further_sequence.error is None


def test_a_guide_that_fails_in_the_middle_of_an_answer_ends_only_its_request_with_an_error(
    executor: Executor,
) -> None:
    """After it llguidance allows its end ids, as after a whole answer."""
    failing = executor.enqueue_request(guided(GuideType.EBNF_GRAMMAR, FAILING, streaming=True))
    neighbour_id = executor.enqueue_request(regex("[a-z]{30}"))
    got = collect_ids(executor, [failing, neighbour_id])
    *texts, last = got[failing]

    assert last.error is not None and (last.error.kind, last.error.field) == (
        ErrorKind.INVALID,
        FIELD,
    )
    assert (
        "must be a structure that lmi can follow: parser error: Too many items"
        in last.error.message
    )
    assert re.fullmatch(
        "[abc]{8}i", "".join(text_of(one.get_result().output_token_ids[0]) for one in texts)
    )
    assert len(text_of(got[neighbour_id][-1].get_result().output_token_ids[0])) == 30


def test_a_guide_of_which_a_copy_has_failed_is_compiled_again(executor: Executor) -> None:
    params = GuidedDecodingParams(GuideType.EBNF_GRAMMAR, FAILING + " ")
    for _ in range(2):
        num_before = executor._guides.outcomes.num_compiled
        error_of(executor, guided(params.guide_type, params.guide))
        assert executor._guides.outcomes.num_compiled == num_before + 1


class BrokenGuide:
    """One of which nobody has thought."""

    mask = None

    def is_behind(self, sequence: EmbeddedSequence) -> bool:
        return True

    def follow(self, sequence: EmbeddedSequence) -> None:
        raise RuntimeError("Check failed: (state) is false")

    def note(self, sequence: EmbeddedSequence, spent_s: float) -> None:
        return None


def test_a_guide_that_fails_ends_only_its_request(executor: Executor) -> None:
    result_of(executor, regex("a"))
    compiled = executor._guides.outcomes.of(GuidedDecodingParams(GuideType.REGEX, "a")).result()
    [broken], [whole] = (
        sequences_of(EmbeddedSequence, number, regex("a"), 100) for number in (1, 2)
    )
    broken.guide = BrokenGuide()
    equip(whole, compiled)
    masks = fill_masks([broken, whole], [0, 1], VOCAB_SIZE)

    assert (
        broken.error is not None and "Check failed" in broken.error.message and whole.error is None
    )
    assert masks[1].tolist() == compiled.vocabulary.mask_of([TEXTS.index("a")]).tolist()


def test_guides_catch_up_while_the_model_runs() -> None:
    class WaitingRunner(FakeRunner):
        def forward(self, plan: Plan) -> Floats:
            guided = [
                (tracked.guide, tracked)
                for tracked in executor._scheduler.running
                if tracked.num_generated
            ]
            wait_until(
                lambda: not any(guide.is_behind(tracked) for guide, tracked in guided),
                "all have followed",
                TIMEOUT_S,
            )
            return super().forward(plan)

    executor = Executor(WaitingRunner(VOCAB_SIZE), GUIDED)
    with executor:
        got = collect_ids(executor, executor.enqueue_requests([regex("[a-c]{4}")] * 3))

    for [response] in got.values():
        assert re.fullmatch("[a-c]{4}", text_of(response.get_result().output_token_ids[0]))


def test_a_request_can_be_cancelled_and_time_out_while_its_guide_is_compiled(
    executor: Executor,
) -> None:
    cancelled = executor.enqueue_request(exploding(1))
    late = executor.enqueue_request(exploding(2, allotted_time_ms=100))
    executor.cancel_request(cancelled)
    got = collect_ids(executor, [cancelled, late])
    assert [
        got[request_id][-1].get_result().finish_reasons for request_id in (cancelled, late)
    ] == [
        [FinishReason.CANCELLED],
        [FinishReason.TIMED_OUT],
    ]


def test_the_compilation_of_a_guide_ends_when_the_last_request_that_waits_for_it_has_left(
    executor: Executor,
) -> None:
    result_of(executor, regex("a"))
    pid = compiling_process(executor)
    wait_until(
        lambda: processes.descendants(pid) == [], "the forks of other tests have ended", TIMEOUT_S
    )
    for number in range(4, 9):
        ids = executor.enqueue_requests([exploding(number)] * 2)
        wait_until(
            lambda: len(processes.descendants(pid)) == 1, "its fork compiles the guide", TIMEOUT_S
        )
        forks = processes.descendants(pid)
        executor.cancel_request(ids[0])
        collect_ids(executor, [ids[0]])
        if processes.descendants(pid) == forks:
            # Else it has reached its own limit meanwhile, as on a busy machine it may
            break

        collect_ids(executor, [ids[1]])
    else:
        raise AssertionError("the fork ended with the first of its two requests")

    executor.cancel_request(ids[1])
    wait_until(lambda: processes.descendants(pid) == [], "the fork ends", 1.0)


def test_an_option_gives_json_its_spaces() -> None:
    config = EngineConfig(options={"disable_any_whitespace": "false"})
    with pytest.raises(BadConfiguration, match="option.disable_any_whitespace=perhaps: allowed is"):
        own_options({"disable_any_whitespace": "perhaps"})

    request = guided(
        GuideType.JSON_SCHEMA,
        '{"type": "array", "items": {"const": 1}, "minItems": 9}',
        end_id=None,
    )
    with Executor(tiny_model("llama"), config) as loose:
        tokenizer = tokenizers.Tokenizer.from_file(str(tiny_model("llama") / "tokenizer.json"))
        bias = tuple((token_id, 20.0) for token_id in [tokenizer.token_to_id("\u0120")])
        result = result_of(loose, msgspec.structs.replace(request, embedding_bias=bias))

        assert " " in tokenizer.decode(result.output_token_ids[0])


def compiling_process(executor: Executor) -> int:
    process = executor._guides._compiler._process
    assert process is not None
    return process.popen.pid


# The guides of an engine.


def test_requests_with_the_same_guide_compile_it_once(executor: Executor) -> None:
    num_before = executor._guides.outcomes.num_compiled
    requests = [regex("same[0-9]{2}", sampling_config=sampled(seed)) for seed in range(8)]
    got = collect_ids(executor, executor.enqueue_requests(requests))
    later = result_of(executor, requests[0])
    assert executor._guides.outcomes.num_compiled == num_before + 1
    assert got[min(got)][0].get_result().output_token_ids == later.output_token_ids


def test_guides_are_kept_up_to_a_number_and_a_size() -> None:
    cache = Kept[Exception](max_num=3, max_chars=100)
    guides = [GuidedDecodingParams(GuideType.REGEX, str(number) * 20) for number in range(6)]
    for guide in guides[:3]:
        cache.put(guide, InvalidRequest("wrong"))

    # Now it was used last
    cache.move_to_end(guides[0])
    cache.put(guides[3], InvalidRequest("wrong"))

    assert list(cache) == [guides[2], guides[0], guides[3]]

    cache.put(GuidedDecodingParams(GuideType.REGEX, "x" * 90), InvalidRequest("wrong"))
    assert len(cache) == 1 and cache.num_chars == 90


def test_the_process_is_started_again_after_its_end_and_ends_with_the_engine() -> None:
    executor = Executor(FakeRunner(VOCAB_SIZE), GUIDED)
    result_of(executor, regex("a"))
    first = executor._guides._compiler._process
    assert first is not None

    os.kill(first.popen.pid, signal.SIGKILL)
    first.popen.wait()
    assert text_of(result_of(executor, regex("b")).output_token_ids[0]) == "b"

    request_id = executor.enqueue_request(exploding(3))
    executor.shutdown()
    [response] = executor.await_responses(request_id, TIMEOUT_S)

    assert isinstance(response, Response) and response.get_result().finish_reasons == [
        FinishReason.CANCELLED
    ]

    second = executor._guides._compiler._process
    assert second is not None and second is not first and second.popen.poll() is not None


def test_a_guide_whose_process_is_ended_meanwhile_is_not_refused_for_good(
    executor: Executor,
) -> None:
    result_of(executor, regex("a"))
    compiler = executor._guides._compiler
    assert compiler._process is not None

    popen, compiler._process.popen = compiler._process.popen, cast(Any, StillRunning())
    os.kill(popen.pid, signal.SIGKILL)
    popen.wait()
    [response] = collect_ids(executor, [executor.enqueue_request(regex("b"))]).popitem()[1]
    compiler._process.popen = popen

    assert response.error is not None and response.error.kind is ErrorKind.UNAVAILABLE, (
        response.error
    )
    assert text_of(result_of(executor, regex("b")).output_token_ids[0]) == "b"


class StillRunning:
    """A process that is being ended and has no exit status yet."""

    def poll(self) -> None:
        return None


# Beside others.


class LoopingRunner(SharingRunner):
    """The next token depends only on the last one, so that answers repeat and drafts pay."""

    def forward(self, plan: Any) -> Floats:
        time.sleep(0.003)
        return super().forward(plan)

    def _logits(self, state: int, token_id: int) -> Floats:
        return super()._logits(token_id % 11, token_id)


def mixed(num: int) -> list[Request]:
    """Random requests, most of them with a guide."""
    choice = random.Random(7)
    guides = ["(abc|x){50}", "[a-f]{1,60}", "([0-9],){40}", None]
    return [
        Request(
            input_token_ids=tuple(choice.choices(range(1, 50), k=choice.randint(1, 60))),
            max_tokens=choice.randint(20, 80),
            end_id=END,
            sampling_config=choice.choice([SamplingConfig(temperature=0), sampled(number)]),
            output_config=OutputConfig(return_log_probs=True),
            guided_decoding_params=None
            if guide is None
            else GuidedDecodingParams(GuideType.REGEX, guide),
            streaming=choice.random() < 0.5,
        )
        for number, guide in ((number, choice.choice(guides)) for number in range(num))
    ]


def test_every_answer_is_the_one_the_request_gets_alone() -> None:
    """In any batch, with drafts, with shared prefixes and after a preemption, guided or not."""
    requests = mixed(16)
    with Executor(LoopingRunner(VOCAB_SIZE), GUIDED) as executor:
        alone = [joined(responses_of(executor, request)) for request in requests]

    runner = LoopingRunner(VOCAB_SIZE)
    config = ExecutorConfig(
        max_batch_size=8,
        kv_cache_config=KvCacheConfig(max_tokens=256),
        guided_decoding_config=CONFIG,
    )
    with steady(Executor(runner, config)) as executor:
        executor._scheduler.drafts = True  # a server's option
        for request in requests:
            # Now its guide is compiled
            responses_of(executor, msgspec.structs.replace(request, max_tokens=1))

        # And all start together
        ids = executor.enqueue_requests(requests)
        got = collect(executor, len(requests))
        stats = executor.get_latest_iteration_stats()

    assert [joined(got[request_id]) for request_id in ids] == alone
    assert sum(request_id.num_preemptions for request_id in stats) > 0
    assert any(len(chunk.token_ids) > 1 for plan in runner.plans for chunk in plan.decodes), (
        "drafts"
    )


# The vocabulary.


def test_an_engine_without_a_config_refuses_guides_and_says_why() -> None:
    with Executor(tiny_model("llama")) as executor:
        assert executor.info.capabilities.guided_decoding == ()
        with pytest.raises(Unsupported, match="no GuidedDecodingConfig was given"):
            executor.enqueue_request(regex("a"))


def test_a_folder_without_a_tokenizer_is_the_reason(tmp_path: Any) -> None:
    for file in tiny_model("llama").iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)

    with (
        Executor(tmp_path, EngineConfig()) as executor,
        pytest.raises(Unsupported, match="the model's folder has no tokenizer.json"),
    ):
        executor.enqueue_request(regex("a"))


def test_an_engine_starts_without_llguidance_and_says_so() -> None:
    code = (
        "import sys; sys.modules['llguidance'] = None\n"
        "from handlers.lmi_dist import Executor\n"
        "from lmi.executor import Request\n"
        "from lmi.settings.config import EngineConfig\n"
        f"with Executor({str(tiny_model('llama'))!r}, EngineConfig()) as executor:\n"
        "    print(executor.info.capabilities.why_no_guides)\n"
        "    i = executor.enqueue_request(Request(input_token_ids=(1, 2), max_tokens=2))\n"
        "    assert executor.await_responses(i)[0].result is not None\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ended.stdout.strip() == "llguidance is not installed"


@pytest.mark.parametrize("folder", ["demo", "llama"])
def test_the_config_of_a_folder_is_what_the_recipe_finds(folder: str) -> None:
    path = "handlers/lmi_dist/demo" if folder == "demo" else tiny_model(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    encoded_vocab = tokenizer.get_vocab()
    encoded_vocab = [token for token, _ in sorted(encoded_vocab.items(), key=lambda x: x[1])]
    tokenizer_str = tokenizer.backend_tokenizer.to_str()
    stop_token_ids = [tokenizer.eos_token_id]
    tokenizer_config = read_vocabulary(path)

    assert (tokenizer_config.encoded_vocab, tokenizer_config.stop_token_ids) == (
        encoded_vocab,
        stop_token_ids,
    )
    assert without_post_processor(tokenizer_config.tokenizer_str) == without_post_processor(
        tokenizer_str
    )


def without_post_processor(tokenizer_str: str | None) -> dict[str, Any]:
    """transformers writes an empty one where there is none. It says nothing of what
    tokens write.
    """
    assert tokenizer_str is not None
    return {**json.loads(tokenizer_str), "post_processor": None}


# On a model.


@pytest.fixture(scope="module")
def model() -> Iterator[Executor]:
    with Executor(tiny_model("llama"), EngineConfig(max_num_sequences=64)) as executor:
        yield executor


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tiny_model("llama") / "tokenizer.json"))


def is_json(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def follows_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def follows_regex(text: str) -> bool:
    return re.fullmatch(REGEX, text) is not None


def follows_grammar(text: str) -> bool:
    return lark.Lark(LARK).parse(text) is not None


@pytest.mark.parametrize(
    ("kind", "guide", "is_valid"),
    [
        (GuideType.JSON, None, is_json),
        (GuideType.JSON_SCHEMA, json.dumps(SCHEMA), follows_schema),
        (GuideType.REGEX, REGEX, follows_regex),
        (GuideType.EBNF_GRAMMAR, GRAMMAR, follows_grammar),
    ],
)
def test_a_thousand_sampled_answers_fit_their_guide(
    model: Executor,
    tokenizer: tokenizers.Tokenizer,
    kind: GuideType,
    guide: str | None,
    is_valid: Any,
) -> None:
    # Without them a random model rarely comes to an end
    weights = {
        "}": 8.0,
        '"': 9.0,
        "]": 8.0,
        ")": 8.0,
    }
    bias = tuple((tokenizer.token_to_id(text), weight) for text, weight in weights.items())
    requests = [
        guided(
            kind,
            guide,
            sampling_config=sampled(seed, temperature=1.5),
            embedding_bias=bias,
            max_tokens=150,
        )
        for seed in range(1050)
    ]
    texts = []
    for responses in collect_ids(model, model.enqueue_requests(requests)).values():
        result = responses[-1].get_result()
        if result.finish_reasons == [FinishReason.END_ID]:
            texts.append(tokenizer.decode(result.output_token_ids[0]))

    assert len(texts) >= 1000, "most answers must come to their end"
    assert all(map(is_valid, texts))
    assert len(set(texts)) > 100, "they must differ"


SCHEMAS: list[dict[str, Any]] = [
    {"type": "number", "minimum": -3.5, "maximum": 12.25},
    {"type": "integer", "exclusiveMinimum": -5, "maximum": 1007},
    {"type": "string", "pattern": r"^[a-c]{2}\d+$"},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "format": "uuid"},
    {"type": "string", "enum": ["x", 'y\u00e9"z']},
    {
        "type": "array",
        "prefixItems": [{"const": 1}],
        "items": {"type": "null"},
        "minItems": 3,
        "maxItems": 4,
    },
    {"type": "array", "items": {"enum": ["a", 1, None, {"b": [2]}]}, "minItems": 1, "maxItems": 3},
    {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}},
        "minProperties": 1,
    },
    {
        "properties": {"b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": {"type": "null"},
    },
    {
        "type": "object",
        "patternProperties": {"^a+$": {"type": "integer"}},
        "additionalProperties": False,
    },
    {
        "type": "object",
        "propertyNames": {"pattern": "^[a-f]{1,3}$"},
        "additionalProperties": {"type": "boolean"},
    },
    {
        "$defs": {"n": {"properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"const": 1}]}}}},
        "$ref": "#/$defs/n",
    },
    {"type": ["integer", "null"]},
    {"allOf": [{"type": "integer", "minimum": 2, "maximum": 30}]},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: "-".join(schema))
def test_an_answer_fits_its_schema(
    model: Executor, tokenizer: tokenizers.Tokenizer, schema: dict[str, Any]
) -> None:
    bias = tuple((tokenizer.token_to_id(text), 9.0) for text in '}"]')
    sampling = sampled(temperature=1.5, num_return_sequences=32)
    request = guided(
        GuideType.JSON_SCHEMA, json.dumps(schema), sampling_config=sampling, embedding_bias=bias
    )
    results = [result.get_result() for result in responses_of(model, request)]
    ids = [
        result.output_token_ids[0]
        for result in results
        if result.finish_reasons == [FinishReason.END_ID]
    ]
    assert len(ids) > 10, "most answers must come to their end"

    for result in ids:
        jsonschema.validate(json.loads(tokenizer.decode(result)), schema)
