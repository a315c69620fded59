"""Regular expressions of clients, written as llguidance reads them: the syntax of Rust's `regex` crate.

`\\d`, `\\w` and `\\s` are of ASCII in some languages and of Unicode in others: what is written fits both. In a class
`[`, `&&`, `--` and `~~` are letters, as in Python and JavaScript.
"""

from __future__ import annotations

import re

TOKEN = re.compile(r"\\(?:[xuU]\{[0-9A-Fa-f]*\}|[pP]\{[^}]*\}|.)|.|\\", re.DOTALL)
NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
WIDE = {"d": r"\p{N}", "w": r"\p{L}\p{M}\p{N}\p{Pc}", "s": r"\p{Z}\t\n\r\f\v\x1c-\x1f\x{85}"}
CLASSES = "dDwWsSpP"
IN_CLASS = "[&~"  # of another meaning in a class of Rust's
# What an answer in JSON may have. llguidance 1.9.1 takes a class of all control characters for one of all characters:
# `[^"]` would allow a quote with its backslash.
WRITABLE = r"[^\x00-\x07\x0b\x0e-\x1f\x7f]"
OF_A_LINE = r"[^\n\x00-\x07\x0b\x0e-\x1f\x7f]"


def rust_regex(pattern: str, *, is_in_json: bool = False) -> str:
    """Raises ValueError for what Rust would read as something else."""
    begin, end = ("[", f"&&{WRITABLE}]") if is_in_json else ("", "")
    written: list[str] = []
    inside: list[str] = []  # of the class that is open
    for token in TOKEN.findall(pattern):
        if token == "\\":
            raise ValueError("the regular expression ends with a backslash")
        is_class = token[0] == "\\" and token[1] in CLASSES
        if is_class and token[1].lower() in NARROW:
            is_negated = token[1].isupper()
            letters = WIDE if is_negated != (inside[:2] == ["[", "^"]) else NARROW
            token = f"[{'^' if is_negated else ''}{letters[token[1].lower()]}]"
        has_begun = inside in (["["], ["[", "^"])
        if not inside and token == "[":
            inside = [token]
        elif not inside:
            text = OF_A_LINE if token == "." and is_in_json else token
            written.append(f"{begin}{text}{end}" if is_class else text)
        elif token == "]" and not has_begun:
            written.append(f"{begin}{''.join(inside)}]{end}")
            inside = []
        elif token in IN_CLASS or (token == "-" and (has_begun or inside[-1] == "-")):
            inside.append("\\" + token)
        else:
            inside.append(token)
    return "".join(written + inside)


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
