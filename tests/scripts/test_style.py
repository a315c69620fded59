"""What the counts of `scripts/style.py` are, each on a small piece of Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from scripts.style import Style, python_files, style_of, style_of_text

ROOT = Path(__file__).resolve().parents[2]


def counted(text: str) -> Style:
    return style_of_text(dedent(text))


def test_comments_docstrings_and_layout_are_no_tokens() -> None:
    style = counted('''\
        """A module."""

        # above
        limit = 3  # at the end
        """The docstring of a field."""
    ''')

    assert style.num_tokens == 3
    assert style.num_code_lines == 1
    assert style.num_lines == 5


def test_an_fstring_is_one_token_whatever_stands_in_it() -> None:
    style = counted("""\
        text = f"{a + b!r:>{width}} {f'{inner}'}"
        more = text
    """)

    assert style.num_tokens == 6


def test_a_line_inside_a_string_is_no_line_of_code() -> None:
    style = counted('''\
        text = """one
        two
        """
    ''')

    assert style.num_code_lines == 1


@pytest.mark.parametrize(
    ("statement", "num_tokens"),
    [("a = f(b, c, d, e, g)", 14), ("a = -f(b, c, d, e, g)", 15)],
)
def test_a_function_of_four_lines_is_dense_from_15_tokens_a_line(
    statement: str, num_tokens: int
) -> None:
    head = 'def run(first, second):\n    """Run."""\n'
    style = style_of_text(head + 4 * f"    {statement}\n")
    [function] = style.functions

    assert function.num_lines == 4
    assert function.num_tokens == 4 * num_tokens
    assert style.num_dense_functions == (num_tokens == 15)


def test_a_function_of_three_lines_is_never_dense() -> None:
    statement = "    a = f(b, c, d, e, g, h, i, j, k)\n"
    style = style_of_text("def run():\n" + 3 * statement)

    assert style.num_dense_functions == 0
    assert style.share_of_dense_functions == 0


def long_function(between: str) -> str:
    return "def run():\n" + 6 * "    step()\n" + between + 6 * "    step()\n"


@pytest.mark.parametrize(
    ("between", "share"),
    [
        ("", 0),
        ("\n", 1),
        ('    text = """first\n\nlast"""\n', 0),
        ("\n    def inner():\n        step()\n\n", 0),
        ("\n    @cache\n    def inner():\n        step()\n\n", 0),
    ],
    ids=["packed", "blank", "inside a string", "beside a function", "beside a decorated function"],
)
def test_a_paragraph_is_a_blank_line_between_thoughts(between: str, share: float) -> None:
    style = style_of_text(long_function(between))

    assert style.num_long_functions == 1
    assert style.share_with_paragraphs == share


def test_a_blank_line_below_a_docstring_is_no_paragraph() -> None:
    text = 'def run():\n    """Run."""\n\n' + 12 * "    step()\n"

    assert style_of_text(text).share_with_paragraphs == 0


@pytest.mark.parametrize(
    ("statement", "is_unrelated"),
    [
        ("a, b = x, y", True),
        ("self.a, self.b = 0, a", True),
        ("a, b = b, a", False),
        ("a, b = b, a + b", False),
        ("a[i], a[j] = a[j], a[i]", False),
        ("a, b = pair", False),
        ("a = x, y", False),
    ],
)
def test_an_assignment_is_of_unrelated_values_if_none_has_a_target_in_it(
    statement: str, is_unrelated: bool
) -> None:
    assert style_of_text(statement).num_unrelated_assignments == is_unrelated


def test_all_purpose_names_are_counted_where_something_is_bound_to_them() -> None:
    style = counted("""\
        def run(given, route):
            for one in route:
                given.found = one
    """)

    assert style.num_assigned_names == 3
    assert style.num_all_purpose_names == 2


def test_a_thousand_lines_of_code_are_the_measure_of_expressions() -> None:
    style = counted("""\
        a = b if c else d

        e = [f for f in a if f]
        g = sum(f for f in a)
        h = {f for f in a}
    """)

    assert style.per_thousand_lines(style.num_conditionals) == 250
    assert style.per_thousand_lines(style.num_comprehensions) == 750


def test_a_comment_is_above_if_it_has_its_line_for_itself() -> None:
    style = counted("""\
        # above
        a = "#"  # at the end
        if a:
            # above, too
            b = 1
        # above
    """)

    assert style.share_of_comments_above == 0.75


def test_identifiers_are_names_that_are_no_keywords() -> None:
    assert style_of_text("for chunk in ab: pass").letters_an_identifier == 3.5


def test_files_are_summed_by_their_ending_or_their_first_line(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("a = 1\n")
    (tmp_path / "command").write_text("#!/usr/bin/env python3\nb = 2\n")
    (tmp_path / "shell").write_text("#!/usr/bin/env bash\n")
    (tmp_path / "notes.md").write_text("c = 3\n")

    files = python_files(tmp_path)

    assert [file.name for file in files] == ["command", "module.py"]
    assert style_of(files).num_tokens == 6


def test_the_command_prints_a_column_for_each_argument(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text("a = 1\n")

    done = measured("first", "first+second", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "| | first | first+second |"
    assert "| tokens | 3 | 6 |" in lines


def test_the_command_names_a_folder_that_is_not_there(tmp_path: Path) -> None:
    done = measured("nowhere", cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr == "scripts/measure-style: nowhere is no folder\n"


def measured(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts/measure-style", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)
