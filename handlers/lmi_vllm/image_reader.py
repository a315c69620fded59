"""The reading of images beside the steps. A sequence waits for it before vLLM gets it."""

import hashlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from threading import Lock
from typing import Any

from vllm.inputs import TokensPrompt
from vllm.multimodal.media import ImageMediaIO

from handlers.base.client_turns import ClientTurns
from handlers.base.sequence import Sequence
from handlers.driven.preparation import Preparation
from handlers.lmi_vllm.image_limits import check_images, pixel_limit, unreadable
from lmi.errors import InvalidRequest, OutOfMemory, cause_line, is_out_of_memory
from lmi.executor import Request

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

    Clients take turns, and what they ask for costs by its pixels. So a request has two turns. In
    the first one a thread looks at the heads of its files, which say how many pixels they have
    (`begin`). The second one, at that price, decodes the files (`_await_second_turn`, `_read`).
    Several threads decode files. Only one at a time calls vLLM's processor, whose cache allows no
    more.
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
        num_pixels.add_done_callback(partial(self._await_second_turn, request, reading, start))

        check = partial(check_images, request.images, self._limit)
        self._turns.submit(request.client_id, check, num_pixels, HEADS_PRICE)
        return reading

    def _await_second_turn(
        self, request: Request, reading: Reading, start: float, num_pixels: Future[int]
    ) -> None:
        """Let a request, at whose heads a thread has looked, wait for its turn to be read.

        Its wait began at `start`, before the first turn. It fails here if its images have a fault.
        """
        if num_pixels.cancelled():
            # The reader is closed.
            reading.cancel()
            return

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
            raise unreadable(number, error) from error


def _raise_lack_of_memory(error: Exception) -> None:
    if is_out_of_memory(error):
        raise OutOfMemory(f"vLLM cannot read its images: {error}") from error
