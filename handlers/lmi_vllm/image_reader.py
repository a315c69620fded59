"""The reading of images beside the steps, before vLLM gets their sequences."""

import hashlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from io import BytesIO
from threading import Lock
from typing import Any, NamedTuple

from PIL import Image
from vllm import envs
from vllm.inputs import TokensPrompt
from vllm.multimodal.media import ImageMediaIO

from handlers.base.client_turns import ClientTurns
from handlers.base.sequence import Sequence
from handlers.driven.preparation import Preparation
from lmi.errors import InvalidParameter, InvalidRequest, OutOfMemory, cause_line, is_out_of_memory
from lmi.executor import Request

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
VARIABLE = "VLLM_MAX_IMAGE_PIXELS"
# Pillow opens no image of more.
MAX_PILLOW_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 0)
# The most pixels of an image, unless vLLM's variable says otherwise. Models look at 13 million
# pixels at most, mostly at one to four million; a photo of a telephone has twelve.
MAX_IMAGE_PIXELS = 1 << 24
# The images of a request together have at most the pixels of so many of the largest ones.
MAX_LARGE_IMAGES = 3
NUM_IMAGE_THREADS = 2
# The price of a look at the heads of a request's files, in pixels decoded meanwhile.
HEADS_PRICE = 4096


class Reading(Future[Any]):
    """The images of one request, as vLLM's input once they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.is_wanted = True

    def cancel(self) -> bool:
        """Let the thread that reads them read no further file."""
        self.is_wanted = False
        return super().cancel()

    def check_wanted(self) -> None:
        """Raise CancelledError if nobody waits any more."""
        if not self.is_wanted:
            raise CancelledError


class ImageReader(Preparation[Any]):
    """Lets a sequence pass once the images of its request are read.

    Clients take turns, and what they ask for costs by its pixels. These are known from the heads of
    files, at which a request looks in a turn of its own. Several threads decode files. Only one at
    a time calls vLLM's processor, whose cache allows no more.
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
        self._limit = pixel_limit()

    def begin(self, sequence: Sequence) -> Future[Any] | None:
        """Read the images of a sequence, once for all sequences of its request, or return None if
        it has none.
        """
        request = sequence.request
        if not request.images:
            return None

        for waiting, future in self._futures.items():
            if waiting.id == sequence.id:
                return future

        reading = Reading()
        num_pixels = Future[int]()
        start = self._turns.num_spent
        num_pixels.add_done_callback(partial(self._queue, request, reading, start))

        check = partial(check_images, request.images, self._limit)
        self._turns.submit(request.client_id, check, num_pixels, HEADS_PRICE)
        return reading

    def _queue(
        self, request: Request, reading: Reading, start: float, num_pixels: Future[int]
    ) -> None:
        """Let a request wait for its turn to be read, or fail if its images have a fault.

        Its wait began at `start`, with the wait for the turn to look at the heads.
        """
        error = num_pixels.exception()
        if error is None:
            work = partial(self._read, request, reading)
            price = num_pixels.result()
            self._turns.submit(request.client_id, work, reading, price, start)
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

        # vLLM keeps what it has computed of an image by this name. So requests with different salts
        # share nothing of images either.
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
        """Return the pixels of a file. Raises InvalidParameter, or OutOfMemory."""
        try:
            return ImageMediaIO(**self._options).load_bytes(file)
        except Exception as error:
            _raise_lack_of_memory(error)
            raise _unreadable(number, error) from error


def _raise_lack_of_memory(error: Exception) -> None:
    if is_out_of_memory(error):
        raise OutOfMemory(f"vLLM cannot read its images: {error}") from error


class PixelLimit(NamedTuple):
    """The most pixels of an image, and whose limit this is, as errors tell it."""

    max_pixels: int
    source: str


def pixel_limit() -> PixelLimit:
    """Return the limit of this process: the operator's, or that of this server.

    0 in vLLM's variable means no limit there. Pillow, which reads the files, has one all the same.
    """
    if not envs.is_set(VARIABLE):
        source = f"the server's limit, unless {VARIABLE} is set"
        return PixelLimit(MAX_IMAGE_PIXELS, source)

    given = envs.VLLM_MAX_IMAGE_PIXELS
    if 0 < given <= MAX_PILLOW_PIXELS:
        return PixelLimit(given, f"the server's {VARIABLE}")

    return PixelLimit(MAX_PILLOW_PIXELS, "the limit of Pillow, which reads images")


def check_images(images: tuple[bytes, ...], limit: PixelLimit) -> int:
    """Return the number of pixels of all images. Only the heads of their files are read.

    Raises InvalidParameter for a file that is no image, for an image with more pixels than the
    limit, and for too many pixels together.
    """
    num_pixels = 0
    max_together = MAX_LARGE_IMAGES * limit.max_pixels
    rule_for_image = f"of at most {limit.max_pixels} pixels ({limit.source})"
    rule_for_all = (
        f"of at most {max_together} pixels, together with those before it: {MAX_LARGE_IMAGES} "
        f"times as many as one image ({limit.source})"
    )
    for number, file in enumerate(images):
        try:
            with Image.open(BytesIO(file), formats=FORMATS) as image:
                width, height = image.size
        except Image.DecompressionBombError as error:
            raise InvalidParameter(f"images[{number}]", rule_for_image, str(error)) from None
        except Exception as error:
            # What a parser of files raises is not known.
            raise _unreadable(number, error) from error

        num_pixels += width * height
        if width * height > limit.max_pixels:
            raise InvalidParameter(f"images[{number}]", rule_for_image, f"{width}x{height}")

        if num_pixels > max_together:
            raise InvalidParameter(f"images[{number}]", rule_for_all, f"{width}x{height}")

    return num_pixels


def _unreadable(number: int, error: Exception) -> InvalidParameter:
    rule = f"a file of one of {', '.join(FORMATS)} that can be read"
    return InvalidParameter(f"images[{number}]", rule, cause_line(error).partition(" <_io.")[0])
