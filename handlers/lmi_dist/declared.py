"""The additional outputs that a configuration declares, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from handlers.base.captured import LOGITS
from handlers.base.configuration import CONTEXT
from lmi.errors import BadConfiguration, shorten
from lmi.settings.config import EngineConfig

HIDDEN_STATES = "hidden_states"  # after the last norm


def layer_name(layer: int) -> str:
    """The name of what a layer gives to the next one."""
    return f"{HIDDEN_STATES}.{layer}"


def hidden_names(num_layers: int) -> tuple[str, ...]:
    """The outputs that every model has beside the logits."""
    return (HIDDEN_STATES, *map(layer_name, range(num_layers)))


def declared_names(config: EngineConfig, known: Iterable[str]) -> list[str]:
    """The declared outputs that a runner keeps, which are all but the logits.

    Raises BadConfiguration with one line for each that is not `known`, which names the nearest one.
    """
    texts = (text.removesuffix(CONTEXT) for text in config.additional_outputs)
    names = [name for name in texts if name != LOGITS]
    known = [LOGITS, *known]
    faults = [
        f"additional_outputs: the model has no output {shorten(name)}; the nearest is "
        + difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        for name in names
        if name not in known
    ]
    if faults:
        raise BadConfiguration("\n".join(faults))
    return names
