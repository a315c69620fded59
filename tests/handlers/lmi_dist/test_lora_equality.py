"""LoRA on the embedded engine: with an adapter it answers as the model into which PEFT has merged
it.

Native kernels keep more: whatever adapters the rows of a batch have, each gets the bits that it
gets by itself. Rows without an adapter get those of an engine that knows none.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from handlers.lmi_dist import Executor
from handlers.lmi_dist.native.records import TOKENS_PER_BLOCK
from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.runner import Runner
from lmi.executor import LoraConfig, OutputConfig, Request, SamplingConfig
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist import peft_adapters
from tests.handlers.lmi_dist.play import PIECES, forward, load_native, load_runner, table_of
from tests.handlers.lmi_dist.test_equality import Answer, alone, last_stats, take_all
from tests.tiny_models import VOCAB_SIZE, tiny_model

LORA = {"enable_lora": "true", "max_lora_rank": "8", "max_loras": "3"}
CONFIG = EngineConfig(options=LORA)
IDS = [(11 * index * index + 3) % VOCAB_SIZE for index in range(80)]
# Two logits this close count as equal; sums are rounded elsewhere than in a merged weight
TIE = 1e-3
ALL: dict[str, Any] = {"target_modules": "all-linear"}
OUR_OPT = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        family: (family, ALL)
        for family in (
            "llama",
            "mistral",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3",
            "phi",
            "phi3",
            "gpt2",
            "opt",
        )
    },
    "a head that is not tied": ("llama_wide", {"target_modules": ["lm_head", "up_proj"]}),
    "a tied head": ("llama", {"target_modules": ["lm_head", "up_proj"]}),
    "a tied head behind a cap": ("gemma2", {"target_modules": ["lm_head"]}),
    "a tied head of a checkpoint without its first words": (
        "gpt2",
        {"target_modules": ["lm_head", "c_attn"]},
    ),
    "a head with a bias": ("phi", {"target_modules": ["lm_head"]}),
    "all that may be saved beside it": (
        "llama_wide",
        {"target_modules": ["o_proj"], "save_embedding_layers": True},
    ),
    "biases, and a scale for stable ranks": ("llama_bias", ALL | {"use_rslora": True}),
    "a rank and a scale of their own": (
        "qwen2",
        {"target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]}
        | {
            "rank_pattern": {"v_proj": 7, r"layers\.1\.self_attn\.q_proj": 2},
            "alpha_pattern": {"mlp.gate_proj": 3},
        },
    ),
    "one layer": (
        "llama3",
        {"target_modules": ["k_proj", "o_proj", "up_proj"], "layers_to_transform": [1]},
    ),
    "a regular expression": (
        "gpt2",
        {"target_modules": r".*\.h\.0\..*c_(attn|proj)", "fan_in_fan_out": True},
    ),
    "a model that only transformers knows": ("olmo2", ALL),
    "its head too": ("olmo2", {"target_modules": ["lm_head", "o_proj", "down_proj"]}),
    "its tied head too": ("olmo2_tied", {"target_modules": ["lm_head", "o_proj"]}),
    "projected embeddings": ("opt_post_norm", {"target_modules": OUR_OPT}),
    "a half of what phi3 joins": (
        "phi3",
        {"target_modules": ["gate_up_proj"], "exclude_modules": ["qkv_proj"]},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A model and an adapter of it."""
    family, settings = CASES[request.param]
    folder = tmp_path_factory.mktemp("case") / "adapter"
    return tiny_model(family), peft_adapters.make(tiny_model(family), folder, **settings)


def test_answers_are_token_by_token_those_of_the_merged_model(case: tuple[Path, Path]) -> None:
    model, adapter = case
    with Executor(model, CONFIG) as executor:
        executor.load_adapter("mine", str(adapter))
        requests = [asking(IDS[:length], name) for name in ("mine", None) for length in (1, 7, 70)]
        answers = take_all(executor, executor.enqueue_requests(requests))

    merged, base = (peft_adapters.merged(model, folder) for folder in (adapter, None))
    for request, (tokens, *_) in zip(requests, answers, strict=True):
        ids = [*request.input_token_ids, *tokens]
        rows = peft_adapters.logits_of(merged if request.lora_config else base, ids)[
            -len(tokens) - 1 : -1
        ]
        chosen_logits = rows.gather(1, torch.tensor(tokens)[:, None])

        assert bool((chosen_logits[:, 0] >= rows.max(1).values - TIE).all())

    assert answers[2][0] != answers[5][0], "the adapter changes nothing"


