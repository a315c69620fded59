"""The parameters that an engine with its own defaults samples with, filled in for a request of the LMI APIs.

Such an engine has no do_sample. It decodes greedily if the temperature is 0, if top_k is 1, or if top_k and top_p are
both 0; if one of the two is 0, it is no limit. `do_sample` only chooses which defaults hold. Source: LMI's page, under
the additional parameters of TensorRT-LLM. The reference's code has another temperature there; the page counts.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lmi.apis.base.parameters import Given
from lmi.settings.config import SamplingDefaults

NO_LIMIT: dict[str, tuple[int, ...]] = {"temperature": (1,), "top_k": (-1, 0), "top_p": (0, 1)}


def fill_in(given: dict[str, Any], written: Given, defaults: SamplingDefaults) -> None:
    """Set do_sample in `given` if the request samples, and then every value that has an effect.

    `written` holds the checked parameters as the client wrote them, with those that mean the same as leaving them out
    on other engines.
    """
    left_out = asdict(defaults.with_do_sample if "do_sample" in given else defaults.without)
    values = left_out | {name: given.get(name, written[name]) for name in left_out if written.get(name) is not None}
    given.pop("do_sample", None)
    if _is_greedy(**values):
        return
    given["do_sample"] = True
    for name, value in values.items():
        given.pop(name, None)
        if value not in NO_LIMIT[name]:
            given[name] = value


def _is_greedy(temperature: float, top_k: int, top_p: float) -> bool:
    return temperature == 0 or top_k == 1 or (top_k < 1 and top_p == 0)
