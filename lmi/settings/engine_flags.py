"""The variables of AWS's vLLM image, where SM_VLLM_<FLAG> is a flag of vLLM's server.

A flag here is the option of the same name, as on the command line, so those that only the engine
knows reach it. Source: AWS's vLLM containers.
"""

import json
import re
from collections.abc import Iterator, Mapping

from lmi.settings.flag_variables import Flag, flag_variables, report_flags
from lmi.settings.given import PLATFORM, Given
from lmi.settings.steps import Resolution
from lmi.settings.table import find

PREFIX = "SM_VLLM_"
# Behind the names of a model, of all images.
ORDER = 20
FLAGS = {
    flag.name: flag
    for flag in (
        Flag("data_parallel_size", "minWorkers"),
        Flag("uvicorn_log_level", "log_level", words={"trace": "debug"}),
        Flag("config", instead="lmi serve --config FILE reads a file of flags"),
        Flag("hf_token", instead="HF_TOKEN is the hub's token"),
    )
}
# An array is the value of these, and of every other flag the words.
OF_ONE_WORD = frozenset(("allowed_origins", "allowed_methods", "allowed_headers", "middleware"))
SEPARATORS = re.compile(r"[\s,\[]")
BLANKS = re.compile(r"\s*")


def givens(environ: Mapping[str, str]) -> Iterator[Given]:
    """Yield the values that the image's variables give to options."""
    for variable in flag_variables(environ, PREFIX):
        row = FLAGS.get(variable.flag, Flag(variable.flag, _key_of(variable.flag)))
        if variable.is_left_out or not row.key:
            continue

        text = row.text(variable.text)
        words = None if variable.flag in OF_ONE_WORD else words_of(text)
        if words is not None:
            text = _text_of_words(row.key, words)

        if text:
            yield Given.of(row.key, text, variable.name, PLATFORM, ORDER)


def _key_of(flag: str) -> str:
    """Return the key of the option that has the flag's name."""
    key = f"option.{flag}"
    if find(key) is None and find(flag) is not None:
        return flag

    return key


def words_of(text: str) -> list[str] | None:
    """Return the words that an array in JSON means, or several objects with blanks between. None:
    the text is one word.
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
    """Return the objects in JSON that a text is a sequence of, () if it is none."""
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
    """Return words as the text of an option: with commas between for one of the table, an array for
    an engine's, unless it is one plain word.
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
