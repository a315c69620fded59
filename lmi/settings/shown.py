"""The lines of `lmi config`: each option's value, and where it comes from."""

from typing import Any, Self

from msgspec import Struct

from lmi.settings.table import find
from lmi.settings.values import Values


class Setting(Struct, frozen=True):
    """One line of `lmi config`."""

    option: str
    value: str
    source: str
    # "value (source)" of each value that was given and does not count.
    shadowed: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Values, key: str) -> Self:
        """Return the line of an option."""
        value = text_in_file(key, values.final(key))
        winner = values.picked.get(key)
        reason = values.chosen[key].reason if key in values.chosen else ""
        if winner is None:
            return cls(key, value, reason or "default")

        if winner.given.shown == "***":
            value = "***"

        source = winner.given.source
        if reason:
            source = f"{source}, {reason}"

        shadowed = tuple(f"{rival.shown} ({rival.source})" for rival in winner.shadowed)
        return cls(key, value, source, shadowed)


def text_in_file(key: str, value: Any) -> str:
    """Return an option's value in the form that serving.properties has."""
    if value is None:
        option = find(key)
        return option.kind.unset if option else ""

    if value == {}:
        return ""

    if isinstance(value, bool):
        return str(value).lower()

    if isinstance(value, float):
        return f"{value:g}"

    if isinstance(value, tuple):
        return ";".join(map(str, value))

    return str(value)
