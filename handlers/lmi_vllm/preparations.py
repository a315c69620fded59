"""What a sequence needs before vLLM gets it, made beside the steps: the check of its structure, and
its images.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from io import BytesIO
from threading import Lock
from typing import Any

from PIL import Image
from vllm import envs
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.multimodal.media import ImageMediaIO
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config

from handlers.base.client_turns import ClientTurns
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

# Processor time: with a large vocabulary xgrammar takes seconds for schemas that are in use.
MAX_CPU_S = 10
# The memory of all compilations together, which is at most a quarter of the container's.
MAX_MEMORY_BYTES = 4 << 30
FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
# Models look at 13 million pixels of an image at most, mostly at one to four; a photo of a
# telephone has 12. vLLM's variable may say otherwise.
MAX_IMAGE_PIXELS = 1 << 24
# The images of a request together have at most the pixels of so many images.
MAX_LARGE_IMAGES = 3
NUM_IMAGE_THREADS = 2
# So many pixels are decoded in the time that heads take.
HEADS_PRICE = 4096


class GuideGate(Preparation[StructuredOutputsParams]):
    """The check of structures. vLLM does it on the thread that steps, and compiles with no limit of
    time or memory.

    So a structure is compiled first in a process with limits. `checked` has them as vLLM has marked
    them.
    """

    is_of_guides = True

    def __init__(self, config: VllmConfig, wake_engine: Callable[[], None]) -> None:
        super().__init__(wake_engine)
        self.checked: dict[Sequence, StructuredOutputsParams] = {}
        settings = config.structured_outputs_config
        self._config = config
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
        """Check the guide of a sequence, or return None if it has none."""
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
        """Let vLLM check a structure that has kept the limits, and return it as vLLM
        has marked it.
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
        """The vocabulary in the form in which vLLM gives it to xgrammar."""
        if XGRAMMAR not in self._backends:
            return GuidedDecodingConfig([])

        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        model = self._config.model_config
        tokenizer = cached_tokenizer_from_config(model)
        backend = XgrammarBackend(self._config, tokenizer, model.get_vocab_size())
        tokenizer_info = backend.compiler.compile_regex("a").tokenizer_info
        return GuidedDecodingConfig([], tokenizer_info.serialize_json())


