"""The thread that reads images for vLLM, with a processor that a test holds up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest

from handlers.base.sequence import Sequence, new_sequences
from handlers.lmi_vllm.process_setup import forget_variables, hide_foreign_builds
from lmi.errors import InvalidParameter, PromptTooLong
from lmi.executor import Request, SamplingConfig
from tests.machine import wait_until
from tests.tiny_vision import png

pytestmark = pytest.mark.vllm

RED = png((200, 30, 10))


class Processor:
    """In the place of vLLM's: it makes three tokens of one, when it may."""

    model_config = SimpleNamespace(multimodal_config=None)

    def __init__(self) -> None:
        self.prompts: list[Any] = []
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def process_for_engine(self, prompt: Any, arrival_s: float) -> dict[str, Any]:
        self.prompts.append(prompt)
        self.begun.set()
        assert self.may_end.wait(60)
        return {"prompt_token_ids": [1, 7, 7, 7]}


class Reading:
    def __init__(self) -> None:
        hide_foreign_builds()
        from handlers.lmi_vllm.image_reader import ImageReader

        self.processor = Processor()
        self.reader = ImageReader(self.processor, 32, lambda: None)

    def begin(self, sequence: Sequence) -> None:
        future = self.reader.begin(sequence)
        assert future is not None
        self.reader.add_waiting(sequence, future)

    def done(self) -> list[tuple[Sequence, Any]]:
        """The sequences that were read next, with their prompts or errors."""
        while not (done := self.reader.take_done()):
            self.reader.wait()

        return [
            (sequence, image_future.exception() or image_future.result())
            for sequence, image_future in done
        ]


@pytest.fixture
def reading() -> Iterator[Reading]:
    reading = Reading()
    yield reading
    reading.processor.may_end.set()
    reading.reader.close()


def sequences(number: int, *files: bytes, **fields: Any) -> list[Sequence]:
    request = Request((1, 7), 10, images=files or (RED,), **fields)
    return new_sequences(number, request, 32)


def test_the_sequences_of_a_request_share_one_reading_and_no_step_waits_for_it(
    reading: Reading,
) -> None:
    both = sequences(1, sampling_config=SamplingConfig(num_return_sequences=2, temperature=1.0))
    for sequence in both:
        reading.begin(sequence)

    assert (
        reading.processor.begun.wait(60)
        and reading.reader.take_done() == []
        and reading.reader.waiting
    )

    reading.processor.may_end.set()
    assert [sequence for sequence, _ in reading.done()] == both
    assert len(reading.processor.prompts) == 1 and not reading.reader.waiting


def test_what_nobody_waits_for_any_more_is_not_read(reading: Reading) -> None:
    [first], [gone], [last] = (sequences(number) for number in range(3))
    for sequence in (first, gone, last):
        reading.begin(sequence)

    dropped = reading.reader.drop_waiting(gone)
    assert dropped is not None and dropped.cancel()

    reading.processor.may_end.set()
    ended: list[Sequence] = []
    while len(ended) < 2:
        ended += [sequence for sequence, _ in reading.done()]

    assert ended == [first, last] and len(reading.processor.prompts) == 2


def test_a_small_image_of_another_client_is_decoded_beside_the_large_ones_of_one_client(
    reading: Reading,
) -> None:
    large = png((0, 0, 0), 800, 800)
    for number in range(3):
        reading.begin(sequences(number, large, client_id=1)[0])

    assert reading.processor.begun.wait(60)

    small = sequences(3, client_id=2)[0]
    reading.begin(small)
    reading.processor.may_end.set()
    order: list[int] = []
    while len(order) < 4:
        order += [sequence.id for sequence, _ in reading.done()]

    assert order.index(3) <= 1


def test_of_one_client_a_small_image_is_read_before_large_ones_that_wait(reading: Reading) -> None:
    large = png((0, 0, 0), 800, 800)
    for number in range(4):
        reading.begin(sequences(number, large)[0])

    assert reading.processor.begun.wait(60)

    reading.begin(sequences(4)[0])
    reading.processor.may_end.set()
    while len(reading.processor.prompts) < 5:
        reading.done()

    images = [prompt["multi_modal_data"]["image"][0].media for prompt in reading.processor.prompts]
    assert [image.size for image in images] == [(800, 800), (64, 40), *[(800, 800)] * 3]


