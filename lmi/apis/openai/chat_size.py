"""Measures the texts and images of a chat before it is decoded. All else must be small."""

from functools import partial

import msgspec

from lmi.apis.base.readers import check_size


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
    texts = [
        outline.system,
        outline.instructions,
        outline.input,
    ]
    for message in outline.messages:
        texts.append(message.content)

    return sum(_num_bytes_of_content(bytes(text)) for text in texts)


def _num_bytes_of_content(content: bytes, max_levels: int = 3) -> int:
    """Return the length of a text, or of the texts and images in a list of parts."""
    if content[:1] == b'"':
        return len(content)

    if content[:1] not in (b"[", b"{") or not max_levels:
        return 0

    if content[:1] == b"{":
        content = b"[%b]" % content

    num_bytes = 0
    for part in msgspec.json.decode(content, type=list[_Part]):
        for inner in msgspec.structs.astuple(part):
            num_bytes += _num_bytes_of_content(bytes(inner), max_levels - 1)

    return num_bytes


check_chat_size = partial(
    check_size, num_text_bytes=_num_bytes_of_texts, kind="a chat", texts="the texts"
)
