"""Puts the calls of the limits into a chat template: filters whose names no template can write."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

CLOCK, MADE, PART = " clock", " made", " part"
CONCAT, LISTED = " concat", " listed"


class BoundedTree(NodeTransformer):
    """Changes a parsed template in place."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _look_at_clock(node.lineno))
        if node.test is not None:
            node.test = nodes.And(_filtered(nodes.Const(True), CLOCK), node.test).set_lineno(node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _look_at_clock(node.lineno))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self.visit_Macro(node)  # type: ignore[arg-type]  # it has a body too

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node.nodes[0], CONCAT, *node.nodes[1:])

    def visit_List(self, node: nodes.List | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if _is_const(node) else _filtered(node, MADE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_List(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return _filtered(self.generic_visit(node), MADE)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        part = node.arg
        if not isinstance(part, nodes.Slice):
            return node
        ends = (nodes.Const(None) if end is None else end for end in (part.start, part.stop, part.step))
        return _filtered(node.node, PART, *ends)

    def generic_visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(node, nodes.Call | nodes.Filter | nodes.Test) and node.dyn_args is not None:
            node.dyn_args = _filtered(node.dyn_args, LISTED)
        return super().generic_visit(node, *args, **kwargs)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Leave a comparison with a constant, which takes no longer than the constant is long."""
        self.generic_visit(node)
        is_short = len(node.ops) == 1 and (
            _is_const(node.ops[0].expr) or (_is_const(node.expr) and node.ops[0].op not in ("in", "notin"))
        )
        return node if is_short else _filtered(node, CLOCK)


def _filtered(node: nodes.Node, name: str, *args: nodes.Node) -> nodes.Expr:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _is_const(node: nodes.Node) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_const, node.items))
    return isinstance(node, nodes.Const)


def _look_at_clock(lineno: int) -> nodes.Node:
    return nodes.ExprStmt(_filtered(nodes.Const(None), CLOCK)).set_lineno(lineno)
