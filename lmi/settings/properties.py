"""Reads a serving.properties file into its keys, their values and their lines.

The javaproperties library reads the syntax of java.util.Properties (continuations, escapes, `=`, `:` or blank between
key and value). This module adds line numbers, warnings of repeated keys, and errors that name file and line. It skips
a byte order mark. It does not know what a key means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import javaproperties

from lmi.errors import BadConfiguration, shorten

MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PropertiesLine:
    value: str
    line: int  # of the key, counted from 1


@dataclass(frozen=True, slots=True)
class Properties:
    """The entries of one file. Messages call the file `name`."""

    name: str = "serving.properties"
    entries: dict[str, PropertiesLine] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def source(self, key: str) -> str:
        return f"{self.name}:{self.entries[key].line}"


def read(path: Path) -> Properties:
    """Read a file. Raises BadConfiguration if it cannot be read as properties."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadConfiguration(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise BadConfiguration(f"{path}: {len(data)} bytes, allowed are {MAX_BYTES}")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data:
        raise BadConfiguration(f"{path}: not a text file in UTF-8 (a NUL byte or a UTF-16 mark stands in it)")
    try:
        return parse(data.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        properties = parse(data.decode("latin-1"), str(path))
        properties.warnings.append(f"{path}:{line}: not UTF-8, the file is read as ISO-8859-1")
        return properties


def parse(text: str, name: str = "serving.properties") -> Properties:
    """Parse the text of a file. If a key has several values, the last one counts and a warning says so.

    Raises BadConfiguration for an escape that is not valid.
    """
    properties = Properties(name)
    line = 1
    elements = javaproperties.parse(text.removeprefix("\ufeff"))
    while True:
        try:
            element = next(elements, None)
        except javaproperties.InvalidUEscapeError as error:
            rule = "\\u must be followed by four hexadecimal digits"
            raise BadConfiguration(f"{name}:{line}: {rule}, given {shorten(error.escape)}") from None
        if element is None:
            return properties
        if isinstance(element, javaproperties.KeyValue):
            _add(properties, element.key, PropertiesLine(element.value, line))
        line += _num_lines(element.source)


def _add(properties: Properties, key: str, entry: PropertiesLine) -> None:
    if not key:
        properties.warnings.append(f"{properties.name}:{entry.line}: a value without a key is ignored")
        return
    earlier = properties.entries.get(key)
    if earlier is not None:
        where = f"{properties.name}:{entry.line}: {shorten(key)}"
        properties.warnings.append(f"{where} stands in line {earlier.line} already; the later line counts")
    properties.entries[key] = entry


def _num_lines(source: str) -> int:
    """Return the number of line ends in `source`. CR LF is one line end, and so is a single CR or LF."""
    return source.count("\n") + source.count("\r") - source.count("\r\n")
