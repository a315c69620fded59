"""Variables of AWS's images that each are a flag of the server in the image: SM_<SERVER>_<FLAG>.

The text `true` is a flag without a value, and `false` leaves the flag out. Source: the start
scripts of AWS's containers.
"""

from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from lmi.settings.table import OPTIONS
from lmi.settings.values import Values

# Variables that the table of options has.
VARIABLES_OF_OPTIONS = frozenset(name for option in OPTIONS for name in option.platform)
FLAG_ALONE = "true"
LEFT_OUT = "false"


class Flag(Struct, frozen=True):
    """A flag of another server, and what becomes of it. It has a key, or says what to write
    instead, or why it is needless.
    """

    name: str
    # The option that means it.
    key: str = ""
    instead: str = ""
    needless: str = ""
    # The texts of the option by those of the flag, where they differ. "" gives nothing.
    words: Mapping[str, str] = field(default_factory=dict)

    def text(self, flag_text: str) -> str:
        """Return the option's text for a text of the flag."""
        return self.words.get(flag_text, flag_text)


class FlagVariable(Struct, frozen=True):
    """A variable that is set: its name, the flag in lower case, and the flag's text."""

    name: str
    flag: str
    text: str

    @property
    def is_left_out(self) -> bool:
        """Whether the server gets no such flag."""
        return self.text == LEFT_OUT


def flag_variables(environ: Mapping[str, str], prefix: str) -> list[FlagVariable]:
    """Return the variables with a prefix, sorted by name, without those that the table of options
    has.
    """
    variables: list[FlagVariable] = []
    for name in sorted(environ):
        flag = name.removeprefix(prefix).lower()
        if not name.startswith(prefix) or not flag or name in VARIABLES_OF_OPTIONS:
            continue

        text = environ[name].strip()
        if text.lower() in (FLAG_ALONE, LEFT_OUT):
            text = text.lower()

        variables.append(FlagVariable(name, flag, text or FLAG_ALONE))

    return variables


def report_flags(
    values: Values, variables: list[FlagVariable], flags: Mapping[str, Flag]
) -> Iterator[FlagVariable]:
    """Yield the variables that are left for the caller: those whose flag has an option, and those
    whose flag is unknown. Warns of each that is not read, with what to write instead, and notes
    those that are needless or left out.
    """
    left_out: list[str] = []
    for variable in variables:
        flag = flags.get(variable.flag)
        if variable.is_left_out:
            left_out.append(variable.name)
        elif flag is not None and flag.instead and flag.text(variable.text):
            values.warn(f"{variable.name}: is not read, {flag.instead}")
        elif flag is not None and flag.needless:
            values.note(f"{variable.name}: has no effect here, {flag.needless}")
        else:
            yield variable

    if left_out:
        values.note(f"{', '.join(left_out)}: false leaves the flag out, so its default counts")
