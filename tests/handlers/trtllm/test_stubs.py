"""mypy, with the facts as stubs, finds no fault in the adapter, and each kind of mistake."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.handlers.trtllm.facts import PROFILES
from tests.handlers.trtllm.mutations import MUTATIONS, STATIC, Gone, Mutation
from tests.handlers.trtllm.stubs import adapter, faults

BY_CHECK = {f"mistake_{number}": one for number, one in enumerate(MUTATIONS) if one.found_by == STATIC}
# A line that ends with `# both`, or with a profile, is a mistake there.
LINES = """
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm import RequestOutput as Elsewhere  # both
from tensorrt_llm.llmapi import KvCacheConfig, KvCacheRetentionConfig, RequestOutput, TorchLlmArgs
from tensorrt_llm.llmapi import BuildConfig  # main-2026-08
from tensorrt_llm.bindings.executor import FinishReason
from tensorrt_llm.bindings.executor import Executor  # both
import tensorrt_llm.engine  # both
import tensorrt_llm._utils  # both

def submit(llm: LLM, params: SamplingParams, more: dict[str, object]) -> None:
    llm.generate_async([1], params)
    llm.generate_async(inputs={"prompt_token_ids": [1]}, sampling_params=params, streaming=True, **more)
    llm.generate_async([1], params, None)  # both
    llm.generate_async(inputs=[1], stream=True)  # both
    llm.generate_async(inputs=[1], priority=1.0)  # main-2025-10
    llm.generate_async(sampling_params=params)  # both
    llm.generate_async([1], inputs=[2])  # both
    llm.generate_async(inputs={"prompt_ids": [1]})  # both
    llm.generate_async(inputs=[1], _postproc_params=None)  # both

def make() -> None:
    SamplingParams(16)  # both
    SamplingParams(max_new_tokens=16)  # both
    LLM("m", max_batch_size=4)
    LLM("m", max_sequences=4)  # both
    LLM("m", enable_tqdm=True)  # main-2026-08
    KvCacheConfig(onboard_blocks=True)  # main-2026-08
    KvCacheRetentionConfig.TokenRangeRetentionConfig(token_start=0)  # both

async def read(given: RequestOutput) -> None:
    print((await given).finished, TorchLlmArgs.model_fields, FinishReason.LENGTH)
    async for output in given:
        print(output.output)  # both
        print(output.error)  # main-2025-10
        print(output.mm_embedding_handle)  # main-2026-08
        print(output._done)  # both
        print(output.outputs[0].tokens)  # both
        print([one.ids for one in output.outputs])  # both
        print([each.value for one in output.outputs for each in one.logprobs[0].values()])  # both
        print(output.sampling_params.max_new_tokens)  # both
        output.abort(True)  # both
    print(FinishReason.STOP)  # both
    print(TorchLlmArgs.fields)  # both
"""


@pytest.fixture(scope="module", params=PROFILES)
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(profile: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of the adapter, of the lines above, and of each mistake that applies."""
    packages = {"adapter": adapter(), "written": {"lines": LINES}}
    for name, mutation in BY_CHECK.items():
        with suppress(Gone):  # its own test says so
            packages[name] = adapter() | {mutation.module: mutation.text()}
    return faults(tmp_path_factory.mktemp(profile), profile, packages)


def test_the_adapter_has_no_fault(found: dict[str, list[str]]) -> None:
    assert found["adapter"] == []


def test_what_is_not_published_is_a_fault(profile: str, found: dict[str, list[str]]) -> None:
    wrong = [i for i, line in enumerate(LINES.splitlines(), 1) if line.endswith(("# both", f"# {profile}"))]
    assert sorted({int(fault.split(":")[1]) for fault in found["written"]}) == wrong


@pytest.mark.parametrize("name", BY_CHECK, ids=lambda name: BY_CHECK[name].name)
def test_a_mistake_in_the_adapter_is_found(name: str, found: dict[str, list[str]]) -> None:
    mutation: Mutation = BY_CHECK[name]
    mutation.text()
    assert found[name] and all(fault.startswith(f"{mutation.module}.py:") for fault in found[name])
