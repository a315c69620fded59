"""Regular expressions of clients, written as llguidance reads them: the syntax of Rust's `regex` crate.

`\\d`, `\\w` and `\\s` stand for ASCII. In a class `[`, `&&`, `--` and `~~` are letters, as in Python and JavaScript.
"""

from __future__ import annotations

import re

TOKEN = re.compile(r"\\(?:[xuU]\{[0-9A-Fa-f]*\}|.)|.|\\", re.DOTALL)
OF_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
IN_CLASS = "[&~"  # of another meaning in a class of Rust's


def rust_regex(pattern: str) -> str:
    """Raises ValueError for what Rust would read as something else."""
    written: list[str] = []
    start: int | None = None  # of the class that is open, in `written`
    for token in TOKEN.findall(pattern):
        if token == "\\":
            raise ValueError("the regular expression ends with a backslash")
        if token[0] == "\\" and token[1].lower() in OF_ASCII:
            token = f"[{'^' if token[1].isupper() else ''}{OF_ASCII[token[1].lower()]}]"
        elif start is None:
            start = len(written) if token == "[" else None
        elif token == "]" and "".join(written[start:]) not in ("[", "[^"):
            start = None
        elif token in IN_CLASS or (token == "-" and written[-1] == "-"):
            token = "\\" + token
        elif token == "-" and "".join(written[start:]) in ("[", "[^"):
            token = r"\-"
        written.append(token)
    return "".join(written)


def lark_of_regex(pattern: str) -> str:
    """A grammar of Lark that writes the whole matches of a regular expression."""
    written = "".join(_in_slashes(token) for token in TOKEN.findall(rust_regex(pattern)))
    return f"start: /{written}/" if written else 'start: ""'


def _in_slashes(token: str) -> str:
    """A part of a regular expression, as it may stand between slashes on one line."""
    if token in ("/", "\\/"):
        return r"\x2f"
    if token[-1] < " ":  # a control character, with a backslash or without
        return f"\\x{ord(token[-1]):02x}"
    return token
