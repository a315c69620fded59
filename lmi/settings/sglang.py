"""The variables of AWS's SGLang image, where SM_SGLANG_<FLAG> is a flag of SGLang's server.

Sources: AWS's SGLang containers, and the arguments of SGLang 0.5.
"""

import re
from collections.abc import Iterator, Mapping

from lmi.settings.flag_variables import Flag, flag_variables, report_flags
from lmi.settings.given import PLATFORM, Given
from lmi.settings.steps import Resolution

PREFIX = "SM_SGLANG_"
# Among the variables of AWS's images these come behind those that name a model, and behind vLLM's.
FIRST_ORDER = 30
TENSOR = "option.tensor_parallel_degree"
PIPELINE = "option.pipeline_parallel_degree"
PREFILL = "option.max_rolling_batch_prefill_tokens"
SPECULATION = (
    "option.speculative_config says how tokens are guessed ahead, or option.speculative=ngram"
)
TEMPLATE = "chat_template"
# SGLang brings templates that have such names.
TEMPLATE_NAME = re.compile(r"[a-z0-9_-]+")
TOOL_CALL_NAMES = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "glm": "glm45",
    "gpt-oss": "openai",
    "minimax-m2": "minimax_m2",
}
REASONING_NAMES = {
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "deepseek_v3",
    "gpt-oss": "openai",
    "minimax": "minimax_m2",
    "minimax-append-think": "minimax_m2",
    "qwen3-thinking": "qwen3",
}
# If two rows have one option, the first that is set counts.
ROWS = (
    Flag("context_length", "option.max_model_len"),
    Flag("max_running_requests", "option.max_rolling_batch_size"),
    Flag("max_queued_requests", "job_queue_size"),
    Flag("chunked_prefill_size", PREFILL, words={"-1": ""}),
    Flag("max_prefill_tokens", PREFILL),
    Flag("max_total_tokens", "option.max_kv_cache_tokens"),
    Flag("mem_fraction_static", "option.gpu_memory_utilization"),
    Flag("cpu_offload_gb", "option.cpu_offload_gb"),
    Flag("disable_radix_cache", "option.enable_prefix_caching", words={"true": "false"}),
    Flag("disable_cuda_graph", "option.enforce_eager"),
    Flag("disable_custom_all_reduce", "option.disable_custom_all_reduce"),
    # Replicas and ranks.
    Flag("tp_size", TENSOR),
    Flag("tp", TENSOR),
    Flag("tensor_parallel_size", TENSOR),
    Flag("pp_size", PIPELINE),
    Flag("pp", PIPELINE),
    Flag("pipeline_parallel_size", PIPELINE),
    Flag("dp_size", "minWorkers"),
    Flag("dp", "minWorkers"),
    Flag("data_parallel_size", "minWorkers"),
    Flag("nnodes", "option.nnodes"),
    Flag("node_rank", "option.node_rank"),
    Flag("device", "option.device"),
    Flag("watchdog_timeout", "step_timeout"),
    # The model.
    Flag("dtype", "option.dtype"),
    Flag("quantization", "option.quantize"),
    Flag("kv_cache_dtype", "option.kv_cache_dtype"),
    Flag("load_format", "option.load_format"),
    Flag("model_loader_extra_config", "option.model_loader_extra_config"),
    Flag("json_model_override_args", "option.hf_overrides"),
    Flag("trust_remote_code", "option.trust_remote_code"),
    Flag("tokenizer_path", "option.tokenizer"),
    Flag("tokenizer_mode", "option.tokenizer_mode"),
    Flag("download_dir", "download_dir"),
    Flag("random_seed", "option.seed"),
    Flag("is_embedding", "option.task", words={"true": "text-embedding"}),
    # Adapters.
    Flag("enable_lora", "option.enable_lora"),
    Flag("max_loras_per_batch", "option.max_loras"),
    Flag("max_loaded_loras", "option.max_cpu_loras"),
    Flag("max_lora_rank", "option.max_lora_rank"),
    # The server and its answers.
    Flag("host", "host"),
    Flag("port", "port"),
    Flag("api_key", "option.api_key"),
    Flag("ssl_certfile", "ssl_certfile"),
    Flag("ssl_keyfile", "ssl_keyfile"),
    Flag("log_level", "log_level"),
    Flag("served_model_name", "option.served_model_name"),
    Flag(TEMPLATE, "option.chat_template"),
    Flag("tool_call_parser", "option.tool_call_parser", words=TOOL_CALL_NAMES),
    Flag("reasoning_parser", "option.reasoning_parser", words=REASONING_NAMES),
    Flag("stream_interval", "option.stream_interval"),
    Flag("constrained_json_disable_any_whitespace", "option.disable_any_whitespace"),
    Flag("enable_metrics", needless="/metrics is always there"),
    Flag("enable_cache_report", needless="usage always has the cached tokens"),
    Flag("skip_server_warmup", needless="a server is ready when its engines are"),
    Flag("config", instead="lmi serve --config FILE reads a file of flags"),
    Flag(
        "lora_paths",
        instead="an adapter is a folder in adapters/ beside the model, or registered at /adapters",
    ),
    Flag("dist_init_addr", instead="OPTION_MASTER_ADDR and OPTION_MASTER_PORT are the first node"),
    Flag(
        "sampling_defaults",
        instead="OPTION_GENERATION_CONFIG is auto for the model's, lmi for OpenAI's",
    ),
    Flag("default_chat_template_kwargs", instead="a request says them, as chat_template_kwargs"),
    Flag(
        "kv_events_config",
        instead='OPTION_KV_EVENTS_CONFIG is {"enable_kv_cache_events": true, "endpoint": …}',
    ),
    Flag(
        "otlp_traces_endpoint",
        instead="OPTION_OTLP_TRACES_ENDPOINT is http://HOST:PORT/v1/traces, for OTLP over HTTP",
    ),
    Flag("speculative_algorithm", instead=SPECULATION),
    Flag("speculative_draft_model_path", instead=SPECULATION),
    Flag("speculative_draft_model", instead=SPECULATION),
    Flag("speculative_num_steps", instead=SPECULATION),
    Flag("speculative_eagle_topk", instead=SPECULATION),
    Flag("speculative_num_draft_tokens", instead=SPECULATION),
    Flag(
        "engine",
        instead="engines here generate text or give embeddings, and make no images",
        words={"llm": ""},
    ),
)
FLAGS = {flag.name: flag for flag in ROWS}
ORDERS = {flag.name: order for order, flag in enumerate(ROWS, FIRST_ORDER)}


