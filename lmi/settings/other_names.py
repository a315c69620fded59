"""Options and variables that no field is, and those of other servers: what they mean here, or why
nothing.

Sources: LMI's serving.properties, and AWS's pages of LMI and of its vLLM, SGLang and llama.cpp
images.
"""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from lmi.errors import shorten
from lmi.settings.annexes import MODELS, REASONING_FORMS, TOOL_CALL_FORMS
from lmi.settings.engine_choice import ChosenEngine, is_for_embeddings
from lmi.settings.handler import USER_CODE
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
from lmi.settings.values import BY_KEY, COMMAND_LINE, OPTIONS, Given, Values, find

# of difflib: rolling_back is a slip for rolling_batch, max_new_tokens is not one for max_num_tokens
NEARLY_SAME = 0.86
USUAL = ("option.adapters", "adapters")  # what is so without it
OF_PROMPT = "a prompt may fill all but one token of the context, which option.max_model_len sets"
# Keys of the reference that have no effect here, because processes, memory and batches are arranged
# differently, and the reason where it is not obvious.
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

# Options that LMI documents for one of its engines, and what to write instead on an engine that
# does not use one. They are never unknown. An engine that does not list its options gets all of
# them.
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

# Keys and flags of other servers for features that are missing here. They are never taken for a
# misspelt option.
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
# Variables that AWS's other images read and this server does not, yet. Who moves here may still set
# them.
PREFIXES = ("SM_VLLM_", "SM_SGLANG_", "SM_LLAMA_CPP_", "CUSTOM_FASTAPI_", "SUPERVISOR_")
NAMES = frozenset(
    (
        "CUSTOM_PRE_PROCESS",
        "CUSTOM_POST_PROCESS",
        "CUSTOM_SCRIPT_FILENAME",
        "PROCESS_AUTO_RECOVERY",
        "SAGEMAKER_MODEL_PATH",
        "STANDARD_PIP_ARGS",
    )
)
MODEL = "option.model_id"
# Variables of AWS's llama.cpp image that name the model, a GGUF file. One of them ends the start,
# because the model that would be served is another one.
OF_GGUF = re.compile(
    r"SM_LLAMA_CPP_(MODELS?(_DIR|_URL|_PRESET)?|HF_REPO|HF_FILE|DOCKER_REPO|[A-Z0-9_]+_DEFAULT)"
)
# Names that other servers have for the model and this one does not read. One of them ends a start
# that would serve the demo, and is no reason to end any other.
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
READ = frozenset(name for option in OPTIONS for name in (*option.platform, *option.env))
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
    """Add the options that others imply: an address implies host and port, and load_models may name
    an engine.

    gpu.minWorkers means minWorkers if a GPU is visible, and cpu.minWorkers if none is. The other of
    the two is dropped.
    """
    for given in givens:
        prefix, _, rest = given.key.partition(".")
        if prefix in ("gpu", "cpu"):
            if (prefix == "gpu") == has_gpus:
                yield replace(given, key=rest, rank=(given.rank[0], -1))

            continue

        if (positive := _positive(given)) is not None:
            yield positive
            continue

        yield given
        texts: dict[str, str] = {}
        with suppress(
            ValueError, IndexError
        ):  # the option's row reports a bad text; there may be no model
            if given.key == "inference_address":
                host, port = ADDRESS.parse(given.text)
                texts = {"host": host, "port": str(port)}

            if given.key == "load_models":
                texts = {"engine": MODELS.parse(given.text)[0].engine}

        for key, text in texts.items():
            if text:
                yield replace(given, key=key, text=text, rank=(given.rank[0], 1))


def _positive(given: Given) -> Given | None:
    """Return option.no_X=true as option.X=false, or None for any other key. djl-serving spells
    vLLM's flags so.
    """
    key = f"option.{given.key.removeprefix('option.no_')}"
    is_negated = given.key.startswith("option.no_") and find(given.key) is None
    if (
        not is_negated
        or (find(key) is None and key not in ENGINE_KEYS)
        or given.text.lower() not in WORDS
    ):
        return None

    return replace(given, key=key, text=str(not WORDS[given.text.lower()]).lower())


