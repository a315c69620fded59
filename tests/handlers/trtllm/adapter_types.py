"""Which values in the adapter's source are TensorRT-LLM's, as far as annotations and assignments say."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TypeAlias

from tests.handlers.trtllm.adapter_source import Function, Module, Source, assigned, is_name, walk
from tests.handlers.trtllm.facts import Facts

MANY = frozenset("list List Sequence SequenceOf Iterable Iterator AsyncIterator tuple set frozenset".split())
MAPS = frozenset("dict Dict Mapping OrderedDict".split())
SAME = frozenset("list tuple sorted reversed".split())  # functions that keep the elements
OUTPUT, COMPLETION = "tensorrt_llm.llmapi.RequestOutput", "tensorrt_llm.llmapi.CompletionOutput"
LLM, ARGUMENTS = "tensorrt_llm.LLM", "tensorrt_llm.llmapi.TorchLlmArgs"


@dataclass(frozen=True)
class Instance:
    name: str  # of a class in the facts


@dataclass(frozen=True)
class ClassOf:
    """The class itself, or an enumeration."""

    name: str


@dataclass(frozen=True)
class Own:
    """An instance of a class of the adapter."""

    module: Module
    node: ast.ClassDef

    def __hash__(self) -> int:
        return id(self.node)


@dataclass(frozen=True)
class Many:
    of: Type


@dataclass(frozen=True)
class Map:
    to: Type


@dataclass(frozen=True)
class Pair:
    second: Type


Type: TypeAlias = Instance | ClassOf | Own | Many | Map | Pair | None

ATTRIBUTES: dict[tuple[str, str], Type] = {
    (OUTPUT, "outputs"): Many(Instance(COMPLETION)),
    (OUTPUT, "sampling_params"): Instance("tensorrt_llm.SamplingParams"),
    (LLM, "args"): Instance(ARGUMENTS),
}
RESULTS: dict[tuple[str, str], Type] = {
    (LLM, "generate_async"): Instance(OUTPUT),
    (OUTPUT, "result"): Instance(OUTPUT),
    (OUTPUT, "aresult"): Instance(OUTPUT),
    (OUTPUT, "__aiter__"): Many(Instance(OUTPUT)),
}


class Types:
    def __init__(self, source: Source, profiles: list[Facts]) -> None:
        self._source, self._profiles = source, profiles
        self._under_way: set[tuple[int, str]] = set()

    def of(self, node: ast.expr | None, module: Module) -> Type:
        match node:
            case ast.Name():
                return self._name(node, module)
            case ast.Attribute():
                return self._attribute(node, module)
            case ast.Call():
                return self._call(node, module)
            case ast.Subscript():
                return self._item(node, module)
            case ast.Await() | ast.NamedExpr() | ast.Starred():
                return self.of(node.value, module)
            case ast.BoolOp():
                return next((known for one in node.values if (known := self.of(one, module))), None)
            case ast.IfExp():
                return self.of(node.body, module) or self.of(node.orelse, module)
            case ast.ListComp() | ast.GeneratorExp():
                return Many(self.of(node.elt, module))
        return None

    def annotated(self, node: ast.expr | None, module: Module) -> Type:
        match node:
            case ast.Constant(value=str(text)):
                return self.annotated(ast.parse(text, mode="eval").body, module)
            case ast.BinOp():
                return self.annotated(node.left, module) or self.annotated(node.right, module)
            case ast.Subscript():
                return self._generic(node, module)
            case ast.Name() | ast.Attribute():
                known = self.of(node, module)
                return Instance(known.name) if isinstance(known, ClassOf) else known
        return None

    def _generic(self, node: ast.Subscript, module: Module) -> Type:
        name = node.value.id if isinstance(node.value, ast.Name) else ""
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name in ("Optional", "Union"):
            return next((known for one in inner if (known := self.annotated(one, module))), None)
        if name in MANY and (known := self.annotated(inner[0], module)):
            return Many(known)
        if name in MAPS and (known := self.annotated(inner[-1], module)):
            return Map(known)
        return None

    def _name(self, node: ast.Name, module: Module) -> Type:
        key = (id(module.function_of(node) or module), node.id)
        if key in self._under_way:
            return None
        self._under_way.add(key)
        try:
            return self._found(node, module)
        finally:
            self._under_way.discard(key)

    def _found(self, node: ast.Name, module: Module) -> Type:
        for above in module.around(node):
            if isinstance(above, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
                for generator in above.generators:
                    if generator.iter is not node and _binds(generator.target, node.id):
                        return self._bound(generator.target, generator.iter, node.id, module)
            if isinstance(above, ast.Lambda) and any(one.arg == node.id for one in above.args.args):
                return None
            if isinstance(above, Function) and (found := self._local(above, node.id, module)) is not None:
                return found[0]
        return self._global(node.id, module)

    def _local(self, function: Function, name: str, module: Module) -> list[Type] | None:
        """[type] of a local name, None if it is not local."""
        arguments = function.args
        for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            if one.arg == name:
                return [self._self(function, module) if name == "self" else self.annotated(one.annotation, module)]
        is_local = False
        for node in walk(function):
            if isinstance(node, ast.For | ast.AsyncFor) and _binds(node.target, name):
                return [self._bound(node.target, node.iter, name, module)]
            targets, value = assigned(node)
            if any(is_name(target, name) for target in targets):
                is_local = True
                declared = self.annotated(node.annotation, module) if isinstance(node, ast.AnnAssign) else None
                if known := declared or self.of(value, module):
                    return [known]
        return [None] if is_local else None

    def _self(self, function: Function, module: Module) -> Type:
        owner = module.parents.get(function)
        return Own(module, owner) if isinstance(owner, ast.ClassDef) else None

    def _bound(self, target: ast.expr, value: ast.expr, name: str, module: Module) -> Type:
        """The type of a name in the target of a loop over `value`."""
        if isinstance(value, ast.Call) and is_name(value.func, "zip") and isinstance(target, ast.Tuple):
            sides = zip(target.elts, value.args, strict=False)
            return next((self._bound(one, given, name, module) for one, given in sides if _binds(one, name)), None)
        each = self.of(value, module)
        if isinstance(each, Instance) and each.name == OUTPUT:
            return each  # `async for step in output` gives the same object
        each = each.of if isinstance(each, Many) else None
        if isinstance(target, ast.Tuple):
            is_second = isinstance(each, Pair) and is_name(target.elts[-1], name)
            return each.second if is_second and isinstance(each, Pair) else None
        return each

    def _global(self, name: str, module: Module) -> Type:
        for node in module.tree.body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._imported(str(node.module), alias.name)
            if isinstance(node, ast.ClassDef) and node.name == name:
                return Own(module, node)
            if isinstance(node, ast.AnnAssign) and is_name(node.target, name):
                alias_of = is_name(node.annotation, "TypeAlias")
                return self.annotated(node.value if alias_of else node.annotation, module)
        return None

    def _imported(self, module: str, name: str) -> Type:
        for facts in self._profiles:
            if known := facts.find(module, name) or (f"{module}.{name}" in facts.enums and f"{module}.{name}"):
                return ClassOf(known)
        home = self._source.modules.get(module.removeprefix("handlers.lmi_trtllm."))
        return self._global(name, home) if home and module.startswith("handlers.lmi_trtllm.") else None

    def _attribute(self, node: ast.Attribute, module: Module) -> Type:
        base = self.of(node.value, module)
        if isinstance(base, Instance):
            return ATTRIBUTES.get((base.name, node.attr)) or self._parameter(base.name, node.attr)
        if isinstance(base, ClassOf):
            nested = f"{base.name}.{node.attr}"
            return ClassOf(nested) if any(nested in facts.classes for facts in self._profiles) else None
        return self._field(base, node.attr) if isinstance(base, Own) else None

    def _parameter(self, cls: str, name: str) -> Type:
        """The type of a field of a dataclass of theirs, as its annotation says."""
        for facts in self._profiles:
            for fact in facts.classes[cls].parameters if cls in facts.classes else ():
                if fact.name == name and fact.annotation:
                    return self._theirs(ast.parse(fact.annotation, mode="eval").body, facts)
        return None

    def _theirs(self, node: ast.expr, facts: Facts) -> Type:
        if isinstance(node, ast.Name):
            known = [name for name in facts.classes if name.rsplit(".", 1)[1] == node.id]
            return Instance(known[0]) if known else None
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            return None
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if node.value.id in ("Optional", "Union"):
            return next((known for one in inner if (known := self._theirs(one, facts))), None)
        known = self._theirs(inner[-1], facts)
        if known is None or node.value.id == "Literal":
            return None
        return Map(known) if node.value.id in MAPS else Many(known)

    def _field(self, own: Own, name: str) -> Type:
        for node in walk(own.node):
            if isinstance(node, ast.AnnAssign) and _target(node.target) == name:
                return self.annotated(node.annotation, own.module)
        for node in walk(own.node):
            targets, value = assigned(node)
            if any(_target(target) == name for target in targets) and (known := self.of(value, own.module)):
                return known
        return None

    def _call(self, node: ast.Call, module: Module) -> Type:
        if isinstance(node.func, ast.Name) and node.func.id in SAME and node.args:
            return self.of(node.args[0], module)
        if isinstance(node.func, ast.Attribute):
            base = self.of(node.func.value, module)
            if isinstance(base, Map):
                return {"items": Many(Pair(base.to)), "values": Many(base.to), "get": base.to}.get(node.func.attr)
            if isinstance(base, Instance):
                return RESULTS.get((base.name, node.func.attr))
        made = self.of(node.func, module)
        if isinstance(made, ClassOf):
            return Instance(made.name)
        if isinstance(made, Own):
            return made
        found = self._source.function(node.func, module)
        return self.annotated(found[1].returns, found[0]) if found else None

    def _item(self, node: ast.Subscript, module: Module) -> Type:
        base = self.of(node.value, module)
        if isinstance(base, Many):
            return base if isinstance(node.slice, ast.Slice) else base.of
        if isinstance(base, Pair):
            return base.second if isinstance(node.slice, ast.Constant) and node.slice.value == 1 else None
        return base.to if isinstance(base, Map) else None


def _binds(target: ast.expr, name: str) -> bool:
    return any(is_name(one, name) for one in walk(target))


def _target(node: ast.expr) -> str | None:
    """The name of a field: a bare one in the class, or self.name."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) and is_name(node.value, "self") else None
