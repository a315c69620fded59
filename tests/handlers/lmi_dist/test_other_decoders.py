"""Decoders of transformers that no table of ours has: each loads, or the refusal says why in a
sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from handlers.lmi_dist import Executor
from handlers.lmi_dist.config_file import KEEPS_ITS_OWN, OWN_ATTENTION, RUN_HERE
from lmi.errors import ModelUnusable
from lmi.executor import SamplingConfig
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist import peft_adapters
from tests.handlers.lmi_dist.test_executor import ask, one_result

# Fields by all names that configurations have for them. Each takes those that it knows.
SHAPE: dict[str, Any] = {
    **{
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "head_dim": 16,
    },
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rotary_dim": 8},
    **{
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
    },
    **{"num_layers": 2, "attention_heads": 4, "ffn_dim": 96, "d_inner": 96, "ffn_hidden_size": 96},
    **{
        "num_local_experts": 4,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
    },
    **{
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_types": [[["global"], 2]],
    },
}
RUN = (
    "apertus arcee biogpt bitnet cohere cohere2 glm glm4 gpt_neox granite helium ministral "
    "mixtral nemotron"
)
RUN += " olmo olmo2 olmo3 olmoe persimmon phimoe qwen2_moe qwen3_moe seed_oss smollm3 stablelm starcoder2"  # noqa: E501
REFUSED = (
    "bloom codegen diffllama falcon gpt_neo gpt_neox_japanese gpt_oss gptj hunyuan_v1_moe "
    "jetmoe mpt openai-gpt"
)
REFUSED += " rembert xglm xlnet"


def save(kind: str, folder: Path) -> str:
    """A random checkpoint of a type, whose weights are wide enough to tell one attention from
    another.
    """
    config_class = transformers.CONFIG_MAPPING[kind]
    names = {
        name
        for name in dir(config_class())
        if not isinstance(getattr(config_class, name, None), property)
    }
    config = config_class(**{name: SHAPE[name] for name in SHAPE.keys() & names})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)

    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", RUN.split())
def test_a_decoder_that_only_attends_runs_by_the_modules_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    prompt = list(range(5, 40))
    greedy = SamplingConfig(temperature=0)
    expected = peft_adapters.greedy(
        peft_adapters.merged(Path(save(kind, tmp_path)), None), prompt, 8
    )
    with Executor(tmp_path, EngineConfig()) as executor:
        assert executor.info.kernels == "torch"
        result = one_result(executor, ask(*prompt, ignore_eos=True, sampling_config=greedy))

    assert result.output_token_ids == [expected]


@pytest.mark.parametrize("kind", REFUSED.split())
def test_another_decoder_is_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable) as refusal:
        Executor(save(kind, tmp_path), EngineConfig())

    reason = str(refusal.value).removesuffix("; " + RUN_HERE)
    assert reason != str(refusal.value), reason
    assert " does " in reason and "lmi_slots" not in reason
    assert (KEEPS_ITS_OWN in reason) == (kind in OWN_ATTENTION)
