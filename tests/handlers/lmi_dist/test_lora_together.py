"""Adapters beside what else a request may ask for: beams, guides and outputs are those of the
merged model.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from handlers.lmi_dist import Executor
from lmi.executor import (
    AdditionalModelOutput,
    GuidedDecodingParams,
    GuideType,
    LoraConfig,
    OutputConfig,
    Request,
    Result,
    SamplingConfig,
)
from lmi.settings.config import EngineConfig
from tests.beam_reference import Comparison, transformers_beams
from tests.handlers.lmi_dist import peft_adapters
from tests.handlers.lmi_dist.test_beams import found, random_beams, results
from tests.tiny_models import VOCAB_SIZE, tiny_model

MODEL = "qwen3"
NAMES = ("first", "second")
SETTINGS: dict[str, dict[str, Any]] = {
    "first": {"target_modules": "all-linear"},
    "second": {"target_modules": ["k_proj", "o_proj"], "r": 7},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("together")
    return {
        name: peft_adapters.make(tiny_model(MODEL), folder / name, seed=len(name), **SETTINGS[name])
        for name in NAMES
    }


@pytest.fixture(scope="module")
def executor(folders: dict[str, Path]) -> Iterator[Executor]:
    options = {"enable_lora": "true", "max_lora_rank": "8"}
    config = EngineConfig(
        options=options, max_num_sequences=16, additional_outputs=("hidden_states:context",)
    )
    with Executor(tiny_model(MODEL), config) as executor:
        for name, folder in folders.items():
            executor.load_adapter(name, str(folder))

        yield executor


def named(request: Request, adapter: str | None) -> Request:
    return replace(request, lora_config=None if adapter is None else LoraConfig(adapter))


def test_beams_are_those_of_the_merged_model(executor: Executor, folders: dict[str, Path]) -> None:
    choice = random.Random(6)
    comparison = Comparison()
    models = {
        name: peft_adapters.merged(tiny_model(MODEL), folders.get(name or ""))
        for name in (*NAMES, None)
    }
    requests = [
        named(
            random_beams(choice, VOCAB_SIZE, max_prompt=70, max_tokens=16, width=3),
            choice.choice((*NAMES, None)),
        )
        for _ in range(24)
    ]
    for number, (request, result) in enumerate(
        zip(requests, results(executor, requests), strict=True)
    ):
        expected = transformers_beams(
            models[request.lora_config and request.lora_config.name], request
        )
        comparison.check(f"{number}: {request}", found(request, result, expected), expected)

    assert comparison.num_equal > len(comparison.ties)


def test_a_guide_holds_beside_other_adapters(executor: Executor) -> None:
    guide = GuidedDecodingParams(GuideType.REGEX, "[ab]{40}")
    requests = [
        named(asking(16 + number, guided_decoding_params=None if number % 2 else guide), name)
        for number, name in enumerate((*NAMES, None, *NAMES, None))
    ]
    together = results(executor, requests)
    alone = [results(executor, [request])[0] for request in requests]
    assert [bits(token_result) for token_result in together] == [
        bits(token_result) for token_result in alone
    ]

    ids = json.loads((tiny_model(MODEL) / "tokenizer.json").read_text())["model"]["vocab"]
    words = {token_id: word for word, token_id in ids.items()}
    texts = [
        "".join(words[token_result] for token_result in result.output_token_ids[0])
        for result in together[::2]
    ]

    assert all(re.fullmatch("[ab]{16,40}", text) for text in texts), texts


def test_hidden_states_are_those_of_the_merged_model(
    executor: Executor, folders: dict[str, Path]
) -> None:
    hidden_states = AdditionalModelOutput("hidden_states", gather_context=True)
    for name in (*NAMES, None):
        output = OutputConfig(additional_model_outputs=(hidden_states,))
        request = named(asking(4, output_config=output, cache_salt=f"whole {name}"), name)
        [result] = results(executor, [request])
        rows = result.additional_outputs["context_hidden_states"]
        states = torch.frombuffer(bytearray(rows.data), dtype=torch.float32).view(*rows.shape)
        model = peft_adapters.merged(tiny_model(MODEL), folders.get(name or ""))
        with torch.inference_mode():
            expected = model.model(
                torch.tensor([request.input_token_ids]), use_cache=False
            ).last_hidden_state[0]

        assert torch.allclose(states.reshape(expected.shape), expected, atol=1e-3)


def asking(max_tokens: int, **more: Any) -> Request:
    return Request(
        **{
            "input_token_ids": tuple(range(11, 50)),
            "max_tokens": max_tokens,
            "sampling_config": SamplingConfig(seed=max_tokens),
            "output_config": OutputConfig(return_log_probs=True),
            **more,
        }
    )


def bits(result: Result) -> tuple[list[list[int]], list[list[float]] | None]:
    return result.output_token_ids, result.log_probs
