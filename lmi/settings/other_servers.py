"""Words for flags and variables of other servers: what to write here, or why nothing is needed.

Sources: the front-end arguments of vLLM 0.32 and 0.33, and the variables that AWS's pages, its SDK
and JumpStart set.
"""

# Flags that name what is always so here, and the reason. They start with a note.
NEEDLESS = {
    "enable_prompt_tokens_details": "usage always has them",
    "enable_server_load_tracking": "/load always has it",
    "enable_request_id_headers": "every answer has x-request-id",
    "enable_offline_docs": "the pages load from this server alone",
    "exclude_tools_when_tool_choice_none": "tools are left out beside tool_choice none",
    "tool_strict_level": (
        "a forced call has the form of its tool, where the engine can guide decoding"
    ),
    "max_log_len": "the log has no prompts",
    "log_error_stack": "a fault of this server is logged with its stack",
    "enable_log_deltas": "the log has no answers",
    "disable_access_log_for_endpoints": (
        "a request has one line in the log, and --log-level WARNING leaves it out"
    ),
    "h11_max_incomplete_event_size": "the limits of a request's head are fixed",
    "h11_max_header_count": "the limits of a request's head are fixed",
}
# Flags that ask for what is not here, and what to do instead. They end the start.
ABSENT = {
    "return_tokens_as_token_ids": "a request says it, as return_tokens_as_token_ids",
    "default_chat_template_kwargs": "a request says them, as chat_template_kwargs",
    "enable_force_include_usage": "a request says it, as stream_options with include_usage",
    "anthropic_disabled_thinking_effort": "a request says it, as chat_template_kwargs",
    "enable_per_request_metrics": (
        "/metrics has the times of all requests, option.otlp_traces_endpoint those of each"
    ),
    "enable_tokenizer_info_endpoint": "/tokenize and /detokenize are here, /tokenizer_info is not",
    "trust_request_chat_template": "option.chat_template is the template of all requests",
    "trust_request_mm_kwargs": "a request cannot set how images are prepared",
    "response_role": "an answer has the role assistant",
    "tool_parser_plugin": "option.tool_call_parser names one of the forms that are here",
    "tool_server": "clients run the tools that the model calls",
    "enable_log_outputs": "the log has no answers",
    "sse_keep_alive_interval": "a stream carries no comments between its events",
    **dict.fromkeys(
        (
            "dp_supervisor_probe_interval_s",
            "dp_supervisor_probe_timeout_s",
            "dp_supervisor_probe_failure_threshold",
        ),
        "--min-workers is the number of replicas, which have one supervisor",
    ),
    "cohere_is_reasoning_model": "Cohere's API is not here",
    "cohere_format": "Cohere's API is not here",
    "fingerprint_mode": "system_fingerprint is the server's own",
    "fingerprint_value": "system_fingerprint is the server's own",
    "enable_scale_out": "--min-workers is the number of replicas",
    "data_parallel_supervisor_port": (
        "--min-workers is the number of replicas, which have one supervisor"
    ),
    "grpc_port": "the server speaks HTTP alone",
    "uds": "--host and --port say where it listens",
    "allow_credentials": "--allowed-origins names whose pages may call",
    "allowed_methods": "--allowed-origins names whose pages may call, by every method",
    "allowed_headers": "--allowed-origins names whose pages may call, with every header",
    "ssl_cert_reqs": "this server asks no client for a certificate",
    "ssl_ciphers": "the ciphers are those of Python's ssl",
    "enable_ssl_refresh": "SIGHUP to lmi-supervisor reads a renewed certificate",
    "middleware": "no code runs in front of the routes; a model.py may read and write bodies",
    "enable_flash_late_interaction": "nothing is reranked here",
    "max_seq_len": "option.max_model_len is the context",
    "context_length": "option.max_model_len is the context",
    "lmcache_auto_config": "option.kv_transfer_config names LMCache's connector",
}
# Variables that set nothing here although their users expect something, and what to write.
WRITE_INSTEAD = {
    **dict.fromkeys(
        ("ENDPOINT_SERVER_TIMEOUT", "TS_DEFAULT_RESPONSE_TIMEOUT", "MMS_DEFAULT_RESPONSE_TIMEOUT"),
        "PREDICT_TIMEOUT is the time for a whole request",
    ),
    "MAX_NUM_SEQS": "OPTION_MAX_ROLLING_BATCH_SIZE is the number of sequences that run at once",
    # TGI's launcher, whose names may be those of other programs too.
    "API_KEY": "LMI_API_KEY is the key that clients need",
    "DTYPE": "OPTION_DTYPE is the type of the weights",
    "JSON_OUTPUT": "SERVING_LOG_FORMAT is the form of the log",
    "KV_CACHE_DTYPE": "OPTION_KV_CACHE_DTYPE is the type of the KV cache, on an engine that has it",
    "LORA_ADAPTERS": (
        "an adapter is a folder in adapters/ beside the model, or registered at /adapters"
    ),
    "MAX_BEST_OF": "SERVING_MAX_REQUEST_SEQUENCES bounds the sequences of a request",
    "OTLP_ENDPOINT": (
        "OPTION_OTLP_TRACES_ENDPOINT is http://HOST:PORT/v1/traces, for OTLP over HTTP"
    ),
    "PAYLOAD_LIMIT": "SERVING_MAX_REQUEST_SIZE bounds a body",
    "QUANTIZE": "HF_MODEL_QUANTIZE is the method",
    **dict.fromkeys(
        ("ROPE_SCALING", "ROPE_FACTOR"), "the model's config.json has its rope_scaling"
    ),
    "SPECULATE": "OPTION_SPECULATIVE=ngram guesses tokens ahead",
    "TOKENIZER_CONFIG_PATH": "OPTION_CHAT_TEMPLATE is the chat template",
    "TRUST_REMOTE_CODE": "HF_MODEL_TRUST_REMOTE_CODE lets the model's code run",
    # Hugging Face's image of vLLM.
    "HF_LMCACHE_KV_CONFIG": "OPTION_KV_TRANSFER_CONFIG names the connector",
}
# Variables without an effect, and the reason where it is not obvious.
UNUSED = {
    "SAGEMAKER_ENABLE_LOAD_AWARE": "requests always go to the replica with the least work",
    "SAGEMAKER_MODEL_SERVER_WORKERS": "SERVING_MIN_WORKERS is the number of replicas",
    "MESSAGES_API_ENABLED": "chats are always answered",
    "MODEL_CACHE_ROOT": (
        "OPTION_MODEL_ID names the model, SERVING_DOWNLOAD_DIR where what is fetched goes"
    ),
    **dict.fromkeys(("SAGEMAKER_ENV", "USE_HF_TRANSFER", "TIKTOKEN_ENCODINGS_BASE"), ""),
    "HF_ENABLE_RUNAI_STREAMER": "s3:// is fetched before the start",
    **dict.fromkeys(("WAITING_SERVED_RATIO", "MAX_WAITING_TOKENS"), "a request joins at once"),
    "SHARDED": "SM_NUM_GPUS is the number of GPUs",
    **dict.fromkeys(
        ("CUDA_GRAPHS", "DISABLE_CUSTOM_KERNELS", "USAGE_STATS", "VALIDATION_WORKERS"), ""
    ),
}
PROGRAM = "SAGEMAKER_PROGRAM"
SUBMIT_DIRECTORY = "SAGEMAKER_SUBMIT_DIRECTORY"
PROGRAM_INSTEAD = "it is not run; a model.py with a function handle is"