def settle_forms(values: Values) -> None:
    """Leave tool calls and reasoning in the text, with a warning, if their form is not
    read here.
    """
    for key, known, instead in (
        ("option.tool_call_parser", TOOL_CALL_FORMS, "text"),
        ("option.reasoning_parser", REASONING_FORMS, None),
    ):
        name = values.given(key)
        if name is not None and name not in known:
            read_here = ", ".join(one for one in known if one not in ("text", "none"))
            values.warn(
                f"{values.how_given(key).said}: this form stays plain text, read here are "
                f"{read_here}"
            )
            values.settle(key, instead, "not read here")


def other_options(values: Values, engine: ChosenEngine) -> dict[str, str]:
    """Return the options for the engine, by name without `option.`. Reports every key that the
    engine does not use.

    They are options without a row, those of the table that engines read themselves, and each length
    of auto that this engine knows.
    """
    known = engine.handler.option_keys()
    options = {}
    for key, picked in values.picked.items():
        row = find(key)
        name = key.removeprefix("option.")
        if row is None:
            _report(picked.given, values, engine, known)
            if (
                key.startswith("option.")
                and (known is None or key in known)
                and key not in WITHOUT_EFFECT
            ):
                options[name] = picked.value
        elif row.is_for_engine:
            options[name] = picked.given.text
        elif row.kind is LENGTH_OR_AUTO and picked.value is None and key in (known or ()):
            options[name] = "auto"

    # What was given counts, also where it contradicts the task.
    if is_for_embeddings(values):
        return {**engine.handler.embedding_options, **options}

    return options


def warn_of_some_engines(values: Values, engine: ChosenEngine) -> None:
    """Warn of each option of the table that has no effect on this engine."""
    for option in OPTIONS:
        key = option.key
        is_given = values.given(option.key, option.default) != option.default
        if option.otherwise and is_given and key not in engine.handler.uses:
            users = " or ".join(
                name for name, handler in values.handlers.items() if key in handler.uses
            )
            said = f"has an effect on {users} alone, {option.otherwise}"
            values.warn(f"{values.how_given(key).place}: {said}")


def _report(
    given: Given, values: Values, engine: ChosenEngine, known: frozenset[str] | None
) -> None:
    """Report a key without a row, unless the engine uses it. User code gets every option, so none
    is unknown.
    """
    is_option = given.key.startswith("option.")
    if (engine.handler is USER_CODE and is_option) or (given.key, given.text.strip("/")) == USUAL:
        return

    if given.key in WITHOUT_EFFECT:
        reason = WITHOUT_EFFECT[given.key]
        values.note(f"{given.place}: has no effect here{reason and f': {reason}'}")
    elif given.key in (known or ()):
        return
    elif given.key in ENGINE_KEYS or given.key in engine.handler.unused:
        if given.key in engine.handler.unused or known is not None:
            instead = engine.handler.unused.get(given.key) or ENGINE_KEYS.get(given.key, "")
            values.warn(f"{given.place}: {engine.name} does not use it{instead and f', {instead}'}")
    else:
        meaning = elsewhere(given.key)
        nearest = closest(given.key, known or ())
        if is_option and values.final("option.strict"):
            hint = f"; {meaning}" if meaning else nearest
            values.faults.append(f"{given.place}: unknown option, and option.strict is true{hint}")
            return

        said = f"{given.place}: {meaning or f'unknown option{nearest}'}"
        values.warn(said)
        if not meaning and closest(
            given.key
        ):  # another key may belong to an engine whose name is a fault
            values.unknown.append(said)


def known_keys() -> list[str]:
    return sorted({*BY_KEY, *WITHOUT_EFFECT, *ENGINE_KEYS})


def elsewhere(key: str) -> str:
    """Return a hint on a key or flag of other servers, or ""."""
    return ELSEWHERE.get(key.removeprefix("option.").lstrip("-").replace("-", "_").lower(), "")


def closest(key: str, further: Iterable[str] = ()) -> str:
    """Return a hint at a known key that is spelt nearly like `key`, or "". `further` are keys that
    one engine knows.
    """
    known = {name.removeprefix("option.").lower(): name for name in [*known_keys(), *further]}
    matches = difflib.get_close_matches(key.removeprefix("option.").lower(), known, 1, NEARLY_SAME)
    return f"; the closest known key is {known[matches[0]]}" if matches else ""


