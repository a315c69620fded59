"""vLLM's engine, stepped in this process, or in others by an event loop. It uses more than vLLM's public classes."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch
from torch.distributed import TCPStore
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.pooling_params import PoolingParams
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.sample import sampler

from handlers.base.adapters import LoadedAdapter
from handlers.base.stepped import EngineStopped
from handlers.driven.executor import EngineLoad
from handlers.driven.loop import EngineLoop, Processes
from handlers.driven.outputs import SequenceOutput
from handlers.lmi_vllm import process_setup, translation
from handlers.lmi_vllm.translation import VllmWork
from lmi.errors import cause_line
from lmi.shared import linux

BEAT_S = 0.5
SILENT_S = 10.0  # a node that is silent for longer is lost
WAIT_S = 0.1  # for an output of another process, before deadlines are checked

Allocate = Callable[..., Any]

log = logging.getLogger("lmi.vllm")


class InProcess:
    """vLLM's scheduler is called directly, and no other process can be left behind."""

    num_open: ClassVar[int] = 0  # in this process
    closed: ClassVar[list[LLMEngine]] = []  # kept alive, because the finalizer of an engine ends groups of ranks too

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        cast(Any, sampler).batched_count_greater_than = _no_ranks
        self._engine = LLMEngine.from_engine_args(arguments)
        self._scheduler = cast(Any, self._engine.engine_core).engine_core.scheduler
        shorten_allocation(self._scheduler)
        self._preempted: dict[str, int] = {}
        self._num_preemptions = 0
        self.config, self.tasks = self._engine.vllm_config, self._engine.get_supported_tasks()
        self.renderer = self._engine.renderer
        InProcess.num_open += 1

    def add(self, work: VllmWork) -> None:
        self._engine.add_request(work.id, work.prompt, work.params, lora_request=work.adapter, priority=work.priority)

    def abort(self, ids: Iterable[str]) -> None:
        self._engine.abort_request(list(ids))

    def step(self) -> Sequence[SequenceOutput]:
        """Step the core directly. LLMEngine.step detokenises and copies each log-prob four times.

        For a small model that takes a tenth of the time. Raises EngineStopped if the device is lost.
        """
        try:
            new = self._engine.engine_core.get_output().outputs
        except Exception as error:
            if isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error):
                raise EngineStopped(f"the device cannot be used any more: {error}") from error
            raise
        if ended := [output.request_id for output in new if output.finish_reason is not None]:
            self._engine.output_processor.abort_requests(ended, internal=True)  # the core has already forgotten them
        return [translation.of_core(_outer_id(output.request_id), output) for output in new]

    def load(self) -> EngineLoad:
        before, self._preempted = self._preempted, {}
        for request in self._scheduler.waiting:  # a preempted one waits again and keeps the number of its preemptions
            if request.num_preemptions:
                self._preempted[request.request_id] = request.num_preemptions
                self._num_preemptions += request.num_preemptions > before.get(request.request_id, 0)
        running = [_outer_id(request.request_id) for request in self._scheduler.running]
        return EngineLoad(
            num_running=len(running),
            running=running,
            num_preemptions=self._num_preemptions,
            kv_cache=translation.kv_cache_stats(self.config, self._scheduler.kv_cache_manager.usage),
        )

    def wake(self) -> None:
        return None

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        translation.check_adapter(adapter, self.config)

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        self._engine.add_lora(translation.lora_request(adapter))
        if adapter.is_pinned:
            self._engine.pin_lora(adapter.number)

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        self._engine.remove_lora(adapter.number)

    @property
    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        """Shut down. vLLM's groups of ranks belong to the process, so only the last of several engines ends them."""
        InProcess.num_open -= 1
        InProcess.closed.append(self._engine)
        if InProcess.num_open == 0:
            self._engine.engine_core.shutdown()
            InProcess.closed.clear()


def _no_ranks(log_probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Replace vLLM's count of likelier tokens, which lmi does not use: (rows, vocabulary), (rows, 1) to (rows,)."""
    return torch.zeros(len(chosen), dtype=torch.int64, device=chosen.device)


@lru_cache(maxsize=4096)  # asked twice a token
def _outer_id(inner_id: str) -> str:
    """The id that vLLM was given. vLLM appends eight letters to it."""
    return inner_id.rpartition("-")[0]


def shorten_allocation(scheduler: Any) -> bool:
    """Let the scheduler skip the allocation of cache blocks where nothing can change, if its cache allows that.

    vLLM asks its block manager for each sequence in each step, though a sequence that computes one token needs a new
    block only at every `block_size`-th. For a small model the question takes a twenty-fifth of the step. Anything but
    the plain cache of one group of full attention keeps vLLM's own way.
    """
    manager = scheduler.kv_cache_manager
    managers = manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager or scheduler.connector is not None:
        return False
    manager.allocate_slots = skipping(manager.allocate_slots, managers[0], manager.empty_kv_cache_blocks)
    return True


def skipping(allocate: Allocate, manager: FullAttentionManager, nothing: Any) -> Allocate:
    """Return `allocate` without its work for one more token that has room in the last block and does not fill it.

    A token that fills a block is left to vLLM, which then offers the block to other sequences.
    """
    block_size, blocks_of = manager.block_size, manager.req_to_blocks

    def allocate_slots(request: Any, num_new_tokens: int, *, num_lookahead_tokens: int = 0, **more: Any) -> Any:
        if num_new_tokens == 1 and not (num_lookahead_tokens or more):
            end = request.num_computed_tokens + 1
            if end % block_size and end > request.num_prompt_tokens:
                if len(blocks_of.get(request.request_id, ())) * block_size >= end:
                    return nothing
        return allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **more)

    return allocate_slots


