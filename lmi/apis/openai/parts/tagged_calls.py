"""A reader of tool calls whose name and arguments stand between tags, and the tags of the families
of models that write them: Qwen, GLM and MiniMax.

A reader of calls is a generator over the buffer of an answer (`buffer.py`): it yields what it has
read, and None while it needs more text.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from lmi.apis.openai.parts.argument_types import argument_json
from lmi.apis.openai.parts.buffer import AnswerBuffer, Arguments, CallReading
from lmi.apis.openai.parts.json_calls import read_head


class Tags(NamedTuple):
    """The tags between which a family of models writes its calls."""

    # A pattern of all up to `stop`. Its group is the function's name.
    head: str
    # It ends the head (`>`), or begins what follows.
    stop: str
    # What an argument begins with.
    opening: str
    # A pattern of a whole argument. Its groups are name and value.
    argument: str
    # What an argument ends with.
    closing: str
    # What the call ends with.
    end: str


def tagged_call(buffer: AnswerBuffer, tags: Tags) -> CallReading:
    """Read a name and arguments between tags, each passed on when it is whole.

    The type of an argument is that of the function's schema; without one it is a text.
    """
    call = yield from read_head(buffer, tags.head, tags.stop)
    if isinstance(call, str):
        return call

    yield call

    root = _schema_of_arguments(buffer.tools.get(call.name, {}))
    schemas = root.get("properties")
    if not isinstance(schemas, dict):
        schemas = {}

    buffer.text = buffer.text.removeprefix(">")
    has_arguments = False
    while True:
        text = buffer.text.lstrip()
        argument = _argument(text, tags)
        if argument is not None:
            name = argument[1].strip()
            value = argument_json(argument[2], schemas.get(name), root)
            buffer.text = text[argument.end() :]
            separator = ", " if has_arguments else "{"
            yield Arguments(f"{separator}{json.dumps(name, ensure_ascii=False)}: {value}")
            has_arguments = True
        elif _is_end(buffer, text, tags):
            buffer.text = text.removeprefix(tags.end)
            yield Arguments("}" if has_arguments else "{}")
            return None
        elif buffer.is_over:
            # The answer was cut within an argument.
            buffer.take()
            return None
        else:
            yield None


def _schema_of_arguments(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of all arguments of a tool."""
    return tool.get("function", {}).get("parameters") or {}


def _argument(text: str, tags: Tags) -> re.Match[str] | None:
    """Return the whole argument that the text begins with, or None."""
    if not text.startswith(tags.opening) or tags.closing not in text:
        return None

    return re.match(tags.argument, text, re.DOTALL)


def _is_end(buffer: AnswerBuffer, text: str, tags: Tags) -> bool:
    """Return whether no argument follows. The model may have left the end of the call out, before a
    text or as the last of its answer.
    """
    is_last = buffer.is_over and not buffer.is_cut and not text
    return is_last or _is_after_arguments(text, tags)


def _is_after_arguments(text: str, tags: Tags) -> bool:
    """Return whether a text is surely no argument and no beginning of one or of the end."""
    if text.startswith(tags.opening) or tags.opening.startswith(text):
        return False

    return text == tags.end or not tags.end.startswith(text)


QWEN = Tags(
    head=r"\s*([^<>\s]+)\s*",
    stop=">",
    opening="<parameter=",
    argument=r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>",
    closing="</parameter>",
    end="</function>",
)
GLM = Tags(
    head=r"\s*([\w.:-]+)\s*",
    stop="<",
    opening="<arg_key>",
    argument=r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    closing="</arg_value>",
    end="</tool_call>",
)
MINIMAX = Tags(
    head=r"\s*\"([^\"]+)\"\s*",
    stop=">",
    opening="<parameter name=",
    argument=r"<parameter name=\"([^\"]*)\">(.*?)</parameter>",
    closing="</parameter>",
    end="</invoke>",
)
read_qwen_call = partial(tagged_call, tags=QWEN)
read_glm_call = partial(tagged_call, tags=GLM)
read_minimax_call = partial(tagged_call, tags=MINIMAX)
