"""What upstream's two lines do differently, beyond their signatures. The sources are named in
README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

# The Torch sampler of main of October 2025 knows temperature, top_k, top_p and stop words only.
UNKNOWN_TO_OLD_SAMPLER = frozenset(
    {
        "seed",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "no_repeat_ngram_size",
        "bad_token_ids",
        "bad",
    }
)


LORA_MODULES = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_dense": "o_proj",
    "mlp_h_to_4h": "gate_proj",
    "mlp_4h_to_h": "down_proj",
    "mlp_gate": "up_proj",
}
LATER_LORA_MODULES = {
    "shared_expert_gate": "shared_expert.up_proj",
    "mamba_in_proj": "in_proj",
    "mamba_out_proj": "out_proj",
    "moe_latent_fc1": "fc1_latent_proj",
}


@dataclass(frozen=True)
class Line:
    name: str  # of its facts
    # Of the package that the double writes
    version: str
    # Over max_num_tokens without chunked prefill
    long_prompt: Literal["ValueError", "RequestError"]
    samplers: frozenset[str]  # values of sampler_type
    # What the Torch sampler drops silently
    ignored: frozenset[str] = field(default=frozenset())
    # logprobs=0 and prompt_logprobs=0 ask for nothing
    is_zero_log_probs_none: bool = False
    # In the dict of a position's log-probs; else behind the best
    is_chosen_first: bool = True
    # A row of prompt_logprobs has its own token, even if it is not among the best
    has_prompt_tokens: bool = True
    max_beam_log_probs: int = 0
    guides_without_backend: Literal["ignored", "refused"] = "refused"
    # `auto` is the C++ sampler where there are beams
    has_cpp_beams: bool = False
    get_default_trtllm_modules_to_hf_modules: Mapping[str, str] = field(
        default_factory=lambda: LORA_MODULES | LATER_LORA_MODULES
    )


LINES = {
    "main-2025-10": Line(
        name="main-2025-10",
        version="1.2.1",
        long_prompt="ValueError",
        samplers=frozenset({"auto", "TorchSampler", "TRTLLMSampler"}),
        ignored=UNKNOWN_TO_OLD_SAMPLER,
        is_zero_log_probs_none=True,
        is_chosen_first=False,
        has_prompt_tokens=False,
        max_beam_log_probs=1,
        guides_without_backend="ignored",
        has_cpp_beams=True,
        get_default_trtllm_modules_to_hf_modules=LORA_MODULES,
    ),
    "main-2026-08": Line(
        name="main-2026-08",
        version="1.3.0rc26",
        long_prompt="RequestError",
        samplers=frozenset({"auto", "TorchSampler"}),
    ),
}
# A candidate between the two, as far as its pages and pull requests say: it has the arguments of
# the first one.
LINES["1.3.0rc5"] = replace(
    LINES["main-2025-10"],
    version="1.3.0rc5",
    is_zero_log_probs_none=False,
    has_cpp_beams=False,
    max_beam_log_probs=0,
)
