"""Reads the images of requests with vLLM's processor: files become pixels, and placeholders in a prompt many tokens.

That takes milliseconds to seconds, so it happens on a thread beside the steps, for one request after another. What a
client sent is checked here, where the libraries are that know it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from typing import Any

from PIL import Image
from vllm.config import ModelConfig
from vllm.inputs import TokensPrompt
from vllm.model_executor.model_loader import get_model_cls
from vllm.multimodal.media import ImageMediaIO

from handlers.base.driven import Preparation
from handlers.base.sequence import Sequence
from lmi.errors import InvalidParameter, InvalidRequest, OutOfMemory, cause_line, is_out_of_memory
from lmi.executor import Request

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
MAX_PIXELS = 50_000_000  # of all images of a request


class ImageReader(Preparation[Any]):
    def __init__(self, renderer: Any, max_sequence_length: int, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self._renderer, self._max_sequence_length = renderer, max_sequence_length
        self._options: Mapping[str, Any] = {}
        if (config := renderer.model_config.multimodal_config) is not None:
            self._options = config.media_io_kwargs.get("image", {})
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


def reads_images(model: ModelConfig, renderer: Any) -> tuple[int, str]:
    """Return how many images a prompt may have, and the placeholder of one where a chat template writes none."""
    if not model.supports_multimodal_inputs:
        return 0, ""
    num = renderer.get_mm_processor().info.allowed_mm_limits.get("image", 0)
    first, second = (get_model_cls(model).get_placeholder_str("image", n) if num else "" for n in (1, 2))
    return num, (first or "") if first == second else first.replace("1", "{n}")
