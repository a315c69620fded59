"""The contract between lmi and its engines: token ids in, token ids out.

    # lmi_dist's Executor, or lmi_vllm's
    with Executor("/models/mine", ExecutorConfig()) as executor:
        request_id = executor.enqueue_request(Request([1, 2, 3], 16))
        print(executor.await_responses(request_id)[0].get_result().output_token_ids)

The engine       Executor, its EngineInfo, Capabilities, Embeddings, MemoryUse, Progress and
                 PromptProgress; IterationStats with KvCacheStats, InflightBatchingStats and
                 SpecDecodingStats;
                 RequestStatsPerIteration of RequestStats
How it is built  ExecutorConfig with BatchingType, KvCacheConfig, GuidedDecodingConfig and
                 LogitsPostProcessorConfig of LogitsPostProcessor and LogitsPostProcessorBatched
What it takes    Request with SamplingConfig, OutputConfig, AdditionalModelOutput,
                 GuidedDecodingParams, GuideType, LoraConfig, PoolingParams,
                 KvCacheRetentionConfig and TokenRangeRetentionConfig; every engine here refuses
                 PromptTuningConfig and ExternalDraftTokensConfig
What it answers  Response of a Result or a ResponseError; FinishReason, ErrorKind, TokenLogProb,
                 PromptLogProb, Tensor, RequestPerfMetrics

The names are those of TensorRT-LLM's Executor API, so a reader of one knows the other. A docstring
says where lmi adds a name or settles a choice that upstream leaves open. All but the configuration
are msgspec structs, which are both the Python API and the messages on the engine socket.

Errors have two channels. A request that can never be right raises ValueError where it is built, or
`Unsupported`, `InvalidParameter` or `Overloaded` of `lmi.errors` where it is enqueued. After
acceptance every fault is a Response with an `error`, which is always final.
"""

# ruff: noqa: F403
from lmi.executor.config import *
from lmi.executor.executor import *
from lmi.executor.request import *
from lmi.executor.response import *
