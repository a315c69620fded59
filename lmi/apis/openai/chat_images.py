"""Reads the images in a chat: files in base64, which the request itself holds."""

import binascii
from typing import Any

from lmi.apis.base.readers import an_object, choice, text
from lmi.errors import InvalidParameter, Unsupported, shorten
from lmi.types import Image

# The types of parts that are images, at OpenAI's chats, at Responses and at Anthropic's.
IMAGE_PARTS = ("image_url", "input_image", "image")
MEDIA_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
# The beginnings of files of these types.
BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF")
FETCHES_NOTHING = (
    "this server fetches no image: send the file itself in base64 (data:image/png;base64,…)"
)
# An error shows so many characters of a URL.
MAX_SHOWN = 100
read_media_type = choice(MEDIA_TYPES)


def read_image(place: str, part: dict[str, Any]) -> Image:
    """Return the image of a part, whose type is one of IMAGE_PARTS. Raises InvalidParameter or
    Unsupported.
    """
    if part["type"] == "image":
        return Image(_source_bytes(f"{place}.source", part.get("source")), place, "image")

    if part.get("file_id") is not None:
        raise Unsupported(f"{place}.file_id", "no files are stored here")

    name = f"{place}.image_url"
    url = part.get("image_url")
    if isinstance(url, dict):
        name = f"{name}.url"
        url = url.get("url")

    return Image(_url_bytes(name, url), place, part["type"])


def _source_bytes(name: str, value: object) -> bytes:
    """Return the file in a `source`, which is how Anthropic's API has images."""
    source = an_object(name, value)
    if source.get("type") != "base64":
        reason = f"{FETCHES_NOTHING}, given {shorten(source.get('type'))}"
        raise Unsupported(f"{name}.type", reason)

    read_media_type(f"{name}.media_type", source.get("media_type"))
    return _image_bytes(f"{name}.data", text(f"{name}.data", source.get("data")))


def _url_bytes(name: str, url: object) -> bytes:
    """Return the file in a data URL."""
    if not isinstance(url, str):
        raise InvalidParameter(name, "a data URL", url)

    head, _, data = url.partition(",")
    if not head.startswith("data:"):
        raise Unsupported(name, f"{FETCHES_NOTHING}, given {shorten(url[:MAX_SHOWN])}")

    media_type, _, encoding = head.removeprefix("data:").partition(";")
    if encoding != "base64" or media_type not in MEDIA_TYPES:
        rule = f"a data URL of one of {', '.join(MEDIA_TYPES)} in base64"
        raise InvalidParameter(name, rule, head[:MAX_SHOWN])

    return _image_bytes(name, data)


def _image_bytes(name: str, data: str) -> bytes:
    """Return the file that a text holds in base64. Raises InvalidParameter for another type."""
    try:
        file = binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:
        # A text that is not ASCII raises ValueError too.
        raise InvalidParameter(name, f"base64 ({error})", data[-MAX_SHOWN:]) from None

    if not file.startswith(BEGINNINGS):
        rule = f"a file of one of {', '.join(MEDIA_TYPES)}"
        raise InvalidParameter(name, rule, file[:8].hex(" "))

    return file
