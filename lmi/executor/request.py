"""One prompt and everything an engine needs to continue it, as how it chooses the next token."""

import enum
import math
from typing import ClassVar

import msgspec
from msgspec.structs import force_setattr, replace

from lmi.executor.checks import broken, check_int, check_range

__all__ = [
    "DEFAULT_PRIORITY",
    "DEFAULT_RETENTION_PRIORITY",
    "MAX_PENALTY",
    "MAX_SEED",
    "MAX_TEMPERATURE",
    "PRIORITY_STEPS",
    "REPETITION_PENALTIES",
    "AdditionalModelOutput",
    "ExternalDraftTokensConfig",
    "GuideType",
    "GuidedDecodingParams",
    "KvCacheRetentionConfig",
    "LoraConfig",
    "OutputConfig",
    "PoolingParams",
    "PromptTuningConfig",
    "Request",
    "SamplingConfig",
    "TokenRangeRetentionConfig",
]

# Clients send unsigned 64-bit seeds.
MAX_SEED = 2**64 - 1
# The distribution is nearly flat far below this.
MAX_TEMPERATURE = 100.0
# Beyond these, a logit divided by the penalty may leave the range of float32.
REPETITION_PENALTIES = (
    0.01,
    100.0,
)
# Sequences of one request. It is also the default of `max_request_sequences`.
MAX_SEQUENCES = 512
# Bounds presence and frequency penalties on both sides, as OpenAI and vLLM do.
MAX_PENALTY = 2.0
DEFAULT_RETENTION_PRIORITY = 35
MAX_RETENTION_PRIORITY = 100
DEFAULT_PRIORITY = 0.5
# The steps from the least urgent to the most. A float32 keeps them apart.
PRIORITY_STEPS = 1 << 20
MAX_FLOAT32 = 3.4028234663852886e38


class _BeamWidth(msgspec.Struct, frozen=True):
    """The positional argument of a SamplingConfig."""

    beam_width: int = 1


