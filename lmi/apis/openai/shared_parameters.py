"""The parameters that completions and chats share, by their names on the wire.

Names, defaults and bounds are those of OpenAI's API reference. Fields of vLLM's server are taken
too, and names that SGLang and llama-server have for the same.
"""

from msgspec.structs import replace

from lmi.apis.base import readers
from lmi.apis.base.parameters import ROWS, Parameter
from lmi.apis.base.readers import an_object, boolean, takes, text
from lmi.apis.beams import USE_BEAM_SEARCH
from lmi.apis.guides.fields import GUIDED, HELP, OTHER_GUIDES, structured_outputs
from lmi.errors import InvalidParameter
from lmi.executor import DEFAULT_PRIORITY
from lmi.types import OutputFormat

MAX_TEMPERATURE = 2.0
# The most that a bias adds to a logit, or takes from it.
MAX_BIAS = 100.0
# The most digits of a token id that is the key of an object.
MAX_ID_DIGITS = 9
STREAM_OPTIONS = (
    "include_usage",
    # This one is vLLM's.
    "continuous_usage_stats",
    # This one is OpenAI's, and has no effect: nothing here is padded.
    "include_obfuscation",
)
STREAM_OPTIONS_HELP = (
    "With `include_usage` true, a stream ends with the numbers of tokens; "
    "with `continuous_usage_stats` true too, each chunk has those so far."
)
read_stop_sequences = ROWS["stop_sequences"].read
read_bias = readers.number(-MAX_BIAS, MAX_BIAS)


@takes(
    {
        "type": ["string", "array"],
        "items": {"type": "string", "minLength": 1},
        "maxItems": readers.MAX_STOP_SEQUENCES,
    }
)
def read_stop(name: str, value: object) -> tuple[str, ...]:
    """Read a text or a list of texts. An empty text asks for nothing."""
    if isinstance(value, str):
        return read_stop_sequences(name, [value]) if value else ()

    return read_stop_sequences(name, value)  # type: ignore[no-any-return]


@takes({"type": "object", "maxProperties": readers.MAX_WORDS})
def read_biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """Read an object, and return its pairs of token id and bias."""
    if not isinstance(value, dict) or len(value) > readers.MAX_WORDS:
        raise InvalidParameter(
            name, f"an object of at most {readers.MAX_WORDS} token ids and numbers", value
        )

    biases = []
    for token_id, bias in value.items():
        is_number = token_id.isascii() and token_id.isdigit()
        if not is_number or len(token_id) > MAX_ID_DIGITS:
            raise InvalidParameter(name, "an object whose keys are token ids", token_id)

        biases.append((int(token_id), read_bias(f"{name}.{token_id}", bias)))

    return tuple(biases)


SHARED: dict[str, Parameter] = {
    "n": ROWS["n"],
    "seed": ROWS["seed"],
    "top_p": ROWS["top_p"],
    "presence_penalty": ROWS["presence_penalty"],
    "frequency_penalty": ROWS["frequency_penalty"],
    "top_k": ROWS["top_k"],
    "min_p": ROWS["min_p"],
    "repetition_penalty": ROWS["repetition_penalty"],
    "ignore_eos": ROWS["ignore_eos"],
    "min_tokens": ROWS["min_tokens"],
    "stop_token_ids": ROWS["stop_token_ids"],
    "skip_special_tokens": ROWS["skip_special_tokens"],
    "spaces_between_special_tokens": ROWS["spaces_between_special_tokens"],
    "include_stop_str_in_output": ROWS["include_stop_str_in_output"],
    "cache_salt": ROWS["cache_salt"],
    "add_special_tokens": ROWS["add_special_tokens"],
    "use_beam_search": USE_BEAM_SEARCH,
    "length_penalty": ROWS["length_penalty"],
    "early_stopping": ROWS["early_stopping"],
    "logits_post_processor_name": ROWS["logits_post_processor_name"],
    **GUIDED,
    **OTHER_GUIDES,
    # This is SGLang's name.
    "no_stop_trim": ROWS["include_stop_str_in_output"],
    "truncation_side": ROWS["truncation_side"],
    "bad_words": ROWS["bad_sequences"],
    "truncate_prompt_tokens": ROWS["truncate"],
    "max_tokens": ROWS["max_new_tokens"],
    "model": Parameter(
        "model",
        text,
        "The model or adapter that answers; left out, the server's own.",
        fields=("lora_config",),
    ),
    "stream": Parameter("stream", boolean, "Whether the answer comes token by token."),
    "stream_options": Parameter("stream_options", an_object, STREAM_OPTIONS_HELP),
    "return_token_ids": Parameter(
        "return_token_ids", boolean, "Whether the ids of prompt and answer are given.", (False,)
    ),
    "return_tokens_as_token_ids": Parameter(
        "return_tokens_as_token_ids",
        boolean,
        "Whether log-probs name tokens as `token_id:ID`.",
        (False,),
    ),
    "prompt_logprobs": ROWS["num_prompt_log_probs"],
    "stop": replace(ROWS["stop_sequences"], read=read_stop),
    "temperature": replace(ROWS["temperature"], read=readers.number(0, MAX_TEMPERATURE)),
    "logit_bias": Parameter(
        "token_biases",
        read_biases,
        "What is added to the logits of tokens, by id.",
        fields=("embedding_bias",),
    ),
    "prompt_cache_key": Parameter(
        "prompt_cache_key",
        text,
        "Requests with the same key go to the same replica where loads allow it.",
    ),
    "priority": Parameter(
        "priority", readers.priority, "A lower number is served earlier.", (DEFAULT_PRIORITY,)
    ),
    "structured_outputs": Parameter("structured_outputs", structured_outputs, HELP),
    "output_formatter": Parameter(
        "output_formatter",
        readers.choice(list(OutputFormat)),
        "The form of the answer at `/invocations`.",
    ),
}
