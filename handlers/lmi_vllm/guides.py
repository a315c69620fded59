"""The check of each structure before vLLM gets it, beside the steps and in a process with limits.

vLLM itself checks a structure on the thread that steps, and compiles it with no limit of time or memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config

from handlers.base.driven import Preparation
from handlers.base.sequence import Sequence
from handlers.guides.compiler import MAX_START_S, GuideCompiler, Wait
from handlers.guides.process import MAX_COMPILATIONS
from handlers.guides.turns import GuideOutcomes
from handlers.lmi_vllm import vllm_log
from handlers.lmi_vllm.guide_check import BACKENDS, XGRAMMAR
from handlers.lmi_vllm.translation import structure
from lmi.errors import GenerationFailed, InvalidRequest, LmiError, cause_line
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams
from lmi.shared import linux

MAX_COMPILE_S = 10  # of processor time: with a large vocabulary xgrammar takes seconds for schemas that are in use
MAX_MEMORY_BYTES = 4 << 30  # of all compilations together, and at most a quarter of the container's

log = logging.getLogger("lmi.vllm")


class GuideGate(Preparation[StructuredOutputsParams]):
    """The check of structures. It goes on for others when a sequence leaves, and ends by its limits."""

    is_of_guides = True

    def __init__(self, config: VllmConfig, wake_engine: Callable[[], None]) -> None:
        super().__init__(wake_engine)
        self.checked: dict[Sequence, StructuredOutputsParams] = {}
        settings = config.structured_outputs_config
        self._config, self._backends = config, BACKENDS.get(settings.backend, ())
        self._compiler = GuideCompiler(
            self._read_config,
            config.model_config.get_vocab_size(),
            is_compact=settings.disable_any_whitespace,
            compiler="handlers.lmi_vllm.guide_check",
            backends=self._backends,
            max_cpu_s=MAX_COMPILE_S,
            max_start_wait_s=MAX_START_S,  # it imports torch
            max_bytes=min(MAX_MEMORY_BYTES, linux.memory_bytes() // 4) // MAX_COMPILATIONS,
        )
        self._outcomes: GuideOutcomes[StructuredOutputsParams] = GuideOutcomes(self._compiler, self._check)

    def begin(self, sequence: Sequence) -> Future[StructuredOutputsParams] | None:
        params = sequence.request.guided_decoding_params
        return None if params is None else self._outcomes.of(params, sequence.request.client_id)

    def equip(self, sequence: Sequence, made: StructuredOutputsParams) -> None:
        self.checked[sequence] = made

    def drop_waiting(self, sequence: Sequence) -> Future[StructuredOutputsParams] | None:
        self.checked.pop(sequence, None)
        return super().drop_waiting(sequence)

    def close(self) -> None:
        self._outcomes.close()

    def _check(self, params: GuidedDecodingParams, wait: Wait) -> StructuredOutputsParams:
        """Let vLLM check a structure that has kept the limits, and return it as vLLM has marked it."""
        config = self._config
        try:
            if self._backends:
                self._compiler.check(params, wait)
            checked = SamplingParams(structured_outputs=structure(params))
            tokenizer = cached_tokenizer_from_config(config.model_config)
            checked.verify(config.model_config, None, config.structured_outputs_config, tokenizer)
        except LmiError:
            raise
        except (VLLMValidationError, ValueError) as error:
            raise InvalidRequest(vllm_log.refusal(error), vllm_log.GUIDE_FIELD) from error
        except Exception as error:
            log.exception("a structure was not checked")
            raise GenerationFailed(f"the structure was not checked: {cause_line(error)}") from error
        assert checked.structured_outputs is not None
        return checked.structured_outputs

    def _read_config(self) -> GuidedDecodingConfig:
        """The vocabulary in the form in which vLLM gives it to xgrammar."""
        if XGRAMMAR not in self._backends:
            return GuidedDecodingConfig([])
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        model = self._config.model_config
        backend = XgrammarBackend(self._config, cached_tokenizer_from_config(model), model.get_vocab_size())
        return GuidedDecodingConfig([], backend.compiler.compile_regex("a").tokenizer_info.serialize_json())
