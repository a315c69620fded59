"""The start of vLLM, whose failure is explained in one line."""

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.engine.arg_utils import AsyncEngineArgs

from handlers.driven.arguments import refusal
from handlers.lmi_vllm.about import environment
from handlers.lmi_vllm.arguments import engine_arguments, named_for
from handlers.lmi_vllm.vllm_log import StartupLog
from lmi import errors
from lmi.executor import Progress
from lmi.settings.config import EngineConfig

OUT_OF_MEMORY = (
    "set option.gpu_memory_utilization, option.max_model_len or option.max_rolling_batch_size "
    "lower, or option.tensor_parallel_degree higher"
)
LACKS_MEMORY = r"Free memory on device|out of memory|can't allocate memory|No available memory"
WITHOUT_RAY = (
    "leave option.distributed_executor_backend out: nodes work together without Ray too "
    "(option.nnodes)"
)
# Patterns of the texts of vLLM 0.30 to 0.33, in the order in which they are tried, and the options
# that help.
ADVICE = {
    "(?s)max seq len.*KV cache|KV cache.*max seq len|larger than the maximum number of tokens": (
        "set option.max_model_len lower or option.max_kv_cache_tokens higher"
    ),
    "No available memory for the cache blocks|kv_cache_memory|KV cache": (
        "set option.max_kv_cache_tokens or option.max_model_len lower, or "
        "option.gpu_memory_utilization higher"
    ),
    LACKS_MEMORY: OUT_OF_MEMORY,
    "max_model_len .* greater than": "set option.max_model_len lower",
    r"CppCompileError|InductorError|C\+\+ compile": (
        "set option.enforce_eager=true, or mend the C++ compiler (CXX names another one)"
    ),
    "running Ray instance": f"start Ray on this machine first (ray start), or {WITHOUT_RAY}",
    "import Ray|not support ray": f"or {WITHOUT_RAY}",
}
# The fault is in the options of Ray.
OF_RAY = re.compile("running Ray instance|not support ray")
# The fault is in the model, though vLLM reports it as a bad value.
OF_THE_MODEL = re.compile("architecture|checkpoint")

log = logging.getLogger("lmi.vllm")


@contextmanager
def starting(model: str, config: EngineConfig, progress: Progress) -> Iterator[AsyncEngineArgs]:
    """Yield vLLM's arguments, with which the caller starts it, and report the stages of the start.

    Raises StartError, in place of what vLLM raises.
    """
    progress("configuration", 0.0)
    startup_log = StartupLog.new()

    # In a server there are none to add: the supervisor has set them.
    added_variables = environment(config, os.environ, 0, "")
    os.environ.update(added_variables)
    try:
        arguments = AsyncEngineArgs(**engine_arguments(config, model))
        # The warnings name functions that torch will drop; they are for vLLM's authors.
        with startup_log.reported_to(progress), warnings.catch_warnings(action="ignore"):
            yield arguments
    except Exception as error:
        log.debug("vLLM did not start", exc_info=error)
        raise explained(error, model, config, startup_log.cause) from error
    finally:
        for name in added_variables:
            del os.environ[name]


def explained(
    error: Exception, model: str, config: EngineConfig, cause: str | None = None
) -> errors.StartError:
    """Return the error that explains `error`, which ended the start of vLLM.

    `cause` is what one of vLLM's processes reported, if any.
    """
    if isinstance(error, errors.StartError):
        return error

    bad_values = refusal(error, lambda place: named_for(config, str(place[-1])))
    text = str(bad_values or cause or _cause_of(error)).strip()
    advice = _advice_for(text)
    if bad_values is not None and not OF_THE_MODEL.search(text):
        return errors.BadConfiguration(f"{text}; {advice}" if advice else text)

    lacks_memory = errors.is_out_of_memory(error) or re.search(LACKS_MEMORY, text, re.I)
    if lacks_memory and not advice:
        advice = OUT_OF_MEMORY

    # vLLM lists what it supports behind the fault.
    line = text.partition("\n")[0].partition(". Supported ")[0]
    reason = errors.shorten(line or type(error).__name__, 400)[1:-1]
    if advice:
        reason += f"; {advice}"

    if OF_RAY.search(text):
        return errors.BadConfiguration(
            f"option.distributed_executor_backend=ray: vLLM cannot start: {reason}"
        )

    message = f"{model}: vLLM cannot start: {reason}"
    if lacks_memory:
        return errors.NoMemory(message)

    return errors.ModelUnusable(message)


def _cause_of(error: Exception) -> str:
    """Return the text of an error, or of the error of a rank that Ray has wrapped in it."""
    error_of_rank = getattr(error, "cause", None)
    if isinstance(error_of_rank, Exception):
        return f"{type(error_of_rank).__name__}: {error_of_rank}"

    return str(error)


def _advice_for(text: str) -> str | None:
    """Return what helps against an error with this text, or None if nothing is known."""
    for pattern, advice in ADVICE.items():
        if re.search(pattern, text, re.I):
            return advice

    return None
