"""Logits and additional outputs of the embedded executor: those of transformers, each row once."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoModelForCausalLM

from handlers.lmi_dist import Executor
from handlers.lmi_dist.plan import Plan
from handlers.lmi_dist.runner import Runner
from lmi.errors import BadConfiguration, Unsupported
from lmi.executor import (
    AdditionalModelOutput,
    FinishReason,
    OutputConfig,
    Request,
    Response,
    Result,
    SamplingConfig,
    Tensor as Rows,
)
from lmi.settings.config import EngineConfig
from tests.fake_runner import FakeRunner, Floats, SharingRunner
from tests.handlers.lmi_dist.play import load_native, load_runner
from tests.handlers.lmi_dist.test_executor import ask, collect, drained, one_result
from tests.handlers.lmi_dist.test_speculation import LoopingRunner, steady
from tests.tiny_models import VOCAB_SIZE, tiny_model

GREEDY = SamplingConfig(temperature=0)
HIDDEN = ("hidden_states", "hidden_states.0", "hidden_states.1")
NAMES = ("logits", *HIDDEN)
EVERYTHING = OutputConfig(
    return_context_logits=True,
    return_generation_logits=True,
    additional_model_outputs=tuple(
        AdditionalModelOutput(name, gather_context=True) for name in NAMES
    ),
)
DECLARED = EngineConfig(additional_outputs=tuple(f"{name}:context" for name in NAMES))
# over the runner without weights:
STATE = OutputConfig(
    return_context_logits=True,
    return_generation_logits=True,
    additional_model_outputs=(AdditionalModelOutput("state", gather_context=True),),
)
WITH_STATE = EngineConfig(additional_outputs=("state:context",))


def array(tensor: Rows | None) -> np.ndarray[Any, Any]:
    assert tensor is not None
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


def results(responses: list[Response]) -> list[Result]:
    return [response.get_result() for response in responses]


def tensors(result: Result) -> dict[str, Rows]:
    """All that a Result carries, by name."""
    flags = {"context logits": result.context_logits, "generation logits": result.generation_logits}
    return (result.additional_outputs or {}) | {
        name: flag for name, flag in flags.items() if flag is not None
    }


def joined(answer: list[Result]) -> dict[str, np.ndarray[Any, Any]]:
    """The rows of all Results together: of the prompt (tokens, …), of generated tokens (1, tokens,
    …).
    """
    parts: dict[str, list[np.ndarray[Any, Any]]] = {}
    for result in answer:
        for name, tensor in tensors(result).items():
            parts.setdefault(name, []).append(array(tensor))

    assert all(len(rows) == 1 for name, rows in parts.items() if name.startswith("context")), (
        "a prompt's rows twice"
    )
    return {
        name: np.concatenate(rows, axis=0 if name.startswith("context") else 1)
        for name, rows in parts.items()
    }


def token_ids(answer: list[Result]) -> list[int]:
    return [token_id for result in answer for token_id in result.output_token_ids[0]]


@cache
def reference_model(family: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        tiny_model(family), attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def reference(family: str, ids: list[int]) -> dict[str, np.ndarray[Any, Any]]:
    """What transformers gives for each token: logits, and hidden states by hooks on its modules."""
    model = reference_model(family)
    rows = dict[str, Tensor]()
    hooks = []
    layers = next(
        list_module
        for list_module in model.modules()
        if isinstance(list_module, torch.nn.ModuleList) and len(list_module) == 2
    )

    def keep(name: str) -> Any:
        def hook(module: object, arguments: object, output: Any) -> None:
            rows[name] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    for layer, module in enumerate(layers):
        hooks.append(module.register_forward_hook(keep(f"hidden_states.{layer}")))

    output = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    for hook in hooks:
        hook.remove()

    rows |= {"logits": output.logits[0], "hidden_states": output.hidden_states[-1][0]}
    return {name: list_module.numpy() for name, list_module in rows.items()}


def check_against_transformers(family: str, request: Request, answer: list[Result]) -> None:
    prompt = list(request.input_token_ids)
    made_tokens = token_ids(answer)
    expected = reference(family, prompt + made_tokens[:-1])
    got = joined(answer)
    num_cached = sum(result.num_cached_tokens for result in answer)
    got |= {"context_logits": got["context logits"], "generation_logits": got["generation logits"]}
    for name, rows in expected.items():
        tolerance = 1e-4 * float(np.abs(rows).max())
        np.testing.assert_allclose(
            got[f"context_{name}"], rows[num_cached : len(prompt)], rtol=0, atol=tolerance
        )
        np.testing.assert_allclose(
            got[f"generation_{name}"], rows[None, len(prompt) - 1 :], rtol=0, atol=tolerance
        )


def runner_of(kind: str, family: str, config: EngineConfig) -> Runner:
    if kind == "native":
        return load_native(tiny_model(family), config, max_length=400)

    return load_runner(tiny_model(family), config, num_slots=8, max_length=400)


FAMILIES = ("llama", "gemma2", "gpt2", "phi", "qwen3", "opt")


@pytest.mark.parametrize(
    ("kind", "family"),
    [*((kind, one) for one in FAMILIES for kind in ("native", "torch")), ("torch", "olmo2")],
)
def test_logits_and_hidden_states_are_those_of_transformers(kind: str, family: str) -> None:
    """Streamed and not, in one batch, with a prompt that is cut into chunks."""
    choice = random.Random(family)
    config = dataclasses.replace(DECLARED, max_prefill_tokens=48)
    requests = [
        Request(
            tuple(choice.choices(range(3, VOCAB_SIZE), k=num_prompt_tokens)),
            choice.randint(1, 12),
            streaming=streaming,
            sampling_config=GREEDY if streaming else SamplingConfig(seed=3),
            output_config=EVERYTHING,
        )
        for num_prompt_tokens in (1, 30, 130)
        for streaming in (True, False)
    ]
    with Executor(runner_of(kind, family, config), config) as executor:
        assert executor.capabilities.additional_outputs == EVERYTHING.additional_model_outputs
        ids = executor.enqueue_requests(requests)
        got = collect(executor, len(ids))

    for request, request_id in zip(requests, ids, strict=True):
        answer = results(got[request_id])
        assert (len(answer) > 1) == (request.streaming and len(token_ids(answer)) > 1)

        for result in answer:
            assert array(result.generation_logits).shape == (
                1,
                len(result.output_token_ids[0]),
                VOCAB_SIZE,
            )

        check_against_transformers(family, request, answer)


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_a_family_without_a_last_norm_has_what_its_last_layer_gives(kind: str) -> None:
    """Its head projects once more, so the two names are one tensor, and transformers has no name
    for it.
    """
    with Executor(runner_of(kind, "opt_post_norm", DECLARED), DECLARED) as executor:
        request = Request((5, 6, 7), 3, sampling_config=GREEDY, output_config=EVERYTHING)
        answer = one_result(executor, request)

    expected = reference("opt_post_norm", [5, 6, 7, *answer.output_token_ids[0][:-1]])
    got = joined([answer])
    for name in ("logits", "hidden_states.0", "hidden_states.1"):
        atol = 1e-4 * float(np.abs(expected[name]).max())
        np.testing.assert_allclose(got[f"context_{name}"], expected[name][:3], rtol=0, atol=atol)
        np.testing.assert_allclose(
            got[f"generation_{name}"], expected[name][None, 2:], rtol=0, atol=atol
        )

    np.testing.assert_array_equal(got["context_hidden_states"], got["context_hidden_states.1"])


@pytest.mark.parametrize(
    ("kind", "family", "name", "nearest"),
    [
        ("native", "llama", "hidden_stats", "hidden_states"),
        ("torch", "llama", "hidden_states.2", "hidden_states"),
        ("native", "llama", "model.norm", ""),
        ("native", "llama", "logit", "logits"),
        ("torch", "olmo2", "hidden_states.3", "hidden_states"),
    ],
)
def test_an_output_that_the_model_has_not_stops_the_start_with_the_nearest(
    kind: str, family: str, name: str, nearest: str
) -> None:
    message = rf"additional_outputs: the model has no output '{name}'; the nearest is {nearest}"
    with pytest.raises(BadConfiguration, match=message):
        runner_of(kind, family, EngineConfig(additional_outputs=(f"{name}:context",)))


def test_a_program_without_outputs_is_the_one_it_was() -> None:
    plain = load_native(tiny_model("llama"), max_length=100)
    normed = load_native(
        tiny_model("llama"), EngineConfig(additional_outputs=("hidden_states",)), max_length=100
    )
    gathered = load_native(
        tiny_model("llama"), EngineConfig(additional_outputs=("hidden_states.0",)), max_length=100
    )
    sizes = [len(runner.program.operations) for runner in (plain, normed, gathered)]
    assert sizes == [sizes[0], sizes[0], sizes[0] + 1] and plain.program.outputs == {}


def test_each_output_comes_only_where_it_is_asked_for() -> None:
    output_names = {
        OutputConfig(): set(),
        OutputConfig(return_context_logits=True): {"context logits"},
        OutputConfig(return_generation_logits=True): {"generation logits"},
        OutputConfig(additional_model_outputs=(AdditionalModelOutput("state"),)): {
            "generation_state"
        },
        OutputConfig(
            additional_model_outputs=(AdditionalModelOutput("logits", gather_context=True),)
        ): {
            "context_logits",
            "generation_logits",
        },
        STATE: {"context logits", "generation logits", "context_state", "generation_state"},
    }
    config = EngineConfig(additional_outputs=("state:context", "logits:context"))
    with Executor(FakeRunner(), config) as executor:
        got = {
            output: set(tensors(one_result(executor, ask(output_config=output))))
            for output in output_names
        }
        plain = one_result(executor, ask())

    assert got == output_names and plain.additional_outputs is None


def test_what_was_not_declared_is_refused_with_what_was() -> None:
    def asking(*outputs: AdditionalModelOutput) -> Request:
        return ask(output_config=OutputConfig(additional_model_outputs=outputs))

    with Executor(FakeRunner(), EngineConfig(additional_outputs=("state",))) as executor:
        with pytest.raises(Unsupported, match=r"additional_model_outputs .* \['state'\]"):
            executor.enqueue_request(asking(AdditionalModelOutput("hidden_states")))

        with pytest.raises(Unsupported, match="state without gather_context"):
            executor.enqueue_request(asking(AdditionalModelOutput("state", gather_context=True)))

        assert set(tensors(one_result(executor, asking(AdditionalModelOutput("state"))))) == {
            "generation_state"
        }


def check_against_runner(
    runner: FakeRunner, request: Request, answer: list[Result], num_absent: int = 0
) -> None:
    """Every row is that of the tokens up to it. Of the prompt the first `num_absent`
    are missing.
    """
    prompt = list(request.input_token_ids)
    made_tokens = token_ids(answer)
    got = joined(answer)
    ids = prompt + made_tokens[:-1]
    logits = np.stack([runner.logits(ids[: end + 1]) for end in range(len(ids))])
    states = np.array([[runner.share(ids[: end + 1])] for end in range(len(ids))], np.float32)
    for flag, name, rows in (("logits", "logits", logits), ("state", "state", states)):
        separator = " " if flag == "logits" else "_"
        np.testing.assert_array_equal(
            got[f"context{separator}{name}"], rows[num_absent : len(prompt)]
        )
        np.testing.assert_array_equal(
            got[f"generation{separator}{name}"], rows[None, len(prompt) - 1 :]
        )


def random_requests(
    num: int, choice: random.Random, max_prompt: int = 60, max_tokens: int = 90
) -> list[Request]:
    return [
        ask(
            *choice.choices(range(50), k=choice.randint(1, max_prompt)),
            max_tokens=choice.randint(1, max_tokens),
            streaming=choice.random() < 0.5,
            return_all_generated_tokens=False,
            sampling_config=choice.choice([GREEDY, SamplingConfig(seed=3)]),
            output_config=replace(STATE, num_prompt_log_probs=choice.choice([None, None, 1])),
        )
        for _ in range(num)
    ]


@pytest.mark.parametrize("kind", [FakeRunner, SharingRunner, LoopingRunner])
def test_each_row_comes_once_also_after_a_preemption_and_with_drafts(
    kind: type[FakeRunner],
) -> None:
    runner = kind()
    requests = random_requests(24, random.Random(1))
    config = EngineConfig(
        max_num_sequences=16,
        max_kv_cache_tokens=256,
        max_prefill_tokens=20,
        speculative="ngram",
        enable_prefix_caching=False,
        additional_outputs=("state:context",),
    )
    with steady(Executor(runner, config)) as executor:
        ids = executor.enqueue_requests(requests)
        got = collect(executor, len(ids))
        assert sum(stats_entry.num_preemptions for stats_entry in drained(executor)) > 0

    has_drafts = any(len(chunk.token_ids) > 1 for plan in runner.plans for chunk in plan.decodes)
    assert has_drafts or kind is not LoopingRunner

    for request, request_id in zip(requests, ids, strict=True):
        check_against_runner(runner, request, results(got[request_id]))


def test_rows_of_a_reused_beginning_are_absent_and_their_number_is_said() -> None:
    """Also where a prompt was preempted, and where requests that run together share one."""
    runner = SharingRunner()
    choice = random.Random(4)
    stems = [choice.choices(range(50), k=num_tokens) for num_tokens in (40, 70)]
    requests = [
        replace(
            plain_request, input_token_ids=(*choice.choice(stems), *plain_request.input_token_ids)
        )
        for plain_request in random_requests(24, choice)
    ]
    config = EngineConfig(
        max_num_sequences=8,
        max_kv_cache_tokens=448,
        max_prefill_tokens=30,
        additional_outputs=("state:context",),
    )
    with Executor(runner, config) as executor:
        num_absent = 0
        for _ in range(2):
            ids = executor.enqueue_requests(requests)
            got = collect(executor, len(ids))
            for request, request_id in zip(requests, ids, strict=True):
                answer = results(got[request_id])
                check_against_runner(runner, request, answer, answer[0].num_cached_tokens)
                num_absent += answer[0].num_cached_tokens

        assert sum(plain_request.num_preemptions for plain_request in drained(executor)) > 0

    assert num_absent > 500


@pytest.mark.parametrize("num_cached", [0, 16])
def test_a_prompt_that_is_preempted_halfway_loses_no_row(num_cached: int) -> None:
    """Its blocks are in the cache by then, but rows cannot be read from there, so it is computed
    again as a whole.
    """
    runner = SharingRunner()
    long = ask(*range(40), *range(40), max_tokens=2, priority=0.1, output_config=STATE)
    config = EngineConfig(
        max_num_sequences=4,
        max_kv_cache_tokens=112,
        max_prefill_tokens=1,
        additional_outputs=("state:context",),
    )
    with Executor(runner, config) as executor:
        if num_cached:
            one_result(executor, ask(*range(num_cached), max_tokens=1))

        first, second = executor.enqueue_requests(
            [ask(max_tokens=60, sampling_config=GREEDY), long]
        )
        got = collect(executor, 2)
        stats = drained(executor)

    assert sum(stat.num_preemptions for stat in stats) > 0
    assert sum(stat.num_reused_tokens for stat in stats) == num_cached
    assert token_ids(results(got[first])) and results(got[second])[0].num_cached_tokens == 0

    check_against_runner(runner, long, results(got[second]))


def test_of_several_sequences_only_the_first_carries_the_prompts_rows() -> None:
    runner = SharingRunner()
    for sampling in (
        SamplingConfig(seed=1, num_return_sequences=3),
        replace(GREEDY, num_return_sequences=3),
    ):
        request = ask(max_tokens=5, sampling_config=sampling, output_config=STATE)
        with Executor(runner, WITH_STATE) as executor:
            executor.enqueue_request(request)
            [responses] = collect(executor, 1).values()

        by_index = {result.sequence_index: result for result in results(responses)}
        check_against_runner(runner, request, [by_index[0]])
        for index in (1, 2):
            assert set(tensors(by_index[index])) == {"generation logits", "generation_state"}

            ids = [1, 2, 3, *by_index[index].output_token_ids[0][:-1]]
            rows = [runner.logits(ids[:end]) for end in range(3, len(ids) + 1)]
            np.testing.assert_array_equal(
                array(by_index[index].generation_logits)[0], np.stack(rows)
            )


class CountedRunner(FakeRunner):
    """Makes as many steps as it is told."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.steps = threading.Semaphore(num_steps)

    def forward(self, plan: Plan) -> Floats:
        assert self.steps.acquire(timeout=60.0)
        return super().forward(plan)


