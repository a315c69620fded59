"""How densely Python is written: what tests bound and `scripts/measure-style` prints.

A token is a name, a keyword, a number, an operator or a string; an f-string is one, in each version
of Python. Comments and docstrings, those of fields too, are none. A line of code is one on which a
token begins. A function's lines are those lines of its body, with those of functions in it.
"""

import ast
import io
import keyword
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

# Words that fit whatever a local holds, and so do not say what it is.
ALL_PURPOSE_NAMES = {
    "asked",
    "chosen",
    "each",
    "found",
    "given",
    "held",
    "item",
    "kept",
    "known",
    "left",
    "listed",
    "made",
    "named",
    "one",
    "other",
    "others",
    "ours",
    "own",
    "picked",
    "read",
    "rest",
    "said",
    "seen",
    "shown",
    "taken",
    "thing",
    "things",
    "told",
    "wanted",
    "what",
    "written",
}

MAX_TOKENS_A_LINE_OF_A_FUNCTION = 15
# A shorter one has no lines to spread its tokens over.
MIN_LINES_TO_BE_DENSE = 4
# A shorter one may be a single thought.
MIN_LINES_FOR_PARAGRAPHS = 12

LAYOUT = {
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
# From Python 3.12 on, the parts of such a string are tokens of their own.
STARTS_OF_STRINGS = {
    getattr(tokenize, name)
    for name in ("FSTRING_START", "TSTRING_START")
    if hasattr(tokenize, name)
}
ENDS_OF_STRINGS = {
    getattr(tokenize, name) for name in ("FSTRING_END", "TSTRING_END") if hasattr(tokenize, name)
}

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = (ast.DictComp, ast.GeneratorExp, ast.ListComp, ast.SetComp)


@dataclass(frozen=True)
class Function:
    num_lines: int
    num_tokens: int
    has_paragraphs: bool

    @property
    def may_be_dense(self) -> bool:
        return self.num_lines >= MIN_LINES_TO_BE_DENSE

    @property
    def is_dense(self) -> bool:
        limit = MAX_TOKENS_A_LINE_OF_A_FUNCTION * self.num_lines
        return self.may_be_dense and self.num_tokens >= limit

    @property
    def needs_paragraphs(self) -> bool:
        return self.num_lines >= MIN_LINES_FOR_PARAGRAPHS


@dataclass(frozen=True)
class Style:
    """The counts of one file or, summed, of several."""

    num_lines: int = 0
    num_code_lines: int = 0
    num_tokens: int = 0
    functions: tuple[Function, ...] = ()
    num_unrelated_assignments: int = 0
    num_assigned_names: int = 0
    num_all_purpose_names: int = 0
    num_conditionals: int = 0
    num_comprehensions: int = 0
    num_comments: int = 0
    num_comments_above: int = 0
    num_identifiers: int = 0
    num_letters_of_identifiers: int = 0

    def __add__(self, addend: "Style") -> "Style":
        sums = {
            field.name: getattr(self, field.name) + getattr(addend, field.name)
            for field in fields(Style)
        }
        return Style(**sums)

    @property
    def tokens_a_line(self) -> float:
        return self.num_tokens / max(self.num_code_lines, 1)

    @property
    def num_dense_functions(self) -> int:
        return sum(function.is_dense for function in self.functions)

    @property
    def share_of_dense_functions(self) -> float:
        num_functions = sum(function.may_be_dense for function in self.functions)
        return self.num_dense_functions / max(num_functions, 1)

    @property
    def num_long_functions(self) -> int:
        return sum(function.needs_paragraphs for function in self.functions)

    @property
    def share_with_paragraphs(self) -> float:
        long = [function for function in self.functions if function.needs_paragraphs]
        return sum(function.has_paragraphs for function in long) / max(len(long), 1)

    @property
    def share_of_all_purpose_names(self) -> float:
        return self.num_all_purpose_names / max(self.num_assigned_names, 1)

    @property
    def share_of_comments_above(self) -> float:
        return self.num_comments_above / max(self.num_comments, 1)

    @property
    def letters_an_identifier(self) -> float:
        return self.num_letters_of_identifiers / max(self.num_identifiers, 1)

    def per_thousand_lines(self, number: int) -> float:
        """Return how many there are to a thousand lines of code."""
        return 1000 * number / max(self.num_code_lines, 1)


def style_of(paths: Iterable[Path]) -> Style:
    """Return the summed counts of these files. A file is read only once in a process."""
    return sum((_style_of_file(path) for path in paths), Style())


@cache
def _style_of_file(path: Path) -> Style:
    return style_of_text(path.read_text())


def style_of_text(text: str) -> Style:
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    lines = text.splitlines()
    tokens = list(_whole_tokens(text))
    code = _code(tokens, _lines_of_docstrings(nodes))
    tokens_of_lines = Counter(token.start[0] for token in code)

    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    assigned_names = list(_assigned_names(nodes))
    identifiers = [
        token.string
        for token in code
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string)
    ]

    return Style(
        num_lines=len(lines),
        num_code_lines=len(tokens_of_lines),
        num_tokens=len(code),
        functions=tuple(
            _function(node, lines, tokens_of_lines)
            for node in nodes
            if isinstance(node, FunctionNode)
        ),
        num_unrelated_assignments=sum(_assigns_unrelated_values(node) for node in nodes),
        num_assigned_names=len(assigned_names),
        num_all_purpose_names=sum(name in ALL_PURPOSE_NAMES for name in assigned_names),
        num_conditionals=sum(isinstance(node, ast.IfExp) for node in nodes),
        num_comprehensions=sum(isinstance(node, COMPREHENSIONS) for node in nodes),
        num_comments=len(comments),
        num_comments_above=sum(comment.line.lstrip().startswith("#") for comment in comments),
        num_identifiers=len(identifiers),
        num_letters_of_identifiers=sum(map(len, identifiers)),
    )


