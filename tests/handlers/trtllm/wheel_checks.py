"""What is checked where TensorRT-LLM is installed: its surface against the facts, and our Executor
on a small model.

`test_wheel.py` runs the checks under pytest; `scripts/try-trtllm` runs them without it and prints a
table. A check raises AssertionError. Nobody has run them on the real package yet. Under pytest they
also run on the double, and on the embedded engine, which shows that the checks themselves work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmi.errors import LmiError
from lmi.executor import (
    Executor,
    FinishReason,
    GuidedDecodingParams,
    GuideType,
    Request,
    Response,
    Result,
    SamplingConfig,
)
from lmi.settings.config import EngineConfig
from lmi.settings.handler import folder_of
from tests.handlers.trtllm.facts import PROFILES, Facts, load
from tests.handlers.trtllm.surface import (
    class_differences,
    enum_differences,
    export_differences,
    function_differences,
)
from tests.tiny_models import END_ID, VOCAB_SIZE, save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# For one answer; the first ones of a new engine may wait for kernels
TIMEOUT_S = 300.0
CONTEXT_LENGTH = 1024
PROMPT = tuple(range(40, 52))
PROMPTS = (PROMPT, (7,), (300, 12, 12, 12, 299), tuple(range(60, 100)))
GREEDY = SamplingConfig(temperature=0)
# of the distance between the best logit and their mean: what rounding to bf16 may exchange is
# nearer
TIE = 0.05
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "answer": {"enum": ["yes", "no"]}},
    "required": ["sure", "answer"],
    "additionalProperties": False,
}


# What is there.


def why_not_the_package() -> str | None:
    """Why there is no real TensorRT-LLM here, or None. A double is pure Python."""
    folder = folder_of("tensorrt_llm")
    if folder is None:
        return "TensorRT-LLM is not installed"

    if next(folder.rglob("*.so"), None) is None:
        return (
            f"{folder} has no compiled code: it is a double, or a stub that has not fetched "
            f"the "
            f"package"
        )

    return None


def why_no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU"


def profile_name() -> str:
    """The facts that are nearest to the installed package."""
    from tensorrt_llm import LLM

    from handlers.lmi_trtllm.profile import installed

    return PROFILES[installed(LLM.generate_async).takes_priority]


# Its surface.


def surface_checks(profile: str) -> dict[str, Callable[[], None]]:
    """The comparisons with the facts of a profile, by what they compare."""
    facts = load(profile)
    sources: dict[str, Callable[[], Iterator[str]]] = {
        "names of modules": lambda: export_differences(facts),
        "enumerations": lambda: enum_differences(facts),
        "functions": lambda: function_differences(facts),
    }
    sources |= {name: _class_source(facts, name) for name in facts.classes}
    return {name: _no_difference(source) for name, source in sources.items()}


def _class_source(facts: Facts, name: str) -> Callable[[], Iterator[str]]:
    return lambda: class_differences(name, facts.cls(name))


def _no_difference(source: Callable[[], Iterator[str]]) -> Callable[[], None]:
    def check() -> None:
        differences = list(source())
        assert not differences, "; ".join(differences)

    return check


# Its answers.


def small_model(folder: Path) -> Path:
    """A random Llama in bf16 with a tokenizer. Its heads are of a width that every kernel has."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=1,
        eos_token_id=END_ID,
    )
    torch.manual_seed(4)
    model = LlamaForCausalLM(config).eval()
    # Wider than at a start of training, so that the best token is clear
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.08)

    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def config_of_checks(handler: str = "trtllm") -> EngineConfig:
    return EngineConfig(
        handler=handler,
        max_num_sequences=8,
        max_sequence_length=CONTEXT_LENGTH,
        max_kv_cache_tokens=8 * CONTEXT_LENGTH,
        max_beam_width=1,
    )


def greedy_tokens_are_those_of_transformers(executor: Executor, model: Path) -> None:
    """Each token is the best of transformers' logits after the tokens before it, or nearly tied
    with the best.
    """
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    reference.to("cuda" if torch.cuda.is_available() else "cpu")
    for prompt in PROMPTS:
        token_ids = tokens(executor, input_token_ids=prompt, max_tokens=24)
        assert len(token_ids) == 24, f"{len(token_ids)} tokens of 24"
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *token_ids]], device=reference.device)
            logits = reference(ids).logits[0, len(prompt) - 1 : -1].float().cpu()

        best = logits.max(-1).values
        gaps = (best - logits[torch.arange(24), torch.tensor(token_ids)]) / (best - logits.mean(-1))
        assert gaps.max() <= TIE, f"after {prompt}: {token_ids} leave the best by {gaps.tolist()}"
        assert (gaps == 0).sum() >= 18, (
            f"after {prompt}: only {(gaps == 0).sum()} of 24 tokens are the best"
        )


def a_streamed_answer_is_the_whole_one(executor: Executor, model: Path) -> None:
    whole = tokens(executor, max_tokens=200)
    parts = results(executor, ask(max_tokens=200, streaming=True))

    assert len(parts) > 1, "all tokens came at once"
    assert [token for part in parts for token in part.output_token_ids[0]] == whole
    assert [part.is_final for part in parts] == [False] * (len(parts) - 1) + [True]


