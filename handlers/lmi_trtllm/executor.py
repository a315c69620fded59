"""TensorRT-LLM behind the contract: its start, what it can do, its checks, and the translation of a
sequence.

The engine counts refused requests towards the errors after which it ends itself, so a request is
checked here first.
"""

import logging
import os
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tensorrt_llm import LLM

from handlers.base.configuration import AnyConfig, settled
from handlers.base.sequence import Sequence, new_sequences
from handlers.base.stepped import Step
from handlers.driven.engine import name_of
from handlers.driven.executor import DrivenExecutor
from handlers.driven.outputs import SequenceOutput
from handlers.driven.preparation import Preparation
from handlers.guides.compiler import GuideCompiler, Wait, compile_limit_s
from handlers.guides.process import Start
from handlers.guides.support import NO_TEXTS, why_no_guides
from handlers.guides.tokenizer_files import read_vocabulary
from handlers.guides.turns import GuideOutcomes
from handlers.lmi_trtllm import adapters, processors
from handlers.lmi_trtllm.arguments import llm_arguments
from handlers.lmi_trtllm.engine import TrtllmEngine, TrtllmWork
from handlers.lmi_trtllm.output_rows import note_rows
from handlers.lmi_trtllm.profile import AUTO, CPP_SAMPLER, installed
from handlers.lmi_trtllm.sampling import (
    TrtllmSampler,
    check_beams,
    refuse_rules,
    retention,
    sampling_params,
)
from handlers.lmi_trtllm.start_errors import explained
from lmi.errors import ModelUnusable, PromptTooLong, Unsupported
from lmi.executor.config import ExecutorConfig
from lmi.executor.executor import Capabilities, EngineInfo, Progress
from lmi.executor.request import (
    GuidedDecodingParams,
    GuideType,
    OutputConfig,
    Request,
    SamplingConfig,
)
from lmi.settings.config import EngineConfig
from lmi.settings.kinds import is_true

MAX_TOP_LOG_PROBS = 20
LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
NUM_WARM_UP_TOKENS = 4
MAX_WARM_UP_PROMPT = 8
IN_A_FILE = (
    "TensorRT-LLM's processes read functions from a file, which option.logits_post_processors names"
)
BACKEND = "guided_decoding_backend"
XGRAMMAR = "xgrammar"
LLGUIDANCE = "llguidance"
# llguidance reads what is called a grammar as one of Lark, which is another language than EBNF.
KINDS = {
    XGRAMMAR: tuple(GuideType),
    LLGUIDANCE: (GuideType.JSON, GuideType.JSON_SCHEMA, GuideType.REGEX),
}
MAX_PREFILL = (
    "(option.max_rolling_batch_prefill_tokens; option.enable_chunked_prefill=true lifts it)"
)

log = logging.getLogger("lmi.trtllm")