def test_torch_gives_the_logits_of_the_merged_model(case: tuple[Path, Path]) -> None:
    model, adapter = case
    runner = load_runner(model, CONFIG, num_slots=2, max_length=200)

    assert runner.adapters is not None

    runner.adapters.model.put_adapter(5, runner.adapters.read(str(adapter)))
    prefills = [Chunk(0, 0, IDS, len(IDS), adapter=5), Chunk(1, 0, IDS[:9], 9)]
    with_adapter, without = forward(runner, Plan([], prefills)).split((len(IDS), 9))
    expected = peft_adapters.logits_of(peft_adapters.merged(model, adapter), IDS)
    base = peft_adapters.logits_of(peft_adapters.merged(model, None), IDS[:9])

    assert torch.allclose(with_adapter, expected, atol=TIE) and torch.allclose(
        without, base, atol=TIE
    )


def asking(prompt: list[int], adapter: str | None, max_tokens: int = 16) -> Request:
    return Request(
        input_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        ignore_eos=True,
        sampling_config=SamplingConfig(temperature=0),
        lora_config=None if adapter is None else LoraConfig(adapter),
    )


NAMES = ("attention", "everything", "one layer")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three adapters of the small Llama, with ranks, scales and linears of their own."""
    folder = tmp_path_factory.mktemp("three")
    model = tiny_model("llama")
    settings: list[dict[str, Any]] = [
        {"r": 8, "target_modules": ["q_proj", "v_proj"]},
        {"r": 3, **ALL, "use_rslora": True},
        {"r": 5, "target_modules": ["gate_proj", "k_proj"], "layers_to_transform": 1},
    ]
    return {
        name: str(peft_adapters.make(model, folder / name, seed=seed, **more))
        for seed, (name, more) in enumerate(zip(NAMES, settings, strict=True))
    }


@pytest.mark.parametrize(
    "kind",
    [{"dtype": "fp32"}, {"dtype": "bf16"}, {"quantize": "int8"}, {"quantize": "int4"}],
    ids=str,
)
def test_no_batch_no_cut_and_no_other_adapter_changes_a_bit(
    adapters: dict[str, str], kind: dict[str, str]
) -> None:
    draw = random.Random(str(kind))
    model = tiny_model("llama")
    plain = load_native(model, EngineConfig(**kind), max_length=200)  # type: ignore[arg-type]
    runner = load_native(model, EngineConfig(options=LORA, **kind), max_length=200)  # type: ignore[arg-type]
    assert runner.adapters is not None

    for number, path in enumerate(adapters.values(), start=1):
        runner.adapters.model.put_adapter(number, runner.adapters.read(path))

    prompts = [
        [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((1, 30, 180)))] for _ in range(12)
    ]
    users = [index % 4 for index in range(12)]
    expected = [
        whole(runner if user else plain, ids, user)
        for ids, user in zip(prompts, users, strict=True)
    ]
    ends = [0] * len(prompts)
    while remaining := [index for index, ids in enumerate(prompts) if ends[index] < len(ids)]:
        batch = draw.sample(remaining, k=min(len(remaining), draw.randint(1, 6)))
        chunks = []
        for index in batch:
            ids = prompts[index][ends[index] : ends[index] + draw.choice(PIECES)]
            chunks.append(
                Chunk(index, ends[index], ids, len(ids), table_of(index, 200), users[index])
            )

        logits = forward(runner, Plan([], chunks)).split([len(chunk.token_ids) for chunk in chunks])
        for index, chunk, rows in zip(batch, chunks, logits, strict=True):
            assert torch.equal(rows, expected[index][chunk.start : chunk.end])
            ends[index] = chunk.end


def whole(runner: Runner, ids: list[int], adapter: int) -> Tensor:
    """The logits of a prompt that is computed whole and by itself, (num_tokens, vocab_size)."""
    chunk = Chunk(0, 0, ids, len(ids), table_of(0, len(ids)), adapter)
    return forward(runner, Plan([], [chunk]))


@pytest.fixture(scope="module")
def lone(adapters: dict[str, str]) -> Iterator[tuple[list[Request], list[Answer]]]:
    """Requests with and without adapters over a few shared beginnings, and their answers one after
    the other.
    """
    choice = random.Random(8)
    beginnings = [choice.choices(range(3, VOCAB_SIZE), k=length) for length in (3, 90, 150)]
    requests = [
        request(choice, choice.choice(beginnings), choice.choice((*NAMES, None))) for _ in range(40)
    ]
    with Executor(
        tiny_model("llama"), EngineConfig(options=LORA, enable_prefix_caching=False)
    ) as executor:
        load_all(executor, adapters)
        yield requests, alone(executor, requests)


def request(choice: random.Random, beginning: list[int], adapter: str | None) -> Request:
    return Request(
        input_token_ids=(
            *beginning,
            *choice.choices(range(3, VOCAB_SIZE), k=choice.randint(1, 20)),
        ),
        max_tokens=choice.randint(4, 300),
        ignore_eos=True,
        sampling_config=SamplingConfig(
            seed=choice.randrange(99), temperature=choice.choice((0.0, 0.9))
        ),
        output_config=OutputConfig(return_log_probs=True),
        lora_config=None if adapter is None else LoraConfig(adapter),
    )


def load_all(executor: Any, adapters: dict[str, str]) -> None:
    for name, path in adapters.items():
        executor.load_adapter(name, path)


def test_requests_that_share_beginnings_and_steps_have_the_bits_of_their_lone_runs(
    adapters: dict[str, str], lone: tuple[list[Request], list[Answer]]
) -> None:
    requests, expected = lone
    with Executor(
        tiny_model("llama"), EngineConfig(options=LORA, max_num_sequences=12)
    ) as executor:
        load_all(executor, adapters)
        got = take_all(executor, executor.enqueue_requests(requests))
        num_reused = sum(
            stats_entry.num_reused_tokens for stats_entry in executor.get_latest_iteration_stats()
        )

    assert got == expected
    assert num_reused > 10 * TOKENS_PER_BLOCK


def test_preempted_requests_have_the_bits_of_their_lone_runs(
    adapters: dict[str, str], lone: tuple[list[Request], list[Answer]]
) -> None:
    requests, expected = lone
    config = EngineConfig(
        options=LORA, max_num_sequences=12, max_kv_cache_tokens=1280, speculative="ngram"
    )
    with Executor(tiny_model("llama"), config) as executor:
        load_all(executor, adapters)
        got = take_all(executor, executor.enqueue_requests(requests))
        num_preemptions, last = last_stats(executor)

    assert num_preemptions > 0 and last.kv_cache_stats.used_num_blocks == 0
    assert got == expected


def test_torch_gives_the_tokens_of_the_native_kernels_in_mixed_batches_too(
    adapters: dict[str, str], lone: tuple[list[Request], list[Answer]]
) -> None:
    requests, expected = lone
    runner = load_runner(tiny_model("llama"), CONFIG, num_slots=8, max_length=600)
    with Executor(runner, EngineConfig(max_num_sequences=8)) as executor:
        load_all(executor, adapters)
        got = take_all(executor, executor.enqueue_requests(requests))

    assert [tokens for tokens, *_ in got] == [tokens for tokens, *_ in expected]


def test_requests_without_an_adapter_have_the_bits_of_an_engine_that_knows_none(
    lone: tuple[list[Request], list[Answer]],
) -> None:
    requests, expected = lone
    pairs = [pair for pair in zip(requests, expected, strict=True) if pair[0].lora_config is None]
    with Executor(tiny_model("llama")) as executor:
        assert alone(executor, [request for request, _ in pairs]) == [answer for _, answer in pairs]

    assert len(pairs) > 3
