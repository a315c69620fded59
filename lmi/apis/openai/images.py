"""Images in the content of messages, as the chats of OpenAI, its Responses and Anthropic write them.

Chats have an `image_url` with a `url`, Responses an `input_image` whose `image_url` is a text, Anthropic an `image`
with a `source`. Only what a request holds is read: a data URL, or Anthropic's base64.
"""

from __future__ import annotations

import binascii
from typing import Any

from lmi.apis.base.guides import an_object
from lmi.apis.base.readers import text
from lmi.errors import InvalidParameter, Unsupported, shorten
from lmi.types import Image

IMAGE_PARTS = ("image_url", "input_image", "image")
MEDIA_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF")  # of files of these types
FETCHES_NOTHING = "this server fetches no image: send the file itself in base64 (data:image/png;base64,…)"
MAX_SHOWN = 100  # characters of a URL, in errors


def read_image(place: str, part: dict[str, Any]) -> Image:
    """Return the image of a part, whose type is one of IMAGE_PARTS. Raises InvalidParameter or Unsupported."""
    if part["type"] == "image":
        return _of_source(place, an_object(f"{place}.source", part.get("source")))
    if part.get("file_id") is not None:
        raise Unsupported(f"{place}.file_id", "no files are stored here")
    name, url = f"{place}.image_url", part.get("image_url")
    if isinstance(url, dict):
        name, url = f"{name}.url", url.get("url")
    if not isinstance(url, str):
        raise InvalidParameter(name, "a data URL", url)
    head, _, data = url.partition(",")
    media_type, _, encoding = head.removeprefix("data:").partition(";")
    if not head.startswith("data:"):
        raise Unsupported(name, f"{FETCHES_NOTHING}, given {shorten(url[:MAX_SHOWN])}")
    if encoding != "base64" or media_type not in MEDIA_TYPES:
        rule = f"a data URL of one of {', '.join(MEDIA_TYPES)} in base64"
        raise InvalidParameter(name, rule, head[:MAX_SHOWN])
    return Image(_bytes(name, data), place, part["type"])


def _of_source(place: str, source: dict[str, Any]) -> Image:
    name = f"{place}.source"
    if source.get("type") != "base64":
        raise Unsupported(f"{name}.type", f"{FETCHES_NOTHING}, given {shorten(source.get('type'))}")
    if source.get("media_type") not in MEDIA_TYPES:
        raise InvalidParameter(f"{name}.media_type", f"one of {', '.join(MEDIA_TYPES)}", source.get("media_type"))
    return Image(_bytes(f"{name}.data", text(f"{name}.data", source.get("data"))), place, "image")


def _bytes(name: str, data: str) -> bytes:
    try:
        found = binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:  # also for what is not ASCII
        raise InvalidParameter(name, f"base64 ({error})", data[-MAX_SHOWN:]) from None
    if not found.startswith(BEGINNINGS):
        raise InvalidParameter(name, f"a file of one of {', '.join(MEDIA_TYPES)}", found[:8].hex(" "))
    return found
