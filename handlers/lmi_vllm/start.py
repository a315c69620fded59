"""The start of vLLM: its stages are reported, and a failure is explained in one line that says what to change."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.engine.arg_utils import AsyncEngineArgs

from handlers.base.engine_arguments import refusal
from handlers.lmi_vllm.about import environment
from handlers.lmi_vllm.arguments import engine_arguments, named_for
from handlers.lmi_vllm.vllm_log import START, StartupLog, new_file
from lmi.errors import BadConfiguration, ModelUnusable, NoMemory, StartError, is_out_of_memory, shorten
from lmi.executor import Progress
from lmi.settings.config import EngineConfig

OUT_OF_MEMORY = (
    "set option.gpu_memory_utilization, option.max_model_len or option.max_rolling_batch_size lower, or "
    "option.tensor_parallel_degree higher"
)
LACKS_MEMORY = re.compile(r"Free memory on device|out of memory|can't allocate memory|No available memory", re.I)
# Texts of vLLM 0.30 to 0.33, and the options that help.
ADVICE = (
    (
        re.compile(r"max seq len.*KV cache|KV cache.*max seq len|larger than the maximum number of tokens", re.S),
        "set option.max_model_len lower or option.max_kv_cache_tokens higher",
    ),
    (
        re.compile(r"No available memory for the cache blocks|kv_cache_memory|KV cache", re.I),
        "set option.max_kv_cache_tokens or option.max_model_len lower, or option.gpu_memory_utilization higher",
    ),
    (LACKS_MEMORY, OUT_OF_MEMORY),
    (re.compile(r"max_model_len .* greater than"), "set option.max_model_len lower"),
    (
        re.compile(r"CppCompileError|InductorError|C\+\+ compile", re.I),
        "set option.enforce_eager=true, or mend the C++ compiler (CXX names another one)",
    ),
    (
        re.compile(r"running Ray instance"),
        "start Ray on this machine first (ray start), or leave option.distributed_executor_backend out: nodes work "
        "together without Ray too (option.nnodes)",
    ),
    (
        re.compile(r"import Ray|not support ray"),
        "or leave option.distributed_executor_backend out: nodes work together without Ray too (option.nnodes)",
    ),
)
OF_RAY = re.compile(r"running Ray instance|not support ray")
OF_THE_MODEL = re.compile(r"architecture|checkpoint")

log = logging.getLogger("lmi.vllm")


@contextmanager
def starting(model: str, config: EngineConfig, progress: Progress) -> Iterator[AsyncEngineArgs]:
    """Yield vLLM's arguments, and report the stages of the start that the caller makes with them.

    Ranks find their cores in the environment meanwhile. Raises StartError with one line that says why vLLM does not
    start.
    """
    progress("configuration", 0.0)
    startup_log = StartupLog(new_file(START))
    added = environment(config, os.environ, 0, "")  # nothing in a server, whose engines share the cores
    os.environ.update(added)
    try:
        arguments = AsyncEngineArgs(**engine_arguments(config, model))
        # The warnings name functions that torch will drop; they are for vLLM's authors.
        with startup_log.reported_to(progress), warnings.catch_warnings(action="ignore"):
            yield arguments
    except Exception as error:
        log.debug("vLLM did not start", exc_info=error)
        raise explained(error, model, config, startup_log.cause) from error
    finally:
        for name in added:
            del os.environ[name]


def explained(error: Exception, model: str, config: EngineConfig, cause: str | None = None) -> StartError:
    """Explain `error`, which ended the start of vLLM. `cause` is what one of vLLM's processes reported, if any."""
    if isinstance(error, StartError):
        return error
    refused = refusal(error, lambda place: named_for(config, str(place[-1])))
    text = str(refused or cause or error).strip()
    advice = next((advice for pattern, advice in ADVICE if pattern.search(text)), None)
    if refused is not None and not OF_THE_MODEL.search(text):
        return BadConfiguration(text + (f"; {advice}" if advice else ""))
    said = shorten(text.partition("\n")[0].partition(". Supported ")[0] or type(error).__name__, 400)[1:-1]
    if lacks_memory := is_out_of_memory(error) or LACKS_MEMORY.search(text) is not None:
        advice = advice or OUT_OF_MEMORY
    said += f"; {advice}" if advice else ""
    if OF_RAY.search(text):
        return BadConfiguration(f"option.distributed_executor_backend=ray: vLLM cannot start: {said}")
    return (NoMemory if lacks_memory else ModelUnusable)(f"{model}: vLLM cannot start: {said}")
