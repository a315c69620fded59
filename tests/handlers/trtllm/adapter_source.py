"""The source text of an adapter, parsed: its modules, what surrounds a node, and which keys a dictionary may have."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

PACKAGE = "handlers.lmi_trtllm"
FOLDER = Path(__file__).parents[3] / "handlers" / "lmi_trtllm"

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@functools.lru_cache(maxsize=1 << 14)
def walk(node: ast.AST) -> tuple[ast.AST, ...]:
    """A node and all below it, which many questions go through again."""
    return tuple(ast.walk(node))


@dataclass(frozen=True)
class Key:
    """A literal key of a dictionary, at the node that gives it."""

    name: str
    node: ast.AST
    module: Module


@dataclass(eq=False)
class Module:
    """One file. `parents` leads from each node to the one around it."""

    name: str  # as handlers/lmi_trtllm/name.py
    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        while (above := self.parents.get(node)) is not None:
            yield above
            node = above

    def function_of(self, node: ast.AST) -> Function | None:
        return next((one for one in self.around(node) if isinstance(one, Function)), None)

    @functools.cached_property
    def functions(self) -> dict[str, Function]:
        """By name; methods too, where no function has their name."""
        known = {one.name: one for one in walk(self.tree) if isinstance(one, Function)}
        return known | {one.name: one for one in self.tree.body if isinstance(one, Function)}

    def is_guarded(self, node: ast.AST, fields: frozenset[str]) -> bool:
        """Whether a test that reads a field of a Profile decides about this node, in its own function."""
        below = node
        for above in self.around(node):
            if isinstance(above, ast.If | ast.IfExp) and below is not above.test and _reads(above.test, fields):
                return True
            if isinstance(above, ast.BoolOp) and any(_reads(one, fields) for one in above.values if one is not below):
                return True
            if isinstance(below, ast.stmt) and any(_leaves(one, fields) for one in _before(below, above)):
                return True
            if isinstance(above, Function):
                return False
            below = above
        return False


def _reads(test: ast.AST, fields: frozenset[str]) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr in fields for one in walk(test))


def _before(statement: ast.stmt, above: ast.AST) -> list[ast.stmt]:
    blocks = [block for _, block in ast.iter_fields(above) if isinstance(block, list) and statement in block]
    return blocks[0][: blocks[0].index(statement)] if blocks else []


def _leaves(statement: ast.stmt, fields: frozenset[str]) -> bool:
    return isinstance(statement, ast.If) and _reads(statement.test, fields) and isinstance(statement.body[-1], LEAVES)


@dataclass
class Source:
    """All modules of the adapter by their short names, and the fields of its Profile."""

    modules: dict[str, Module]

    @classmethod
    def read(cls, folder: Path = FOLDER) -> Source:
        return cls.of({file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py"))})

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Source:
        """Raises SyntaxError."""
        return cls({name: Module(f"{name}.py", ast.parse(text)) for name, text in texts.items()})

    @property
    def profile_fields(self) -> frozenset[str]:
        tree = self.modules["profile"].tree if "profile" in self.modules else ast.Module([], [])
        found = [node for node in walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Profile"]
        fields = [one.target for node in found for one in node.body if isinstance(one, ast.AnnAssign)]
        return frozenset(one.id for one in fields if isinstance(one, ast.Name)) - {"name"}

    def function(self, callee: ast.expr, module: Module) -> tuple[Module, Function] | None:
        """The function of the adapter that an expression names: f, module.f or self.f."""
        if isinstance(callee, ast.Name):
            imported = _imports(module).get(callee.id)
            home, name = (self.modules.get(imported[0]), imported[1]) if imported else (module, callee.id)
        elif isinstance(callee, ast.Attribute) and isinstance(callee.value, ast.Name):
            home = module if callee.value.id == "self" else self.modules.get(callee.value.id)
            name = callee.attr
        else:
            return None
        found = home.functions.get(name) if home else None
        return (home, found) if home and found else None

    def keys(self, node: ast.expr | None, module: Module, depth: int = 6) -> list[Key]:
        """The literal keys that a dictionary may have, as far as its making can be followed."""
        if node is None or depth == 0:
            return []
        if isinstance(node, ast.Dict):
            return self._display(node, module, depth)
        if isinstance(node, ast.BinOp):
            return self.keys(node.left, module, depth) + self.keys(node.right, module, depth)
        if isinstance(node, ast.IfExp):
            return self.keys(node.body, module, depth) + self.keys(node.orelse, module, depth)
        if isinstance(node, ast.DictComp):
            return [Key(name, node, module) for name in self._comprehended(node, module)]
        if isinstance(node, ast.Call):
            return self._called(node, module, depth)
        if isinstance(node, ast.Name):
            return self._named(node, module, depth)
        return []

    def _display(self, node: ast.Dict, module: Module, depth: int) -> list[Key]:
        found = []
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                found += self.keys(value, module, depth)
            elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                found.append(Key(key.value, key, module))
        return found

    def _called(self, node: ast.Call, module: Module, depth: int) -> list[Key]:
        if isinstance(node.func, ast.Name) and node.func.id == "dict":
            return [Key(one.arg, one, module) for one in node.keywords if one.arg is not None]
        found = self.function(node.func, module)
        if found is None:
            return []
        home, function = found
        returned = [one.value for one in walk(function) if isinstance(one, ast.Return)]
        return [key for value in returned for key in self.keys(value, home, depth - 1)]

    def _named(self, node: ast.Name, module: Module, depth: int) -> list[Key]:
        scope = module.function_of(node) or module.tree
        found: list[Key] = []
        for one in walk(scope):
            targets, value = assigned(one)
            if any(isinstance(target, ast.Name) and target.id == node.id for target in targets):
                found += self.keys(value, module, depth - 1)
            for target in targets:
                if isinstance(target, ast.Subscript) and is_name(target.value, node.id):
                    found += [Key(name, target, module) for name in _words(target.slice)]
        if not found and scope is not module.tree:
            return self._global(node.id, module, depth)
        return found

    def _global(self, name: str, module: Module, depth: int) -> list[Key]:
        for one in module.tree.body:
            targets, value = assigned(one)
            if any(is_name(target, name) for target in targets):
                return self.keys(value, module, depth - 1)
        return []

    def _comprehended(self, node: ast.DictComp, module: Module) -> list[str]:
        """The keys of {name: … for name in names}, where the names are literal."""
        first = node.generators[0]
        target = first.target.elts[0] if isinstance(first.target, ast.Tuple) else first.target
        if not (isinstance(node.key, ast.Name) and is_name(target, node.key.id)):
            return []
        source = first.iter
        if isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and source.func.attr == "items":
            return [key.name for key in self.keys(source.func.value, module)]
        if isinstance(source, ast.Name):
            scope = module.function_of(node) or module.tree
            values = [value for one in walk(scope) for targets, value in [assigned(one)] if value is not None
                      and any(is_name(target, source.id) for target in targets)]  # fmt: skip
            return [name for value in values for name in _words(value)]
        return _words(source)


def _imports(module: Module) -> dict[str, tuple[str, str]]:
    """Local names of functions of other modules of the adapter: (module, name)."""
    found = {}
    for node in walk(module.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
            home = str(node.module).removeprefix(f"{PACKAGE}.")
            found |= {alias.asname or alias.name: (home, alias.name) for alias in node.names}
    return found


def assigned(node: ast.AST) -> tuple[list[ast.expr], ast.expr | None]:
    if isinstance(node, ast.Assign):
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            return [], None
        return node.targets, value
    if isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.AugAssign):
        return [node.target], node.value
    return [], None


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _words(node: ast.expr) -> list[str]:
    """The texts of a literal, or of a tuple, list or set of literals."""
    nodes = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return [one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str)]
