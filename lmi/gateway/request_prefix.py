"""The beginning of a request, by which prefix-aware endpoints choose the instance that answers."""

import hashlib
from dataclasses import dataclass

import msgspec

DIGEST_BYTES = 16


class _ContentPart(msgspec.Struct):
    # An image has none.
    text: str = ""


class _ChatMessage(msgspec.Struct):
    content: str | list[_ContentPart] | None = None


class _ChatBody(msgspec.Struct):
    messages: list[_ChatMessage]
    prompt_cache_key: str | None = None


@dataclass(frozen=True)
class RequestPrefix:
    """What of a request says which instance may have its prompt in its cache.

    `identifier` is the X-Amzn-SageMaker-Prefix-Aware-Id of the request, "" for none. A body of
    OpenAI's chat API has it as `prompt_cache_key`.
    """

    body: bytes
    identifier: str = ""
    is_chat: bool = False

    def digest(self, max_length: int) -> bytes:
        """Return the same bytes for requests that begin alike and have the same identifier.

        `max_length` counts bytes of the body, of a chat the characters of its messages' texts. A
        chat that cannot be read counts as bytes. Source: AWS's PrefixAwareRoutingConfig.
        """
        beginning = self.body[:max_length]
        identifier = self.identifier
        if self.is_chat:
            chat = _read_chat(self.body)
            if chat is not None:
                beginning = _text_of(chat.messages, max_length).encode()
                identifier = chat.prompt_cache_key or ""

        # No text of a request moves the bound between the two.
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        digest.update(len(beginning).to_bytes(8))
        digest.update(beginning)
        digest.update(identifier.encode())
        return digest.digest()


def _read_chat(body: bytes) -> _ChatBody | None:
    """Return what a chat's body says, or None where the container will refuse it."""
    try:
        return msgspec.json.decode(body, type=_ChatBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _text_of(messages: list[_ChatMessage], max_chars: int) -> str:
    """Return the first characters of what messages say."""
    texts = []
    num_chars = 0
    for message in messages:
        for text in _texts(message):
            texts.append(text)
            num_chars += len(text)

        if num_chars >= max_chars:
            break

    return "".join(texts)[:max_chars]


def _texts(message: _ChatMessage) -> list[str]:
    if isinstance(message.content, str):
        return [message.content]

    return [part.text for part in message.content or []]
