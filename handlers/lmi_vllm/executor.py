"""vLLM behind the contract: its start, whose failure is explained in one line, its executor, and a
further node's.
"""

import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from handlers.base.configuration import AnyConfig, settled
from handlers.base.mailbox import Mailbox
from handlers.base.sequence import Sequence
from handlers.driven.arguments import refusal
from handlers.driven.beam_rounds import BeamRow
from handlers.driven.engine import name_of
from handlers.driven.executor import DrivenExecutor
from handlers.lmi_vllm import engine_info, translation
from handlers.lmi_vllm.about import environment
from handlers.lmi_vllm.arguments import engine_arguments, named_for
from handlers.lmi_vllm.drivers import VllmEngine
from handlers.lmi_vllm.guide_gate import GuideGate
from handlers.lmi_vllm.heartbeat import NodeHeartbeat
from handlers.lmi_vllm.image_reader import ImageReader
from handlers.lmi_vllm.shared_memory import unlink_shared_memory
from handlers.lmi_vllm.vllm_log import StartupLog
from lmi import errors
from lmi.executor import EngineInfo, ErrorKind, Progress, Request
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
# Texts of vLLM 0.30 to 0.33, and the options that help.
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
OF_RAY = re.compile("running Ray instance|not support ray")
OF_THE_MODEL = re.compile("architecture|checkpoint")

log = logging.getLogger("lmi.vllm")


class VllmExecutor(DrivenExecutor[translation.VllmWork]):
    """`Executor(path, config)`: a checkpoint's folder, no buffer, and the contract's or the
    server's configuration.
    """

    title = "vLLM"

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes,
        json_config_str: str | AnyConfig | None = None,
        config: AnyConfig | None = None,
        *,
        progress: Progress = lambda stage, share: None,
    ) -> None:
        folder, settings, options = settled(self.title, model, json_config_str, config)
        if settings.logits_post_processor_config or options.logits_post_processors:
            reason = "vLLM calls no function of a request on its logits"
            raise errors.Unsupported("logits_post_processor_config", reason)

        if settings.additional_model_outputs:
            reason = "a step of vLLM returns only tokens"
            raise errors.Unsupported("additional_model_outputs", reason)

        with starting(folder, options, progress) as arguments:
            engine = VllmEngine(arguments)

        info = engine_info.describe(engine.config, settings.max_beam_width, engine.renderer)
        is_pooling = info.capabilities.embeddings is not None
        if is_pooling and "embed" not in engine.tasks:
            tasks = ", ".join(engine.tasks)
            raise errors.ModelUnusable(
                f"{folder}: vLLM runs it for {tasks}, and lmi serves only embeddings so"
            )

        lora = engine.config.lora_config
        super().__init__(
            engine,
            info,
            settings,
            max_resident_adapters=0 if lora is None else lora.max_loras,
            # On a CPU vLLM computes wrong rows for the base model beside adapters.
            mixes_adapters=info.device != "cpu",
        )
        self._guides = GuideGate(engine.config, engine.wake)
        image_reader = ImageReader(engine.renderer, info.max_sequence_length, self._wake)
        self._preparations = (self._guides, image_reader)

        progress("warm-up", 0.0)
        try:
            self._run_to_the_end(translation.warm_up_works(is_pooling=is_pooling))
        except Exception as error:
            # Only a step shows that a kernel cannot do what the model needs.
            raise explained(error, folder, options) from error

        self._start()

    def _work(self, sequence: Sequence) -> translation.VllmWork:
        request = sequence.request
        prompt = sequence.prompt
        if not prompt:
            token_ids = list(request.input_token_ids)
            prompt = tokens_input(token_ids, cache_salt=request.cache_salt)

        structure = self._guides.checked.get(sequence)
        params = translation.params_of(sequence, self.capabilities.embeddings, structure)
        return self._work_of(sequence, name_of(sequence), prompt, params)

    def _row_work(self, sequence: Sequence, row: BeamRow) -> translation.VllmWork:
        prompt = tokens_input(row.token_ids, cache_salt=sequence.request.cache_salt)
        prompt["arrival_time"] = row.arrival_time
        params = translation.row_params(sequence, row.num_top)
        return self._work_of(sequence, row.name, prompt, params)

    def _work_of(
        self, sequence: Sequence, name: str, prompt: Any, params: translation.Params
    ) -> translation.VllmWork:
        loaded = self._adapters.used_by(sequence)
        adapter = None if loaded is None else translation.lora_request(loaded)
        priority = translation.priority(sequence.request)
        return translation.VllmWork(name, prompt, params, adapter, priority)

    def _kind_of(self, error: Exception) -> ErrorKind:
        if isinstance(error, VLLMValidationError):
            return ErrorKind.INVALID

        return super()._kind_of(error)


