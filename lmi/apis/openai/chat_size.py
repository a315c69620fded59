"""Checks the size of a chat before it is decoded: only its texts and images may be large."""

from functools import partial

import msgspec

from lmi.apis.base.body import check_size


class _Part(msgspec.Struct):
    """A part of a content, or a message, whose fields may be texts or images."""

    text: msgspec.Raw = msgspec.Raw()
    # The content of a tool's result, or of an item, in other APIs.
    content: msgspec.Raw = msgspec.Raw()
    output: msgspec.Raw = msgspec.Raw()
    image_url: msgspec.Raw = msgspec.Raw()
    source: msgspec.Raw = msgspec.Raw()
    # An image has a URL, or its data.
    url: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()


class _Outline(msgspec.Struct):
    """The part of a body that `check_chat_size` measures."""

    messages: list[_Part] = []
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


def _num_bytes_of_texts(body: bytes) -> int:
    """Return how many bytes of a body are texts and images of its messages."""
    outline = msgspec.json.decode(body, type=_Outline)
    contents = [
        outline.system,
        outline.instructions,
        outline.input,
    ]
    for message in outline.messages:
        contents.append(message.content)

    return sum(_num_bytes_of_content(bytes(content)) for content in contents)


def _num_bytes_of_content(content: bytes, max_levels: int = 3) -> int:
    """Return the length of a text, or of the texts and images in a part or a list of parts. The
    JSON of parts is read `max_levels` deep.
    """
    first_byte = content[:1]
    if first_byte == b'"':
        return len(content)

    if first_byte not in (b"[", b"{") or not max_levels:
        return 0

    parts = content
    if first_byte == b"{":
        parts = b"[%b]" % content

    num_bytes = 0
    for part in msgspec.json.decode(parts, type=list[_Part]):
        for part_field in msgspec.structs.astuple(part):
            num_bytes += _num_bytes_of_content(bytes(part_field), max_levels - 1)

    return num_bytes


check_chat_size = partial(
    check_size, num_text_bytes=_num_bytes_of_texts, kind="a chat", texts="the texts"
)