class SamplingConfig(_BeamWidth, frozen=True, kw_only=True):
    """How the next token is chosen.

    Decoding is greedy if and only if `temperature` is 0 or `top_k` is 1; otherwise it samples. None
    means "off": no top_k, no penalty. Upstream has no `typical_p`. A `seed` of None draws fresh
    randomness (upstream is deterministic then). Sequence i of a request uses seed + i. An engine
    whose seeds are signed drops the highest bit. The constants above bound temperature and
    penalties (upstream has no bounds), so that no value makes logits NaN or infinite. An engine may
    raise a tiny temperature to a larger one that is still nearly greedy.
    """

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    temperature: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    # None becomes all beams, or one sequence.
    num_return_sequences: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1)
        if self.num_return_sequences is None:
            force_setattr(self, "num_return_sequences", self.beam_width)

        check_int("num_return_sequences", self.num_return_sequences, 1)
        for name in ("beam_width", "num_return_sequences"):
            if getattr(self, name) > MAX_SEQUENCES:
                raise broken(name, f"at most {MAX_SEQUENCES}", getattr(self, name))

        if self.beam_width > 1 and self.num_return_sequences > self.beam_width:
            raise broken(
                "num_return_sequences",
                f"at most beam_width ({self.beam_width})",
                self.num_return_sequences,
            )

        for name in ("top_k", "min_tokens", "early_stopping", "no_repeat_ngram_size"):
            check_int(name, getattr(self, name), 0)

        check_int("seed", self.seed, 0, MAX_SEED)
        check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_range("typical_p", self.typical_p, 0.0, 1.0, low_open=True)
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_range("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        check_range("length_penalty", self.length_penalty, 0.0, math.inf)
        check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


class GuideType(enum.IntEnum):
    JSON = 0
    JSON_SCHEMA = 1
    REGEX = 2
    # The guide may also be in Lark, where the engine reads that too.
    EBNF_GRAMMAR = 3


class GuidedDecodingParams(msgspec.Struct, frozen=True):
    """The structure that the output must have. `guide` may be None only for JSON."""

    guide_type: GuideType
    guide: str | None = None

    def __post_init__(self) -> None:
        if self.guide is None and self.guide_type is not GuideType.JSON:
            raise ValueError(f"guide must be given for {self.guide_type.name}")


class AdditionalModelOutput(msgspec.Struct, frozen=True):
    """A tensor of the model by its name: its rows for generated tokens, and with `gather_context`
    for the prompt's.
    """

    name: str
    gather_context: bool = False


class OutputConfig(msgspec.Struct, frozen=True):
    """The outputs that a Result carries beside the token ids, in upstream's order.

    `num_top_log_probs` and `num_prompt_log_probs` say how many best alternatives each generated
    token and each prompt token gets; upstream does not have them. With `num_prompt_log_probs` 0 a
    Result has only the log-probs of the prompt tokens, with None it has none. Inside lmi the prompt
    is always excluded from the output.
    """

    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: tuple[AdditionalModelOutput, ...] = ()
    num_top_log_probs: int = 0
    num_prompt_log_probs: int | None = None

    def __post_init__(self) -> None:
        check_int("num_top_log_probs", self.num_top_log_probs, 0)
        check_int("num_prompt_log_probs", self.num_prompt_log_probs, 0)


class TokenRangeRetentionConfig(msgspec.Struct, frozen=True):
    """Of the prompt's tokens from `token_start` up to `token_end`, which is not included; None is
    the prompt's end.

    Blocks of a lower priority are evicted first. After `duration_ms` without use the priority is
    the default again; None means that it stays.
    """

    token_start: int
    token_end: int | None = None
    priority: int = DEFAULT_RETENTION_PRIORITY
    duration_ms: int | None = None

    def __post_init__(self) -> None:
        check_int("token_start", self.token_start, 0)
        check_int("token_end", self.token_end, self.token_start + 1)
        check_int("priority", self.priority, 0, MAX_RETENTION_PRIORITY)
        check_int("duration_ms", self.duration_ms, 1)


class KvCacheRetentionConfig(msgspec.Struct, frozen=True):
    """Ranges of the prompt, and the priority of what is generated. Upstream's durations are
    timedeltas.
    """

    token_range_retention_configs: tuple[TokenRangeRetentionConfig, ...] = ()
    decode_retention_priority: int = DEFAULT_RETENTION_PRIORITY
    decode_duration_ms: int | None = None

    def __post_init__(self) -> None:
        check_int(
            "decode_retention_priority", self.decode_retention_priority, 0, MAX_RETENTION_PRIORITY
        )
        check_int("decode_duration_ms", self.decode_duration_ms, 1)

        ranges = sorted(self.token_range_retention_configs, key=lambda config: config.token_start)
        for first, second in zip(ranges, ranges[1:], strict=False):
            if first.token_end is None or first.token_end > second.token_start:
                raise ValueError(
                    f"token_range_retention_configs must not overlap, given {first} and {second}"
                )


class LoraConfig(msgspec.Struct, frozen=True):
    """The adapter to use, by the name under which it was loaded."""

    name: str


class PromptTuningConfig(msgspec.Struct, frozen=True):
    """A table of embeddings that takes the place of prompt tokens. Refused by every engine here."""

    embedding_table: object


class ExternalDraftTokensConfig(msgspec.Struct, frozen=True):
    """Draft tokens of a client. Refused by every engine here: speculation is an option of the
    engine.
    """

    tokens: tuple[int, ...]


class PoolingParams(msgspec.Struct, frozen=True):
    """Asks for the embedding of the prompt in place of an answer: its first `dimensions` numbers,
    None for all.

    vLLM has this name; upstream has nothing like it.
    """

    dimensions: int | None = None

    def __post_init__(self) -> None:
        check_int("dimensions", self.dimensions, 1)


class _Arguments(msgspec.Struct, frozen=True):
    """The positional arguments of a Request, in upstream's order."""

    input_token_ids: tuple[int, ...]
    max_tokens: int
    streaming: bool = False
    sampling_config: SamplingConfig = SamplingConfig()
    output_config: OutputConfig = OutputConfig()


class Request(_Arguments, frozen=True, kw_only=True):
    """One prompt and everything an engine needs to continue it.

    `end_ids` holds further end tokens beside `end_id`, and `ignore_eos` lets generation continue
    past all of them; upstream has neither, no `is_express` and no `images`. `stop_words` and
    `bad_words` are token id sequences. Stop words are matched only on generated tokens and stay in
    the output. `allotted_time_ms` counts from enqueue. Every Response carries the `client_id`.
    `num_return_sequences` becomes the SamplingConfig's, where it may stand instead.
    """

    BATCHED_POST_PROCESSOR_NAME: ClassVar[str] = "batched"

    end_id: int | None = None
    end_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop_words: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: tuple[tuple[int, float], ...] = ()
    guided_decoding_params: GuidedDecodingParams | None = None
    lora_config: LoraConfig | None = None
    logits_post_processor_name: str | None = None
    return_all_generated_tokens: bool = False
    # 1 is the most urgent.
    priority: float = DEFAULT_PRIORITY
    # Whether it may have one of the engine's express places.
    is_express: bool = False
    allotted_time_ms: int | None = None
    client_id: int | None = None
    num_return_sequences: int | None = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    prompt_tuning_config: PromptTuningConfig | None = None
    external_draft_tokens_config: ExternalDraftTokensConfig | None = None
    # Prompts share what is cached only if they have the same salt. Without a salt, only whole
    # blocks are shared.
    cache_salt: str | None = None
    pooling_params: PoolingParams | None = None
    # Files, each of which has its model's placeholder in `input_token_ids`, in order.
    images: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if not self.input_token_ids:
            raise ValueError("input_token_ids must not be empty")

        check_int("max_tokens", self.max_tokens, 1)
        self._move_num_return_sequences()
        check_range("priority", self.priority, 0.0, 1.0)
        check_int("allotted_time_ms", self.allotted_time_ms, 1)

        for name in ("stop_words", "bad_words"):
            if any(not word for word in getattr(self, name)):
                raise ValueError(f"{name} must not hold an empty word")

        for _, bias in self.embedding_bias:
            if not abs(bias) <= MAX_FLOAT32:
                raise broken("embedding_bias", "finite in float32", bias)

        if self.cache_salt == "":
            raise ValueError("cache_salt must not be empty")

        if self.guided_decoding_params is not None and self.sampling_config.beam_width > 1:
            raise ValueError("guided_decoding_params must not be combined with beam_width over 1")

    def _move_num_return_sequences(self) -> None:
        """Give it to the SamplingConfig, whose number is the only one that counts afterwards."""
        num = self.num_return_sequences
        sampling = self.sampling_config
        if num is None or num == sampling.num_return_sequences:
            return

        check_int("num_return_sequences", num, 1)
        if sampling.num_return_sequences != sampling.beam_width:
            field = "sampling_config.num_return_sequences"
            both = f"{num} and {field}={sampling.num_return_sequences}"
            raise ValueError(
                f"num_return_sequences must be given once or twice alike, given {both}"
            )

        force_setattr(self, "sampling_config", replace(sampling, num_return_sequences=num))
