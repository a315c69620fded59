"""The LLM class of the double: what happens in the caller's process, before and around
the engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import time
from collections.abc import AsyncIterator
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.handlers.trtllm.double import sampling
from tests.handlers.trtllm.double.engine import Engine
from tests.handlers.trtllm.double.guide import Guides
from tests.handlers.trtllm.double.jobs import Job
from tests.handlers.trtllm.double.knobs import current
from tests.handlers.trtllm.double.model import Model, end_id_of, read_adapter, read_tokenizer
from tests.handlers.trtllm.double.prefixes import Prefixes
from tests.handlers.trtllm.double.responses import Channel

ARGUMENTS = "TorchLlmArgs"
DEFAULT_BATCH_SIZE = 2048
SHARED_SEED = 42
NUM_BLOCKS = 1000
STATS_POLL_S = 0.01

log = logging.getLogger("tensorrt_llm")


class LLM:
    """The facts give the signatures of the constructor and of every method, which get their
    arguments by name.
    """

    # Of the package's classes
    _maker: Any

    def _begin(self, arguments: dict[str, Any]) -> None:
        """Check the arguments and load the model, as the constructor does."""
        more = arguments.pop("kwargs", {})
        self._engine: Engine | None = None
        self.args = self._checked({**arguments, **more})
        self._folder = Path(self.args.model)
        if not self._folder.is_dir():
            raise RuntimeError(
                f"Executor worker returned error: {self._folder} is no folder of a model"
            )

        knobs = current()
        if knobs.start_error:
            raise RuntimeError(f"Executor worker returned error: {knobs.start_error}")

        self._model = Model(self._folder)
        self._tokenizer = None if self.args.skip_tokenizer_init else read_tokenizer(self._folder)
        self._end_id = end_id_of(self._folder)
        self._ids = count(1)
        self._adapters: dict[int, Tensor] = {}
        self._was_used = False
        self._engine = self._new_engine()

    def _checked(self, given: dict[str, Any]) -> Any:
        model = self._maker.made(ARGUMENTS)
        for name in given:
            if name not in model.model_fields and name not in ("backend", "_mpi_session"):
                raise ValueError(f"LLM got invalid argument: {name}")

        if given.get("backend", "pytorch") not in ("pytorch", "_autodeploy"):
            raise ValueError(f"Unknown backend: {given['backend']!r}")

        args = model(**given)
        sampler = getattr(args, "sampler_type", "auto")
        if str(getattr(sampler, "value", sampler)) not in self._maker.line.samplers:
            raise ValueError(f"sampler_type {sampler!r} is not supported")

        return args

    @property
    def _num_ranks(self) -> int:
        args = self.args
        ranks: int = args.tensor_parallel_size * args.pipeline_parallel_size
        return ranks * getattr(args, "context_parallel_size", 1)

    def _new_engine(self) -> Engine:
        cache = self.args.kv_cache_config
        num_blocks = (
            NUM_BLOCKS
            if cache.max_tokens is None
            else -(-cache.max_tokens // cache.tokens_per_block)
        )
        is_guided = self.args.guided_decoding_backend is not None
        if is_guided and self._tokenizer is None:
            raise ValueError("guided decoding needs the tokenizer")

        guides = partial(Guides, self._tokenizer, self._model.vocab_size, self._end_id)
        return Engine(
            max_batch_size=self.args.max_batch_size or DEFAULT_BATCH_SIZE,
            stream_interval=self.args.stream_interval,
            prefixes=Prefixes(
                is_enabled=cache.enable_block_reuse,
                has_parts=cache.enable_partial_reuse,
                tokens_per_block=cache.tokens_per_block,
                max_blocks=num_blocks,
            ),
            guides=guides if is_guided else None,
            shared_generator=torch.Generator().manual_seed(SHARED_SEED)
            if self._is_torch_sampler
            else None,
            keeps_stats=self.args.enable_iter_perf_stats,
            num_ranks=self._num_ranks,
        )

    @cached_property
    def _is_torch_sampler(self) -> bool:
        sampler_type = self.args.sampler_type
        name = str(getattr(sampler_type, "value", sampler_type))
        return name == "TorchSampler" or (
            name == "auto" and not (self._maker.line.has_cpp_beams and self._max_width > 1)
        )

    @property
    def _max_width(self) -> int:
        return self.args.max_beam_width or 1

    @property
    def _max_length(self) -> int:
        return min(self.args.max_seq_len or self._model.context_length, self._model.context_length)

    # Requests.

    def generate_async(self, *, inputs: Any, sampling_params: Any, **more: Any) -> Any:
        engine = self._open_engine()
        params = self._prepared(sampling_params)
        prompt = list(inputs["prompt_token_ids"])
        if not 0 <= more.get("priority", 0.5) <= 1:
            raise ValueError(f"priority must be a float in [0.0, 1.0], got {more['priority']}")

        self._check_length(len(prompt))
        channel = Channel()
        request_id = next(self._ids)
        output = self._maker.made("RequestOutput")._of(request_id, params, channel, engine.abort)
        # The worker's, in another process
        copy = pickle.loads(pickle.dumps(params))
        try:
            engine.submit(self._job(request_id, prompt, copy, channel, more))
        except Exception as error:
            self._refuse(engine, channel, str(error))

        self._was_used = True
        return output

    def _open_engine(self) -> Engine:
        if self._engine is None or self._engine.error is not None:
            raise RuntimeError("LLM is shutting down")

        return self._engine

    def _refuse(self, engine: Engine, channel: Channel, message: str) -> None:
        """Tell the caller now if the worker is its own process, else through the request's
        iterator.
        """
        engine.count_failure()
        if os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS") == "1":
            raise self._maker.made("RequestError")(message)

        engine.refuse(channel, message)

    def _prepared(self, params: Any) -> Any:
        """The parameters, which this changes."""
        kind = self._maker.made("SamplingParams")
        if not isinstance(params, kind):
            raise TypeError(
                f"The sampling_params must be type SamplingParams, but got {type(params)}"
            )

        params._stream_interval = params._stream_interval or self.args.stream_interval
        return params

    def _check_length(self, num_tokens: int) -> None:
        limit = self.args.max_num_tokens
        if limit and num_tokens > limit and not self.args.enable_chunked_prefill:
            is_value = self._maker.line.long_prompt == "ValueError"
            kind = ValueError if is_value else self._maker.made("RequestError")
            raise kind(
                f"The sum of prompt length ({num_tokens}) should not exceed max_num_tokens "
                f"({limit})"
            )

    # What the worker does with a request before it queues it.

    def _job(
        self,
        request_id: int,
        prompt: list[int],
        params: Any,
        channel: Channel,
        more: dict[str, Any],
    ) -> Job:
        """Raises what the worker raises, which ends this request only."""
        if fault := sampling.faults(params):
            raise RuntimeError(fault)

        if self._is_torch_sampler:
            for name in self._maker.line.ignored:
                setattr(params, name, None)

        max_tokens = self._max_tokens(prompt, params)
        self._check(prompt, params)
        lora = more.get("lora_request")
        return Job(
            id=request_id,
            prompt=prompt,
            params=params,
            is_streamed=more["streaming"],
            channel=channel,
            priority=more.get("priority", 0.5),
            line=self._maker.line,
            model=self._model,
            max_tokens=max_tokens,
            make_log_prob=self._maker.made("Logprob"),
            adapter=self._adapter(lora),
            cache_key=(more.get("cache_salt"), lora and lora.adapter_id),
            knows_chosen_only=not self._is_torch_sampler,
            overlaps=not self.args.disable_overlap_scheduler,
        )

    def _max_tokens(self, prompt: list[int], params: Any) -> int:
        """What the context has room for: more is cut with a warning."""
        room = self._max_length - len(prompt)
        if room <= 0:
            raise ValueError(
                f"the prompt of {len(prompt)} tokens leaves no room in max_seq_len "
                f"({self._max_length})"
            )

        if params.max_tokens is not None and params.max_tokens > room:
            log.warning("max_tokens (%d) is cut to %d", params.max_tokens, room)

        return room if params.max_tokens is None else min(room, int(params.max_tokens))

    def _check(self, prompt: list[int], params: Any) -> None:
        if not prompt:
            raise ValueError("the prompt is empty")

        if not all(0 <= token < self._model.vocab_size for token in prompt):
            raise ValueError("Token ID out of range")

        width = params.best_of if params.use_beam_search else 1
        if width != self._max_width:
            raise ValueError(
                f"Request beam width {width} is not equal to max_beam_width {self._max_width}. "
                f"This is not supported!"
            )

        if params.embedding_bias is not None and tuple(params.embedding_bias.shape) != (
            self._model.vocab_size,
        ):
            raise ValueError(f"embedding_bias has shape {tuple(params.embedding_bias.shape)}")

        if width > 1 and (params.logprobs or 0) > self._maker.line.max_beam_log_probs:
            raise ValueError(f"logprobs ({params.logprobs}) is not supported with beam search")

        self._check_guide(params, width)

    def _check_guide(self, params: Any, width: int) -> None:
        if params.guided_decoding is None or not params.guided_decoding._is_any():
            params.guided_decoding = None
            return

        if width > 1:
            raise ValueError("guided decoding is not supported with beam search")

        if self.args.guided_decoding_backend is None:
            if self._maker.line.guides_without_backend == "refused":
                raise ValueError(
                    "guided decoding is not enabled: guided_decoding_backend is not set"
                )

    def _adapter(self, lora: Any) -> Tensor | None:
        """The weights of a request's adapter. They are read once for each number."""
        if lora is None:
            return None

        config = self.args.lora_config
        if not self.args.enable_lora and config is None:
            raise ValueError("LoRA is not enabled")

        if lora.adapter_id not in self._adapters:
            max_rank = 64 if config is None else config.max_lora_rank
            self._adapters[lora.adapter_id] = read_adapter(
                Path(lora.path), max_rank, self._model.vocab_size
            )

        return self._adapters[lora.adapter_id]

    # Statistics, end.

    def get_stats_async(self, *, timeout: float | None = None) -> AsyncIterator[dict[str, Any]]:
        engine = self._open_engine()
        return _stats(engine, 2.0 if timeout is None else timeout) if self._was_used else _nothing()

    def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __getstate__(self) -> Any:
        raise RuntimeError("LLM object can not be pickled.")

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None:
            self.shutdown()


async def _stats(engine: Engine, timeout: float) -> AsyncIterator[dict[str, Any]]:
    """The statistics of steps as they come, until none has come for a while."""
    last = time.monotonic()
    while time.monotonic() < last + timeout:
        if engine.stats:
            yield engine.stats.popleft()
            last = time.monotonic()
        else:
            await asyncio.sleep(STATS_POLL_S)


async def _nothing() -> AsyncIterator[dict[str, Any]]:
    return
    yield {}