def the_end_token_and_the_limit_end_an_answer(executor: Executor, model: Path) -> None:
    [last] = results(executor, ask(max_tokens=6))
    assert last.finish_reasons == [FinishReason.LENGTH] and len(last.output_token_ids[0]) == 6

    token_ids = last.output_token_ids[0]
    [ended] = results(executor, ask(max_tokens=6, end_id=token_ids[-1]))

    assert ended.finish_reasons == [FinishReason.END_ID]
    assert ended.output_token_ids[0] == token_ids[: token_ids.index(token_ids[-1]) + 1]


def a_stop_word_of_two_tokens_ends_an_answer(executor: Executor, model: Path) -> None:
    token_ids = tokens(executor, max_tokens=12)
    [stopped] = results(executor, ask(max_tokens=12, stop_words=(tuple(token_ids[4:6]),)))

    assert stopped.finish_reasons == [FinishReason.STOP_WORDS]
    assert stopped.output_token_ids[0][-2:] == token_ids[4:6]


def a_cancelled_request_ends_and_the_next_one_is_answered(executor: Executor, model: Path) -> None:
    expected = tokens(executor, max_tokens=8)
    request_id = executor.enqueue_request(
        ask(max_tokens=CONTEXT_LENGTH - len(PROMPT), streaming=True)
    )
    parts = [response.get_result() for response in responses(executor, request_id)]
    executor.cancel_request(request_id)
    while not parts[-1].is_final:
        parts += [response.get_result() for response in responses(executor, request_id)]

    assert parts[-1].finish_reasons == [FinishReason.CANCELLED]
    assert tokens(executor, max_tokens=8) == expected


def a_request_for_two_sequences_has_two_different_answers(executor: Executor, model: Path) -> None:
    sampling = SamplingConfig(temperature=2.0, num_return_sequences=2)
    parts = results(executor, ask(max_tokens=32, sampling_config=sampling))

    assert sorted(part.sequence_index for part in parts) == [0, 1]
    assert [part.is_final for part in parts] == [False, True]

    first, second = (part.output_token_ids[0] for part in parts)
    assert len(first) == len(second) == 32 and first != second


def an_answer_follows_a_json_schema(executor: Executor, model: Path) -> None:
    assert GuideType.JSON_SCHEMA in executor.capabilities.guided_decoding, (
        executor.capabilities.why_no_guides
    )

    guide = GuidedDecodingParams(GuideType.JSON_SCHEMA, json.dumps(SCHEMA))
    [answer] = results(executor, ask(max_tokens=200, end_id=END_ID, guided_decoding_params=guide))
    text = tokenizer_of(model).decode(answer.output_token_ids[0], skip_special_tokens=True)
    value = json.loads(text)

    assert (
        value.keys() == {"sure", "answer"}
        and value["answer"] in ("yes", "no")
        and type(value["sure"]) is bool
    )


def bad_requests_are_refused_and_good_ones_beside_them_answered(
    executor: Executor, model: Path
) -> None:
    expected = tokens(executor, max_tokens=16)
    running = executor.enqueue_request(ask(max_tokens=16))
    wrong = GuidedDecodingParams(GuideType.JSON_SCHEMA, '{"type": "nonsense"}')
    for fields in (
        {"input_token_ids": (5, VOCAB_SIZE)},
        {"input_token_ids": (5,) * (CONTEXT_LENGTH + 1)},
        {"guided_decoding_params": wrong, "end_id": END_ID},
    ):
        assert is_refused(executor, ask(**fields)), f"{fields} was answered"

    [answer] = results_of(executor, running)
    assert answer.output_token_ids[0] == expected
    assert tokens(executor, max_tokens=16) == expected


ANSWER_CHECKS: tuple[Callable[[Executor, Path], None], ...] = (
    greedy_tokens_are_those_of_transformers,
    a_streamed_answer_is_the_whole_one,
    the_end_token_and_the_limit_end_an_answer,
    a_stop_word_of_two_tokens_ends_an_answer,
    a_cancelled_request_ends_and_the_next_one_is_answered,
    a_request_for_two_sequences_has_two_different_answers,
    an_answer_follows_a_json_schema,
    bad_requests_are_refused_and_good_ones_beside_them_answered,
)


# How an Executor is asked.


def ask(**fields: Any) -> Request:
    return Request(
        **{"input_token_ids": PROMPT, "max_tokens": 16, "sampling_config": GREEDY, **fields}
    )


def responses(executor: Executor, request_id: int) -> list[Response]:
    """The next Responses of a request. Raises AssertionError if there are none in time."""
    responses = executor.await_responses([request_id], TIMEOUT_S)[0]
    assert isinstance(responses, list) and responses, f"no answer within {TIMEOUT_S:.0f} s"
    return responses


def results_of(executor: Executor, request_id: int) -> list[Result]:
    results: list[Result] = []
    while not results or not results[-1].is_final:
        results += [response.get_result() for response in responses(executor, request_id)]

    return results


def results(executor: Executor, request: Request) -> list[Result]:
    return results_of(executor, executor.enqueue_request(request))


def tokens(executor: Executor, **fields: Any) -> list[int]:
    [result] = results(executor, ask(**fields))
    return result.output_token_ids[0]


def is_refused(executor: Executor, request: Request) -> bool:
    try:
        request_id = executor.enqueue_request(request)
    except (LmiError, ValueError):
        return True

    return any(response.has_error() for response in responses(executor, request_id))


def tokenizer_of(model: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
