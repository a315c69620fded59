"""Options and variables that are not in the table, and those of other servers: what they mean here,
or why they mean nothing.

Sources: LMI's serving.properties, and AWS's pages of LMI and of its vLLM, SGLang and llama.cpp
images.
"""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress

from msgspec.structs import replace

from lmi.errors import shorten
from lmi.settings.annexes import MODELS, REASONING_FORMS, TOOL_CALL_FORMS
from lmi.settings.given import Given, Rank
from lmi.settings.handler import USER_CODE, ChosenEngine
from lmi.settings.kinds import LENGTH_OR_AUTO, WORDS
from lmi.settings.listeners import ADDRESS
from lmi.settings.other_servers import (
    ABSENT,
    NEEDLESS,
    PROGRAM,
    PROGRAM_INSTEAD,
    SUBMIT_DIRECTORY,
    UNUSED,
    WRITE_INSTEAD,
)
from lmi.settings.steps import Resolution
from lmi.settings.table import BY_KEY, MODEL, OPTIONS, find
from lmi.settings.tasks import is_for_embeddings
from lmi.settings.values import Values
from lmi.user_code.options import PIP_ARGS
from lmi.user_code.standards.settings import HANDLERS, MIDDLEWARES, SCRIPT, SCRIPT_FOLDER

# The least ratio of difflib at which a key counts as misspelt: rolling_back is a slip for
# rolling_batch, but max_new_tokens is none for max_num_tokens.
NEARLY_SAME = 0.86
# An option with the value that it has here anyway.
USUAL = ("option.adapters", "adapters")
OF_PROMPT = "a prompt may fill all but one token of the context, which option.max_model_len sets"
# Keys of the reference without an effect here, because processes, memory and batches are arranged
# in another way. Where the reason is not obvious, it is told.
WITHOUT_EFFECT = {
    **dict.fromkeys(
        (
            "max_idle_time",
            "log_request_metric",
            "metrics_aggregation",
            "translatorFactory",
            "features",
            "option.paged_attention",
            "option.n_positions",
            "option.low_cpu_mem_usage",
            "option.mpi_mode",
            "option.use_passive_workers",
            "option.parallel_loading",
            "option.waiting_steps",
            "option.pythonExecutable",
            "option.enable_venv",
            "option.max_output_size",
            "option.log_request_metric",
            "option.bedrock_compat",
        ),
        "",
    ),
    **dict.fromkeys(("fail_fast", "option.fail_fast"), "a start that fails always ends the server"),
    "max_input_length": OF_PROMPT,
    "option.batch_size": "option.max_rolling_batch_size bounds the sequences that run at once",
    "option.enable_auto_tool_choice": (
        "the chat template, or option.tool_call_parser, switches it on"
    ),
    "option.enable_reasoning": "the chat template, or option.reasoning_parser, switches it on",
    **dict.fromkeys(
        ("option.allowed_media_domains", "option.allowed_local_media_path"),
        "clients send images, and nothing is fetched or opened for them",
    ),
    "option.device_map": "option.device and option.tensor_parallel_degree choose the devices",
    "option.batch_invariant": "the native kernels always are, and torch is not",
    **{f"option.{name}": reason for name, reason in NEEDLESS.items()},
}