class Follower(Mailbox):
    """A further node of an engine that spans several machines: its ranks get their work from node
    0.

    It takes no requests, loads this node's part of the model and waits until the group ends.
    """

    def __init__(self, model: str, config: EngineConfig, progress: Progress) -> None:
        super().__init__()
        with starting(model, config, progress) as arguments:
            settings = arguments.create_engine_config(headless=True)
            self._ranks = MultiprocExecutor(settings, monitor_workers=False)

        unlink_shared_memory()
        self._has_lost_rank = threading.Event()
        self._ranks.register_failure_callback(self._has_lost_rank.set)
        self._ranks.start_worker_monitor()

        nodes = settings.parallel_config
        self._heartbeat = NodeHeartbeat(nodes)
        self._info = engine_info.describe(settings, config.max_beam_width)
        place = f"node {nodes.node_rank} of {nodes.nnodes}"
        self._refusal = f"this is {place} and takes no requests; node 0, {nodes.master_addr}, does"

    @property
    def info(self) -> EngineInfo:
        """What the engine of the group says of itself."""
        return self._info

    def can_enqueue_requests(self) -> bool:
        """Whether the group is whole. Requests are refused in any case."""
        return not self._has_lost_rank.is_set() and self._heartbeat.is_whole

    def enqueue_request(self, request: Request) -> int:
        """Refuse a request: node 0 takes them. Raises Unavailable."""
        raise errors.Unavailable(self._refusal)

    def cancel_request(self, request_id: int) -> None:
        """Do nothing: there are no requests here."""
        return None

    def get_latest_iteration_stats(self) -> list[Any]:
        """Return nothing: node 0 has them."""
        return []

    def get_latest_request_stats(self) -> list[Any]:
        """Return nothing: node 0 has them."""
        return []

    def shutdown(self) -> None:
        """Shut down cleanly if the group is whole. Otherwise the ranks die with this process."""
        is_whole = self.can_enqueue_requests()
        self._end_waiting()
        self._heartbeat.close()
        if is_whole:
            self._ranks.shutdown()


@contextmanager
def starting(model: str, config: EngineConfig, progress: Progress) -> Iterator[AsyncEngineArgs]:
    """Yield vLLM's arguments, and report the stages of the start that the caller makes with them.
    Raises StartError.
    """
    progress("configuration", 0.0)
    startup_log = StartupLog.new()

    # They name the cores of ranks. In a server they are none, because engines share the cores.
    added = environment(config, os.environ, 0, "")
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


def explained(
    error: Exception, model: str, config: EngineConfig, cause: str | None = None
) -> errors.StartError:
    """Explain `error`, which ended the start of vLLM. `cause` is what one of vLLM's processes
    reported, if any.
    """
    if isinstance(error, errors.StartError):
        return error

    bad_values = refusal(error, lambda place: named_for(config, str(place[-1])))
    # Ray wraps the error of a rank.
    error_of_rank = getattr(error, "cause", None)
    if isinstance(error_of_rank, Exception):
        cause = cause or f"{type(error_of_rank).__name__}: {error_of_rank}"

    text = str(bad_values or cause or error).strip()
    advice = _advice_for(text)
    if bad_values is not None and not OF_THE_MODEL.search(text):
        return errors.BadConfiguration(f"{text}; {advice}" if advice else text)

    lacks_memory = errors.is_out_of_memory(error) or re.search(LACKS_MEMORY, text, re.I)
    if lacks_memory:
        advice = advice or OUT_OF_MEMORY

    line = text.partition("\n")[0].partition(". Supported ")[0]
    reason = errors.shorten(line or type(error).__name__, 400)[1:-1]
    if advice:
        reason += f"; {advice}"

    if OF_RAY.search(text):
        return errors.BadConfiguration(
            f"option.distributed_executor_backend=ray: vLLM cannot start: {reason}"
        )

    message = f"{model}: vLLM cannot start: {reason}"
    return errors.NoMemory(message) if lacks_memory else errors.ModelUnusable(message)


def _advice_for(text: str) -> str | None:
    """What helps against an error with this text, or None if nothing is known."""
    for pattern, advice in ADVICE.items():
        if re.search(pattern, text, re.I):
            return advice

    return None
