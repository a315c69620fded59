"""Reads from the text of a Python file which functions and which marks of formatters it holds, without running it.

Settings choose the user code by it. The code runs only in its own process.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from lmi.errors import ModelUnusable

HANDLER = "handle"
TRIES_HANDLER = re.compile(
    r"djl_python\.lmi_.*|.*async_service"
)  # entry points that call the handler of a model.py first
MARKS = ("output_formatter", "input_formatter")  # decorators of djl_python


@dataclass(frozen=True, slots=True)
class Outline:
    """The names that a file binds at its top level, and the decorators of djl_python that it uses there."""

    names: frozenset[str]
    marks: frozenset[str]


def outline(path: Path) -> Outline:
    """Read a file. Raises ModelUnusable if it cannot be read or is not Python."""
    try:
        body = ast.parse(path.read_bytes(), str(path)).body
    except SyntaxError as error:
        raise ModelUnusable(f"{path}: line {error.lineno}: SyntaxError: {error.msg}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnusable(f"{path}: {error}") from None
    names = {name for statement in body for name in _bound(statement)}
    functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    used = {_last_name(decorator) for function in functions for decorator in function.decorator_list}
    return Outline(frozenset(names), frozenset(used.intersection(MARKS)))


def _bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []


def _last_name(decorator: ast.expr) -> str:
    """Return `output_formatter` for `@output_formatter`, `@output_formatter()` and `@module.output_formatter`."""
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
