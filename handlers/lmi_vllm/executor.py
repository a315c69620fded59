"""The executor over vLLM: what waits, runs and ends is told between vLLM's steps, in our words.

Everything around the step (queue, cancel, deadlines, answers, statistics) is `SteppedExecutor`; what a sequence is and
why it ends is `handlers/base/sequence.py`, as for the embedded executor. A step that raises leaves vLLM's books in
doubt: what ran ends with an error, what waited is given to it again.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from handlers.base.sequence import Sequence
from handlers.base.stepped import EngineStopped, Step, SteppedExecutor
from handlers.lmi_vllm import guides
from handlers.lmi_vllm.adapters import Adapters, Turns
from handlers.lmi_vllm.arguments import engine_arguments
from handlers.lmi_vllm.engines import Apart, Engine, Failure, Inside, Load, Work
from handlers.lmi_vllm.outputs import Output, feed
from handlers.lmi_vllm.sampling import MAX_TEMPERATURE, priority, sampling_params
from handlers.lmi_vllm.start_errors import explained
from handlers.lmi_vllm.startup_log import Journal
from lmi.errors import InvalidRequest
from lmi.executor import Capabilities, EngineInfo, ErrorKind, GuideType, KvCacheStats, Progress, Request
from lmi.settings.config import EngineConfig

NUM_WARM_UP_TOKENS = 4
ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Request)

log = logging.getLogger("lmi.vllm")


class Executor(SteppedExecutor):
    """`model` is the folder of a Hugging Face checkpoint. `is_apart` None: where several devices work together."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        config: EngineConfig | None = None,
        progress: Progress = lambda stage, share: None,
        *,
        is_apart: bool | None = None,
    ) -> None:
        config = config or EngineConfig(handler="vllm")
        super().__init__(
            max_queue_size=config.max_queue_size,
            max_request_stats=int(config.options.get("request_stats_max_iterations", "0")),
        )
        progress("configuration", 0.0)
        self._engine = _start(os.fspath(model), config, is_apart, progress)
        self._info = describe(self._engine.config)
        self._adapters = Adapters(self._engine)
        if self.capabilities.lora:
            self._adapters.add_all(os.fspath(model))
        self._turns = Turns(is_needed=self.capabilities.lora and self._info.device == "cpu")
        self._known: dict[str, Sequence] = {}  # vLLM has them, by their ids there
        self._load = Load()
        self._num_preemptions = 0
        progress("warm-up", 0.0)
        try:
            _warm_up(self._engine)
        except Exception as error:  # kernels that cannot do what the model needs, which only a step shows
            raise explained(error, os.fspath(model), config) from error
        self._start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def enqueue_requests(self, requests: SequenceOf[Request]) -> list[int]:
        return super().enqueue_requests(list(map(_typed, requests)))

    def add_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter for `Request.lora_config`. Raises ModelUnusable with the reason; nothing else suffers."""
        self._at_border(lambda: self._adapters.add(name, path))

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; its files may go once the requests that use it have ended."""
        self._at_border(lambda: self._adapters.remove(name))

    def can_enqueue_requests(self) -> bool:
        return super().can_enqueue_requests() and self._engine.is_alive

    def _check(self, request: Request) -> None:
        super()._check(request)
        self._adapters.check(request)

    def _add(self, sequence: Sequence) -> None:
        self._turns.held.append(sequence)

    def _remove(self, sequence: Sequence) -> None:
        name = _name(sequence)
        if self._known.pop(name, None) is not None:
            self._engine.abort([name])
        elif sequence in self._turns.held:
            self._turns.held.remove(sequence)

    @property
    def _active(self) -> SequenceOf[Sequence]:
        known, load = self._known.copy(), self._load  # another thread may ask while a step changes them
        if load.running is None:
            return list(known.values())[: load.num_running]
        return [known[name] for name in load.running if name in known]

    @property
    def _queued(self) -> SequenceOf[Sequence]:
        active = set(map(_name, self._active))
        return [*(one for name, one in self._known.copy().items() if name not in active), *self._turns.held.copy()]

    def _wake(self) -> None:
        self._engine.wake()

    def _step(self) -> Step | None:
        refused = self._hand_over()
        try:
            outputs = self._engine.step() if self._known else ()
        except EngineDeadError as error:
            log.error("vLLM's engine died; its own lines further up say why")
            raise EngineStopped("vLLM's engine died") from error
        except Exception as error:
            self._start_over(error)
            raise
        if outputs is None and not refused:
            return None
        self._load = self._engine.load()
        step = Step(refused, num_preemptions=self._load.num_preemptions - self._num_preemptions)
        self._num_preemptions = self._load.num_preemptions
        for output in outputs or ():
            self._feed(output, step)
        return step

    def _hand_over(self) -> list[Sequence]:
        """Give vLLM what may run; returns those that it refused."""
        refused = []
        for sequence in self._turns.take(self._known):
            try:
                self._engine.add(self._work(sequence))
                self._known[_name(sequence)] = sequence
            except Exception as error:
                if self._kind_of(error) is not ErrorKind.INVALID:
                    log.exception("vLLM did not take request %d", sequence.id)
                self._refuse(sequence, error)
                refused.append(sequence)
        return refused

    def _refuse(self, sequence: Sequence, error: Exception) -> None:
        """All but the guide was checked before; only the adapter may be gone since."""
        if isinstance(error, InvalidRequest):
            sequence.fail(error.message, ErrorKind.INVALID, error.field)
        elif sequence.request.guided_decoding_params is not None:
            sequence.fail(guides.refusal(error), self._kind_of(error), guides.FIELD)
        else:
            sequence.fail(str(error), self._kind_of(error))

    def _work(self, sequence: Sequence) -> Work:
        return Work(
            id=_name(sequence),
            token_ids=list(map(int, sequence.request.input_token_ids)),
            params=sampling_params(sequence),
            adapter=self._adapters.of(sequence.request),
            priority=priority(sequence.request),
        )

    def _feed(self, output: Output | Failure, step: Step) -> None:
        sequence = self._known.get(output.id)
        if sequence is None:  # it ended a moment ago
            return
        if isinstance(output, Failure):
            sequence.fail(f"vLLM gave the request up: {output.error}", self._kind_of(output.error))
        else:
            is_first, num_before = sequence.is_prefilling, sequence.num_generated
            feed(sequence, output)
            num_new = sequence.num_generated - num_before  # AsyncLLM puts steps together where we are slow to take them
            step.num_context_tokens += sequence.num_prompt_tokens if is_first else 0
            step.num_generation_tokens += max(0, num_new - is_first)  # the first comes with the prompt
        if isinstance(output, Failure) or output.is_finished:
            del self._known[output.id]
        step.touched.append(sequence)

    def _start_over(self, error: Exception) -> None:
        """After a step that raised, empty vLLM's books; what had not run yet gets in line again, the rest may fail."""
        if _is_device_lost(error):
            raise EngineStopped(f"the device cannot be used any more: {error}") from error
        self._load = self._engine.load()
        waiting = [sequence for sequence in self._queued if not sequence.num_generated]  # else it was preempted
        self._engine.abort(self._known)
        for sequence in waiting:
            self._known.pop(_name(sequence), None)
        self._load = replace(self._load, num_running=len(self._known), running=list(self._known))
        self._turns.held.clear()
        self._turns.held.extend(waiting)

    def _kind_of(self, error: Exception) -> ErrorKind:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return ErrorKind.OUT_OF_MEMORY
        is_invalid = isinstance(error, InvalidRequest | ValueError | VLLMValidationError)
        return ErrorKind.INVALID if is_invalid else ErrorKind.GENERATION

    def _kv_cache_stats(self) -> KvCacheStats:
        max_num_blocks = _num_blocks(self._engine.config)
        num_used_blocks = round(self._load.used_share * max_num_blocks)
        return KvCacheStats(
            max_num_blocks=max_num_blocks,
            free_num_blocks=max_num_blocks - num_used_blocks,
            used_num_blocks=num_used_blocks,
            tokens_per_block=self._engine.config.cache_config.block_size,
        )

    def _close(self) -> None:
        self._engine.close()


