"""Reads a serving.properties file, in the syntax of java.util.Properties: the value of each key,
and the line in which it stands.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct, field

from lmi.errors import BadConfiguration, shorten
from lmi.shared.model_files import read_bounded

MAX_BYTES = 1 << 20
BLANKS = " \t\f"
LINE_END = re.compile(r"\r\n|\r|\n")
# An odd number of backslashes at the end of a line continues it.
CONTINUED = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
ENTRY = re.compile(r"(?P<key>(?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(?P<value>.*)", re.DOTALL)
ESCAPE = re.compile(r"\\(u.{0,4}|.)", re.DOTALL)
HEX = re.compile("u[0-9A-Fa-f]{4}")
ESCAPED = {"t": "\t", "n": "\n", "f": "\f", "r": "\r"}


class PropertiesLine(Struct, frozen=True):
    """What a file has of one key."""

    value: str
    # The number of the key's line, counted from 1.
    line: int


class Properties(Struct, frozen=True):
    """The entries of one file by key. Messages call the file `name`."""

    name: str = "serving.properties"
    entries: dict[str, PropertiesLine] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def source(self, key: str) -> str:
        """Return the place of a key: file:line."""
        return f"{self.name}:{self.entries[key].line}"


def read(path: Path) -> Properties:
    """Read a file. One that does not exist has no entries. Raises BadConfiguration if it cannot be
    read, or is no text.
    """
    try:
        data = read_bounded(path, MAX_BYTES)
    except FileNotFoundError:
        return Properties()
    except OSError as error:
        raise BadConfiguration(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadConfiguration(f"{path}: cannot be read: {error}") from None

    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data:
        raise BadConfiguration(
            f"{path}: not a text file in UTF-8 (a NUL byte or a UTF-16 mark stands in it)"
        )

    try:
        return parse(data.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        properties = parse(data.decode("latin-1"), str(path))
        properties.warnings.append(f"{path}:{line}: not UTF-8, the file is read as ISO-8859-1")
        return properties


def parse(text: str, name: str = "serving.properties") -> Properties:
    """Parse the text of a file. If a key stands there twice, the last value counts, with a warning.
    Raises BadConfiguration for a bad escape.
    """
    properties = Properties(name)
    for number, line in _logical_lines(text.removeprefix("\ufeff")):
        entry = ENTRY.fullmatch(line) if line else None
        if entry is None:
            continue

        try:
            key = _plain(entry["key"])
            value = _plain(entry["value"])
        except ValueError as error:
            rule = "\\u must be followed by four hexadecimal digits"
            raise BadConfiguration(
                f"{name}:{number}: {rule}, given {shorten(str(error))}"
            ) from None

        if not key:
            properties.warnings.append(f"{name}:{number}: a value without a key is ignored")
            continue

        earlier = properties.entries.get(key)
        if earlier is not None:
            again = f"{shorten(key)} stands in line {earlier.line} already; the later line counts"
            properties.warnings.append(f"{name}:{number}: {again}")

        properties.entries[key] = PropertiesLine(value, number)

    return properties


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its number, without comments. A line that is continued is joined with
    the lines behind it, and has the number of its first one.
    """
    lines = enumerate(LINE_END.split(text), 1)
    for number, line in lines:
        line = line.lstrip(BLANKS)
        if line.startswith(("#", "!")):
            continue

        while CONTINUED.search(line):
            _, following = next(lines, (0, ""))
            line = line[:-1] + following.lstrip(BLANKS)

        yield number, line


def _plain(text: str) -> str:
    """Return a text without escapes. Pairs of surrogates become one character."""
    unescaped = ESCAPE.sub(_unescaped, text)
    return unescaped.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _unescaped(match: re.Match[str]) -> str:
    """Return the character of an escape. Raises ValueError, with the escape, if it is not valid."""
    escape = match[1]
    if escape[0] != "u":
        return ESCAPED.get(escape, escape)

    if not HEX.fullmatch(escape):
        raise ValueError(match[0])

    return chr(int(escape[1:], 16))
