"""The value of each option: the one that was given, the one that was chosen, or its default."""

from collections.abc import Iterable
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from lmi.errors import BadConfiguration, ModelUnusable
from lmi.settings.given import Given
from lmi.settings.option import Choice
from lmi.settings.start import StartInputs
from lmi.settings.table import OPTIONS, find


class Picked(Struct, frozen=True):
    """The value that counts for one key, and how it was given."""

    value: Any
    given: Given
    # What was given for the same key and does not count.
    shadowed: tuple[Given, ...] = ()


class Values(Struct):
    """What was given and chosen for each option, and what the operator should know about it.

    The key of an option is that of its row in the table, or as it was written if it has no row.
    """

    start: StartInputs

    picked: dict[str, Picked] = field(default_factory=dict)
    # What was chosen where nothing was given, or in place of that.
    chosen: dict[str, Choice] = field(default_factory=dict)

    # Each of these lines stops the start.
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    # Those of the warnings that are about unknown keys.
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Lines for who looks for the cause of something.
    details: list[str] = field(default_factory=list)
    # The fault of the model, which is reported after every fault of an option.
    unusable: ModelUnusable | None = None

    def pick(self, givens: Iterable[Given]) -> None:
        """Pick the value that counts for each key that was given. A bad value is a fault and is
        left out.
        """
        by_key: dict[str, list[Given]] = {}
        for candidate in sorted(givens, key=lambda candidate: candidate.rank):
            by_key.setdefault(candidate.key, []).append(candidate)

        for key, candidates in by_key.items():
            self._pick(key, candidates)

    def _pick(self, key: str, candidates: list[Given]) -> None:
        """Pick the first of the candidates, which are sorted by rank. All of its rank must have the
        same value.
        """
        winner = candidates[0]
        equals = [candidate for candidate in candidates if candidate.rank == winner.rank]
        values = []
        for candidate in equals:
            try:
                values.append(candidate.value())
            except ValueError as error:
                self.faults.append(str(error))

        if len(values) < len(equals):
            return

        if all(value == values[0] for value in values):
            self.picked[key] = Picked(values[0], winner, tuple(candidates[1:]))
        else:
            texts = ", ".join(candidate.assignment for candidate in equals)
            self.faults.append(f"{texts}: these mean the same option, allowed is one value")

    def read_as(self, key: str, target: str) -> None:
        """Read what was given for `key` as if it were given for `target`, beside what was given
        for that.
        """
        candidates: list[Given] = []
        for picked_key in (key, target):
            picked = self.picked.pop(picked_key, None)
            if picked is not None:
                candidates += [picked.given, *picked.shadowed]

        self.pick([replace(candidate, key=target) for candidate in candidates])

    def drop(self, key: str) -> None:
        """Forget what was given for an option."""
        del self.picked[key]

    def __contains__(self, key: str) -> bool:
        """Return whether an option was given."""
        return key in self.picked

    def given(self, key: str, otherwise: Any = None) -> Any:
        """Return the value that was given for an option, or `otherwise`."""
        return self.picked[key].value if key in self.picked else otherwise

    def how_given(self, key: str) -> Given:
        """Return how the value was given that counts. Raises KeyError if the option was not
        given.
        """
        return self.picked[key].given

    def final(self, key: str) -> Any:
        """Return the value of an option: the chosen one, else the given one, else its default."""
        if key in self.chosen:
            return self.chosen[key].value

        option = find(key)
        default = None if option is None else option.default
        return self.given(key, default)

    def fields(self, part: str) -> dict[str, Any]:
        """Return the fields of `server`, `model` or `engine` whose values were given or chosen."""
        prefix = f"{part}."
        values: dict[str, Any] = {}
        for row in OPTIONS:
            is_settled = row.key in self.picked or row.key in self.chosen
            if is_settled and row.field.startswith(prefix):
                values[row.field.removeprefix(prefix)] = self.final(row.key)

        return values

    def choose(self, key: str, value: Any, reason: str) -> None:
        """Set an option that was not given."""
        if key not in self.picked:
            self.chosen[key] = Choice(value, reason)

    def settle(self, key: str, value: Any, reason: str) -> None:
        """Let another value count than the given one: what a word such as auto means on this
        machine, or what is left of a number or a path.
        """
        if self.given(key) != value:
            self.chosen[key] = Choice(value, reason)

    def explain(self, key: str, reason: str) -> None:
        """Say what becomes of a given value, which stays as it is."""
        self.chosen[key] = Choice(self.given(key), reason)

    def refuse(self, key: str, allowed: str) -> None:
        """Add a fault: the option's value is not what is `allowed`."""
        if key in self.picked:
            self.fail(self.how_given(key).fault(allowed))
        else:
            self.fail(f"{key}={self.final(key)} (not given): allowed is {allowed}")

    def fail(self, line: str) -> None:
        """Add a fault, which ends the start when all are known."""
        self.faults.append(line)

    def warn(self, line: str) -> None:
        """Add a line about something that the operator may not want."""
        self.warnings.append(line)

    def note(self, line: str) -> None:
        """Add a line about something that the operator may want to know."""
        self.notes.append(line)

    def stop_at_faults(self) -> None:
        """Raise BadConfiguration with all faults. If there are none, raise what makes the model
        unusable, if anything does.
        """
        if self.faults:
            raise BadConfiguration("\n".join(self.faults + self.unknown))

        if self.unusable is not None:
            raise self.unusable
