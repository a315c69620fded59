"""What a sequence needs before vLLM gets it, made beside the steps: the check of its structure, and its images."""

import hashlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from typing import Any

from PIL import Image
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.multimodal.media import ImageMediaIO
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config

from handlers.base.sequence import Sequence
from handlers.driven.executor import Preparation
from handlers.guides.compiler import MAX_START_S, GuideCompiler, Wait
from handlers.guides.process import MAX_COMPILATIONS, Start
from handlers.guides.turns import GuideOutcomes
from handlers.lmi_vllm import vllm_log
from handlers.lmi_vllm.guide_check import BACKENDS, XGRAMMAR
from handlers.lmi_vllm.translation import structure
from lmi.errors import InvalidParameter, InvalidRequest, OutOfMemory, cause_line, is_out_of_memory
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams, Request
from lmi.shared import machine

MAX_COMPILE_S = 10  # of processor time: with a large vocabulary xgrammar takes seconds for schemas that are in use
MAX_MEMORY_BYTES = 4 << 30  # of all compilations together, and at most a quarter of the container's
FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
MAX_PIXELS = 50_000_000  # of all images of a request


class GuideGate(Preparation[StructuredOutputsParams]):
    """The check of structures. vLLM does it on the thread that steps, and compiles with no limit of time or memory.

    So a structure is compiled first in a process with limits. `checked` has them as vLLM has marked them.
    """

    is_of_guides = True

    def __init__(self, config: VllmConfig, wake_engine: Callable[[], None]) -> None:
        super().__init__(wake_engine)
        self.checked: dict[Sequence, StructuredOutputsParams] = {}
        settings = config.structured_outputs_config
        self._config, self._backends = config, BACKENDS.get(settings.backend, ())
        start = Start(
            config.model_config.get_vocab_size(),
            is_compact=settings.disable_any_whitespace,
            compiler="handlers.lmi_vllm.guide_check",
            backends=self._backends,
            max_cpu_s=MAX_COMPILE_S,
            max_bytes=min(MAX_MEMORY_BYTES, machine.memory_bytes() // 4) // MAX_COMPILATIONS,
        )
        self._compiler = GuideCompiler(self._read_config, start, MAX_START_S)  # it imports torch
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
        except (VLLMValidationError, ValueError) as error:
            raise InvalidRequest(vllm_log.refusal(error), vllm_log.GUIDE_FIELD) from error
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


class ImageReader(Preparation[Any]):
    def __init__(self, renderer: Any, max_sequence_length: int, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self._renderer, self._max_sequence_length = renderer, max_sequence_length
        config = renderer.model_config.multimodal_config
        self._options: Mapping[str, Any] = {} if config is None else config.media_io_kwargs.get("image", {})
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="images")

    def begin(self, sequence: Sequence) -> Future[Any] | None:
        """Images are read once for all sequences of a request."""
        if not sequence.request.images:
            return None
        read = next((future for one, future in self._futures.items() if one.id == sequence.id), None)
        return read or self._pool.submit(self._read, sequence.request)

    def equip(self, sequence: Sequence, made: Any) -> None:
        sequence.prompt = made
        sequence.replace_prompt(made["prompt_token_ids"], self._max_sequence_length)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _read(self, request: Request) -> Any:
        """Return vLLM's input, with the prompt's new tokens. Raises InvalidRequest."""
        check_images(request.images)
        salt = (request.cache_salt or "").encode()
        prompt = TokensPrompt(
            prompt_token_ids=list(request.input_token_ids),
            multi_modal_data={"image": [self._decode(n, file) for n, file in enumerate(request.images)]},
            # What is cached of an image goes by this name, so images of different salts share nothing either.
            multi_modal_uuids={"image": [hashlib.sha256(salt + b"\0" + file).hexdigest() for file in request.images]},
        )
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        try:
            return self._renderer.process_for_engine(prompt, time.time())
        except Exception as error:
            _raise_lack_of_memory(error)
            raise InvalidRequest(f"vLLM cannot read the images of this prompt: {cause_line(error)}") from error

    def _decode(self, number: int, file: bytes) -> Any:
        try:
            return ImageMediaIO(**self._options).load_bytes(file)
        except Exception as error:
            _raise_lack_of_memory(error)
            raise _unreadable(number, error) from error


def _raise_lack_of_memory(error: Exception) -> None:
    if is_out_of_memory(error):
        raise OutOfMemory(f"vLLM cannot read its images: {error}") from error


def check_images(images: tuple[bytes, ...]) -> None:
    """Raise InvalidParameter for a file that is no image, or for too many pixels. Only the heads of files are read."""
    num_pixels, rule = 0, f"of at most {MAX_PIXELS} pixels, together with those before it"
    for number, file in enumerate(images):
        try:
            with Image.open(BytesIO(file), formats=FORMATS) as image:
                width, height = image.size
        except Image.DecompressionBombError as error:
            raise InvalidParameter(f"images[{number}]", rule, str(error)) from None
        except Exception as error:  # what a parser of files raises is not known
            raise _unreadable(number, error) from error
        num_pixels += width * height
        if num_pixels > MAX_PIXELS:
            raise InvalidParameter(f"images[{number}]", rule, f"{width}x{height}")


def _unreadable(number: int, error: Exception) -> InvalidParameter:
    rule = f"a file of one of {', '.join(FORMATS)} that can be read"
    return InvalidParameter(f"images[{number}]", rule, cause_line(error).partition(" <_io.")[0])