def givens(environ: Mapping[str, str]) -> Iterator[Given]:
    """Yield the values that the image's variables give to options."""
    for variable in flag_variables(environ, PREFIX):
        flag = FLAGS.get(variable.flag)
        if flag is None or not flag.key or variable.is_left_out:
            continue

        text = flag.text(variable.text)
        if text and not _names_a_template(flag.name, text):
            yield Given.of(flag.key, text, variable.name, PLATFORM, ORDERS[flag.name])


def _names_a_template(flag: str, text: str) -> bool:
    """Return whether a flag names a template that SGLang brings, and that is not here."""
    return flag == TEMPLATE and TEMPLATE_NAME.fullmatch(text) is not None


def report(resolution: Resolution) -> None:
    """Report each variable that gives no option: with what to write instead, or as one that means
    nothing here.
    """
    values = resolution.values
    variables = flag_variables(resolution.start.environ, PREFIX)
    unread: list[str] = []
    for variable in report_flags(values, variables, FLAGS):
        if variable.flag not in FLAGS:
            unread.append(variable.name)
        elif _names_a_template(variable.flag, variable.text):
            values.warn(
                f"{variable.name}: is not read, the model's own template counts, or "
                "OPTION_CHAT_TEMPLATE names a file"
            )

    if unread:
        values.warn(f"{', '.join(unread)}: flags of SGLang that no option here means")