class TrtllmExecutor(DrivenExecutor[TrtllmWork]):
    """`Executor(path, config)`: a checkpoint's folder, no buffer, and the contract's or the
    server's configuration.
    """

    title = "TensorRT-LLM"
    searches_beams = True

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes,
        json_config_str: str | AnyConfig | None = None,
        config: AnyConfig | None = None,
        *,
        progress: Progress = lambda stage, share: None,
    ) -> None:
        folder, settings, options = settled(self.title, model, json_config_str, config)
        if settings.logits_post_processor_config is not None:
            raise Unsupported("logits_post_processor_config", IN_A_FILE)

        progress("configuration", 0.0)
        try:
            self._profile = installed(LLM.generate_async)
            arguments = llm_arguments(options, folder, self._profile)
            self._file = processors.file_of(options, folder)
            arguments |= processors.arguments(self._file, arguments)
            arguments |= adapters.arguments(arguments)

            model_config = read_config(folder)
            guides = guide_support(options, folder)
            start = Start(model_config["vocab_size"], compile_limit_s(options.step_timeout_s))
            checks = [GuideChecks(folder, start, self._wake)] if guides.kinds else []

            progress("weights", 0.0)
            self._trtllm = TrtllmEngine(arguments)
        except Exception as error:
            log.debug("TensorRT-LLM did not start", exc_info=error)
            raise explained(error, folder, options) from error

        try:
            self._sampler = self._new_sampler(model_config["vocab_size"])
            info = self._describe(folder, model_config, settings, guides)
            max_loras = 0
            if info.capabilities.lora:
                max_loras = self._trtllm.argument("lora_config").max_loras

            super().__init__(self._trtllm, info, settings, max_resident_adapters=max_loras)
            self._preparations = checks

            progress("warm-up", 0.0)
            self._run_to_the_end(self._warm_up_works())
        except Exception as error:
            self._trtllm.close()
            raise explained(error, folder, options) from error

        self._start()

    def _new_sampler(self, vocab_size: int) -> TrtllmSampler:
        profile = self._profile
        sampler_type = self._trtllm.argument("sampler_type")
        name = str(getattr(sampler_type, "value", sampler_type))

        is_default = name == AUTO and profile.has_cpp_beams and self._trtllm.max_beam_width > 1
        is_option = name == CPP_SAMPLER and profile.has_cpp_sampler
        return TrtllmSampler(profile, vocab_size, is_cpp=is_default or is_option)

    def _describe(
        self,
        folder: str,
        model: dict[str, Any],
        settings: ExecutorConfig,
        guides: "GuideSupport",
    ) -> EngineInfo:
        engine = self._trtllm
        sampler = self._sampler
        dtype = engine.argument("dtype")
        if dtype in (None, "auto"):
            dtype = model.get("dtype") or model.get("torch_dtype") or ""

        lengths = [engine.argument("max_seq_len"), *map(model.get, LENGTHS)]
        usable_lengths = [length for length in lengths if isinstance(length, int) and length > 0]
        if not usable_lengths:
            raise ModelUnusable(
                f"{folder}: config.json has no length of the context; set option.max_model_len"
            )

        has_no_beams = engine.max_beam_width == 1
        max_top_log_probs = min(MAX_TOP_LOG_PROBS, sampler.vocab_size)
        if sampler.is_cpp and has_no_beams:
            max_top_log_probs = 0

        return EngineInfo(
            name="trtllm",
            vocab_size=sampler.vocab_size,
            max_sequence_length=usable_lengths[0],
            max_num_sequences=engine.max_num_sequences,
            dtype=str(dtype).removeprefix("torch."),
            device="cuda",
            max_kv_cache_tokens=settings.kv_cache_config.max_tokens or 0,
            capabilities=Capabilities(
                max_beam_width=engine.max_beam_width,
                num_return_sequences=True,
                guided_decoding=guides.kinds if has_no_beams else (),
                why_no_guides=guides.why_none,
                min_p=sampler.has_rules,
                seed=sampler.has_rules,
                penalties=sampler.has_rules,
                no_repeat_ngram_size=sampler.has_rules,
                embedding_bias=True,
                max_top_log_probs=max_top_log_probs,
                context_logits=True,
                generation_logits=has_no_beams,
                perf_metrics=True,
                additional_outputs=tuple(settings.additional_model_outputs),
                logits_post_processors=processors.names(self._file),
                lora=engine.argument("lora_config") is not None,
                kv_cache_retention=True,
                priority=sampler.profile.takes_priority,
            ),
        )

    def _warm_up_works(self) -> list[TrtllmWork]:
        """Greedy, and sampled with every output there is; where the engine only searches beams, one
        of those.
        """
        capabilities = self.capabilities
        length = self.info.max_sequence_length
        prompt = (0,) * min(MAX_WARM_UP_PROMPT, length - 1)
        new_request = partial(Request, prompt, NUM_WARM_UP_TOKENS)

        beam_width = capabilities.max_beam_width
        if beam_width > 1:
            search = new_request(
                sampling_config=SamplingConfig(beam_width),
                output_config=OutputConfig(return_log_probs=True),
            )
            requests = [search]
        else:
            greedy = new_request(sampling_config=SamplingConfig(temperature=0))
            sampled = new_request(
                sampling_config=SamplingConfig(top_p=0.9),
                output_config=OutputConfig(
                    return_log_probs=True,
                    additional_model_outputs=capabilities.additional_outputs,
                ),
            )
            requests = [greedy, sampled]

        works = list[TrtllmWork]()
        for number, request in enumerate(requests):
            works += map(self._work, new_sequences(-number, request, length))

        return works

    def _check(self, request: Request) -> None:
        super()._check(request)
        check_beams(request, self.info.capabilities.max_beam_width)
        refuse_rules(request, self._sampler)
        argument = self._trtllm.argument
        processors.check(request, sees_tokens=bool(argument("disable_overlap_scheduler")))

        if argument("enable_chunked_prefill"):
            return

        max_tokens = argument("max_num_tokens")
        num_tokens = len(request.input_token_ids)
        if max_tokens is not None and num_tokens > max_tokens:
            raise PromptTooLong(
                f"{max_tokens} tokens at most {MAX_PREFILL}", f"{num_tokens} tokens"
            )

    def _work(self, sequence: Sequence) -> TrtllmWork:
        request = sequence.request
        more = dict[str, Any]()
        functions = processors.of(sequence, self._file, self._trtllm.faults.path)
        params = sampling_params(sequence, self._sampler, functions)

        adapter = self._adapters.used_by(sequence)
        if adapter is not None:
            more["lora_request"] = adapters.lora_request(adapter)

        if request.kv_cache_retention_config is not None:
            more["kv_cache_retention_config"] = retention(request.kv_cache_retention_config)

        # A prompt of which every token needs a row shares no cache.
        salt = secrets.token_hex(16) if sequence.lacks_prompt_rows else request.cache_salt
        if salt is not None:
            more["cache_salt"] = salt

        if self._profile.takes_priority:
            more["priority"] = float(request.priority)

        # Each step is told, not only the end. There are two exceptions: an output of several steps
        # has only the row of the last, and the steps of a search restate its beams and append to
        # the log-probs of other tokens.
        is_each_step_told = self._trtllm.argument("stream_interval") in (None, 1)
        is_streamed = sequence.captured is None or is_each_step_told
        if sequence.search is not None and request.output_config.return_log_probs:
            is_streamed = False

        token_ids = [int(token_id) for token_id in request.input_token_ids]
        return TrtllmWork(name_of(sequence), token_ids, params, more, sequence, is_streamed)

    def _take(self, output: SequenceOutput, step: Step[Sequence]) -> None:
        """Keep the rows of a step's tensors before its tokens are appended."""
        sequence = self._known.get(output.id)
        if sequence is not None and output.rows is not None:
            note_rows(sequence, output.rows, len(output.token_ids))

        super()._take(output, step)


