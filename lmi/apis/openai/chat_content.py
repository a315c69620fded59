"""Reads the content of a message: a text, or parts that are texts and images."""

from collections.abc import Sequence
from typing import Any

from lmi.apis.base.readers import an_object, text
from lmi.apis.openai.chat_images import IMAGE_PARTS, read_image
from lmi.errors import InvalidParameter, Unsupported, shorten
from lmi.types import Image

# The types of parts that are texts. The last four are those of Responses.
TEXT_PARTS = (
    "text",
    "refusal",
    "input_text",
    "output_text",
    "reasoning_text",
    "summary_text",
)


def content(
    name: str, value: object, *, is_needed: bool = True, has_images: bool = True
) -> str | list[str | Image]:
    """Read the content of a message: a text, or a list of parts. With `has_images` these may be
    images. Raises InvalidParameter or Unsupported.
    """
    if isinstance(value, str):
        return value

    if value is None and not is_needed:
        return ""

    if not isinstance(value, list):
        raise InvalidParameter(name, "a string or a list of text parts", value)

    parts: list[str | Image] = []
    for n, part_value in enumerate(value):
        place = f"{name}[{n}]"
        part = an_object(place, part_value)
        if has_images and part.get("type") in IMAGE_PARTS:
            parts.append(read_image(place, part))
        else:
            parts.append(_text_part(place, part))

    return joined(parts)


def joined(parts: Sequence[str | Image]) -> str | list[str | Image]:
    """Return the content of a message: one text, in which newlines join the parts, or the parts if
    images are among them.
    """
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        return list(parts)

    return "\n".join(texts)


def _text_part(name: str, part: dict[str, Any]) -> str:
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise Unsupported(name, f"messages are text alone, given a part of type {shorten(kind)}")

    field = "refusal" if kind == "refusal" else "text"
    return str(text(f"{name}.{field}", part.get(field)))
