"""vLLM behind the contract: its executor, and a further node's."""

import os
import threading
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from handlers.base.configuration import AnyConfig, settled
from handlers.base.mailbox import Mailbox
from handlers.base.sequence import Sequence
from handlers.driven.beam_rounds import BeamRow
from handlers.driven.engine import name_of
from handlers.driven.executor import DrivenExecutor
from handlers.lmi_vllm import engine_info, translation
from handlers.lmi_vllm.drivers import VllmEngine
from handlers.lmi_vllm.guide_gate import GuideGate
from handlers.lmi_vllm.heartbeat import NodeHeartbeat
from handlers.lmi_vllm.image_reader import ImageReader
from handlers.lmi_vllm.shared_memory import unlink_shared_memory
from handlers.lmi_vllm.start import explained, starting
from lmi import errors
from lmi.executor import EngineInfo, ErrorKind, Progress, Request
from lmi.settings.config import EngineConfig


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
    """A further node of an engine that spans several machines.

    It loads this node's part of the model and waits until the group of nodes ends. Its ranks get
    their work from node 0, which takes all requests.
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
        """Whether the group of nodes is whole. Requests are refused in any case."""
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
        """Shut down, cleanly if the group is whole: else the ranks die with this process."""
        is_whole = self.can_enqueue_requests()
        self._end_waiting()
        self._heartbeat.close()
        if is_whole:
            self._ranks.shutdown()