# Options that LMI documents for one of its engines, with what to write instead on an engine that
# does not use it. None of them is unknown. An engine that does not list its options gets them all.
ENGINE_KEYS = {
    **dict.fromkeys(
        (
            "option.enforce_eager",
            "option.gpu_memory_utilization",
            "option.load_format",
            "option.enable_lora",
            "option.max_loras",
            "option.max_lora_rank",
            "option.max_cpu_loras",
            "option.lora_extra_vocab_size",
            "option.kv_cache_dtype",
            "option.enable_chunked_prefill",
            "option.speculative_draft_model",
            "option.speculative_length",
            "option.draft_model_tp_size",
            "option.swap_space",
            "option.cpu_offload_gb",
            "option.limit_mm_per_prompt",
            "option.tokenizer",
            "option.tokenizer_mode",
            "option.max_num_tokens",
            "option.kv_cache_free_gpu_mem_fraction",
            "option.batch_scheduler_policy",
            "option.enable_kv_cache_reuse",
            "option.enable_trt_overlap",
            "option.tokens_per_block",
            "option.seed",
            "option.nnodes",
            "option.node_rank",
            "option.master_addr",
            "option.master_port",
            "option.distributed_executor_backend",
            "option.speculative_config",
            "option.disable_custom_all_reduce",
            "option.lmcache_config_file",
            "option.block_size",
            "option.fully_sharded_loras",
            "option.disable_any_whitespace",
        ),
        "",
    ),
    **dict.fromkeys(
        ("option.stream_interval", "option.enable_expert_parallel", "option.watermark_config"), ""
    ),
    "option.max_logprobs": "a request may ask for 20 log-probs of each token",
    "option.structured_outputs_config": "it has one way of guided decoding",
    "option.long_lora_scaling_factors": (
        "an adapter's own adapter_config.json has its scale; leave this out"
    ),
    "option.max_output_len": (
        "max_new_tokens of a request bounds its answer, option.max_model_len prompt and answer"
    ),
    "option.max_input_len": OF_PROMPT,
}

# Keys and flags of other servers for what is missing here, or is done in another way. None of them
# is taken for a misspelt option.
ELSEWHERE = {
    **ABSENT,
    "ssl_ca_certs": "this server asks no client for a certificate",
    "lora_modules": (
        "an adapter is a folder in adapters/ beside the model, or registered at /adapters"
    ),
    "api_server_count": "frontend_workers is their number",
    "chat_template_content_format": "the template itself decides",
    "disable_fastapi_docs": "management_port moves the docs to a port of their own",
    **dict.fromkeys(
        ("disable_log_requests", "disable_uvicorn_access_log"),
        "a request has one line in the log, without its prompt, and --log-level WARNING leaves it "
        "out",
    ),
    "sampling_defaults": "option.generation_config says it: auto for the model's, lmi for OpenAI's",
    "root_path": "the proxy in front takes its prefix away, and the pages work below any",
    "uvicorn_log_level": "--log-level is for every process",
    "max_stop_sequences": "the limit is fixed, and /info tells it",
    "max_new_tokens": "a request says it, as max_new_tokens among its parameters",
    "adapters": (
        "the adapters are in the folder adapters/ beside the model, move or link them there"
    ),
    **dict.fromkeys(
        ("adapter_ids", "adapter_names"),
        "each adapter is a folder in adapters/ beside the model, which has its name, or is "
        "registered at /adapters",
    ),
}
# Variables that AWS's other images read and this server does not read yet. Users who come from
# there may still set them.
PREFIXES = ("CUSTOM_FASTAPI_", "SUPERVISOR_")
# Names of the model at other servers, which are not read here. One of them ends a start that would
# serve the demo, but no other start.
MODEL_ELSEWHERE = frozenset(
    (
        "SM_VLLM_CONFIG",
        "SM_SGLANG_CONFIG",
        "HF_MODEL_DIR",
        "NIM_MODEL_NAME",
        "LLAMA_ARG_MODEL",
        "LLAMA_ARG_MODEL_URL",
        "LLAMA_ARG_MODELS_DIR",
        "LLAMA_ARG_HF_REPO",
        "LLAMA_ARG_DOCKER_REPO",
    )
)
MODEL_KEY = re.compile(
    r"(?:option\.)?(?:hf_?)?model(?:_?(?:id|dir|file|location|path|uri|url|name_or_path))?",
    re.IGNORECASE,
)
# The variables that give options.
READ = frozenset(name for option in OPTIONS for name in (*option.platform, *option.env))
# What a model's own code for AWS's standards reads.
OF_CODE = frozenset((*HANDLERS, *MIDDLEWARES, SCRIPT, SCRIPT_FOLDER, PIP_ARGS))
# supervisord gives these to every process that it starts.
OF_SUPERVISORD = frozenset(
    (
        "SUPERVISOR_ENABLED",
        "SUPERVISOR_GROUP_NAME",
        "SUPERVISOR_PROCESS_NAME",
        "SUPERVISOR_SERVER_URL",
    )
)


