"""Checks guides before vLLM gets their sequences, beside the thread that steps.

vLLM itself would check a guide on the thread that steps, and compile it without limits of time and
memory. So a guide is first compiled in a process with limits.
"""

from collections.abc import Callable
from concurrent.futures import Future

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config

from handlers.base.sequence import Sequence
from handlers.driven.preparation import Preparation
from handlers.guides.compiler import MAX_START_S, GuideCompiler, Wait
from handlers.guides.process import MAX_COMPILATIONS, Start
from handlers.guides.turns import GuideOutcomes
from handlers.lmi_vllm import vllm_log
from handlers.lmi_vllm.guide_check import BACKENDS, XGRAMMAR
from handlers.lmi_vllm.translation import structure
from lmi.errors import InvalidRequest
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams
from lmi.shared import machine

# Processor time: with a large vocabulary xgrammar takes seconds for schemas that are in use.
MAX_CPU_S = 10
# The memory of all compilations together, which is at most a quarter of the container's.
MAX_MEMORY_BYTES = 4 << 30


class GuideGate(Preparation[StructuredOutputsParams]):
    """Holds a sequence back until its guide is checked."""

    is_of_guides = True

    def __init__(self, config: VllmConfig, wake_engine: Callable[[], None]) -> None:
        super().__init__(wake_engine)
        # The guides of sequences that are checked, and that vLLM does not have yet. vLLM has marked
        # in them which backend follows them.
        self.checked: dict[Sequence, StructuredOutputsParams] = {}
        self._config = config
        settings = config.structured_outputs_config
        self._backends = BACKENDS.get(settings.backend, ())

        memory_bytes = min(MAX_MEMORY_BYTES, machine.memory_bytes() // 4)
        start = Start(
            config.model_config.get_vocab_size(),
            is_compact=settings.disable_any_whitespace,
            compiler="handlers.lmi_vllm.guide_check",
            backends=self._backends,
            max_cpu_s=MAX_CPU_S,
            max_bytes=memory_bytes // MAX_COMPILATIONS,
        )
        # The process imports torch, so its start may take long.
        self._compiler = GuideCompiler(self._read_config, start, MAX_START_S)
        self._outcomes: GuideOutcomes[StructuredOutputsParams] = GuideOutcomes(
            self._compiler, self._check
        )

    def begin(self, sequence: Sequence) -> Future[StructuredOutputsParams] | None:
        """Begin to check the guide of a sequence. Returns None if it has none."""
        params = sequence.request.guided_decoding_params
        if params is None:
            return None

        return self._outcomes.of(params, sequence.request.client_id)

    def equip(self, sequence: Sequence, product: StructuredOutputsParams) -> None:
        """Keep the checked guide until the sequence is given to vLLM."""
        self.checked[sequence] = product

    def drop_waiting(self, sequence: Sequence) -> Future[StructuredOutputsParams] | None:
        """Forget a sequence that has ended, and its guide."""
        self.checked.pop(sequence, None)
        return super().drop_waiting(sequence)

    def close(self) -> None:
        """End the process that compiles."""
        self._outcomes.close()

    def _check(self, params: GuidedDecodingParams, wait: Wait) -> StructuredOutputsParams:
        """Compile a guide with limits, then let vLLM check it.

        Returns the guide with vLLM's mark of its backend. Raises InvalidRequest for one that either
        refuses.
        """
        config = self._config
        try:
            if self._backends:
                self._compiler.check(params, wait)

            checked = SamplingParams(structured_outputs=structure(params))
            tokenizer = cached_tokenizer_from_config(config.model_config)
            checked.verify(config.model_config, None, config.structured_outputs_config, tokenizer)
        except (VLLMValidationError, ValueError) as error:
            raise InvalidRequest(vllm_log.refusal(error), vllm_log.GUIDE_FIELD) from error

        assert checked.structured_outputs is not None
        return checked.structured_outputs

    def _read_config(self) -> GuidedDecodingConfig:
        """Return the vocabulary as vLLM gives it to xgrammar, or an empty one without xgrammar."""
        if XGRAMMAR not in self._backends:
            return GuidedDecodingConfig([])

        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        model = self._config.model_config
        tokenizer = cached_tokenizer_from_config(model)
        backend = XgrammarBackend(self._config, tokenizer, model.get_vocab_size())
        # The backend has its vocabulary only in what it compiles.
        tokenizer_info = backend.compiler.compile_regex("a").tokenizer_info
        return GuidedDecodingConfig([], tokenizer_info.serialize_json())
