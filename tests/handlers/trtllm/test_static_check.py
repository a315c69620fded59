"""The static check finds each kind of mistake, admits what is meant, and finds none in the adapter."""

from __future__ import annotations

import pytest

from tests.handlers.trtllm.adapter_source import Source
from tests.handlers.trtllm.static_check import check

BOTH = "main-2025-10 and main-2026-08"
PROFILE = """
class Profile:
    name: str
    takes_priority: bool
"""


def faults(text: str, **others: str) -> list[str]:
    return [str(fault) for fault in check(Source.of({"profile": PROFILE, "adapter": text, **others}))]


def test_the_adapter_has_no_fault() -> None:
    assert [str(fault) for fault in check(Source.read())] == []


@pytest.mark.parametrize(
    "text, what",
    [
        ("from tensorrt_llm import RequestOutput", f"from tensorrt_llm import RequestOutput: not in {BOTH}"),
        ("from tensorrt_llm.llmapi import BuildConfig",
         "from tensorrt_llm.llmapi import BuildConfig: not in main-2026-08"),
        ("import tensorrt_llm.engine", f"import tensorrt_llm.engine: not in {BOTH}"),
        ("from tensorrt_llm._utils import mpi_rank", "from tensorrt_llm._utils import mpi_rank: _utils is private"),
        ("from tensorrt_llm.bindings.executor import Executor",
         f"from tensorrt_llm.bindings.executor import Executor: not in {BOTH}"),
    ],
)  # fmt: skip
def test_an_import_must_be_published_in_both_profiles(text: str, what: str) -> None:
    assert faults(text) == [f"adapter.py:1: {what}"]


def test_an_import_of_one_profile_is_right_where_a_field_of_the_profile_decides() -> None:
    text = "def f(profile):\n    if profile.takes_priority:\n        from tensorrt_llm.llmapi import {name}\n"
    assert faults(text.format(name="SchedulingParams")) == []
    assert faults(text.format(name="Missing"))


GENERATE = """
from tensorrt_llm import LLM, SamplingParams

def f(llm: LLM, params: SamplingParams, profile, more):
    return llm.generate_async({arguments})
"""


@pytest.mark.parametrize(
    "arguments, what",
    [
        ("[1], params, None", "LLM.generate_async: 3 positional arguments, at most 2 are safe"),
        ("inputs=[1], stream=True", f"LLM.generate_async has no argument stream in {BOTH}"),
        ("inputs=[1], priority=1.0", "LLM.generate_async has no argument priority in main-2025-10"),
        ("sampling_params=params", f"generate_async: missing a required argument: 'inputs' in {BOTH}"),
        ("[1], inputs=[2]", f"generate_async: multiple values for argument 'inputs' in {BOTH}"),
        ("inputs={'prompt_ids': [1]}", "inputs has no key prompt_ids"),
        ("inputs=[1], _postproc_params=None", "LLM.generate_async: the argument _postproc_params is private"),
        ("inputs=[1], **{'streamin': True}", f"LLM.generate_async has no argument streamin in {BOTH}"),
        ("inputs=[1], streaming=True, **{'streaming': True}",
         "LLM.generate_async: streaming is given a second time at adapter.py:5"),
    ],
)  # fmt: skip
def test_a_call_must_fit_the_published_signature(arguments: str, what: str) -> None:
    assert f"adapter.py:5: {what}" in faults(GENERATE.format(arguments=arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        "[1], params",
        "inputs={'prompt_token_ids': [1]}, sampling_params=params, streaming=True, **more",
        "inputs=[1], **({'priority': 1.0} if profile.takes_priority else {})",
    ],
)
def test_a_call_that_fits_is_no_fault(arguments: str) -> None:
    assert faults(GENERATE.format(arguments=arguments)) == []


@pytest.mark.parametrize(
    "text, what",
    [
        ("from tensorrt_llm import SamplingParams as P\nP(16)",
         f"SamplingParams: too many positional arguments in {BOTH}"),
        ("from tensorrt_llm import SamplingParams as P\nP(max_new_tokens=16)",
         f"SamplingParams has no argument max_new_tokens in {BOTH}"),
        ("from tensorrt_llm import LLM\nLLM('m', max_sequences=4)",
         f"LLM has no argument max_sequences in {BOTH}"),
        ("from tensorrt_llm import LLM\nLLM('m', enable_tqdm=True)", "LLM has no argument enable_tqdm in main-2026-08"),
        ("from tensorrt_llm.llmapi import KvCacheConfig\nKvCacheConfig(onboard_blocks=True)",
         "KvCacheConfig has no argument onboard_blocks in main-2026-08"),
        ("from tensorrt_llm.llmapi import KvCacheRetentionConfig as K\nK.TokenRangeRetentionConfig(token_start=0)",
         f"TokenRangeRetentionConfig: missing a required argument: 'token_end' in {BOTH}"),
    ],
)  # fmt: skip
def test_an_object_must_be_made_as_published(text: str, what: str) -> None:
    assert f"adapter.py:2: {what}" in faults(text)