def is_of_other_image(name: str) -> bool:
    return name in NAMES or (name.startswith(PREFIXES) and name not in OF_SUPERVISORD)


def report_unread_models(values: Values) -> None:
    """Report names of a model that nothing here reads. They end the start where another model would
    be served.
    """
    given = {name: shorten(text) for name, text in values.environ.items() if text.strip()}
    in_command = values.is_folder_asked or (
        MODEL in values and values.how_given(MODEL).rank[0] == COMMAND_LINE
    )
    safetensors = "HF_MODEL_ID with OWNER/NAME or a folder of *.safetensors"
    for name in sorted(filter(OF_GGUF.fullmatch, given)):
        said = f"{name}={given[name]}: names a model in GGUF, which is not read"
        if values.final("multi_model"):
            values.warn(f"{said}; multi_model starts without a model")
        elif in_command:
            values.warn(f"{said}, so the model of the command line is served")
        else:
            values.faults.append(f"{said}; write {safetensors} in its place")

    is_demo = values.folder is None and MODEL not in values and not values.final("multi_model")
    if not is_demo:
        return

    instead = (
        "write HF_MODEL_ID with OWNER/NAME or a folder in its place; lmi serve demo serves the demo"
    )
    for name in sorted(MODEL_ELSEWHERE & given.keys()):
        values.faults.append(f"{name}={given[name]}: names a model and is not read; {instead}")

    for key, picked in values.picked.items():
        if find(key) is None and MODEL_KEY.fullmatch(key):
            values.faults.append(f"{picked.given.said}: names a model and is not read; {instead}")


def report_unused_variables(values: Values) -> None:
    """Say of each variable that other servers read and this one does not what to write, or that it
    has no effect.
    """
    given = {name for name, text in values.environ.items() if text.strip()}
    for name in sorted(given & WRITE_INSTEAD.keys()):
        values.warn(f"{name}: has no effect here, {WRITE_INSTEAD[name]}")

    for name in sorted(given & UNUSED.keys()):
        values.note(f"{name}: has no effect here{UNUSED[name] and f', {UNUSED[name]}'}")

    if PROGRAM in given:
        file = values.environ[PROGRAM].strip()
        places = (
            [] if values.folder is None else [values.folder / file, values.folder / "code" / file]
        )
        # JumpStart sets it for every model, also where no such file comes along.
        say = values.warn if any(place.is_file() for place in places) else values.note
        say(f"{PROGRAM}={shorten(file)}: {PROGRAM_INSTEAD}")
    elif SUBMIT_DIRECTORY in given:
        values.note(f"{SUBMIT_DIRECTORY}: has no effect here")

    port = values.final("port")
    wanted = values.environ.get("PORT", "").strip()
    if wanted and wanted != str(port):
        values.warn(
            f"PORT={shorten(wanted)}: has no effect here, SERVING_PORT is the port, which is {port}"
        )


def note_variables_of_engines(values: Values, engine: ChosenEngine) -> None:
    """Note variables that only the library of an engine reads which does not run."""
    for name in values.handlers:
        prefix = f"{name.upper().replace('-', '_')}_"
        if name == engine.name:
            continue

        if unread := sorted(variable for variable in values.environ if variable.startswith(prefix)):
            values.note(
                f"{', '.join(unread)}: no effect on {engine.name}, only {name} reads such variables"
            )

    if unread := sorted(variable for variable in values.environ if variable.startswith("SGLANG_")):
        values.note(f"{', '.join(unread)}: no effect here, only SGLang reads such variables")


def report_variables(values: Values) -> None:
    """Warn of variables of other images, whose values may be secrets, and note SageMaker's that set
    no option.
    """
    others = sorted(name for name in values.environ if is_of_other_image(name) and name not in READ)
    others = [name for name in others if not OF_GGUF.fullmatch(name)]
    if others:
        counted = "1 variable" if len(others) == 1 else f"{len(others)} variables"
        values.warn(f"{counted} of AWS's other images not read yet: {', '.join(others)}")

    used = {*READ, *others, *UNUSED, *WRITE_INSTEAD, PROGRAM, SUBMIT_DIRECTORY}
    if unused := sorted(
        name for name in values.environ if name.startswith("SAGEMAKER_") and name not in used
    ):
        values.details.append(f"{', '.join(unused)}: set no option")
