"""Puts limits into a parsed template, where it makes values or takes time without a filter.

The filters that it puts there have names with a blank, which no template can write. `sandbox.py`
has what they do.
"""

from typing import Any

import jinja2
from jinja2 import nodes, visitor

# Jinja takes about a second for so many. Large templates have some ten thousand.
MAX_NAMES_IN_BRANCHES = 1_000_000
# Looks at the clock, and returns the value as it is.
CLOCK = " clock"
# Spends what a value takes that was just made.
MADE = " made"
# Makes a slice of a value.
PART = " part"
# Joins values to a text.
CONCAT = " concat"
# Makes a list of the arguments of a call.
LISTED = " listed"


class BoundedTree(visitor.NodeTransformer):
    """Changes a parsed template in place."""

    def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(node, nodes.Call | nodes.Filter | nodes.Test) and node.dyn_args is not None:
            node.dyn_args = _filtered(node.dyn_args, LISTED)

        self.generic_visit(node)
        match node:
            case nodes.For() | nodes.Macro() | nodes.CallBlock():
                clock = _filtered(nodes.Const(None, lineno=node.lineno), CLOCK)
                node.body.insert(0, nodes.ExprStmt(clock).set_lineno(node.lineno))
                if isinstance(node, nodes.For) and node.test is not None:
                    clock = _filtered(nodes.Const(True, lineno=node.lineno), CLOCK)
                    node.test = nodes.And(clock, node.test).set_lineno(node.lineno)
            case nodes.Concat():
                return _filtered(node.nodes[0], CONCAT, *node.nodes[1:])
            case nodes.Dict():
                return _filtered(node, MADE)
            case nodes.List() | nodes.Tuple(ctx="load") if not _is_const(node):
                return _filtered(node, MADE)
            case nodes.Getitem(arg=nodes.Slice() as part):
                ends = [end or nodes.Const(None) for end in (part.start, part.stop, part.step)]
                return _filtered(node.node, PART, *ends)
            case nodes.Compare() if not _is_short(node):
                return _filtered(node, CLOCK)

        return node


def check_branches(tree: nodes.Template) -> None:
    """Raise TemplateError for a template that Jinja compiles for long: it copies all names for each
    branch.
    """
    num_names = len({node.name for node in tree.find_all(nodes.Name)})
    num_branches = sum(1 for _ in tree.find_all(nodes.If))
    if num_names * num_branches > MAX_NAMES_IN_BRANCHES:
        raise jinja2.TemplateError(
            f"over {MAX_NAMES_IN_BRANCHES} names in branches: {num_names} x {num_branches}"
        )


def _is_short(node: nodes.Compare) -> bool:
    """Whether a comparison is with a constant, and so takes no longer than the constant is long."""
    if len(node.ops) > 1:
        return False

    operand = node.ops[0]
    is_search = operand.op in ("in", "notin")
    return _is_const(operand.expr) or (_is_const(node.expr) and not is_search)


def _filtered(node: nodes.Node, name: str, *args: nodes.Node) -> nodes.Expr:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _is_const(node: nodes.Node) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_const, node.items))

    return isinstance(node, nodes.Const)