def _name(sequence: Sequence) -> str:
    return f"{sequence.id}.{sequence.index}"


def _typed(request: Request) -> Request:
    """The same with every value of its type: what Python built holds whatever it was given, and vLLM may die of it."""
    try:
        return DECODER.decode(ENCODER.encode(request))
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"the request has a value of a wrong type: {error}") from None


def _num_blocks(config: VllmConfig) -> int:
    """Blocks of the KV cache that requests can have: vLLM keeps one for itself."""
    return max(0, (config.cache_config.num_gpu_blocks or 0) - 1)


def _start(model: str, config: EngineConfig, is_apart: bool | None, progress: Progress) -> Engine:
    """Raises StartError with one line that says why vLLM does not start."""
    journal = Journal.begin()
    try:
        arguments = AsyncEngineArgs(**engine_arguments(config, model))
        num_ranks = arguments.tensor_parallel_size * arguments.pipeline_parallel_size * arguments.nnodes
        is_apart = num_ranks > 1 if is_apart is None else is_apart
        # Warnings here are of names that torch will drop, for vLLM's authors.
        with journal.told_to(progress), warnings.catch_warnings(action="ignore"):
            return Apart(arguments) if is_apart else Inside(arguments)
    except Exception as error:
        explanation = explained(error, model, config, journal.cause)
        log.debug("vLLM did not start", exc_info=error)
        raise explanation from error


def _warm_up(engine: Engine) -> None:
    """The first steps set up kernels, which takes the time of many."""
    prompt = [0] * 8
    kinds = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "seed": 0, "logprobs": 0, "flat_logprobs": True}]
    for number, kind in enumerate(kinds):
        params = SamplingParams(
            max_tokens=NUM_WARM_UP_TOKENS,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
            **kind,
        )
        engine.add(Work(f"warm-up.{number}", prompt, params, None, 0))
    num_open = len(kinds)
    while num_open:
        for output in engine.step() or ():
            if isinstance(output, Failure):
                raise output.error
            num_open -= output.is_finished


def _is_device_lost(error: Exception) -> bool:
    lost = getattr(torch, "AcceleratorError", ())
    return isinstance(error, lost) or "CUDA error" in str(error)


def describe(config: VllmConfig) -> EngineInfo:
    model = config.model_config
    vocab_size, max_logprobs = model.get_vocab_size(), model.max_logprobs
    return EngineInfo(
        name="vllm",
        vocab_size=vocab_size,
        max_sequence_length=model.max_model_len,
        max_num_sequences=config.scheduler_config.max_num_seqs,
        dtype=str(model.dtype).removeprefix("torch."),
        device=config.device_config.device_type,
        max_kv_cache_tokens=_num_blocks(config) * config.cache_config.block_size,
        capabilities=Capabilities(
            num_return_sequences=True,
            guided_decoding=tuple(GuideType),
            embedding_bias=True,
            perf_metrics=True,
            max_top_log_probs=vocab_size if max_logprobs < 0 else min(max_logprobs, vocab_size),
            max_temperature=MAX_TEMPERATURE,
            lora=config.lora_config is not None,
            priority=config.scheduler_config.policy == "priority",
        ),
    )
