"""vLLM with an embedding model: its embeddings are those of transformers, and it
generates nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from handlers.lmi_vllm.process_setup import hide_foreign_builds
from lmi.errors import InvalidRequest
from lmi.executor import Request
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist.test_embeddings import LAST, PROMPTS, embed, expected
from tests.tiny_models import embedding_model


def test_vllm_gives_the_embeddings_of_transformers(tmp_path: Path) -> None:
    hide_foreign_builds()
    from handlers.lmi_vllm import Executor

    folder = embedding_model(tmp_path / "embedder", "llama_wide", LAST, is_matryoshka=True)
    config = EngineConfig(
        handler="vllm",
        dtype="fp32",
        max_num_sequences=4,
        max_sequence_length=512,
        max_kv_cache_tokens=8192,
    )
    with Executor(folder, config) as executor:
        for dimensions in (None, 16, 96):
            states = expected(folder, PROMPTS, LAST, dimensions)
            for embedding, state in zip(embed(executor, PROMPTS, dimensions), states, strict=True):
                np.testing.assert_allclose(embedding, state, atol=2e-5)

        steps = executor.get_latest_iteration_stats()
        assert sum(step.num_generation_tokens for step in steps) == 3 * len(PROMPTS)

        with pytest.raises(InvalidRequest, match="^this is an embedding model"):
            executor.enqueue_request(Request((5, 6), 4))

        with pytest.raises(InvalidRequest, match="^dimensions must be at most 96, given 97$"):
            embed(executor, PROMPTS, 97)

        assert embed(executor, [[5] * 512])[0].shape == (96,)
