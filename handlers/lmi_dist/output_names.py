"""The names of what a model gives beside tokens, and which of them an engine keeps."""

import difflib
from collections.abc import Iterable

from handlers.base.captured import LOGITS
from handlers.base.configuration import CONTEXT
from lmi.errors import BadConfiguration, shorten
from lmi.settings.config import EngineConfig

# The states after the last norm.
HIDDEN_STATES = "hidden_states"


def layer_name(layer: int) -> str:
    """The name of what a layer gives to the next one."""
    return f"{HIDDEN_STATES}.{layer}"


def hidden_names(num_layers: int) -> tuple[str, ...]:
    """The outputs that every model has beside the logits."""
    return (HIDDEN_STATES, *map(layer_name, range(num_layers)))


def declared_names(config: EngineConfig, outputs: Iterable[str]) -> list[str]:
    """The declared outputs that a runner keeps, which are all but the logits.

    Raises BadConfiguration with one line for each that is none of the model's `outputs`, which
    names the nearest one.
    """
    names: list[str] = []
    faults: list[str] = []
    possible_names = [LOGITS, *outputs]
    for text in config.additional_outputs:
        name = text.removesuffix(CONTEXT)
        if name not in possible_names:
            nearest = difflib.get_close_matches(name, possible_names, n=1, cutoff=0.0)[0]
            faults.append(
                f"additional_outputs: the model has no output {shorten(name)}; "
                f"the nearest is {nearest}"
            )
        elif name != LOGITS:
            names.append(name)

    if faults:
        raise BadConfiguration("\n".join(faults))

    return names