def with_meanings(givens: Iterable[Given], has_gpus: bool) -> Iterator[Given]:
    """Yield the values that were given, and those of the options that they imply: an address
    implies host and port, and load_models may name an engine.

    gpu.minWorkers means minWorkers if a GPU is visible, and cpu.minWorkers if none is. The other
    one is dropped.
    """
    for entry in givens:
        prefix, _, key = entry.key.partition(".")
        if prefix in ("gpu", "cpu"):
            is_for_gpus = prefix == "gpu"
            if is_for_gpus == has_gpus:
                yield replace(entry, key=key, rank=Rank(entry.rank.layer, -1))

            continue

        positive = _positive(entry)
        if positive is not None:
            yield positive
            continue

        yield entry
        for key, text in _implied(entry).items():
            if text:
                yield replace(entry, key=key, text=text, rank=Rank(entry.rank.layer, 1))


def _implied(entry: Given) -> dict[str, str]:
    """Return the texts of further options that an option gives, by key."""
    # The option's row reports a bad text, and there may be no model.
    with suppress(ValueError, IndexError):
        if entry.key == "inference_address":
            host, port = ADDRESS.parse(entry.text)
            return {"host": host, "port": str(port)}

        if entry.key == "load_models":
            return {"engine": MODELS.parse(entry.text)[0].engine}

    return {}


def _positive(entry: Given) -> Given | None:
    """Return option.no_X=true as option.X=false, as djl-serving spells vLLM's flags, or None for
    any other key.
    """
    if not entry.key.startswith("option.no_") or find(entry.key) is not None:
        return None

    key = f"option.{entry.key.removeprefix('option.no_')}"
    is_known = find(key) is not None or key in ENGINE_KEYS
    word = entry.text.lower()
    if not is_known or word not in WORDS:
        return None

    return replace(entry, key=key, text=str(not WORDS[word]).lower())


def settle_forms(resolution: Resolution) -> None:
    """Warn of a form of tool calls or of thoughts that is not read here, so that they stay in the
    text.
    """
    values = resolution.values
    for key, forms, instead in (
        ("option.tool_call_parser", TOOL_CALL_FORMS, "text"),
        ("option.reasoning_parser", REASONING_FORMS, None),
    ):
        name = values.given(key)
        if name is None or name in forms:
            continue

        read_here = ", ".join(form for form in forms if form not in ("text", "none"))
        assignment = values.how_given(key).assignment
        values.warn(f"{assignment}: this form stays plain text, read here are {read_here}")
        values.settle(key, instead, "not read here")


def choose_engine_options(resolution: Resolution) -> None:
    """Choose the options that the engine gets, by name without `option.`, and report every key that
    it does not use.

    They are the options that are not in the table, those of the table that engines read themselves,
    and each length of auto, if the engine knows that one.
    """
    values = resolution.values
    engine = resolution.chosen_engine
    keys_of_engine = engine.handler.option_keys()
    options: dict[str, str] = {}
    for key, winner in values.picked.items():
        option = find(key)
        name = key.removeprefix("option.")
        if option is None:
            _report(winner.given, values, engine, keys_of_engine)
            is_of_engine = keys_of_engine is None or key in keys_of_engine
            if key.startswith("option.") and is_of_engine and key not in WITHOUT_EFFECT:
                options[name] = winner.value
        elif option.is_for_engine:
            options[name] = winner.given.text
        elif option.kind is LENGTH_OR_AUTO and winner.value is None:
            if keys_of_engine is not None and key in keys_of_engine:
                options[name] = "auto"

    # What was given counts, also if it contradicts the task.
    if is_for_embeddings(values):
        options = {**engine.handler.embedding_options, **options}

    resolution.engine_options = options


