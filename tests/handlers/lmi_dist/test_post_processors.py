"""Logits post-processors of the embedded executor, over a runner without weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from handlers.lmi_dist import Executor
from lmi.errors import ModelUnusable, Unsupported
from lmi.executor import (
    ExecutorConfig,
    LogitsPostProcessorConfig,
    OutputConfig,
    Request,
    Response,
    Result,
    SamplingConfig,
)
from lmi.settings.config import EngineConfig
from tests.fake_runner import FakeRunner, SharingRunner
from tests.handlers.lmi_dist.test_executor import (
    ask,
    by_sequence,
    collect,
    collect_errors,
    joined,
    one_result,
)
from tests.handlers.lmi_dist.test_speculation import LoopingRunner, steady

GREEDY = SamplingConfig(temperature=0)
BATCHED = Request.BATCHED_POST_PROCESSOR_NAME


@contextmanager
def executor_with(
    config: ExecutorConfig | None = None,
    batched: Any = None,
    runner: FakeRunner | None = None,
    **named: Any,
) -> Iterator[Executor]:
    config = config or ExecutorConfig()
    config.logits_post_processor_config = LogitsPostProcessorConfig(
        processor_map=named, processor_batched=batched
    )
    with Executor(runner or FakeRunner(), config) as executor:
        yield executor


def only(token_id: int) -> Callable[..., None]:
    """A post-processor that leaves one token."""

    def force(request_id: int, logits: Tensor, *_: object) -> None:
        logits[..., torch.arange(logits.shape[-1]) != token_id] = -torch.inf

    return force


def named(name: str, *prompt: int, **fields: Any) -> Request:
    return ask(*prompt, logits_post_processor_name=name, **{"sampling_config": GREEDY, **fields})


def tokens(result: Result) -> list[int]:
    return result.output_token_ids[0]


def test_a_named_post_processor_changes_the_logits_of_the_requests_that_name_it() -> None:
    """The example of the Executor API: a map of callbacks, and requests that name one."""
    with executor_with(fives=only(5), sixes=only(6)) as executor:
        assert executor.capabilities.logits_post_processors == ("fives", "sixes")
        plain, fives, sixes = executor.enqueue_requests(
            [ask(sampling_config=GREEDY), named("fives"), named("sixes")]
        )
        got = collect(executor, 3)

    with Executor(FakeRunner()) as executor:
        alone = tokens(one_result(executor, ask(sampling_config=GREEDY)))

    assert joined(got[fives])[0] == [5] * 8 and joined(got[sixes])[0] == [6] * 8
    assert joined(got[plain])[0] == alone


def test_the_batched_post_processor_is_called_once_a_step_for_all_that_name_it() -> None:
    calls: list[
        tuple[list[int], list[tuple[int, ...]], list[list[list[int]]], Any, list[int | None]]
    ] = []

    def batched(
        ids: list[int], logits: list[Tensor], token_ids: Any, stream: Any, client_ids: Any
    ) -> None:
        calls.append(
            (ids, [tuple(tensor.shape) for tensor in logits], token_ids, stream, client_ids)
        )
        for client_id, tensor in zip(client_ids, logits, strict=True):
            only(client_id)(0, tensor)

    with executor_with(batched=batched) as executor:
        assert executor.capabilities.logits_post_processors == (BATCHED,)

        requests = [named(BATCHED, client_id=number, max_tokens=3) for number in (7, 8)]
        ids = executor.enqueue_requests([*requests, ask(max_tokens=3)])
        got = collect(executor, 3)

    assert [joined(got[open_id])[0] for open_id in ids[:2]] == [[7] * 3, [8] * 3]

    shapes = [(1, 1, 50)] * 2
    # What each has generated, without the prompt
    assert calls == [
        (ids[:2], shapes, [[[7] * length], [[8] * length]], None, [7, 8]) for length in range(3)
    ]


def test_a_named_post_processor_is_told_id_tokens_stream_and_client() -> None:
    calls: list[Any] = []

    def note(
        request_id: int,
        logits: Tensor,
        token_ids: list[list[int]],
        stream: Any,
        client_id: int | None,
    ) -> None:
        calls.append(
            (
                request_id,
                logits.shape,
                logits.dtype,
                [list(token_id) for token_id in token_ids],
                stream,
                client_id,
            )
        )

    with executor_with(note=note) as executor:
        request_id = executor.enqueue_request(named("note", 4, 5, max_tokens=3, client_id=12))
        [response] = collect(executor, 1)[request_id]
        made_tokens = tokens(response.get_result())

    assert calls == [
        (request_id, (1, 1, 50), torch.float32, [made_tokens[:n]], None, 12) for n in range(3)
    ]


def test_the_capabilities_say_what_a_post_processor_gets() -> None:
    with executor_with(fives=only(5)) as executor:
        assert executor.capabilities.logits_post_processor_arrays == "torch"


def test_a_returned_tensor_takes_the_place_of_the_logits() -> None:
    def negative(request_id: int, logits: Tensor, *_: object) -> Tensor:
        return -logits

    runner = FakeRunner()
    with executor_with(negative=negative, runner=runner) as executor:
        assert tokens(one_result(executor, named("negative", max_tokens=1))) == [
            int(runner.logits([1, 2, 3]).argmin())
        ]


def test_an_entry_that_the_batched_one_replaces_takes_the_place_of_the_logits() -> None:
    def negative(ids: list[int], logits: list[Tensor], *_: object) -> None:
        logits[:] = [-tensor for tensor in logits]

    runner = FakeRunner()
    with executor_with(batched=negative, runner=runner) as executor:
        assert tokens(one_result(executor, named(BATCHED, max_tokens=1))) == [
            int(runner.logits([1, 2, 3]).argmin())
        ]


def test_log_probs_are_the_models_and_rules_come_after_the_post_processor() -> None:
    """The order is log-probs, post-processor, bias, bans."""
    logits_seen: list[Tensor] = []

    def note(request_id: int, logits: Tensor, *_: object) -> None:
        logits_seen.append(logits.clone())
        logits[..., 9] = 100.0
        logits[..., 10] = 90.0

    output = OutputConfig(return_log_probs=True, num_prompt_log_probs=1)
    request = named(
        "note", max_tokens=1, bad_words=((9,),), embedding_bias=((4, 50.0),), output_config=output
    )
    runner = FakeRunner()
    with executor_with(note=note, runner=runner) as executor:
        result = one_result(executor, request)

    logits = torch.from_numpy(runner.logits([1, 2, 3]))
    assert tokens(result) == [10] and torch.equal(logits_seen[0][0, 0], logits)
    assert result.log_probs == [[pytest.approx(float(logits.log_softmax(0)[10]))]]
    assert result.prompt_log_probs is not None and len(result.prompt_log_probs) == 3


def broken(*_: object) -> None:
    raise ZeroDivisionError("the user's fault")


def fails_at_third(request_id: int, logits: Tensor, token_ids: list[list[int]], *_: object) -> None:
    if len(token_ids[0]) == 2:
        raise SystemExit("enough")


def breaks_all(request_id: int, logits: Tensor, *_: object) -> None:
    logits.fill_(torch.nan)
    raise ZeroDivisionError("and then")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (breaks_all, "logits post-processor 'broken' failed: ZeroDivisionError: and then"),
        (broken, "logits post-processor 'broken' failed: ZeroDivisionError: the user's fault"),
        (fails_at_third, "logits post-processor 'broken' failed: SystemExit: enough"),
        (lambda *_: 3, "what it returns must be None or a tensor of shape (1, 1, 50), given 3"),
        (lambda *_: torch.zeros(50), "a tensor of shape (1, 1, 50), given (50,)"),
        (lambda i, logits, *_: logits.fill_(torch.nan), "the model's logits are not numbers"),
    ],
)
def test_what_a_post_processor_breaks_ends_its_request_only(processor: Any, message: str) -> None:
    with Executor(FakeRunner()) as executor:
        expected = tokens(one_result(executor, ask(sampling_config=GREEDY)))

    with executor_with(broken=processor, fives=only(5)) as executor:
        requests = [ask(sampling_config=GREEDY), named("broken"), named("fives")]
        plain, bad, fives = executor.enqueue_requests(requests)
        got = collect(executor, 3)

        # The engine goes on
        assert tokens(one_result(executor, ask(sampling_config=GREEDY))) == expected

    assert joined(got[plain])[0] == expected and joined(got[fives])[0] == [5] * 8
    assert [response.is_final for response in got[bad]] == [True] and message in got[bad][
        0
    ].error_msg


def test_what_the_batched_post_processor_breaks_ends_the_requests_that_name_it() -> None:
    with executor_with(batched=broken, fives=only(5)) as executor:
        first, second, fives = executor.enqueue_requests(
            [named(BATCHED), named(BATCHED), named("fives")]
        )
        got = collect(executor, 3)

    assert joined(got[fives])[0] == [5] * 8

    error_texts = ["the batched logits post-processor failed: ZeroDivisionError: the user's fault"]
    assert [
        [response.error_msg for response in got[request_id]] for request_id in (first, second)
    ] == [
        error_texts,
        error_texts,
    ]


def test_a_failure_for_one_sequence_is_one_error_of_the_request() -> None:
    calls = []

    def fail_once(*_: object) -> None:
        calls.append(1)
        raise ValueError("no")

    sampling = SamplingConfig(seed=1, num_return_sequences=3)
    with executor_with(fail_once=fail_once) as executor:
        errors = collect_errors(executor, named("fail_once", sampling_config=sampling))
        executor.enqueue_request(ask())
        collect(executor, 1)

    assert len(errors) == len(calls) == 1


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    with executor_with(fives=only(5), sixes=only(6)) as executor:
        with pytest.raises(
            Unsupported, match=r"logits_post_processor_name .* \['fives', 'sixes'\]"
        ):
            executor.enqueue_request(named("seven"))

        with pytest.raises(Unsupported):
            executor.enqueue_request(named(BATCHED))

    with (
        Executor(FakeRunner()) as executor,
        pytest.raises(Unsupported, match="lmi-dist has no logits post-processors"),
    ):
        executor.enqueue_request(named("fives"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LogitsPostProcessorConfig(processor_map={BATCHED: broken}),
            "must not have the key 'batched'",
        ),
        (
            LogitsPostProcessorConfig(processor_map={"a": 3}),
            r"processor_map\['a'\] must be a function, given 3",
        ),
        (
            LogitsPostProcessorConfig(processor_map={"": broken}),
            "a key of processor_map must be a name, given ''",
        ),
        (
            LogitsPostProcessorConfig(processor_batched="x"),
            "processor_batched must be a function, given 'x'",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_when_the_executor_is_built(
    config: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Executor(FakeRunner(), ExecutorConfig(logits_post_processor_config=config))


def after_last(request_id: int, logits: Tensor, token_ids: list[list[int]], *_: object) -> None:
    """The next token follows from what was generated: a state that a preemption or a draft could
    break.
    """
    logits[..., (7 * sum(token_ids[0]) + len(token_ids[0]) // 2) % 47] += 3.0


def all_after_last(
    ids: list[int], logits: list[Tensor], token_ids: list[list[list[int]]], *_: object
) -> None:
    for beam_logits, ids_of_beams in zip(logits, token_ids, strict=True):
        after_last(0, beam_logits, ids_of_beams)


def in_turn(request_id: int, logits: Tensor, token_ids: list[list[int]], *_: object) -> None:
    only(10 + len(token_ids[0]) % 3)(request_id, logits)


PROCESSORS = LogitsPostProcessorConfig(
    processor_map={"after_last": after_last, "in_turn": in_turn}, processor_batched=all_after_last
)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file that holds PROCESSORS."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from tests.handlers.lmi_dist.test_post_processors import PROCESSORS as "
        "logits_post_processors"
    )
    return str(path)


@pytest.mark.parametrize("kind", [FakeRunner, SharingRunner, LoopingRunner])
def test_answers_with_post_processors_are_those_of_a_lone_run(
    kind: type[FakeRunner], file: str
) -> None:
    """Also after a preemption, with drafts, with several sequences, and beside requests without
    one.
    """
    choice = random.Random(5)
    samplings = [GREEDY, SamplingConfig(seed=2), SamplingConfig(seed=1, num_return_sequences=2)]
    requests = [
        ask(
            *choice.choices(range(50), k=choice.randint(1, 40)),
            logits_post_processor_name=choice.choice(["after_last", BATCHED, None]),
            max_tokens=choice.randint(20, 90),
            sampling_config=choice.choice(samplings),
            output_config=OutputConfig(return_log_probs=True),
        )
        for _ in range(16)
    ]
    nums = [request.sampling_config.num_return_sequences for request in requests]
    with Executor(kind(), EngineConfig(logits_post_processors=file)) as executor:
        lone = []
        for request, num in zip(requests, nums, strict=True):
            executor.enqueue_request(request)
            [responses] = collect(executor, 1).values()
            lone.append(by_sequence(responses, num))

    config = EngineConfig(
        max_num_sequences=8,
        max_kv_cache_tokens=256,
        speculative="ngram",
        logits_post_processors=file,
    )
    with steady(Executor(kind(), config)) as executor:
        ids = executor.enqueue_requests(requests)
        got = collect(executor, len(ids))
        num_preemptions = sum(
            stats_entry.num_preemptions for stats_entry in executor.get_latest_iteration_stats()
        )

    assert [
        by_sequence(got[stats_entry], num) for stats_entry, num in zip(ids, nums, strict=True)
    ] == lone
    assert num_preemptions > 0


def test_a_draft_is_checked_with_the_post_processor_of_each_place(file: str) -> None:
    """With drafts a repeating answer takes fewer steps than it has tokens."""
    runner = LoopingRunner()
    with steady(
        Executor(runner, EngineConfig(speculative="ngram", logits_post_processors=file))
    ) as executor:
        assert tokens(one_result(executor, named("in_turn", max_tokens=60))) == [10, 11, 12] * 20

    assert len(runner.plans) < 40


FILE = """
from lmi.executor import LogitsPostProcessorConfig
from beside_it import TOKEN