def test_a_cancelled_request_keeps_the_rows_that_it_has_sent() -> None:
    runner = CountedRunner(3)
    request = ask(max_tokens=50, streaming=True, sampling_config=GREEDY, output_config=STATE)
    with Executor(runner, WITH_STATE) as executor:
        request_id = executor.enqueue_request(request)
        responses: list[Response] = []
        while len(responses) < 3:
            responses += executor.await_responses(request_id, 60.0)  # type: ignore[arg-type]

        executor.cancel_request(request_id)
        runner.steps.release(2)
        answer = results(responses + collect(executor, 1)[request_id])

    assert answer[-1].finish_reasons == [FinishReason.CANCELLED]

    check_against_runner(runner, request, answer)


def test_all_generated_tokens_again_are_not_all_rows_again() -> None:
    runner = FakeRunner()
    request = ask(
        streaming=True,
        return_all_generated_tokens=True,
        sampling_config=GREEDY,
        output_config=STATE,
    )
    with Executor(runner, WITH_STATE) as executor:
        executor.enqueue_request(request)
        [responses] = collect(executor, 1).values()

    answer = results(responses)
    assert [array(result.generation_logits).shape[1] for result in answer] == [1] * 8

    last = answer[-1].output_token_ids[0]
    rows = np.stack([runner.logits([1, 2, 3, *last[:end]]) for end in range(8)])
    np.testing.assert_array_equal(joined(answer)["generation logits"][0], rows)


