"""The values of options from which a Config is made: given, else chosen, else the default of the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lmi.settings.options import OPTIONS, default, find
from lmi.settings.sources import Given, Picked, Problems, fault, pick


@dataclass(frozen=True, slots=True)
class Values:
    """Values by key. The key is that of the row in the table of options, or as written if the option has no row."""

    picked: Mapping[str, Picked]
    chosen: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # value, why

    def __contains__(self, key: str) -> bool:
        """Return whether the option was given."""
        return key in self.picked

    def given(self, key: str, otherwise: Any = None) -> Any:
        return self.picked[key].value if key in self.picked else otherwise

    def how_given(self, key: str) -> Given:
        """Return the text that counts, and its source. Raises KeyError if the option was not given."""
        return self.picked[key].given

    def final(self, key: str) -> Any:
        if key in self.chosen:
            return self.chosen[key][0]
        return self.picked[key].value if key in self.picked else default(key)

    def choose(self, key: str, value: Any, reason: str) -> Values:
        """Set an option that was not given."""
        return self if key in self.picked else self._with(key, value, reason)

    def settle(self, key: str, value: Any, reason: str) -> Values:
        """Replace a given word, such as auto or max, by the value that it means on this machine."""
        return self if self.given(key) == value else self._with(key, value, reason)

    def rename(self, key: str, to: str, problems: Problems) -> Values:
        """Read what was given for `key` as if it had been given for `to`, an option of the table."""
        rivals = [self.picked[each] for each in (key, to) if each in self.picked]
        givens = [replace(given, key=to) for each in rivals for given in (each.given, *each.shadowed)]
        others = {each: picked for each, picked in self.picked.items() if each not in (key, to)}
        return replace(self, picked=others | pick(givens, problems))

    def annotate(self, key: str, reason: str) -> Values:
        """Add what became of an option that was given to its source."""
        return self._with(key, self.given(key), reason)

    def without_row(self) -> dict[str, str]:
        """Return the options that have no row in the table, by name without `option.`."""
        keys = [key for key in self.picked if key.startswith("option.") and find(key) is None]
        return {key.removeprefix("option."): self.given(key) for key in keys}

    def fields(self, part: str) -> dict[str, Any]:
        """Return the fields of `server`, `model` or `engine` whose values were given or chosen."""
        rows = [row for row in OPTIONS if row.field.startswith(f"{part}.")]
        known = [row for row in rows if row.key in self.picked or row.key in self.chosen]
        return {row.field.removeprefix(f"{part}."): self.final(row.key) for row in known}

    def refuse(self, key: str, allowed: str, problems: Problems) -> None:
        if key in self.picked:
            problems.faults.append(fault(self.how_given(key), allowed))
        else:
            problems.faults.append(f"{key}={self.final(key)} (not given): allowed is {allowed}")

    def _with(self, key: str, value: Any, reason: str) -> Values:
        return replace(self, chosen={**self.chosen, key: (value, reason)})
