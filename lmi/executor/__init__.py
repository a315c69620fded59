"""The contract between lmi and its engines: token ids in, token ids out.

    with Executor("/models/mine", ExecutorConfig()) as executor:  # handlers.lmi_dist, handlers.lmi_vllm
        request_id = executor.enqueue_request(Request([1, 2, 3], 16))
        print(executor.await_responses(request_id)[0].get_result().output_token_ids)

The engine
    Executor                    one model replica: enqueue, await, cancel, statistics
    ExecutorConfig              how one is built: beam widths, limits, what requests may ask for
    BatchingType                in flight; STATIC is refused
    KvCacheConfig               the cache of keys and values: its size, and whether prompts share it
    LogitsPostProcessorConfig   functions that change logits: LogitsPostProcessor, LogitsPostProcessorBatched
    GuidedDecodingConfig        the vocabulary that guides need
    EngineInfo, Capabilities    what a loaded engine is, and what it can do, as the Embeddings that it gives
    Progress                    takes how far a load is

What it takes
    Request                     one prompt and everything needed to continue it
    SamplingConfig              how the next token is chosen, and the beam width
    OutputConfig                what a Result carries beside token ids
    AdditionalModelOutput       a tensor of the model that a Result carries
    GuidedDecodingParams        the structure that the output must have, of a GuideType
    LoraConfig                  the adapter to use
    KvCacheRetentionConfig      how long keys and values of a request are kept, by TokenRangeRetentionConfig
    PoolingParams               asks for an embedding in place of tokens
    PromptTuningConfig, ExternalDraftTokensConfig   refused by every engine here

What it answers
    Response                    a Result, or a ResponseError of an ErrorKind
    Result                      new output of one sequence, with a FinishReason for each beam
    Tensor                      additional outputs and logits
    TokenLogProb, PromptLogProb, RequestPerfMetrics
    IterationStats              one step, with its InflightBatchingStats, KvCacheStats, SpecDecodingStats
    RequestStatsPerIteration    the RequestStats of one step

The names are those of TensorRT-LLM's Executor API, so a reader of one knows the other. A docstring says where lmi adds
a name or settles a choice that upstream leaves open. All but the configuration are msgspec structs, which are both the
Python API and the messages on the engine socket. This package does not know text, HTTP or devices.

Errors have two channels. A request that can never be right raises ValueError where it is built, or `Unsupported`,
`InvalidParameter` or `Overloaded` of `lmi.errors` where it is enqueued. After acceptance every fault is a Response with
an `error`, which is always final.
"""

# ruff: noqa: F403
from lmi.executor.config import *
from lmi.executor.executor import *
from lmi.executor.request import *
from lmi.executor.response import *