def python_files(folder: Path) -> list[Path]:
    """Return the files below it that are Python by their ending, or by their first line."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and _is_python(path))


def _is_python(path: Path) -> bool:
    if path.suffix:
        return path.suffix == ".py"

    with path.open("rb") as file:
        first_line = file.readline(100)

    return first_line.startswith(b"#!") and b"python" in first_line


def _whole_tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens of the text, but of an f-string only its start."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in ENDS_OF_STRINGS:
            depth -= 1
            continue

        if depth == 0:
            yield token

        if token.type in STARTS_OF_STRINGS:
            depth += 1


def _code(
    tokens: Iterable[tokenize.TokenInfo], lines_of_docstrings: set[int]
) -> list[tokenize.TokenInfo]:
    return [
        token
        for token in tokens
        if token.type not in LAYOUT
        and token.type != tokenize.COMMENT
        and token.start[0] not in lines_of_docstrings
    ]


def _lines_of_docstrings(nodes: Iterable[ast.AST]) -> set[int]:
    """Return the numbers of all lines of strings that are statements: those of fields are too."""
    numbers = set[int]()
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                numbers.update(_lines_of(node))

    return numbers


def _assigned_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield each name where something is bound to it, parameters too."""
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name


def _assigns_unrelated_values(node: ast.AST) -> bool:
    """Whether it is `a, b = x, y`, where no value is made of what the statement assigns."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            pass
        case _:
            return False

    assigned = {ast.unparse(target) for target in targets}
    used = {
        ast.unparse(part)
        for value in values
        for part in ast.walk(value)
        if isinstance(part, ast.expr)
    }
    return assigned.isdisjoint(used)


def _function(node: FunctionNode, lines: list[str], tokens_of_lines: Counter[int]) -> Function:
    has_docstring = ast.get_docstring(node, clean=False) is not None
    body = node.body[1:] if has_docstring else node.body
    if not body:
        return Function(num_lines=0, num_tokens=0, has_paragraphs=False)

    numbers = range(_lines_of(body[0]).start, _lines_of(node).stop)
    foreign_lines = _blank_lines_of_others(node)
    counts = [tokens_of_lines[number] for number in numbers if number in tokens_of_lines]

    return Function(
        num_lines=len(counts),
        num_tokens=sum(counts),
        has_paragraphs=any(
            number not in foreign_lines and not lines[number - 1].strip() for number in numbers
        ),
    )


def _blank_lines_of_others(node: FunctionNode) -> set[int]:
    """Return the lines of strings and inner functions, where a blank line parts no thoughts."""
    numbers = set[int]()
    for part in ast.walk(node):
        if isinstance(part, FunctionNode) and part is not node:
            inner = _lines_of(part)
            numbers.update(range(inner.start - 1, inner.stop + 1))
        elif isinstance(part, ast.Constant | ast.JoinedStr):
            numbers.update(_lines_of(part))

    return numbers


def _lines_of(node: ast.stmt | ast.expr) -> range:
    """Return the numbers of its lines, with those of its decorators."""
    first = node.lineno
    if isinstance(node, FunctionNode) and node.decorator_list:
        first = node.decorator_list[0].lineno

    assert node.end_lineno is not None
    return range(first, node.end_lineno + 1)