class GuideChecks(Preparation[None]):
    """The check of structures in a process with limits: the engine has none, and compiles in the
    process that steps.
    """

    is_of_guides = True

    def __init__(self, folder: str, start: Start, wake_engine: Callable[[], None]) -> None:
        super().__init__(wake_engine)
        vocabulary = read_vocabulary(folder)
        self._end_ids = frozenset(vocabulary.stop_token_ids or ())
        self._compiler = GuideCompiler(lambda: vocabulary, start)
        self._outcomes = GuideOutcomes(self._compiler, self._check)

    def begin(self, sequence: Sequence) -> Future[None] | None:
        """Check the guide of a sequence, or return None if it has none."""
        params = sequence.request.guided_decoding_params
        if params is None:
            return None

        return self._outcomes.of(params, sequence.request.client_id)

    def equip(self, sequence: Sequence, product: None) -> None:
        """Let the tokenizer's end tokens end a sequence: the engine closes its structure with one
        of them.
        """
        sequence.end_ids |= self._end_ids

    def close(self) -> None:
        """End the process that compiles."""
        self._outcomes.close()

    def _check(self, params: GuidedDecodingParams, wait: Wait) -> None:
        self._compiler.check(params, wait)


class GuideSupport(NamedTuple):
    """The kinds of structures that requests may have, or none and the reason."""

    kinds: tuple[GuideType, ...]
    why_none: str


def guide_support(config: EngineConfig, folder: str) -> GuideSupport:
    """Return the kinds of structures that requests may have, by options and model folder."""
    backend = config.options.get(BACKEND, XGRAMMAR)
    if backend not in KINDS:
        reason = f"option.{BACKEND}={backend} is neither {XGRAMMAR} nor {LLGUIDANCE}"
        return GuideSupport((), reason)

    if is_true(config.options.get("skip_tokenizer_init", "")):
        return GuideSupport((), NO_TEXTS)

    reason = why_no_guides(Path(folder))
    return GuideSupport(() if reason else KINDS[backend], reason)


def read_config(folder: str) -> dict[str, Any]:
    """config.json of a model, of its text part if it has several. Raises ModelUnusable unless it
    has a `vocab_size`.
    """
    file = Path(folder, "config.json")
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelUnusable(f"{file}: {error}") from None

    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        config |= text_config

    # It is the width of the logits.
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ModelUnusable(f"{folder}: config.json has no vocab_size")

    return config