def test_rows_of_a_step_that_is_repeated_come_once() -> None:
    """Memory runs out after the rows of the step are taken: of a prompt's chunk, and of a generated
    token.
    """
    long = ask(*range(40), *range(40), max_tokens=3, output_config=STATE)
    short = ask(output_config=STATE)
    runner = FakeRunner()
    config = EngineConfig(max_prefill_tokens=30, additional_outputs=("state:context",))
    with Executor(runner, config) as executor:
        sample = executor._sampler.sample
        numbers = itertools.count()

        def sample_or_fail(*args: Any) -> Any:
            if next(numbers) == 2:
                raise MemoryError("no memory")

            return sample(*args)

        executor._sampler.sample = sample_or_fail  # type: ignore[method-assign]
        ids = executor.enqueue_requests([short, long])
        got = collect(executor, 2)

    failed, lived = (0, 1) if got[ids[0]][0].has_error() else (1, 0)
    assert got[ids[failed]][0].has_error()

    check_against_runner(runner, (short, long)[lived], results(got[ids[lived]]))


def test_no_bit_of_a_row_depends_on_the_batch_or_on_reuse() -> None:
    """With native kernels; the log-probs of test_equality, for whole rows."""
    choice = random.Random(11)
    requests = [
        Request(
            tuple(choice.choices(range(3, VOCAB_SIZE), k=choice.randint(1, 150))),
            choice.randint(1, 20),
            sampling_config=GREEDY,
            output_config=EVERYTHING,
        )
        for _ in range(8)
    ]
    config = dataclasses.replace(DECLARED, enable_prefix_caching=False)
    with Executor(runner_of("native", "llama", config), config) as executor:
        alone = [joined([one_result(executor, request)]) for request in requests]

    config = dataclasses.replace(DECLARED, max_prefill_tokens=40, max_num_sequences=6)
    with Executor(runner_of("native", "llama", config), config) as executor:
        # The second time most of each prompt is reused
        for _ in range(2):
            ids = executor.enqueue_requests(requests)
            got = collect(executor, len(ids))
            for request_id, lone in zip(ids, alone, strict=True):
                [answer] = results(got[request_id])
                for name, rows in joined([answer]).items():
                    is_context = name.startswith("context")
                    np.testing.assert_array_equal(
                        rows, lone[name][answer.num_cached_tokens :] if is_context else lone[name]
                    )


