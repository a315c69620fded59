"""Writes clients' regular expressions as Rust's `regex` crate reads them, and so llguidance."""

import re

TOKEN = re.compile(r"\\(?:[xuU]\{[0-9A-Fa-f]*\}|[pP]\{[^}]*\}|.)|.|\\", re.DOTALL)
NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
WIDE = {"d": r"\p{N}", "w": r"\p{L}\p{M}\p{N}\p{Pc}", "s": r"\p{Z}\t\n\r\f\v\x1c-\x1f\x{85}"}
CLASSES = "dDwWsSpP"
# Letters that have another meaning in a class of Rust's.
IN_CLASS = "[&~"
# What an answer in JSON may have. llguidance 1.9.1 takes a class of all control characters for one
# of all characters: `[^"]` would allow a quote with its backslash.
WRITABLE = r"[^\x00-\x07\x0b\x0e-\x1f\x7f]"
OF_A_LINE = r"[^\n\x00-\x07\x0b\x0e-\x1f\x7f]"


def rust_regex(pattern: str, *, is_in_json: bool = False) -> str:
    r"""Raises ValueError for what Rust would read as something else.

    `\d`, `\w` and `\s` are of ASCII in some languages and of Unicode in others: what is written
    fits both. In a class `[`, `&&`, `--` and `~~` are letters, as in Python and JavaScript.
    """
    begin = ""
    end = ""
    if is_in_json:
        begin = "["
        end = f"&&{WRITABLE}]"

    parts: list[str] = []
    # The parts of the class that is open.
    inside: list[str] = []
    for token in TOKEN.findall(pattern):
        if token == "\\":
            raise ValueError("the regular expression ends with a backslash")

        is_class = token[0] == "\\" and token[1] in CLASSES
        if is_class and token[1].lower() in NARROW:
            is_in_negation = inside[:2] == ["[", "^"]
            token = _class_of_letters(token[1], is_in_negation=is_in_negation)

        has_begun = inside in (["["], ["[", "^"])
        if not inside and token == "[":
            inside = [token]
        elif not inside:
            text = OF_A_LINE if token == "." and is_in_json else token
            parts.append(f"{begin}{text}{end}" if is_class else text)
        elif token == "]" and not has_begun:
            parts.append(f"{begin}{''.join(inside)}]{end}")
            inside = []
        elif token in IN_CLASS or (token == "-" and (has_begun or inside[-1] == "-")):
            inside.append("\\" + token)
        else:
            inside.append(token)

    return "".join(parts + inside)


def _class_of_letters(letter: str, *, is_in_negation: bool) -> str:
    r"""The class for `\d`, or `\D` and their like: letters that each reading of it allows."""
    is_negated = letter.isupper()
    letters = WIDE if is_negated != is_in_negation else NARROW
    sign = "^" if is_negated else ""
    return f"[{sign}{letters[letter.lower()]}]"