class MultiProcess(EngineLoop):
    """vLLM's engine for models on several devices, and perhaps on several nodes."""

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        self._stats = _Stats()
        self._llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._stats.made])
        process_setup.unlink_shared_memory()
        # vLLM ends the other ranks before it reports that one has ended. Compilers are not watched.
        pids = [pid for pid in linux.descendants(os.getpid()) if linux.title(pid).startswith("VLLM")]
        self._processes = Processes(pids)
        self._num_steps = 0  # of the core, as far as `step` has reported them
        super().__init__("vllm")
        self.config, self.tasks = self._llm.vllm_config, self.run(self._llm.get_supported_tasks())
        self.renderer = self._llm.renderer
        self._heartbeat: NodeHeartbeat | None = None
        if arguments.nnodes > 1:  # not on Ray, whose own nodes watch each other
            port = self.config.parallel_config.master_port
            self._heartbeat = NodeHeartbeat(arguments.master_addr, port, arguments.node_rank, arguments.nnodes)

    def add(self, work: VllmWork) -> None:
        self.begin(work.id, self._follow(work))

    async def _follow(self, work: VllmWork) -> None:
        how = {"lora_request": work.adapter, "priority": work.priority}
        try:
            if isinstance(work.params, PoolingParams):
                async for pooled in self._llm.encode(work.prompt, work.params, work.id, **how):
                    self.put(translation.of_pooling(pooled))
                return
            async for output in self._llm.generate(work.prompt, work.params, work.id, **how):
                self.put(translation.of_request(output))
        except Exception as error:
            self.put(SequenceOutput(work.id, [], end=error))

    def step(self) -> Sequence[SequenceOutput] | None:
        batch = self.take(WAIT_S)
        if not self.is_alive or any(isinstance(output.end, EngineDeadError) for output in batch):
            log.error("vLLM's engine died; its own lines further up say why")
            raise EngineStopped("vLLM's engine died")
        before, self._num_steps = self._num_steps, self._stats.num_steps
        return batch if batch or self._num_steps > before else None

    def load(self) -> EngineLoad:
        """The KV cache and the counts after the core's last step."""
        return replace(self._stats.load, kv_cache=translation.kv_cache_stats(self.config, self._stats.used_share))

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        translation.check_adapter(adapter, self.config)

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        self.run(self._llm.add_lora(translation.lora_request(adapter)))
        if adapter.is_pinned:
            self.run(self._llm.pin_lora(adapter.number))

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        self.run(self._llm.remove_lora(adapter.number))

    @property
    def is_alive(self) -> bool:
        is_whole = self._heartbeat is None or self._heartbeat.is_whole
        return self._processes.are_alive and not self._llm.errored and is_whole

    def close(self) -> None:
        if not self.is_alive:
            self._processes.kill()  # the group is broken and cannot shut down in order
        if self._heartbeat is not None:
            self._heartbeat.close()
        self.cancel_all()  # the core's end is not an error now
        self._llm.shutdown()
        del self._llm  # at the end of the interpreter its finalizer would call names that are gone
        self.end_loop()
        self._processes.close()


class _Stats(StatLoggerBase):
    """The statistics that the core reports after each step."""

    def __init__(self) -> None:
        self.load = EngineLoad()
        self.used_share = 0.0  # of the KV cache
        self.num_steps = 0

    def made(self, config: VllmConfig, index: int = 0) -> StatLoggerBase:
        """vLLM calls this to make the logger of an engine's statistics."""
        return self

    def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
        self.num_steps += 1
        if scheduler_stats is not None:
            self.load.num_running = scheduler_stats.num_running_reqs
            self.used_share = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.load.num_preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        return None


class NodeHeartbeat:
    """Heartbeats by which the nodes of one engine watch each other. `is_whole` is false once a watched node is lost.

    In vLLM a group that has lost a node waits without end. So each node writes a heartbeat to the store that torch
    keeps on node 0 while the group lives, at `address` and `port`, and reads the heartbeats that it watches.
    """

    def __init__(self, address: str, port: int, rank: int, num_nodes: int) -> None:
        self.is_whole = True
        self._address, self._port, self._rank = address, port, rank
        # Every node watches node 0, which watches every node.
        watched = range(1, num_nodes) if rank == 0 else [0]
        self._heard = {node: (0, time.monotonic()) for node in watched}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            store = TCPStore(self._address, self._port, is_master=False, timeout=timedelta(seconds=SILENT_S))
            while not self._is_closed.wait(BEAT_S):
                store.add(f"lmi/beat/{self._rank}", 1)
                for node, (last, heard_s) in self._heard.items():
                    num_beats, now = store.add(f"lmi/beat/{node}", 0), time.monotonic()
                    if num_beats != last:
                        self._heard[node] = num_beats, now
                    elif now - heard_s > SILENT_S:
                        raise TimeoutError(f"node {node} was silent for {now - heard_s:.0f} s")
        except Exception as error:
            if not self._is_closed.is_set():
                log.critical("node 0 is lost: its store does not answer: %s", cause_line(error))
                self.is_whole = False
