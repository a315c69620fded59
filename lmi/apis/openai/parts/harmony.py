"""A reader of answers in Harmony, the form of gpt-oss."""

import re

from lmi.apis.openai.parts.buffer import (
    AnswerBuffer,
    Arguments,
    Reading,
    Text,
    Thought,
    ToolCall,
    cut,
)

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
# The address of a message to a function. Its group is the name.
FUNCTION = re.compile(r"to=functions\.([\w.-]+)")


def harmony(buffer: AnswerBuffer, *, has_tools: bool) -> Reading:
    """Read an answer in Harmony, the form of gpt-oss: messages on channels, each with a header.

        <|channel|>analysis<|message|>…<|end|>
        <|start|>assistant<|channel|>commentary to=functions.f
        <|constrain|>json<|message|>{…}<|call|>

    Analysis is thought, a message to a function is a call, the rest is text. So is what has no
    header at all. Calls stay text if the request has no tools (`has_tools`). Source:
    openai/harmony.
    """
    kind: type[Thought | Text | Arguments] = Text
    # The header that is read now. Inside of a message there is none.
    header: str | None = None
    while True:
        text, mark, behind = cut(buffer.text, START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
        buffer.take(len(text))
        if header is not None:
            header += text
        elif text:
            yield kind(text)

        buffer.text = behind
        if mark == MESSAGE:
            header = header or ""
            function = FUNCTION.search(header)
            if function is not None and has_tools:
                yield ToolCall(function[1])
                kind = Arguments
            else:
                channel = header.rpartition(CHANNEL)[2].strip()
                kind = Thought if channel.startswith("analysis") else Text

            header = None
        elif mark:
            # Another header begins, or more of one follows.
            header = header or ""
            header += CHANNEL if mark == CHANNEL else " "
        elif not buffer.is_over:
            yield None
        else:
            if header is None and buffer.text:
                yield kind(buffer.take())

            return