def force(request_id, logits, tokens, stream, client_id):
    logits[..., TOKEN] = 1000.0

logits_post_processors = LogitsPostProcessorConfig(processor_map={"force": force})
"""


def test_a_file_in_the_models_folder_holds_post_processors(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "beside_it.py").write_text("TOKEN = 11")
    with Executor(
        FakeRunner(), EngineConfig(logits_post_processors=str(tmp_path / "mine.py"))
    ) as executor:
        assert tokens(one_result(executor, named("force", max_tokens=2))) == [11, 11]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import lmi\n1 / 0", "mine.py, line 2: ZeroDivisionError: division by zero"),
        ("def broken(:", "mine.py: SyntaxError: invalid syntax (mine.py, line 1)"),
        (
            "import missing_package",
            "mine.py, line 1: ModuleNotFoundError: No module named 'missing_package'",
        ),
        ("raise SystemExit(3)", "mine.py, line 1: SystemExit: 3"),
        ("x = 1", "has no attribute 'logits_post_processors'"),
        (
            "logits_post_processors = {}",
            "logits_post_processors must be a LogitsPostProcessorConfig, given {}",
        ),
    ],
)
def test_a_file_that_cannot_be_used_ends_the_start_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ModelUnusable) as error:
        Executor(tmp_path, EngineConfig(logits_post_processors="mine.py"))

    assert (
        message in str(error.value) and "\n" not in str(error.value) and error.value.exit_code == 4
    )


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match=r"mine\.py: FileNotFoundError"):
        Executor(tmp_path, EngineConfig(logits_post_processors="mine.py"))


def test_a_post_processor_gets_all_beams_of_a_search_at_once() -> None:
    calls_seen: list[tuple[Tensor, list[list[int]]]] = []

    def note(request_id: int, logits: Tensor, token_ids: list[list[int]], *_: object) -> None:
        calls_seen.append((logits.clone(), [list(token_id) for token_id in token_ids]))

    runner = FakeRunner()
    sampling = SamplingConfig(3, num_return_sequences=3)
    with executor_with(ExecutorConfig(3), runner=runner, note=note) as executor:
        plain = one_result(executor, ask(max_tokens=4, sampling_config=sampling))
        noted = one_result(executor, named("note", max_tokens=4, sampling_config=sampling))

    assert noted.output_token_ids == plain.output_token_ids
    assert [len(token_ids) for _, token_ids in calls_seen] == [1, 3, 3, 3]

    for logits, token_ids in calls_seen:
        expected = torch.stack(
            [torch.from_numpy(runner.logits([1, 2, 3, *beam])) for beam in token_ids]
        )

        assert torch.equal(logits, expected[None])


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_value_of_a_post_processor_that_is_no_number_ends_its_search_too(value: float) -> None:
    def spoil(request_id: int, logits: Tensor, *_: object) -> None:
        logits[..., -1, 7] = value

    sampling = SamplingConfig(3)
    with executor_with(ExecutorConfig(3), spoil=spoil) as executor:
        plain = ask(max_tokens=4, sampling_config=sampling)
        [failed], [neighbour] = by_id(
            executor, [named("spoil", max_tokens=4, sampling_config=sampling), plain]
        )
        assert (
            neighbour.get_result().output_token_ids == one_result(executor, plain).output_token_ids
        )

    assert "the model's logits are not numbers" in failed.error_msg


def test_a_post_processor_that_bans_a_token_does_what_bad_words_do_in_a_search() -> None:
    sampling = SamplingConfig(4, num_return_sequences=4)
    output = OutputConfig(return_log_probs=True)
    fields: dict[str, Any] = {"max_tokens": 6, "sampling_config": sampling, "output_config": output}
    with executor_with(ExecutorConfig(4), batched=ban_all, ban=ban, broken=broken) as executor:
        plain = one_result(executor, ask(5, **fields))
        token_id = plain.output_token_ids[0][2]
        requests = [
            ask(5, bad_words=((token_id,),), **fields),
            named("ban", 5, client_id=token_id, **fields),
            named(BATCHED, 5, client_id=token_id, **fields),
            named("broken", 5, **fields),
        ]
        *ended, failed = [collected[0] for collected in by_id(executor, requests)]

    expected, *neighbours = [response.get_result() for response in ended]
    assert expected.output_token_ids != plain.output_token_ids

    for neighbour in neighbours:
        assert neighbour.output_token_ids == expected.output_token_ids
        assert sum(neighbour.log_probs or [], []) == pytest.approx(
            sum(expected.log_probs or [], [])
        )

    assert "ZeroDivisionError: the user's fault" in failed.error_msg


def ban(request_id: int, logits: Tensor, token_ids: object, stream: object, client_id: int) -> None:
    logits[..., client_id] = -torch.inf


def ban_all(
    ids: object, logits: list[Tensor], token_ids: object, stream: object, client_ids: list[int]
) -> None:
    for request_logits, client_id in zip(logits, client_ids, strict=True):
        ban(0, request_logits, None, None, client_id)


def by_id(executor: Executor, requests: list[Request]) -> list[list[Response]]:
    ids = executor.enqueue_requests(requests)
    got = collect(executor, len(ids))
    return [got[request_id] for request_id in ids]
