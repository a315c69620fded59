"""Fields of OpenAI-like bodies that are no parameters here. A field is a row of one of two tables.

A field of `CANNOT` would change the prompt or the answer, so it is refused, unless its value asks
for nothing. One of `WITHOUT_EFFECT` changes no answer of this server, and is ignored silently.
Names that are in neither table are ignored too, with a line in the log.

Sources: the request classes of vLLM, SGLang and llama-server, and the types of OpenAI's client.
"""

from collections.abc import Iterable, Mapping

from lmi.apis.base import readers
from lmi.apis.base.parameters import Parameter

NO_CODE = "engines take no code"
NO_CHOICE = "this way to choose tokens is not here"
TELLS_NO_MORE = "an answer tells tokens and their log-probs alone"
AS_THE_MODEL_SAYS = "images are read as the model's own settings say"

# Why a field is refused.
CANNOT: dict[str, str] = {
    "allowed_token_ids": "engines take no such list",
    "custom_logit_processor": NO_CODE,
    "custom_params": NO_CODE,
    "dry_multiplier": NO_CHOICE,
    "dynatemp_range": NO_CHOICE,
    "logits_processors": NO_CODE,
    "logprob_token_ids": "log-probs are those of the likeliest tokens",
    "lora_path": "it is called model",
    "media_io_kwargs": AS_THE_MODEL_SAYS,
    "mirostat": NO_CHOICE,
    "mm_processor_kwargs": AS_THE_MODEL_SAYS,
    "n_predict": "it is called max_tokens",
    "prompt_embeds": "engines take token ids",
    "repeat_penalty": "it is called repetition_penalty",
    "repetition_detection": "an answer ends at its stops, its end token and its length alone",
    "return_hidden_states": TELLS_NO_MORE,
    "return_mm_kwargs": TELLS_NO_MORE,
    "return_prompt_text": TELLS_NO_MORE,
    "return_routed_experts": TELLS_NO_MORE,
    "return_token_offsets": TELLS_NO_MORE,
    "return_weight_versions": TELLS_NO_MORE,
    "routed_experts_prompt_start": TELLS_NO_MORE,
    "session_params": "nothing is kept here, so a request holds the whole conversation",
    "stop_regex": "an answer ends at texts and tokens",
    "thinking_token_budget": "nothing here ends a thought before the model does",
    "vllm_xargs": NO_CODE,
    "watermark": "answers bear no mark",
    "watermarking": "answers bear no mark",
    "xtc_probability": NO_CHOICE,
}
# The values of most fields that ask for nothing, and those of the other fields.
NOTHING: tuple[object, ...] = (False, [], {}, "")
ASKS_NOTHING: dict[str, tuple[object, ...]] = {
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "endianness": ("native", "little"),
    "mirostat": (0,),
    "n_predict": (-1,),
    "repeat_penalty": (1, 1.0),
    "routed_experts_prompt_start": (0,),
    "thinking_token_budget": (-1,),
    "xtc_probability": (0, 0.0),
}
WITHOUT_EFFECT = (
    # SGLang has these three for prefill on other machines.
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    # Prompts share what is cached anyway.
    "cache_prompt",
    "data_parallel_rank",
    # Where caches lie changes no answer.
    "ec_transfer_params",
    "extra_key",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "id_slot",
    "include_reasoning",
    "kv_transfer_params",
    "metadata",
    # It has the form of `return_mm_kwargs`, which is refused.
    "mm_payload",
    "moderation",
    # It makes an answer quicker, never another.
    "prediction",
    "prompt_cache_options",
    "prompt_cache_retention",
    # A header names a request.
    "request_id",
    "rid",
    "safety_identifier",
    "separate_reasoning",
    "service_tier",
    "session_id",
    "store",
    # It says how many tokens a chunk has.
    "stream_interval",
    "stream_reasoning",
    "timings_per_token",
    "user",
    "verbosity",
)


def hidden(
    cannot: Mapping[str, str], without_effect: Iterable[str] = WITHOUT_EFFECT
) -> dict[str, Parameter]:
    """Return the fields that are refused unless they ask for nothing, and those that are ignored
    silently.
    """
    parameters = {}
    for name in without_effect:
        parameters[name] = Parameter(name, lambda name, value: None)

    for name, reason in cannot.items():
        off_values = ASKS_NOTHING.get(name, NOTHING)
        parameters[name] = Parameter(name, readers.refused(reason, *off_values))

    return parameters
