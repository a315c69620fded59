"""Beam search, for each way in which a request asks for it.

`num_beams` and `beam_width` are the width, and the answer holds all beams unless `n` asks for fewer. `use_beam_search`
is vLLM's flag: the width is `best_of`, else `n`, and the answer holds `n` beams. Both are read into `beam_width`, the
name of the engines' contract. A search is not random, so nothing that chooses how to sample has an effect on it.
"""

from __future__ import annotations

from typing import Any

from lmi.apis.base.parameters import SAMPLING, Given, ParameterTable
from lmi.errors import InvalidParameter, Unsupported

ONE_BEAM_STREAMED = "the best beam is known only at its end, so it cannot be streamed"
OF_A_SEARCH = ("length_penalty", "early_stopping")


def read_search(given: dict[str, Any], table: ParameterTable, *, is_streamed: bool) -> None:
    """Read what asks for a search, after `best_of` is known to be at least `n`. Without one `given` has no width.

    Raises InvalidParameter for numbers that do not fit the width, Unsupported for beams in a stream.
    """
    if "use_beam_search" in given:
        _read_flag(given, table, is_streamed)
    elif "beam_width" in given:
        _check_width(given, table)


def _check_width(given: dict[str, Any], table: ParameterTable) -> None:
    width, name = given["beam_width"], table.wire("beam_width")
    best_of = given.pop("best_of", width)
    if best_of != width:
        raise InvalidParameter(table.named("best_of"), f"equal to {name} ({width}), or left out", best_of)
    if given.get("n", 1) > width:
        raise InvalidParameter(table.named("n"), f"at most {name} ({width})", given["n"])


def _read_flag(given: dict[str, Any], table: ParameterTable, is_streamed: bool) -> None:
    name = table.named("use_beam_search")
    if "beam_width" in given:
        raise InvalidParameter(name, f"left out beside {table.wire('beam_width')}", given["use_beam_search"])
    num_returned = given.get("n", 1)
    width = given.pop("best_of", num_returned)
    if width == 1:
        given["temperature"] = 0.0  # with one beam decoding is greedy
        return
    if is_streamed:
        raise Unsupported(name, ONE_BEAM_STREAMED)
    if given.get("temperature") == 0:
        del given["temperature"]  # vLLM's clients send it beside the flag
    given |= {"beam_width": width, "n": num_returned}


def without_effect(given: Given, *, is_greedy: bool) -> dict[str, str]:
    """Return what this way of decoding cannot use, with the reasons."""
    if "beam_width" in given:
        return dict.fromkeys(("do_sample", *SAMPLING), "in beam search")
    without_beams = dict.fromkeys(OF_A_SEARCH, "without beams")
    return without_beams | (dict.fromkeys(SAMPLING, "in greedy decoding") if is_greedy else {})
