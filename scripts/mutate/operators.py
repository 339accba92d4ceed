"""The kinds of changes: an operator looks at one node of the syntax tree and yields other texts for
it.

An operator knows one kind of mistake. Examples are the world instead of the group, a missing copy,
a handle that is waited for at once, and a bound that is off by one.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator

Change = tuple[ast.AST, str]  # the node and the text that takes its place
Operator = Callable[[ast.AST], Iterator[Change]]

COPIES = ("detach", "contiguous", "clone", "cpu", "float", "double", "to", "copy", "view_as")
OPPOSITE = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "ceil": "floor",
    "floor": "ceil",
    "sorted": "list",
    "reversed": "list",
    "abs": "float",
    "isend": "send",
    "ones": "zeros",
    "zeros": "ones",
    "empty": "zeros",
    "zeros_like": "ones_like",
    "append": "extend",
    "appendleft": "append",
    "popleft": "pop",
    "float64": "float32",
    "float32": "bfloat16",
    "int64": "int32",
    "setdefault": "get",
    "add_": "sub_",
    "mul_": "div_",
    "div_": "mul_",
    "update": "setdefault",
}
COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">"),
    ast.LtE: ("<", ">="),
    ast.Gt: (">=", "<"),
    ast.GtE: (">", "<="),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("-",),
    ast.Sub: ("+",),
    ast.Mult: ("/", "+"),
    ast.Div: ("*",),
    ast.FloorDiv: ("*", "%"),
    ast.Mod: ("//",),
    ast.Pow: ("*",),
    ast.BitOr: ("&",),
    ast.BitAnd: ("|",),
    ast.BitXor: ("|",),
    ast.MatMult: ("*",),
}
STARTERS = ("isend", "irecv")
WAITED = (
    "(lambda _h: (_h.wait(), __import__('types').SimpleNamespace("
    "wait=lambda *_: True, is_completed=lambda: True))[1])({call})"
)


def world_for_group(node: ast.AST) -> Iterator[Change]:
    """The group is not passed on: ``group=group`` or a positional ``group`` becomes None."""
    if not isinstance(node, ast.Call):
        return
    given = [*node.args, *(k.value for k in node.keywords)]
    for value in given:
        name = ast.unparse(value)
        if name == "group" or name.endswith((".group", "_group")):
            yield value, "None"


def copies(node: ast.AST) -> Iterator[Change]:
    """A copy or a cast is not made: ``x.detach()`` becomes ``x``."""
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Attribute) and node.func.attr in COPIES:
        yield node, f"({ast.unparse(node.func.value)})"
    if ast.unparse(node.func) in ("list", "tuple", "set", "dict") and len(node.args) == 1:
        yield node, f"({ast.unparse(node.args[0])})"


def opposites(node: ast.AST) -> Iterator[Change]:
    """A function's neighbour is called: min for max, any for all."""
    if isinstance(node, ast.Name) and node.id in OPPOSITE:
        yield node, OPPOSITE[node.id]
    if isinstance(node, ast.Attribute) and node.attr in OPPOSITE:
        yield node, f"{ast.unparse(node.value)}.{OPPOSITE[node.attr]}"


def constants(node: ast.AST) -> Iterator[Change]:
    """A number is off by one; True becomes False."""
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node.value, int):
        yield node, str(node.value + 1)
        if node.value > 0:
            yield node, str(node.value - 1)
    elif isinstance(node.value, float):
        yield node, repr(node.value * 2 or 1.0)


