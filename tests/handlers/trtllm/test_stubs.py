"""mypy, with the facts as stubs, finds no fault in the adapter, and each kind of mistake."""

from __future__ import annotations

import pytest

from tests.handlers.trtllm.facts import PROFILES
from tests.handlers.trtllm.stubs import adapter, faults

# Mistakes in the adapter: what each is, its module, and the text there that another one replaces.
MISTAKES = (
    ("a wrong keyword", "engine", "streaming=work", "stream=work"),
    (
        "arguments by position",
        "engine",
        'inputs={"prompt_token_ids": work.token_ids},',
        '{"prompt_token_ids": work.token_ids}, work.params, None,',
    ),
    (
        "a keyword of SamplingParams that is another engine's",
        "sampling",
        "max_tokens=int(",
        "max_new_tokens=int(",
    ),
    (
        "an attribute of another engine",
        "outputs",
        "output.cached_tokens",
        "output.num_cached_tokens",
    ),
    (
        "a log-prob read by another name",
        "outputs",
        "log_prob.logprob for",
        "log_prob.value for",
    ),
    (
        "a name that its module does not export",
        "outputs",
        "from tensorrt_llm.llmapi import",
        "from tensorrt_llm import",
    ),
    (
        "an adapter's path by another name",
        "adapters",
        "lora_path=adapter.path",
        "path=adapter.path",
    ),
    ("a private name", "engine", "if not output.finished:", "if not output._done:"),
)
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
"""  # noqa: E501


@pytest.fixture(scope="module", params=PROFILES)
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(profile: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of the adapter, of the lines above, and of each mistake."""
    texts = adapter()
    packages = {"adapter": texts, "written": {"lines": LINES}}
    for number, (name, module, old, new) in enumerate(MISTAKES):
        assert texts[module].count(old) == 1, (
            f"{name!r} has to be planted anew: {module}.py has changed"
        )
        packages[f"mistake_{number}"] = texts | {module: texts[module].replace(old, new)}

    return faults(tmp_path_factory.mktemp(profile), profile, packages)


def test_the_adapter_has_no_fault(found: dict[str, list[str]]) -> None:
    assert found["adapter"] == []


def test_what_is_not_published_is_a_fault(profile: str, found: dict[str, list[str]]) -> None:
    wrong = [
        i
        for i, line in enumerate(LINES.splitlines(), 1)
        if line.endswith(("# both", f"# {profile}"))
    ]
    assert sorted({int(fault.split(":")[1]) for fault in found["written"]}) == wrong


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=lambda number: MISTAKES[number][0])
def test_a_mistake_in_the_adapter_is_found(number: int, found: dict[str, list[str]]) -> None:
    lines = found[f"mistake_{number}"]
    assert lines and all(line.startswith(f"{MISTAKES[number][1]}.py:") for line in lines)