def test_the_images_of_a_client_who_has_left_are_not_read_on() -> None:
    reading = Reading()
    [staying], [gone] = sequences(1), sequences(2, RED, RED, client_id=2)
    reading.begin(staying)
    assert reading.processor.begun.wait(60)

    # Its thread waits for the processor
    reading.begin(gone)
    future = reading.reader.drop_waiting(gone)
    assert future is not None

    wait_until(future.running, "its files are read")
    assert not future.cancel()

    reading.processor.may_end.set()
    with pytest.raises(CancelledError):
        future.result(60)

    assert len(reading.processor.prompts) == 1

    reading.reader.close()


def test_a_reader_that_is_closed_leaves_no_request_waiting() -> None:
    reading = Reading()
    begun, waiting = sequences(1, client_id=1)[0], sequences(2, client_id=2)[0]
    reading.begin(begun)
    assert reading.processor.begun.wait(60)

    reading.reader.close()
    reading.begin(waiting)
    [(sequence, future)] = reading.reader.take_done()
    assert sequence is waiting and future.cancelled()

    reading.processor.may_end.set()
    assert [sequence for sequence, _ in reading.done()] == [begun]


def test_images_of_different_salts_have_different_names_in_caches(reading: Reading) -> None:
    reading.processor.may_end.set()
    for number, salt in enumerate((None, "a", "b", "a")):
        [sequence] = sequences(number, cache_salt=salt)
        reading.begin(sequence)
        reading.done()

    names = [prompt["multi_modal_uuids"]["image"][0] for prompt in reading.processor.prompts]
    assert names[1] == names[3] and len(set(names)) == 3
    assert [prompt.get("cache_salt") for prompt in reading.processor.prompts] == [
        None,
        "a",
        "b",
        "a",
    ]


def test_only_the_head_of_a_file_is_read_before_its_size_is_known() -> None:
    hide_foreign_builds()
    from handlers.lmi_vllm import image_limits as images

    limit = images.PixelLimit(1 << 24, "the server's VARIABLE")
    large = png((0, 0, 0), 4000, 4000)
    assert images.check_images((RED, large), limit) == 64 * 40 + 4000 * 4000

    for files, words in (
        (
            (RED, png((0, 0, 0), 5000, 4000)),
            r"images\[1\] must be of at most 16777216 pixels \(the server's VARIABLE\)",
        ),
        (
            (large,) * 4,
            r"images\[3\] must be of at most 50331648 pixels, together with those before it",
        ),
        (
            (RED, b"\x89PNG\r\n\x1a\n and no more"),
            r"images\[1\] must be a file of one of PNG, JPEG, GIF, WEBP that can",
        ),
    ):
        with pytest.raises(InvalidParameter, match=words):
            images.check_images(files, limit)


@pytest.mark.parametrize(
    ("given", "max_pixels", "source"),
    [
        (None, 1 << 24, "the server's limit, unless VLLM_MAX_IMAGE_PIXELS is set"),
        ("1000", 1000, "the server's VLLM_MAX_IMAGE_PIXELS"),
        ("0", 178_956_970, "the limit of Pillow, which reads images"),
        ("1000000000", 178_956_970, "the limit of Pillow, which reads images"),
    ],
)
def test_a_limit_of_pixels_says_whose_it_is(
    monkeypatch: pytest.MonkeyPatch, given: str | None, max_pixels: int, source: str
) -> None:
    hide_foreign_builds()
    from handlers.lmi_vllm.image_limits import pixel_limit

    monkeypatch.delenv("VLLM_MAX_IMAGE_PIXELS", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", given)

    # An engine of another test may have had vLLM keep its variables
    forget_variables()

    assert pixel_limit() == (max_pixels, source)


def test_the_tokens_of_images_count_against_the_context() -> None:
    [sequence] = sequences(1)
    sequence.replace_prompt([1, *[7] * 28], 32)
    assert (sequence.num_prompt_tokens, sequence.num_generated, sequence.max_tokens) == (29, 0, 3)
    with pytest.raises(
        PromptTooLong, match="context of 32 tokens, given '32 tokens, with those of its images'"
    ):
        sequence.replace_prompt([7] * 32, 32)
