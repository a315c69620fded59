"""A sequence as vLLM gets it, its outputs as `handlers/base` has them, and what the loaded engine
can do.

Every value gets its exact type: a wrong type ends vLLM silently. vLLM stops at the same token as
`handlers/base`, except for stop words of several tokens, which it does not know.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from vllm.config import ModelConfig, VllmConfig
from vllm.inputs import MultiModalInput, TokensInput, tokens_input
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import get_model_cls
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from handlers.base.adapters import LoadedAdapter
from handlers.base.sequence import Sequence
from handlers.driven.outputs import LogProbs, SequenceOutput, ending_tokens
from handlers.guides.vocabulary import NO_TEXTS
from handlers.lmi_vllm import vllm_log
from handlers.lmi_vllm.arguments import num_express_places
from lmi.errors import InvalidRequest
from lmi.executor.executor import Capabilities, Embeddings, EngineInfo
from lmi.executor.request import (
    DEFAULT_PRIORITY,
    PRIORITY_STEPS,
    GuidedDecodingParams,
    GuideType,
    Request,
)
from lmi.executor.response import FinishReason, Tensor

# SamplingParams takes no higher one.
MAX_TEMPERATURE = 2.0
# vLLM's seeds are signed, as torch's are: two seeds that differ by 2^63 become one.
MAX_SIGNED = 2**63 - 1
# The ends that vLLM reports, for a sequence that Sequence's rules have not ended by then.
REASONS = {
    "stop": FinishReason.END_ID,
    "length": FinishReason.LENGTH,
    "repetition": FinishReason.STOP_WORDS,
}
NUM_WARM_UP_TOKENS = 4
# The parameters of every request for tokens. Its stop_token_ids has the end tokens too.
OF_ALL = {
    "ignore_eos": True,
    "detokenize": False,
    "output_kind": RequestOutputKind.DELTA,
    "skip_clone": True,
}

Params: TypeAlias = SamplingParams | PoolingParams


@dataclass(frozen=True, slots=True)
class VllmWork:
    """A sequence as vLLM gets it."""

    id: str
    prompt: TokensInput | MultiModalInput
    params: Params
    adapter: LoRARequest | None = None
    priority: int = 0


def lora_request(adapter: LoadedAdapter) -> LoRARequest:
    """Return an adapter as vLLM names it."""
    return LoRARequest(adapter.name, adapter.number, adapter.path)


class CheckedParams(SamplingParams):
    """Parameters whose structure was checked: vLLM calls this on the thread that steps, and need
    not do it again.
    """

    def _validate_structured_outputs(self, *args: object, **more: object) -> None:
        return None


def params_of(
    sequence: Sequence, embeddings: Embeddings | None, structure: StructuredOutputsParams | None
) -> Params:
    """Translate the request of a sequence, whose structure is given as vLLM has checked it."""
    pooling = sequence.request.pooling_params
    if pooling is None or embeddings is None:
        return sampling_params(sequence, structure)

    # vLLM refuses the size of the whole embedding if the model has no other.
    is_whole = pooling.dimensions in (None, embeddings.size)
    return PoolingParams(task="embed", dimensions=None if is_whole else pooling.dimensions)


def sampling_params(
    sequence: Sequence, structure: StructuredOutputsParams | None = None
) -> SamplingParams:
    """Translate a request for tokens."""
    request = sequence.request
    biases = {int(token_id): float(bias) for token_id, bias in request.embedding_bias}
    kind = SamplingParams if structure is None else CheckedParams
    params = kind(
        max_tokens=int(sequence.max_tokens),
        min_tokens=min(int(sequence.min_tokens), int(sequence.max_tokens)),
        stop_token_ids=ending_tokens(sequence),
        structured_outputs=structure,
        logit_bias=biases or None,
        **OF_ALL,
        **_choice(sequence),
        **_log_probs(sequence),
    )
    # vLLM's argument takes texts and turns them into token ids.
    if request.bad_words:
        params._bad_words_token_ids = [list(map(int, word)) for word in request.bad_words]

    return params


def row_params(sequence: Sequence, num_top: int) -> SamplingParams:
    """The parameters of a running beam: one token, and the best `num_top` with their log-probs."""
    return SamplingParams(
        max_tokens=1, temperature=0.0, **OF_ALL, **_log_probs(sequence) | {"logprobs": num_top}
    )


def warm_up_works(*, is_pooling: bool) -> list[VllmWork]:
    """The first steps set up kernels and so take as long as many steps."""
    greedy = SamplingParams(max_tokens=NUM_WARM_UP_TOKENS, temperature=0.0, **OF_ALL)
    sampled = SamplingParams(max_tokens=NUM_WARM_UP_TOKENS, top_p=0.9, seed=0, logprobs=0, **OF_ALL)
    kinds: list[Params] = [PoolingParams(task="embed")] if is_pooling else [greedy, sampled]

    works = []
    for number, params in enumerate(kinds):
        works.append(VllmWork(f"warm-up.{number}", tokens_input([0] * 8), params))

    return works


def _choice(sequence: Sequence) -> dict[str, Any]:
    """The parameters that choose a token. Unset ones are omitted: vLLM accepts None only in some
    fields.
    """
    config = sequence.request.sampling_config
    if config.is_greedy:
        values: dict[str, float | None] = {"temperature": 0.0}
    else:
        values = {"temperature": config.temperature, "top_p": config.top_p, "min_p": config.min_p}

    values["repetition_penalty"] = config.repetition_penalty
    values["presence_penalty"] = config.presence_penalty
    values["frequency_penalty"] = config.frequency_penalty

    params: dict[str, Any] = {}
    for name, value in values.items():
        if value is not None:
            params[name] = float(value)

    if not config.is_greedy and config.top_k is not None:
        params["top_k"] = int(config.top_k)

    # With a seed vLLM makes a generator for the request, which costs time.
    if config.seed is not None:
        # The highest bit could make -1, which means no seed.
        params["seed"] = int(sequence.seed) & MAX_SIGNED

    return params


def _log_probs(sequence: Sequence) -> dict[str, Any]:
    output = sequence.request.output_config
    params = dict[str, Any]()
    if output.return_log_probs or output.num_top_log_probs:
        params["logprobs"] = int(output.num_top_log_probs)

    if sequence.lacks_prompt_log_probs:
        params["prompt_logprobs"] = int(output.num_prompt_log_probs or 0)

    return params


def structure(guide: GuidedDecodingParams) -> StructuredOutputsParams:
    """Return a guide as vLLM takes it."""
    if guide.guide_type is GuideType.JSON:
        return StructuredOutputsParams(json_object=True)

    if guide.guide_type is GuideType.JSON_SCHEMA:
        return StructuredOutputsParams(json=guide.guide)

    if guide.guide_type is GuideType.REGEX:
        return StructuredOutputsParams(regex=guide.guide)

    return StructuredOutputsParams(grammar=guide.guide)


def priority(request: Request) -> int:
    """vLLM's priority of a request, where a lower number is more urgent. An express request comes
    before all that are not.
    """
    return round((DEFAULT_PRIORITY - request.priority - request.is_express) * PRIORITY_STEPS)


def of_core(name: str, output: EngineCoreOutput) -> SequenceOutput:
    """Translate an output of the core. Its log-probs are arrays (positions, largest number asked
    for + 1).
    """
    embedding = None
    vector = output.pooling_output
    if vector is not None:
        embedding = Tensor(tuple(vector.shape), "float32", vector.float().numpy().tobytes())

    stats = output.prefill_stats
    reason = output.finish_reason
    return SequenceOutput(
        name,
        output.new_token_ids,
        _of_arrays(output.new_logprobs),
        _of_arrays(output.new_prompt_logprobs_tensors),
        end=None if reason is None else _end(name, str(reason)),
        num_cached_tokens=0 if stats is None else stats.num_cached_tokens,
        embedding=embedding,
    )


def _of_arrays(arrays: LogprobsLists | LogprobsTensors | None) -> LogProbs | None:
    if arrays is None:
        return None

    return LogProbs(arrays.logprob_token_ids.tolist(), arrays.logprobs.tolist())


def _end(name: str, reason: str) -> FinishReason | Exception:
    """The end of a sequence. If vLLM gave it up, its reason is not in REASONS and the end is an
    error.
    """
    if reason in REASONS:
        return REASONS[reason]

    cause = vllm_log.cause_of(name)
    if cause is None:
        return RuntimeError(reason)

    return InvalidRequest(vllm_log.refusal(cause), vllm_log.GUIDE_FIELD)


def num_blocks(config: VllmConfig) -> int:
    """The number of blocks of the KV cache for requests. vLLM reserves one block."""
    return max(0, (config.cache_config.num_gpu_blocks or 0) - 1)


def describe(config: VllmConfig, max_beam_width: int, renderer: Any = None) -> EngineInfo:
    """Return what the engine says of itself. `renderer` is what reads images, if any does."""
    model = config.model_config
    speculates = config.speculative_config is not None
    max_num_seqs = config.scheduler_config.max_num_seqs
    vocab_size = model.get_vocab_size()
    max_logprobs = model.max_logprobs
    max_top_log_probs = vocab_size if max_logprobs < 0 else min(max_logprobs, vocab_size)
    images = NO_IMAGES if renderer is None else _reads_images(model, renderer)

    embeddings = None
    if model.runner_type == "pooling":
        # The sizes to which embeddings may be shortened.
        sizes = tuple(model.matryoshka_dimensions or ()) if model.is_matryoshka else None
        embeddings = Embeddings(model.embedding_size, sizes)

    return EngineInfo(
        name="vllm",
        vocab_size=vocab_size,
        max_sequence_length=model.max_model_len,
        max_num_sequences=max_num_seqs - num_express_places(max_num_seqs),
        num_express_places=num_express_places(max_num_seqs),
        dtype=str(model.dtype).removeprefix("torch."),
        device=config.device_config.device_type,
        max_kv_cache_tokens=num_blocks(config) * config.cache_config.block_size,
        capabilities=Capabilities(
            max_beam_width=max(1, min(max_beam_width, max_top_log_probs // 2)),
            num_return_sequences=True,
            guided_decoding=() if model.skip_tokenizer_init else tuple(GuideType),
            why_no_guides=NO_TEXTS if model.skip_tokenizer_init else "",
            # vLLM refuses both beside drafts.
            min_p=not speculates,
            embedding_bias=not speculates,
            perf_metrics=True,
            max_top_log_probs=max_top_log_probs,
            max_temperature=MAX_TEMPERATURE,
            lora=config.lora_config is not None,
            adapter_pins=True,
            priority=config.scheduler_config.policy == "priority",
            embeddings=embeddings,
            max_images=images.max_num,
        ),
        image_placeholder=images.placeholder,
    )


class Images(NamedTuple):
    """How many images a prompt may have, and the placeholder of one where a chat template writes
    none.
    """

    max_num: int
    placeholder: str


NO_IMAGES = Images(0, "")


def _reads_images(model: ModelConfig, renderer: Any) -> Images:
    if not model.supports_multimodal_inputs:
        return NO_IMAGES

    max_num = renderer.get_mm_processor().info.allowed_mm_limits.get("image", 0)
    if not max_num:
        return Images(max_num, "")

    # Some models number their placeholders.
    placeholder_of = get_model_cls(model).get_placeholder_str
    first = placeholder_of("image", 1)
    second = placeholder_of("image", 2)
    if first == second:
        return Images(max_num, first or "")

    return Images(max_num, first.replace("1", "{n}"))
