"""How large the images of a request may be, as the heads of their files say."""

from io import BytesIO
from typing import NamedTuple

from PIL import Image
from vllm import envs

from lmi.errors import InvalidParameter, cause_line

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
VARIABLE = "VLLM_MAX_IMAGE_PIXELS"
# Pillow opens no image of more.
MAX_PILLOW_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 0)
# The most pixels of an image, unless vLLM's variable says otherwise. Models look at 13 million
# pixels at most, mostly at one to four million; a photo of a telephone has twelve.
MAX_IMAGE_PIXELS = 1 << 24
# The images of a request together have at most the pixels of so many of the largest ones.
MAX_LARGE_IMAGES = 3


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

    max_pixels = envs.VLLM_MAX_IMAGE_PIXELS
    if 0 < max_pixels <= MAX_PILLOW_PIXELS:
        return PixelLimit(max_pixels, f"the server's {VARIABLE}")

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
        name = f"images[{number}]"
        try:
            with Image.open(BytesIO(file), formats=FORMATS) as image:
                width, height = image.size
        except Image.DecompressionBombError as error:
            raise InvalidParameter(name, rule_for_image, str(error)) from None
        except Exception as error:
            # What a parser of files raises is not known.
            raise unreadable(number, error) from error

        if width * height > limit.max_pixels:
            raise InvalidParameter(name, rule_for_image, f"{width}x{height}")

        num_pixels += width * height
        if num_pixels > max_together:
            raise InvalidParameter(name, rule_for_all, f"{width}x{height}")

    return num_pixels


def unreadable(number: int, error: Exception) -> InvalidParameter:
    """Return the error of a request whose image with this number cannot be read."""
    rule = f"a file of one of {', '.join(FORMATS)} that can be read"
    return InvalidParameter(f"images[{number}]", rule, cause_line(error).partition(" <_io.")[0])
