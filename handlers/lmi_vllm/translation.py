"""A sequence in vLLM's words, and vLLM's outputs in those of `handlers/base`.

Every value gets its exact type: a wrong type ends vLLM silently. vLLM stops at the same token as
`handlers/base`, except at stop words of several tokens, which it does not know.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

from vllm.inputs import MultiModalInput, TokensInput, tokens_input
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from handlers.base.adapters import LoadedAdapter
from handlers.base.sequence import Sequence
from handlers.driven.outputs import LogProbs, SequenceOutput, ending_tokens
from handlers.lmi_vllm import vllm_log
from lmi.errors import InvalidRequest
from lmi.executor.executor import Embeddings
from lmi.executor.request import (
    DEFAULT_PRIORITY,
    PRIORITY_STEPS,
    GuidedDecodingParams,
    GuideType,
    Request,
)
from lmi.executor.response import FinishReason, Tensor

# vLLM's seeds are signed, as torch's are: two seeds that differ by 2^63 become one.
MAX_SIGNED = 2**63 - 1
# What the ends that vLLM reports mean, for a sequence that our own rules have not ended by then.
REASONS = {
    "stop": FinishReason.END_ID,
    "length": FinishReason.LENGTH,
    "repetition": FinishReason.STOP_WORDS,
}
NUM_WARM_UP_PROMPT_TOKENS = 8
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
    """Parameters whose structure was checked before."""

    def _validate_structured_outputs(self, *args: object, **more: object) -> None:
        """Do nothing. vLLM would check the structure again, on the thread that steps."""
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
    """Return the parameters of a running beam: one token, and the best `num_top` with their
    log-probs.
    """
    log_probs = _log_probs(sequence) | {"logprobs": num_top}
    return SamplingParams(max_tokens=1, temperature=0.0, **OF_ALL, **log_probs)


def warm_up_works(*, is_pooling: bool) -> list[VllmWork]:
    """Return what vLLM runs before the first request: the first steps set up kernels, and take as
    long as many steps.
    """
    if is_pooling:
        return [_warm_up_work(0, PoolingParams(task="embed"))]

    greedy = SamplingParams(max_tokens=NUM_WARM_UP_TOKENS, temperature=0.0, **OF_ALL)
    sampled = SamplingParams(max_tokens=NUM_WARM_UP_TOKENS, top_p=0.9, seed=0, logprobs=0, **OF_ALL)
    return [_warm_up_work(0, greedy), _warm_up_work(1, sampled)]


def _warm_up_work(number: int, params: Params) -> VllmWork:
    prompt = tokens_input([0] * NUM_WARM_UP_PROMPT_TOKENS)
    return VllmWork(f"warm-up.{number}", prompt, params)


def _choice(sequence: Sequence) -> dict[str, Any]:
    """Return the parameters that choose a token. Those that are not set are left out: vLLM accepts
    None only in some fields.
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
    """Return the parameters that say which log-probs vLLM reports."""
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
    """Return vLLM's priority of a request, where a lower number is more urgent.

    An express request comes before all that are not.
    """
    urgency = request.priority - DEFAULT_PRIORITY
    if request.is_express:
        # A priority is at most 1.
        urgency += 1

    return round(-urgency * PRIORITY_STEPS)


def of_core(name: str, output: EngineCoreOutput) -> SequenceOutput:
    """Translate an output of the core, for the sequence of this name.

    Its log-probs are arrays (num_positions, 1 + the largest number that was asked for).
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
    """Return what the end means that vLLM reports, an error if vLLM gave the sequence up."""
    if reason in REASONS:
        return REASONS[reason]

    cause = vllm_log.cause_of(name)
    if cause is None:
        return RuntimeError(reason)

    return InvalidRequest(vllm_log.refusal(cause), vllm_log.GUIDE_FIELD)