@pytest.mark.parametrize(
    "expression, what",
    [
        ("output.output", f"RequestOutput has no output in {BOTH}"),
        ("output.error", "RequestOutput has no error in main-2025-10"),
        ("output.mm_embedding_handle", "RequestOutput has no mm_embedding_handle in main-2026-08"),
        ("output._done", "RequestOutput._done is private"),
        ("output.outputs[0].tokens", f"CompletionOutput has no tokens in {BOTH}"),
        ("[one.ids for one in output.outputs]", f"CompletionOutput has no ids in {BOTH}"),
        ("output.outputs[0].logprobs[0][7].value", f"Logprob has no value in {BOTH}"),
        (
            "[v.value for _, v in output.outputs[0].logprobs[0].items()]",
            f"Logprob has no value in {BOTH}",
        ),
        (
            "output.sampling_params.max_new_tokens",
            f"SamplingParams has no max_new_tokens in {BOTH}",
        ),
        ("getattr(output, 'errors', None)", f"RequestOutput has no errors in {BOTH}"),
        ("output.abort(True)", f"abort: too many positional arguments in {BOTH}"),
        ("FinishReason.STOP", f"FinishReason has no STOP in {BOTH}"),
        ("TorchLlmArgs.fields", f"TorchLlmArgs has no fields in {BOTH}"),
    ],
)
def test_an_attribute_must_be_published(expression: str, what: str) -> None:
    text = (
        "from tensorrt_llm.llmapi import RequestOutput, TorchLlmArgs\n"
        "from tensorrt_llm.bindings.executor import FinishReason\n"
        f"async def f(given: RequestOutput | None):\n    async for output in given:\n        {expression}\n"
    )
    assert faults(text) == [f"adapter.py:5: {what}"]


def test_an_attribute_that_one_profile_lacks_may_be_asked_for_with_a_default() -> None:
    text = "from tensorrt_llm.llmapi import RequestOutput\ndef f(output: RequestOutput):\n    {}\n"
    assert faults(text.format("return getattr(output, 'error', None)")) == []
    assert faults(text.format("return getattr(output, 'error')"))


def test_types_are_followed_through_fields_and_results_of_the_adapter() -> None:
    text = (
        "from tensorrt_llm import LLM\n"
        "class Engine:\n"
        "    def __init__(self, arguments):\n"
        "        self._llm = LLM(**arguments)\n"
        "    def submit(self, ids):\n"
        "        output = self._llm.generate_async(inputs=ids)\n"
        "        return first(output).text_delta\n"
        "def first(output) -> 'CompletionOutput':\n"
        "    return output.outputs[0]\n"
        "from tensorrt_llm.llmapi import CompletionOutput\n"
    )
    assert faults(text) == [f"adapter.py:7: CompletionOutput has no text_delta in {BOTH}"]


SPLAT = """
from tensorrt_llm import SamplingParams
from handlers.lmi_trtllm import rules

def params(config):
    chosen = {"top_k": 1}
    chosen["top_p"] = 0.5
    return SamplingParams(end_id=1, **chosen, **rules.of(config))
"""


def test_the_keys_of_a_splatted_result_are_followed_into_another_module() -> None:
    rules = "def of(config):\n    names = ('min_p', {})\n    return {{name: getattr(config, name) for name in names}}\n"
    assert faults(SPLAT, rules=rules.format("'seed'")) == []
    assert faults(SPLAT, rules=rules.format("'random_seed'")) == [
        f"rules.py:3: SamplingParams has no argument random_seed in {BOTH}"
    ]
    assert faults(SPLAT, rules=rules.format("'end_id'")) == [
        "rules.py:3: SamplingParams: end_id is given a second time at adapter.py:8"
    ]


CARRIED = """
from tensorrt_llm import LLM

class Work:
    ids: list
    more: dict

def submit(llm: LLM, work: Work):
    return llm.generate_async(inputs=work.ids, **work.more)

def work(profile, request):
    more = {}
    {guard}more["priority"] = request.priority
    return Work([1], more)
"""


def test_the_keys_that_an_object_of_the_adapter_carries_are_checked_where_they_are_given() -> None:
    assert faults(CARRIED.replace("{guard}", "")) == [
        "adapter.py:13: LLM.generate_async has no argument priority in main-2025-10"
    ]
    assert faults(CARRIED.replace("{guard}", "if profile.takes_priority: ")) == []
    assert faults(CARRIED.replace("{guard}", "if not profile.takes_priority: return Work([1], {})\n    ")) == []


def test_the_arguments_that_options_become_are_arguments_of_the_llm() -> None:
    text = "LACKING = {{'kv_cache_config.onboard_blocks': 'gone'}}\nOPTIONS = {{'a': Translated('{}')}}\n"
    assert faults(text.format("max_batch_size")) == []
    assert faults(text.format("kv_cache_config.onboard_blocks")) == []
    assert faults(text.format("option.max_model_len")) == []
    assert faults(text.format("max_batch")) == [f"adapter.py:2: LLM has no argument max_batch in {BOTH}"]
    assert faults(text.format("kv_cache_config.blocks")) == [
        f"adapter.py:2: LLM has no argument kv_cache_config.blocks in {BOTH}"
    ]
    made = "def llm_arguments(config):\n    return {'model': config.model, 'max_sequences': 4}\n"
    assert faults(made) == [f"adapter.py:2: LLM has no argument max_sequences in {BOTH}"]
