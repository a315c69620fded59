"""Beam search, for each way in which a request asks for it.

`num_beams` and `beam_width` are the width, and the answer holds all beams unless `n` asks for fewer. `use_beam_search`
is vLLM's flag: the width is `best_of`, else `n`, and the answer holds `n` beams. Both are read into `beam_width`, the
name of the engines' contract. A search is not random, so nothing that chooses how to sample has an effect on it.
"""

from __future__ import annotations

from typing import Any

from lmi.apis.base.parameters import Given, Named, Parameter
from lmi.apis.base.readers import boolean, number
from lmi.errors import InvalidParameter, Unsupported

MAX_BEAMS = 256  # as of option.max_beam_width; an engine has a lower bound
ONE_BEAM_STREAMED = "the best beam is known only at its end, so it cannot be streamed"
IN_A_SEARCH = "in beam search"
OF_A_SEARCH: dict[str, Parameter] = {
    "length_penalty": Parameter(number(0), (1,)),
    "early_stopping": Parameter(boolean, (False,)),
}


def read_width(given: dict[str, Any], name: str, named: Named) -> None:
    """Read the width `name`. Raises InvalidParameter if `best_of` is another one, or if `n` is over it."""
    width = given.pop(name, 1)
    if width == 1:
        return
    if given.get("best_of", width) != width:
        raise InvalidParameter(named("best_of"), f"equal to {name} ({width}), or left out", given["best_of"])
    if given.get("n", 1) > width:
        raise InvalidParameter(named("n"), f"at most {name} ({width})", given["n"])
    given.pop("best_of", None)
    given["beam_width"] = width


def read_flag(given: dict[str, Any], *, is_streamed: bool = False) -> None:
    """Read `use_beam_search`, after `check_best_of`. With one beam decoding is greedy.

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


def without_search(given: Given, sampling: tuple[str, ...]) -> dict[str, str]:
    """Return what has no effect beside or without a search, with the reasons. `sampling` chooses how to sample."""
    if "beam_width" in given:
        return dict.fromkeys(sampling, IN_A_SEARCH)
    return dict.fromkeys(OF_A_SEARCH, "without beams")
