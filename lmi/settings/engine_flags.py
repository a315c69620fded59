"""The variables of AWS's vLLM image, where SM_VLLM_<FLAG> is a flag of vLLM's server.

A flag means the option of the same name, as on the command line. So flags that only the engine
knows reach it too. Source: AWS's vLLM containers.
"""

import json
import re
from collections.abc import Iterator, Mapping

from lmi.settings.flag_variables import Flag, flag_variables, report_flags
from lmi.settings.given import PLATFORM, Given
from lmi.settings.steps import Resolution
from lmi.settings.table import find

PREFIX = "SM_VLLM_"
# Among the variables of AWS's images these come behind those that name a model.
ORDER = 20
# The flags that do not mean the option of their name.
FLAGS = {
    flag.name: flag
    for flag in (
        Flag("data_parallel_size", "minWorkers"),
        Flag("uvicorn_log_level", "log_level", words={"trace": "debug"}),
        Flag("config", instead="lmi serve --config FILE reads a file of flags"),
        Flag("hf_token", instead="HF_TOKEN is the hub's token"),
    )
}
# Flags of which an array in JSON is one value. For every other flag it is a list of words.
OF_ONE_WORD = frozenset(("allowed_origins", "allowed_methods", "allowed_headers", "middleware"))
SEPARATORS = re.compile(r"[\s,\[]")
BLANKS = re.compile(r"\s*")


def givens(environ: Mapping[str, str]) -> Iterator[Given]:
    """Yield the values that the image's variables give to options."""
    for variable in flag_variables(environ, PREFIX):
        flag = FLAGS.get(variable.flag, Flag(variable.flag, _key_of(variable.flag)))
        if variable.is_left_out or not flag.key:
            continue

        text = flag.text(variable.text)
        if variable.flag not in OF_ONE_WORD:
            words = words_of(text)
            if words is not None:
                text = _text_of_words(flag.key, words)

        if text:
            yield Given.of(flag.key, text, variable.name, PLATFORM, ORDER)


def _key_of(flag: str) -> str:
    """Return the key of the option that has the flag's name."""
    key = f"option.{flag}"
    if find(key) is None and find(flag) is not None:
        return flag

    return key


def words_of(text: str) -> list[str] | None:
    """Return the words of a text: the items of an array in JSON, or several objects with blanks
    between. None: it is one word.
    """
    if text.startswith("[") and text.endswith("]"):
        try:
            elements = json.loads(text)
        except (ValueError, RecursionError):
            return None

        return [_word(element) for element in elements]

    objects = _objects(text)
    if len(objects) > 1:
        return [_word(value) for value in objects]

    return None


def _word(element: object) -> str:
    """Return an element of an array as a word of a command line."""
    if element is None:
        return ""

    if isinstance(element, str):
        return element

    return json.dumps(element, separators=(",", ":"))


def _objects(text: str) -> list[object]:
    """Return the objects in JSON of a text that has nothing else, or [] for any other text."""
    decoder = json.JSONDecoder()
    objects: list[object] = []
    position = 0
    while position < len(text):
        if text[position] != "{":
            return []

        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return []

        objects.append(value)
        blanks = BLANKS.match(text, end)
        position = blanks.end() if blanks else end

    return objects


def _text_of_words(key: str, words: list[str]) -> str:
    """Return words as the text of an option. One of the table has commas between them. One of an
    engine is an array, unless it has one word that needs none.
    """
    if find(key) is not None:
        return ",".join(words)

    if len(words) == 1 and (words[0].startswith("{") or not SEPARATORS.search(words[0])):
        return words[0]

    return json.dumps(words) if words else ""


def report(resolution: Resolution) -> None:
    """Say of each variable that gives no option what to write instead."""
    values = resolution.values
    variables = flag_variables(resolution.start.environ, PREFIX)
    for variable in report_flags(values, variables, FLAGS):
        if variable.flag not in OF_ONE_WORD and words_of(variable.text) == []:
            values.warn(f"{variable.name}: an empty list leaves the flag out")
