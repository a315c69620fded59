"""Embeddings of the embedded engine, held against what transformers and sentence-transformers
compute.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from handlers.lmi_dist import Executor
from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.native import library
from lmi.errors import BadConfiguration, InvalidRequest, ModelUnusable
from lmi.executor import FinishReason, PoolingParams, Request, Result
from lmi.settings.config import EngineConfig
from tests.machine import WAIT_S
from tests.tiny_models import VOCAB_SIZE, embedding_model

Floats = npt.NDArray[np.float32]

PROMPTS = [[5], list(range(3, 40)), [(7 * n) % VOCAB_SIZE for n in range(1, 300)]]
MEAN = "mean_tokens"
LAST = "lasttoken"


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(
        **{"dtype": "fp32", "max_num_sequences": 4, "max_sequence_length": 512, **fields}
    )


def embed(executor: Any, prompts: list[list[int]], dimensions: int | None = None) -> list[Floats]:
    params = PoolingParams(dimensions)
    ids = executor.enqueue_requests(
        [Request(tuple(prompt), 1, pooling_params=params) for prompt in prompts]
    )
    return [
        vector(responses[0].get_result()) for responses in executor.await_responses(ids, WAIT_S)
    ]


def vector(result: Result) -> Floats:
    assert (result.output_token_ids, result.finish_reasons) == ([[]], [FinishReason.END_ID])
    assert result.is_final and result.embedding is not None
    embedding = np.frombuffer(result.embedding.data, result.embedding.dtype).reshape(
        result.embedding.shape
    )
    return embedding.astype(np.float32)


def expected(
    folder: Path, prompts: list[list[int]], mode: str, dimensions: int | None = None
) -> list[Floats]:
    """What sentence-transformers computes: padded batch, pooling by the attention mask, cut,
    normalised.
    """
    model = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    mask = torch.tensor([[1] * len(prompt) + [0] * (longest - len(prompt)) for prompt in prompts])
    with torch.inference_mode():
        states = model(ids, attention_mask=mask).last_hidden_state

    if mode == MEAN:
        pooled = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    else:
        pooled = states[torch.arange(len(prompts)), mask.sum(1) - 1]

    return list(torch.nn.functional.normalize(pooled[:, :dimensions], dim=1).numpy())


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("llama", MEAN),
        ("qwen3", LAST),
        ("mistral", LAST),
        ("gemma2", MEAN),
        ("gpt2", MEAN),
        ("phi", LAST),
    ],
)
def test_embeddings_are_those_of_transformers(tmp_path: Path, family: str, mode: str) -> None:
    folder = embedding_model(tmp_path / family, family, mode)
    # Prompts are cut into chunks
    with Executor(folder, config(max_prefill_tokens=32)) as executor:
        for vector, expected_vector in zip(
            embed(executor, PROMPTS), expected(folder, PROMPTS, mode), strict=True
        ):
            np.testing.assert_allclose(vector, expected_vector, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_model_without_a_head_pools_its_last_token(tmp_path: Path, family: str) -> None:
    folder = embedding_model(tmp_path / family, family, mode="", has_head=False)
    assert json.loads((folder / "config.json").read_text())["architectures"][0].endswith("Model")
    with Executor(folder, config()) as executor:
        for vector, expected_vector in zip(
            embed(executor, PROMPTS), expected(folder, PROMPTS, LAST), strict=True
        ):
            np.testing.assert_allclose(vector, expected_vector, atol=2e-5)


@pytest.mark.parametrize("mode", [MEAN, LAST])
def test_torch_gives_the_embeddings_of_the_native_kernels(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = embedding_model(tmp_path / "qwen3", "qwen3", mode)
    monkeypatch.setenv("LMI_NATIVE_LIBRARY", str(tmp_path / "not-there.so"))
    # An earlier test has loaded one
    library.load.cache_clear()
    with Executor(folder, config(max_prefill_tokens=32)) as executor:
        assert executor.info.kernels == "torch"
        for vector, expected_vector in zip(
            embed(executor, PROMPTS), expected(folder, PROMPTS, mode), strict=True
        ):
            np.testing.assert_allclose(vector, expected_vector, atol=2e-5)


@pytest.mark.parametrize("mode", [MEAN, LAST])
def test_no_bit_depends_on_neighbours_on_chunks_or_on_the_cache(tmp_path: Path, mode: str) -> None:
    folder = embedding_model(tmp_path / "llama", "llama", mode)
    with Executor(folder, config()) as executor:
        alone = [embed(executor, [prompt])[0] for prompt in PROMPTS]

    with Executor(folder, config(max_prefill_tokens=8)) as executor:
        # The second time the prompts are cached
        for _ in range(2):
            together = embed(executor, PROMPTS * 3)
            assert all(
                np.array_equal(vector, alone[n % len(alone)]) for n, vector in enumerate(together)
            )


def test_a_prefix_is_reused_where_only_the_last_token_counts(tmp_path: Path) -> None:
    for mode, num_cached in ((LAST, 288), (MEAN, 0)):
        folder = embedding_model(tmp_path / mode, "llama", mode)
        with Executor(folder, config()) as executor:
            for num_expected in (0, num_cached):
                request_id = executor.enqueue_request(
                    Request(tuple(PROMPTS[2]), 1, pooling_params=PoolingParams())
                )
                [response] = executor.await_responses(request_id, WAIT_S)
                assert response.get_result().num_cached_tokens == num_expected


def test_a_shorter_embedding_is_normalised_again(tmp_path: Path) -> None:
    folder = embedding_model(tmp_path / "qwen3", "qwen3", LAST, is_matryoshka=True)
    with Executor(folder, config()) as executor:
        vectors = embed(executor, PROMPTS, 16)
        expected_vectors = expected(folder, PROMPTS, LAST, 16)
        assert [vector.shape for vector in vectors] == [(16,)] * len(PROMPTS)
        np.testing.assert_allclose(vectors, expected_vectors, atol=2e-5)
        with pytest.raises(InvalidRequest, match="dimensions must be at most 96, given 97"):
            embed(executor, PROMPTS, 97)


def test_a_prompt_may_fill_the_context(tmp_path: Path) -> None:
    folder = embedding_model(tmp_path / "llama", "llama", MEAN)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    with Executor(folder, config()) as executor:
        assert executor.info.max_sequence_length == 64
        assert embed(executor, [[7] * 64])[0].shape == (96,)
        with pytest.raises(
            InvalidRequest,
            match="no longer than the model's context of 64 tokens, given '65 tokens'",
        ):
            embed(executor, [[7] * 65])


def test_an_embedding_model_generates_nothing(tmp_path: Path) -> None:
    with Executor(embedding_model(tmp_path / "llama", "llama"), config()) as executor:
        with pytest.raises(
            InvalidRequest, match="^this is an embedding model, which answers at /v1/embeddings"
        ):
            executor.enqueue_request(Request((5, 6), 4))

        assert embed(executor, [[5, 6]])[0].shape == (96,)


def test_states_that_are_no_numbers_end_only_their_request(tmp_path: Path) -> None:
    folder = embedding_model(tmp_path / "llama", "llama", LAST)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = float("nan")

    model.save_pretrained(folder)
    with Executor(folder, config()) as executor:
        ids = executor.enqueue_requests(
            [Request((5, n), 1, pooling_params=PoolingParams()) for n in (9, 6)]
        )
        (broken,), (whole,) = executor.await_responses(ids, WAIT_S)

        assert broken.error_msg == "the model's hidden states for the prompt are not numbers"
        assert vector(whole.get_result()).shape == (96,)


def test_a_cancelled_embedding_has_none(tmp_path: Path) -> None:
    with Executor(
        embedding_model(tmp_path / "llama", "llama", MEAN), config(max_prefill_tokens=1)
    ) as executor:
        request_id = executor.enqueue_request(
            Request(tuple(PROMPTS[2]), 1, pooling_params=PoolingParams())
        )
        executor.cancel_request(request_id)
        [response] = executor.await_responses(request_id, WAIT_S)
        result = response.get_result()
        assert (result.finish_reasons, result.embedding) == ([FinishReason.CANCELLED], None)


def test_steps_count_embeddings_as_what_they_have_made(tmp_path: Path) -> None:
    with Executor(embedding_model(tmp_path / "llama", "llama", MEAN), config()) as executor:
        embed(executor, PROMPTS)
        steps = executor.get_latest_iteration_stats()

    assert sum(step.num_generation_tokens for step in steps) == len(PROMPTS)
    assert sum(step.num_context_tokens for step in steps) == sum(map(len, PROMPTS))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"1_Pooling/config.json": {"pooling_mode": "cls"}},
            "pools by mean or lasttoken, not by cls",
        ),
        (
            {
                "1_Pooling/config.json": {
                    "pooling_mode_mean_tokens": True,
                    "pooling_mode_lasttoken": True,
                }
            },
            "not by mean and lasttoken",
        ),
        (
            {"modules.json": [{"type": "x.Pooling", "path": "1_Pooling"}, {"type": "x.Dense"}]},
            "the module 'Dense'",
        ),
        ({"modules.json": {}}, "modules.json: not a JSON array"),
        ({"config.json": {"is_causal": False}}, "its tokens attend to later ones"),
        (
            {"config.json": {"matryoshka_dimensions": [32, 128]}},
            "matryoshka_dimensions must be a list of numbers up",
        ),
    ],
)
def test_what_it_cannot_pool_is_refused_at_the_start(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    folder = embedding_model(tmp_path / "llama", "llama")
    for name, value in change.items():
        before = json.loads((folder / name).read_text()) if name == "config.json" else {}
        (folder / name).write_text(json.dumps(before | value if isinstance(value, dict) else value))

    with pytest.raises(ModelUnusable) as caught:
        read_facts(str(folder))

    assert said in str(caught.value) and str(folder) in str(caught.value)


def test_a_family_without_a_last_norm_is_refused(tmp_path: Path) -> None:
    folder = embedding_model(tmp_path / "opt", "opt_post_norm")
    with pytest.raises(ModelUnusable, match="makes no embeddings with this form of OPTForCausalLM"):
        read_facts(str(folder))

    shutil.rmtree(folder / "1_Pooling")
    (folder / "modules.json").unlink()
    assert read_facts(str(folder)).pooling is None


def test_options_of_models_that_generate_are_refused(tmp_path: Path) -> None:
    folder = embedding_model(tmp_path / "llama", "llama")
    with pytest.raises(
        BadConfiguration,
        match="option.enable_lora: lmi-dist does not have it for an embedding model",
    ):
        Executor(folder, config(options={"enable_lora": "true"}))
