"""Variables of AWS's images that each are a flag of the server in the image: SM_<SERVER>_<FLAG>.

The text `true` is a flag without a value, and `false` leaves the flag out. Source: the start
scripts of AWS's containers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lmi.settings.table import OPTIONS
from lmi.settings.values import Values

# Names that are rows of the table themselves.
OF_ROWS = frozenset(name for option in OPTIONS for name in option.platform)
FLAG_ALONE = "true"
LEFT_OUT = "false"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of another server: the option that means it, or else what to write instead, or why
    nothing is needed.

    `words` has the option's texts, by those of the flag; "" gives nothing.
    """

    name: str
    key: str = ""
    instead: str = ""
    needless: str = ""
    words: Mapping[str, str] = field(default_factory=dict)

    def text(self, of_flag: str) -> str:
        """Return the option's text for a text of the flag."""
        return self.words.get(of_flag, of_flag)


@dataclass(frozen=True, slots=True)
class FlagVariable:
    """A variable that is set: its name, the flag in lower case, and the flag's text."""

    name: str
    flag: str
    text: str

    @property
    def is_left_out(self) -> bool:
        return self.text == LEFT_OUT


def flag_variables(environ: Mapping[str, str], prefix: str) -> list[FlagVariable]:
    """Return the variables of a prefix, sorted by name, without those that are rows of the
    table.
    """
    variables: list[FlagVariable] = []
    for name in sorted(environ):
        flag = name.removeprefix(prefix).lower()
        if not name.startswith(prefix) or not flag or name in OF_ROWS:
            continue

        text = environ[name].strip()
        if text.lower() in (FLAG_ALONE, LEFT_OUT):
            text = text.lower()

        variables.append(FlagVariable(name, flag, text or FLAG_ALONE))

    return variables


def report_flags(
    values: Values, variables: list[FlagVariable], flags: Mapping[str, Flag]
) -> Iterator[FlagVariable]:
    """Warn of each flag in whose place something else is to be written, and note those that are
    needless or false. Yields the others.
    """
    left_out: list[str] = []
    for variable in variables:
        row = flags.get(variable.flag)
        if variable.is_left_out:
            left_out.append(variable.name)
        elif row is not None and row.instead and row.text(variable.text):
            values.warn(f"{variable.name}: is not read, {row.instead}")
        elif row is not None and row.needless:
            values.note(f"{variable.name}: has no effect here, {row.needless}")
        else:
            yield variable

    if left_out:
        values.note(f"{', '.join(left_out)}: false leaves the flag out, so its default counts")
