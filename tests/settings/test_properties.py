from pathlib import Path

import javaproperties
import pytest
from hypothesis import given, strategies as st

from lmi.errors import BadConfiguration
from lmi.settings.properties import MAX_BYTES, parse, read

ODD_FILES = {
    "empty": ("", {}),
    "only blanks and comments": ("\n  \n# a=1\n! b=2\n\t#c=3\n", {}),
    "three separators": ("a=1\nb:2\nc 3\n", {"a": "1", "b": "2", "c": "3"}),
    "blanks around the separator": ("  a  =  1  \n", {"a": "1  "}),
    "separators inside the value": ("a=b=c:d\n", {"a": "b=c:d"}),
    "escaped separators in the key": (r"a\:b\=c\ d=1", {"a:b=c d": "1"}),
    "key without a value": ("a\nb=\nc:", {"a": "", "b": "", "c": ""}),
    "continuation": ("a=1,\\\n    2,\\\n    3\n", {"a": "1,2,3"}),
    "continuation at the end of the file": ("a=1\\", {"a": "1"}),
    "even number of backslashes": ("a=1\\\\\nb=2\n", {"a": "1\\", "b": "2"}),
    "comment sign inside a continuation": ("a=1\\\n# 2\n", {"a": "1# 2"}),
    "comment sign inside a value": ("a=1 # not a comment\n", {"a": "1 # not a comment"}),
    "unicode escape": (r"a=\u00e9\u4E2D", {"a": "é中"}),
    "surrogate pair": (r"a=\ud83d\ude00", {"a": "😀"}),
    "control escapes": (r"a=\t\n\r\f\q", {"a": "\t\n\r\fq"}),
    "windows path": ("a=C:\\\\models\\\\m\n", {"a": "C:\\models\\m"}),
    "CR LF": ("a=1\r\nb=2\r\n", {"a": "1", "b": "2"}),
    "lone CR": ("a=1\rb=2\r", {"a": "1", "b": "2"}),
    "byte order mark": ("\ufeffa=1\n", {"a": "1"}),
    "no end of line": ("a=1", {"a": "1"}),
    "JSON value": ('a={"x": [1, 2]}\n', {"a": '{"x": [1, 2]}'}),
    "non-ASCII text": ("a=Grüße 中\n", {"a": "Grüße 中"}),
    "a later line counts": ("a=1\na=2\n", {"a": "2"}),
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_odd_files_are_read_as_java_reads_them(name: str) -> None:
    text, expected = ODD_FILES[name]
    assert {key: entry.value for key, entry in parse(text).entries.items()} == expected


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_each_key_knows_its_line(end: str) -> None:
    properties = parse(end.join(["# one", "a=1", "", "b=2\\", "  3\\", "  4", "c=5", "a=6"]))
    assert {key: entry.line for key, entry in properties.entries.items()} == {
        "a": 8,
        "b": 4,
        "c": 7,
    }
    assert properties.source("c") == "serving.properties:7"


def test_a_repeated_key_is_told_with_both_lines() -> None:
    (warning,) = parse("a=1\n\na=2\n", "x.properties").warnings
    assert warning == "x.properties:3: 'a' stands in line 1 already; the later line counts"


def test_a_value_without_a_key_is_told() -> None:
    properties = parse("b=1\n=2\n")
    assert list(properties.entries) == ["b"]
    assert properties.warnings == ["serving.properties:2: a value without a key is ignored"]


@pytest.mark.parametrize("escape", [r"\u12", r"\uzzzz", r"\u", r"\u00 1"])
def test_a_malformed_escape_names_file_and_line(escape: str) -> None:
    with pytest.raises(
        BadConfiguration, match=r"x\.properties:3: \\u must be followed by four"
    ) as caught:
        parse(f"a=1\n# b\nc={escape}\nd=2\n", "x.properties")

    assert caught.value.exit_code == 2


def test_a_file_that_is_not_utf8_is_read_as_latin1_with_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "serving.properties"
    file.write_bytes(b"a=1\nb=caf\xe9\n")
    properties = read(file)
    assert properties.entries["b"].value == "café"
    assert properties.warnings == [f"{file}:2: not UTF-8, the file is read as ISO-8859-1"]


@pytest.mark.parametrize("data", ["a=1\n".encode("utf-16"), b"a=1\0\n", b"#" * (MAX_BYTES + 1)])
def test_what_is_no_text_file_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "serving.properties"
    file.write_bytes(data)
    with pytest.raises(BadConfiguration, match=str(file)):
        read(file)


def test_a_folder_in_place_of_the_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="cannot be read: Is a directory"):
        read(tmp_path)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.text()))
def test_whatever_is_written_as_properties_is_read_back(wanted: dict[str, str]) -> None:
    text = javaproperties.dumps(wanted, timestamp=False)
    assert {key: entry.value for key, entry in parse(text).entries.items()} == wanted


@given(st.text(st.sampled_from("ab=: \t\f\\\n\r#!u01\ufeff"), max_size=60))
def test_any_text_is_read_as_the_library_reads_it_and_every_line_exists(text: str) -> None:
    try:
        expected = javaproperties.loads(text.removeprefix("\ufeff"))
    except javaproperties.InvalidUEscapeError:
        with pytest.raises(BadConfiguration):
            parse(text)

        return

    entries = parse(text).entries
    assert {key: entry.value for key, entry in entries.items()} == {
        k: v for k, v in expected.items() if k
    }

    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for key, entry in entries.items():
        first = key[0]
        assert first in lines[entry.line - 1] or "\\" in lines[entry.line - 1]