def warn_of_some_engines(resolution: Resolution) -> None:
    """Warn of each option of the table that has no effect on this engine."""
    values = resolution.values
    chosen_engine = resolution.chosen_engine
    for option in OPTIONS:
        key = option.key
        is_given = values.given(key, option.default) != option.default
        if not option.otherwise or not is_given or key in chosen_engine.handler.uses:
            continue

        handlers = values.start.handlers
        engines = [name for name, handler in handlers.items() if key in handler.uses]
        effect = f"has an effect on {' or '.join(engines)} alone, {option.otherwise}"
        values.warn(f"{values.how_given(key).place}: {effect}")


def _report(
    entry: Given, values: Values, engine: ChosenEngine, keys_of_engine: frozenset[str] | None
) -> None:
    """Report a key that is not in the table, unless the engine uses it. User code gets every
    option, so it may use any.
    """
    key = entry.key
    is_of_user_code = engine.handler is USER_CODE and key.startswith("option.")
    is_usual = (key, entry.text.strip("/")) == USUAL
    if is_of_user_code or is_usual:
        return

    unused = engine.handler.unused
    if key in WITHOUT_EFFECT:
        values.note(_with_reason(f"{entry.place}: has no effect here", ": ", WITHOUT_EFFECT[key]))
    elif keys_of_engine is not None and key in keys_of_engine:
        return
    elif key in ENGINE_KEYS or key in unused:
        # An engine that does not list its options may use it.
        if key in unused or keys_of_engine is not None:
            instead = unused.get(key) or ENGINE_KEYS.get(key, "")
            fault = f"{entry.place}: {engine.name} does not use it"
            values.warn(_with_reason(fault, ", ", instead))
    else:
        _report_unknown(entry, values, keys_of_engine)


def _with_reason(line: str, separator: str, reason: str) -> str:
    """Return a line for the operator, with a reason behind it if there is one."""
    return f"{line}{separator}{reason}" if reason else line


def _report_unknown(entry: Given, values: Values, keys_of_engine: frozenset[str] | None) -> None:
    """Warn of a key that means nothing here, with a hint at what was meant. It is a fault if
    `option.strict` is true.
    """
    meaning = elsewhere(entry.key)
    nearest = closest(entry.key, keys_of_engine or ())
    if entry.key.startswith("option.") and values.final("option.strict"):
        hint = f"; {meaning}" if meaning else nearest
        values.fail(f"{entry.place}: unknown option, and option.strict is true{hint}")
        return

    warning = f"{entry.place}: {meaning}" if meaning else f"{entry.place}: unknown option{nearest}"
    values.warn(warning)
    # A key that is like none may belong to an engine whose own name is misspelt.
    if not meaning and closest(entry.key):
        values.unknown.append(warning)


def known_keys() -> list[str]:
    """Return every key that means something here, or to some engine."""
    return sorted({*BY_KEY, *WITHOUT_EFFECT, *ENGINE_KEYS})


def elsewhere(key: str) -> str:
    """Return a hint on a key or a flag of other servers, or ""."""
    name = key.removeprefix("option.").lstrip("-").replace("-", "_").lower()
    return ELSEWHERE.get(name, "")


def closest(key: str, further: Iterable[str] = ()) -> str:
    """Return a hint at a known key that is spelt nearly like `key`, or "". The `further` keys are
    those that one engine knows.
    """
    keys_by_name: dict[str, str] = {}
    for known_key in (*known_keys(), *further):
        keys_by_name[known_key.removeprefix("option.").lower()] = known_key

    name = key.removeprefix("option.").lower()
    matches = difflib.get_close_matches(name, keys_by_name, 1, NEARLY_SAME)
    if not matches:
        return ""

    return f"; the closest known key is {keys_by_name[matches[0]]}"


def is_of_other_image(name: str) -> bool:
    """Return whether a variable is one that only AWS's other images read."""
    is_read = name in OF_CODE or name in OF_SUPERVISORD
    return name.startswith(PREFIXES) and not is_read


