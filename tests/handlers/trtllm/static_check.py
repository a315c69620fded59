"""Checks every use of tensorrt_llm in the adapter against the published facts, with nothing imported or run.

    faults = check(Source.read())        # each prints as `engine.py:31: what`

A name, keyword or attribute must be there in both profiles. In a branch that a field of `Profile` decides, one of them
is enough. What the types of values do not show is not judged.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.handlers.trtllm.adapter_source import Key, Module, Source, walk
from tests.handlers.trtllm.adapter_types import ARGUMENTS, LLM, ClassOf, Instance, Own, Types
from tests.handlers.trtllm.facts import PROFILES, Facts, load

GENERATE = f"{LLM}.generate_async"
MAX_POSITIONAL = {GENERATE: 2}  # `inputs` and `sampling_params`: the lines differ in what follows
INPUTS = frozenset({"prompt", "prompt_token_ids"})
PYDANTIC = frozenset({"model_fields", "model_validate", "model_json_schema"})  # of a class with `extra`
SPLATTED = {"llm_arguments": LLM}  # functions whose result is splatted into a call in another module
PRIVATE_ALLOWED: dict[str, str] = {}  # a private name: the reason why it is used


@dataclass(frozen=True, order=True)
class Fault:
    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def check(source: Source, profiles: tuple[str, ...] = PROFILES) -> list[Fault]:
    """All faults, in the order of files and lines."""
    return sorted(set(Check(source, [load(name) for name in profiles]).faults()))


class Check:
    def __init__(self, source: Source, profiles: list[Facts]) -> None:
        self._source, self._profiles = source, profiles
        self._types = Types(source, profiles)
        self._fields = source.profile_fields

    def faults(self) -> Iterator[Fault]:
        for module in self._source.modules.values():
            for node in walk(module.tree):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    yield from self._import(node, module)
                elif isinstance(node, ast.Attribute):
                    yield from self._attribute(node, module)
                elif isinstance(node, ast.Call):
                    yield from self._call(node, module)
                elif isinstance(node, ast.FunctionDef) and node.name in SPLATTED:
                    yield from self._splatted(node, module)

    def _lacking(self, node: ast.AST, module: Module, has: Callable[[Facts], bool]) -> str:
        """The profiles in which something is missing, or "" if that is no fault."""
        lacking = [facts.version for facts in self._profiles if not has(facts)]
        if len(lacking) < len(self._profiles) and module.is_guarded(node, self._fields):
            return ""
        return " and ".join(lacking)

    # Imports.

    def _import(self, node: ast.Import | ast.ImportFrom, module: Module) -> Iterator[Fault]:
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        else:
            names = [(node.module or "", alias.name) for alias in node.names] if node.level == 0 else []
        for home, name in names:
            if home.partition(".")[0] == "tensorrt_llm":
                yield from self._imported(home, name, node, module)

    def _imported(self, home: str, name: str, node: ast.stmt, module: Module) -> Iterator[Fault]:
        def has(facts: Facts) -> bool:
            return name in facts.exports.get(home, ()) if name else home in facts.exports

        shown = f"from {home} import {name}" if name else f"import {home}"
        if private := next((part for part in f"{home}.{name}".split(".") if _is_private(part)), None):
            yield _fault(node, module, f"{shown}: {private} is private")
        elif lacking := self._lacking(node, module, has):
            yield _fault(node, module, f"{shown}: not in {lacking}")

    # Attributes.

    def _attribute(self, node: ast.Attribute, module: Module) -> Iterator[Fault]:
        base = self._types.of(node.value, module)
        if isinstance(base, Instance | ClassOf):
            yield from self._name(base, node.attr, node, module)

    def _name(self, base: Instance | ClassOf, name: str, node: ast.AST, module: Module) -> Iterator[Fault]:
        short = base.name.rsplit(".", 1)[1]
        if _is_private(name):
            yield _fault(node, module, f"{short}.{name} is private")
        elif not _is_dunder(name) and (lacking := self._lacking(node, module, lambda facts: _has(facts, base, name))):
            yield _fault(node, module, f"{short} has no {name} in {lacking}")

    # Calls.

    def _call(self, node: ast.Call, module: Module) -> Iterator[Fault]:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            yield from self._getattr(node, module)
        elif isinstance(node.func, ast.Name) and node.func.id == "Translated":
            yield from self._translated(node, module)
        elif (callee := self._callee(node, module)) is not None:
            yield from self._arguments(node, callee, module)

    def _getattr(self, node: ast.Call, module: Module) -> Iterator[Fault]:
        """With a default, a name that one profile lacks is meant; one that none has is a mistake."""
        base = self._types.of(node.args[0], module)
        name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
        if isinstance(base, Instance) and isinstance(name, str):
            known = [_has(facts, base, name) for facts in self._profiles]
            is_tried = len(node.args) > 2 or (isinstance(node.func, ast.Name) and node.func.id == "hasattr")
            if _is_private(name) or not (any(known) if is_tried else all(known)):
                yield from self._name(base, name, node, module)

    def _callee(self, node: ast.Call, module: Module) -> str | None:
        known = self._types.of(node.func, module)
        if isinstance(known, ClassOf):
            return known.name if known.name in self._profiles[0].classes else None
        if isinstance(node.func, ast.Attribute):
            base = self._types.of(node.func.value, module)
            if isinstance(base, Instance) and node.func.attr in self._profiles[0].classes[base.name].methods:
                return f"{base.name}.{node.func.attr}"
        return None

    def _arguments(self, node: ast.Call, callee: str, module: Module) -> Iterator[Fault]:
        short = callee.removeprefix("tensorrt_llm.").removeprefix("llmapi.")
        given = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
        splats = [keyword.value for keyword in node.keywords if keyword.arg is None]
        keys = [key for splat in splats for key in self._splat_keys(splat, module)]
        most = MAX_POSITIONAL.get(callee)
        if most is not None and len(node.args) > most:
            yield _fault(node, module, f"{short}: {len(node.args)} positional arguments, at most {most} are safe")
        for keyword in node.keywords:
            if keyword.arg is not None:
                yield from self._keyword(callee, keyword.arg, keyword, module)
        for key in keys:
            yield from self._keyword(callee, key.name, key.node, key.module)
            if key.name in given:
                yield _fault(
                    key.node, key.module, f"{short}: {key.name} is given a second time at {module.name}:{node.lineno}"
                )
        yield from self._binding(node, callee, given, is_open=bool(splats), module=module)
        if callee == GENERATE:
            yield from self._inputs(node, module)

    def _keyword(self, callee: str, name: str, node: ast.AST, module: Module) -> Iterator[Fault]:
        short = callee.removeprefix("tensorrt_llm.").removeprefix("llmapi.")
        if _is_private(name):
            yield _fault(node, module, f"{short}: the argument {name} is private")
        elif lacking := self._lacking(node, module, lambda facts: name in _keywords(facts, callee)):
            yield _fault(node, module, f"{short} has no argument {name} in {lacking}")

    def _binding(
        self, node: ast.Call, callee: str, given: list[str], *, is_open: bool, module: Module
    ) -> Iterator[Fault]:
        """What `bind` says of arguments that are missing or given twice. Unknown names are reported elsewhere."""
        if any(isinstance(one, ast.Starred) for one in node.args):
            return
        lacking = self._lacking(node, module, lambda facts: not _misfit(facts, callee, node, given, is_open=is_open))
        if lacking:
            misfits = [_misfit(facts, callee, node, given, is_open=is_open) for facts in self._profiles]
            what = next(misfit for misfit in misfits if misfit)
            yield _fault(node, module, f"{callee.rsplit('.', 1)[1]}: {what} in {lacking}")

    def _inputs(self, node: ast.Call, module: Module) -> Iterator[Fault]:
        given = node.args[0] if node.args else next((one.value for one in node.keywords if one.arg == "inputs"), None)
        for key in self._source.keys(given, module):
            if key.name not in INPUTS:
                yield _fault(key.node, key.module, f"inputs has no key {key.name}")

    def _splat_keys(self, splat: ast.expr, module: Module) -> list[Key]:
        """The keys of a splatted dictionary, also of one that an object of the adapter carries."""
        if isinstance(splat, ast.Attribute) and isinstance(own := self._types.of(splat.value, module), Own):
            return [key for made in self._made(own) for key in self._carried(made, own, splat.attr)]
        return self._source.keys(splat, module)

    def _made(self, own: Own) -> Iterator[tuple[ast.Call, Module]]:
        for module in self._source.modules.values():
            for node in walk(module.tree):
                if isinstance(node, ast.Call) and self._types.of(node.func, module) == own:
                    yield node, module

    def _carried(self, made: tuple[ast.Call, Module], own: Own, name: str) -> list[Key]:
        node, module = made
        fields = [
            one.target.id
            for one in own.node.body
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        ]
        given = dict(zip(fields, node.args, strict=False)) | {one.arg: one.value for one in node.keywords if one.arg}
        return self._source.keys(given.get(name), module)

    # What is splatted, or read from options, in another place.

    def _splatted(self, node: ast.FunctionDef, module: Module) -> Iterator[Fault]:
        for one in walk(node):
            for key in self._source.keys(one.value, module) if isinstance(one, ast.Return) else ():
                yield from self._keyword(SPLATTED[node.name], key.name, key.node, key.module)

    def _translated(self, node: ast.Call, module: Module) -> Iterator[Fault]:
        """The target of an option must be an argument of LLM, or a field of a nested configuration."""
        target = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        if not isinstance(target, str) or target.startswith("option."):
            return
        admitted = {key.name for key in self._source.keys(ast.Name("LACKING"), module)}
        lacking = [facts.version for facts in self._profiles if not _is_argument(facts, target)]
        if lacking and (target not in admitted or len(lacking) == len(self._profiles)):
            yield _fault(node, module, f"LLM has no argument {target} in {' and '.join(lacking)}")


def _has(facts: Facts, base: Instance | ClassOf, name: str) -> bool:
    if base.name in facts.enums:
        return isinstance(base, ClassOf) and name in facts.enums[base.name]
    if base.name not in facts.classes:
        return False
    cls = facts.classes[base.name]
    if isinstance(base, ClassOf) and cls.extra and name in PYDANTIC:
        return True
    return name in cls.names or f"{base.name}.{name}" in facts.classes


def _keywords(facts: Facts, callee: str) -> frozenset[str]:
    """The names that a call may give."""
    if callee == LLM:
        return facts.classes[ARGUMENTS].keywords
    return frozenset(facts.signature(callee).parameters) - {"self"}


def _misfit(facts: Facts, callee: str, node: ast.Call, given: list[str], *, is_open: bool) -> str:
    """Why `bind` refuses a call, or "". Names that are unknown are left out."""
    signature, known = facts.signature(callee), _keywords(facts, callee)
    owner = () if callee in facts.classes else (None,)
    try:
        bind = signature.bind_partial if is_open else signature.bind
        bind(*owner, *node.args, **{name: None for name in given if name in known})
    except TypeError as error:
        return str(error)
    return ""


def _is_argument(facts: Facts, target: str) -> bool:
    """Whether there is a field a, or a field b of the class of a, for "a" or "a.b"."""
    name, _, inner = target.partition(".")
    fact = next((one for one in facts.classes[ARGUMENTS].parameters if one.name == name), None)
    if fact is None or not inner:
        return fact is not None
    classes = [cls for known, cls in facts.classes.items() if known.rsplit(".", 1)[1] in (fact.annotation or "")]
    return any(inner in cls.keywords for cls in classes)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not _is_dunder(name) and name not in PRIVATE_ALLOWED


def _fault(node: ast.AST, module: Module, what: str) -> Fault:
    return Fault(module.name, getattr(node, "lineno", 0), what)
