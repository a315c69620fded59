"""The defaults of sampling of an engine that has its own, as TensorRT-LLM has.

Source: LMI's page, under the additional parameters of TensorRT-LLM.
"""

from typing import Any

import msgspec.structs

from lmi.apis.base.parameters import ParameterValues
from lmi.settings.config import SamplingDefaults

# The values that leave all tokens to draw from, as they are.
NO_LIMIT: dict[str, tuple[int, ...]] = {
    "temperature": (1,),
    "top_k": (-1, 0),
    "top_p": (0, 1),
}


def fill_in(values: dict[str, Any], fields: ParameterValues, defaults: SamplingDefaults) -> None:
    """Set do_sample in `values` if the request samples, and then every value that has an effect.

    An engine with its own defaults has no do_sample, which only chooses among them. It decodes
    greedily if the temperature is 0, if top_k is 1, or if top_k and top_p are both 0; if one of the
    two is 0, it is no limit. With do_sample the temperature is 1.0 on LMI's page and 0.8 in the
    reference's code; the page counts.

    `values` holds the checked parameters that have an effect. `fields` holds all checked parameters
    as the client wrote them, with those that mean the same as leaving them out on other engines.
    """
    if "do_sample" in values:
        sampling = msgspec.structs.asdict(defaults.with_do_sample)
    else:
        sampling = msgspec.structs.asdict(defaults.without)

    for name in sampling:
        if fields.get(name) is not None:
            # `values` lacks it if it is the number by which other engines switch it off.
            sampling[name] = values.get(name, fields[name])

    values.pop("do_sample", None)
    temperature = sampling["temperature"]
    top_k = sampling["top_k"]
    top_p = sampling["top_p"]
    is_greedy = temperature == 0 or top_k == 1 or (top_k < 1 and top_p == 0)
    if is_greedy:
        return

    values["do_sample"] = True
    for name, value in sampling.items():
        values.pop(name, None)
        if value not in NO_LIMIT[name]:
            values[name] = value
