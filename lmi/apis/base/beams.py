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


def read_width(given: dict[str, Any], table: ParameterTable) -> None:
    """Read `beam_width`. Raises InvalidParameter if `best_of` is another one, or if `n` is over it."""
    width, name = given.get("beam_width"), table.wire("beam_width")
    if width is None:
        return
    if given.get("best_of", width) != width:
        raise InvalidParameter(table.named("best_of"), f"equal to {name} ({width}), or left out", given["best_of"])
    if given.get("n", 1) > width:
        raise InvalidParameter(table.named("n"), f"at most {name} ({width})", given["n"])
    given.pop("best_of", None)


def read_flag(given: dict[str, Any], *, is_streamed: bool = False) -> None:
    """Read `use_beam_search`, after `best_of` is known to be at least `n`. With one beam decoding is greedy.

    Raises Unsupported for more of them in a stream.
    """
    if not given.pop("use_beam_search", False):
        return
    num_returned = given.get("n", 1)
    width = given.pop("best_of", num_returned)
    if width == 1:
        given["temperature"] = 0.0
        return
    if is_streamed:
        raise Unsupported("use_beam_search", ONE_BEAM_STREAMED)
    if given.get("temperature") == 0:
        del given["temperature"]  # vLLM's clients send it beside the flag
    given |= {"beam_width": width, "n": num_returned}


def without_effect(given: Given, *, is_greedy: bool) -> dict[str, str]:
    """Return what this way of decoding cannot use, with the reasons."""
    if "beam_width" in given:
        return dict.fromkeys(("do_sample", *SAMPLING), "in beam search")
    without_beams = dict.fromkeys(OF_A_SEARCH, "without beams")
    return without_beams | (dict.fromkeys(SAMPLING, "in greedy decoding") if is_greedy else {})