class Reading(Future[Any]):
    """What becomes of the images of one request. Once it is cancelled, its thread reads no further
    file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_wanted = True

    def cancel(self) -> bool:
        """Let its thread read no further file."""
        self.is_wanted = False
        return super().cancel()

    def check_wanted(self) -> None:
        """Raise CancelledError if nobody waits any more."""
        if not self.is_wanted:
            raise CancelledError


class ImageReader(Preparation[Any]):
    """The images of requests, which clients have read in turns. They pay by pixels, known from the
    heads of files.

    Files are decoded by several threads, and one at a time passes vLLM's processor, whose cache
    knows no others.
    """

    def __init__(self, renderer: Any, max_sequence_length: int, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self._renderer = renderer
        self._max_sequence_length = max_sequence_length
        self._options: Mapping[str, Any] = {}
        config = renderer.model_config.multimodal_config
        if config is not None:
            self._options = config.media_io_kwargs.get("image", {})

        self._turns: ClientTurns[Any] = ClientTurns(NUM_IMAGE_THREADS, "images")
        self._processor = Lock()
        self._max_pixels = MAX_IMAGE_PIXELS
        if envs.is_set("VLLM_MAX_IMAGE_PIXELS"):
            self._max_pixels = envs.VLLM_MAX_IMAGE_PIXELS

    def begin(self, sequence: Sequence) -> Future[Any] | None:
        """Images are read once for all sequences of a request."""
        request = sequence.request
        if not request.images:
            return None

        for waiting, future in self._futures.items():
            if waiting.id == sequence.id:
                return future

        reading = Reading()
        heads = Future[int]()
        heads.add_done_callback(partial(self._queue, request, reading, self._turns.num_spent))
        look = partial(check_images, request.images, self._max_pixels)
        self._turns.submit(request.client_id, look, heads, HEADS_PRICE)
        return reading

    def _queue(self, request: Request, reading: Reading, since: float, heads: Future[int]) -> None:
        """Let a request wait for its turn, whose price the heads of its files have told."""
        error = heads.exception()
        if error is None:
            work = partial(self._read, request, reading)
            self._turns.submit(request.client_id, work, reading, heads.result(), since)
        elif reading.set_running_or_notify_cancel():
            reading.set_exception(error)

    def equip(self, sequence: Sequence, product: Any) -> None:
        """Give a sequence the prompt with its images. Raises PromptTooLong."""
        sequence.prompt = product
        sequence.replace_prompt(product["prompt_token_ids"], self._max_sequence_length)

    def close(self) -> None:
        """Begin to read nothing more."""
        self._turns.close()

    def _read(self, request: Request, reading: Reading) -> Any:
        """Return vLLM's input, with the prompt's new tokens. Raises InvalidRequest."""
        salt = (request.cache_salt or "").encode()
        images = []
        for number, file in enumerate(request.images):
            reading.check_wanted()
            images.append(self._decode(number, file))

        # What is cached of an image goes by this name, so images of different salts share nothing
        # either.
        names = [hashlib.sha256(salt + b"\0" + file).hexdigest() for file in request.images]
        prompt = TokensPrompt(
            prompt_token_ids=list(request.input_token_ids),
            multi_modal_data={"image": images},
            multi_modal_uuids={"image": names},
        )
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt

        with self._processor:
            reading.check_wanted()
            try:
                return self._renderer.process_for_engine(prompt, time.time())
            except Exception as error:
                _raise_lack_of_memory(error)
                raise InvalidRequest(
                    f"vLLM cannot read the images of this prompt: {cause_line(error)}"
                ) from error

    def _decode(self, number: int, file: bytes) -> Any:
        try:
            return ImageMediaIO(**self._options).load_bytes(file)
        except Exception as error:
            _raise_lack_of_memory(error)
            raise _unreadable(number, error) from error


def _raise_lack_of_memory(error: Exception) -> None:
    if is_out_of_memory(error):
        raise OutOfMemory(f"vLLM cannot read its images: {error}") from error


def check_images(images: tuple[bytes, ...], max_pixels: int) -> int:
    """Return the pixels of all images, of which each has at most `max_pixels`. Only the heads of
    their files are read.

    Raises InvalidParameter for a file that is no image, and for too many pixels, in one image or
    together.
    """
    num_pixels = 0
    max_together = MAX_LARGE_IMAGES * max_pixels
    of_one = f"of at most {max_pixels} pixels (VLLM_MAX_IMAGE_PIXELS)"
    of_all = (
        f"of at most {max_together} pixels, together with those before it (VLLM_MAX_IMAGE_PIXELS)"
    )
    for number, file in enumerate(images):
        try:
            with Image.open(BytesIO(file), formats=FORMATS) as image:
                width, height = image.size
        except Image.DecompressionBombError as error:
            raise InvalidParameter(f"images[{number}]", of_one, str(error)) from None
        except Exception as error:
            # What a parser of files raises is not known.
            raise _unreadable(number, error) from error

        num_pixels += width * height
        if width * height > max_pixels:
            raise InvalidParameter(f"images[{number}]", of_one, f"{width}x{height}")

        if num_pixels > max_together:
            raise InvalidParameter(f"images[{number}]", of_all, f"{width}x{height}")

    return num_pixels


def _unreadable(number: int, error: Exception) -> InvalidParameter:
    rule = f"a file of one of {', '.join(FORMATS)} that can be read"
    return InvalidParameter(f"images[{number}]", rule, cause_line(error).partition(" <_io.")[0])
