"""vLLM's flag for a beam search: the width is `best_of`, else `n`, and the answer holds
`n` beams.
"""

from typing import Any

from lmi.apis.base.parameters import Parameter, ParameterTable
from lmi.apis.base.readers import boolean
from lmi.errors import InvalidParameter, Unsupported

ONE_BEAM_STREAMED = "the best beam is known only at its end, so it cannot be streamed"
USE_BEAM_SEARCH = Parameter(
    "use_beam_search", boolean, "Whether to search with beams.", (False,), ("beam_width",)
)


def read_search(table: ParameterTable, values: dict[str, Any], *, is_streamed: bool) -> None:
    """Read the flag, or what else asks for a search, into `beam_width`, after `best_of` is known to
    be at least `n`.

    Raises InvalidParameter for numbers that do not fit the width, Unsupported for beams in a
    stream.
    """
    if "use_beam_search" not in values:
        table.read_search(values)
        return

    name = table.named("use_beam_search")
    if "beam_width" in values:
        rule = f"left out beside {table.wire('beam_width')}"
        raise InvalidParameter(name, rule, values["use_beam_search"])

    num_returned = values.get("n", 1)
    width = values.pop("best_of", num_returned)
    if width == 1:
        # With one beam decoding is greedy.
        values["temperature"] = 0.0
        return

    if is_streamed:
        raise Unsupported(name, ONE_BEAM_STREAMED)

    if values.get("temperature") == 0:
        # vLLM's clients send a temperature of 0 beside the flag.
        del values["temperature"]

    values |= {"beam_width": width, "n": num_returned}