@pytest.mark.parametrize("kind", [FakeRunner, SharingRunner])
@pytest.mark.parametrize("streaming", [False, True])
def test_each_beam_has_the_rows_of_its_own_tokens(kind: type[FakeRunner], streaming: bool) -> None:
    """Also after a preemption. A shorter beam has zeros behind its rows."""
    runner = kind(context_length=160)
    choice = random.Random(2)
    requests = [
        ask(
            *choice.choices(range(50), k=choice.randint(1, 20)),
            max_tokens=choice.randint(100, 140),
            streaming=streaming,
            end_ids=(0, 1, 2) if number % 2 else (),
            sampling_config=SamplingConfig(3, num_return_sequences=choice.randint(1, 3)),
            output_config=STATE,
        )
        for number in range(8)
    ]
    config = EngineConfig(
        max_beam_width=3,
        max_num_sequences=18,
        max_kv_cache_tokens=480,
        enable_prefix_caching=False,
        additional_outputs=("state:context",),
    )
    with Executor(runner, config) as executor:
        ids = executor.enqueue_requests(requests)
        got = collect(executor, len(ids))
        assert sum(stats_entry.num_preemptions for stats_entry in drained(executor)) > 0

    is_ragged = False
    for request, request_id in zip(requests, ids, strict=True):
        answer = results(got[request_id])
        check_beams(runner, request, answer)
        is_ragged = is_ragged or len({len(beam) for beam in answer[-1].output_token_ids}) > 1

    assert is_ragged


def check_beams(runner: FakeRunner, request: Request, answer: list[Result]) -> None:
    prompt = list(request.input_token_ids)
    logits = np.stack([runner.logits(prompt[: end + 1]) for end in range(len(prompt))])

    assert [result.context_logits is not None for result in answer] == [True] + [False] * (
        len(answer) - 1
    )

    np.testing.assert_array_equal(array(answer[0].context_logits), logits)
    for result in (answer[0], answer[-1]):
        beams = result.output_token_ids
        most = max(map(len, result.output_token_ids))
        states = array((result.additional_outputs or {})["generation_state"])
        logits = array(result.generation_logits)

        assert states.shape == (len(beams), most, 1) and logits.shape == (len(beams), most, 50)

        for place, beam in enumerate(beams):
            prefixes = [[*prompt, *beam[:end]] for end in range(len(beam))]
            expected = np.stack([runner.logits(prefix) for prefix in prefixes])
            np.testing.assert_array_equal(logits[place, : len(beam)], expected)
            np.testing.assert_array_equal(
                states[place, : len(beam), 0], [runner.share(prefix) for prefix in prefixes]
            )

            assert not states[place, len(beam) :].any() and not logits[place, len(beam) :].any()