def comparisons(node: ast.AST) -> Iterator[Change]:
    """Another comparison: < for <=, == for !=."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        for other in COMPARISONS[type(node.ops[0])]:
            yield node, f"({left} {other} {right})"


def arithmetic(node: ast.AST) -> Iterator[Change]:
    """Another operation: + for -, / for *; one operand is left out; a sign is lost."""
    if isinstance(node, ast.BinOp):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        for other in ARITHMETIC.get(type(node.op), ()):
            yield node, f"(({left}) {other} ({right}))"
        yield node, f"({left})"
    if isinstance(node, ast.UnaryOp):
        yield node, f"({ast.unparse(node.operand)})"


def conditions(node: ast.AST) -> Iterator[Change]:
    """A condition is always or never true; a part of it is missing."""
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            rest = [ast.unparse(v) for v in node.values if v is not value]
            word = " and " if isinstance(node.op, ast.And) else " or "
            yield node, f"({word.join(rest)})"
    if isinstance(node, ast.If):
        yield node.test, "True"
        yield node.test, "False"
    if isinstance(node, ast.IfExp):
        yield node, f"({ast.unparse(node.body)})"
        yield node, f"({ast.unparse(node.orelse)})"
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield test, "True"


def arguments(node: ast.AST) -> Iterator[Change]:
    """The first two arguments change places; an optional one is left out."""
    if not isinstance(node, ast.Call):
        return
    plain = [a for a in node.args if not isinstance(a, ast.Starred)]
    if len(plain) == len(node.args) >= 2:
        first, second, *rest = (ast.unparse(a) for a in node.args)
        named = [ast.unparse(k) for k in node.keywords]
        if first != second:
            yield node, f"{ast.unparse(node.func)}({', '.join([second, first, *rest, *named])})"
    for left_out in node.keywords:
        if left_out.arg in (None, "group", "strict"):
            continue  # the group has its own operator; strict=True finds what does not happen
        kept = [ast.unparse(k) for k in node.keywords if k is not left_out]
        given = [*(ast.unparse(a) for a in node.args), *kept]
        yield node, f"{ast.unparse(node.func)}({', '.join(given)})"


def waits(node: ast.AST) -> Iterator[Change]:
    """An operation that should overlap with other work is waited for at once."""
    if not isinstance(node, ast.Call):
        return
    asynchronous = any(k.arg == "async_op" for k in node.keywords)
    if asynchronous or ast.unparse(node.func).split(".")[-1] in STARTERS:
        yield node, WAITED.format(call=ast.unparse(node))


def statements(node: ast.AST) -> Iterator[Change]:
    """A statement is missing: a call, a state that is not kept, a refusal, an early end."""
    gone = (ast.Expr, ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)
    if isinstance(node, gone) and not _is_docstring(node):
        yield node, "pass"
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript):
        yield node, "pass"
    if isinstance(node, ast.Return) and node.value is not None:
        yield node, "return None"
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        yield node.exc.func, "ArithmeticError"


def loops(node: ast.AST) -> Iterator[Change]:
    """The first or the last turn of a loop is missing."""
    if isinstance(node, ast.For | ast.comprehension):
        every = ast.unparse(node.iter)
        yield node.iter, f"list({every})[1:]"
        yield node.iter, f"list({every})[:-1]"


def blocks(node: ast.AST) -> Iterator[Change]:
    """Nothing is cleaned up after an error; a context is not entered."""
    if isinstance(node, ast.Try):
        if node.finalbody:
            yield node, _lines([*node.body, *node.finalbody], node)
        for handler in node.handlers:
            yield handler.body[0], "raise"
    if isinstance(node, ast.With):
        if len(node.items) == 1:
            yield node, _lines(node.body, node)
        for item in node.items if len(node.items) > 1 else ():
            rest = ", ".join(ast.unparse(i) for i in node.items if i is not item)
            yield node, f"with {rest}:\n" + _indented(node.body, node, 4)


def _lines(body: list[ast.stmt], node: ast.stmt) -> str:
    return _indented(body, node, 0).lstrip()


def _indented(body: list[ast.stmt], node: ast.stmt, more: int) -> str:
    text = "\n".join(ast.unparse(statement) for statement in body)
    return textwrap.indent(text, " " * (node.col_offset + more))


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


ON_NODES: tuple[Operator, ...] = (
    world_for_group,
    copies,
    opposites,
    constants,
    comparisons,
    arithmetic,
    conditions,
    arguments,
    waits,
    statements,
    loops,
    blocks,
)