def report_unread_models(resolution: Resolution) -> None:
    """Report variables and keys that name a model and are not read. They end the start if it would
    serve the demo.
    """
    values = resolution.values
    names_model = values.start.folder is not None or MODEL in values
    if names_model or values.final("multi_model"):
        return

    texts: dict[str, str] = {}
    for name, text in values.start.environ.items():
        if text.strip():
            texts[name] = shorten(text)

    instead = (
        "write HF_MODEL_ID with OWNER/NAME or a folder in its place; lmi serve demo serves the demo"
    )
    for name in sorted(MODEL_ELSEWHERE & texts.keys()):
        values.fail(f"{name}={texts[name]}: names a model and is not read; {instead}")

    for key, winner in values.picked.items():
        if find(key) is None and MODEL_KEY.fullmatch(key):
            values.fail(f"{winner.given.assignment}: names a model and is not read; {instead}")


def report_unused_variables(resolution: Resolution) -> None:
    """Report each variable of other servers that is not read here, with what to write instead if
    anything is needed.
    """
    values = resolution.values
    names = {name for name, text in values.start.environ.items() if text.strip()}
    for name in sorted(names & WRITE_INSTEAD.keys()):
        values.warn(f"{name}: has no effect here, {WRITE_INSTEAD[name]}")

    for name in sorted(names & UNUSED.keys()):
        values.note(_with_reason(f"{name}: has no effect here", ", ", UNUSED[name]))

    if PROGRAM in names:
        _report_program(values)
    elif SUBMIT_DIRECTORY in names:
        values.note(f"{SUBMIT_DIRECTORY}: has no effect here")

    port = values.final("port")
    other_port = values.start.environ.get("PORT", "").strip()
    if other_port and other_port != str(port):
        values.warn(
            f"PORT={shorten(other_port)}: has no effect here, SERVING_PORT is the port, which is "
            f"{port}"
        )


def _report_program(values: Values) -> None:
    """Warn of a program that is there and is not run. If it is not there, a note will do: JumpStart
    names one for every model, also without such a file.
    """
    program = values.start.environ[PROGRAM].strip()
    is_there = False
    if values.start.folder is not None:
        paths = (values.start.folder / program, values.start.folder / "code" / program)
        is_there = any(path.is_file() for path in paths)

    report = f"{PROGRAM}={shorten(program)}: {PROGRAM_INSTEAD}"
    if is_there:
        values.warn(report)
    else:
        values.note(report)


def note_variables_of_engines(resolution: Resolution) -> None:
    """Note variables that are read only by the library of an engine that was not chosen."""
    values = resolution.values
    engine = resolution.chosen_engine
    environ = resolution.start.environ
    for name in resolution.start.handlers:
        if name == engine.name:
            continue

        prefix = f"{name.upper().replace('-', '_')}_"
        unread = sorted(variable for variable in environ if variable.startswith(prefix))
        if unread:
            values.note(
                f"{', '.join(unread)}: no effect on {engine.name}, only {name} reads such variables"
            )

    unread = sorted(variable for variable in environ if variable.startswith("SGLANG_"))
    if unread:
        values.note(f"{', '.join(unread)}: no effect here, only SGLang reads such variables")


def report_variables(resolution: Resolution) -> None:
    """Warn of variables of other images, and note SageMaker's that set no option. Their values are
    not shown, since they may be secrets.
    """
    values = resolution.values
    environ = resolution.start.environ
    of_images: list[str] = []
    for name in sorted(environ):
        if is_of_other_image(name) and name not in READ:
            of_images.append(name)

    if of_images:
        counted = "1 variable" if len(of_images) == 1 else f"{len(of_images)} variables"
        values.warn(f"{counted} of AWS's other images not read yet: {', '.join(of_images)}")

    reported = {*READ, *OF_CODE, *of_images, *UNUSED, *WRITE_INSTEAD, PROGRAM, SUBMIT_DIRECTORY}
    of_sagemaker = {name for name in environ if name.startswith("SAGEMAKER_")}
    unused = sorted(of_sagemaker - reported)
    if unused:
        values.details.append(f"{', '.join(unused)}: set no option")
